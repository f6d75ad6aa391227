"""Runs stored inputs that once failed, and says how each ends now.

`python -m tests.cases FOLDER [NAME …]`. FOLDER has one folder a case:
- `training/NAME`: its README has the command to try, in backquotes after "Try".
- `decoding/cases/NAME`: `case.py`, `run.sh` or `request.txt`, beside `scripts` and `models`.

Each case runs in a copy. It is good if it ends with an answer or with one line that refuses. It may
print no traceback and no other text than the target's. `MUST` and `MUST_NOT` say what the output of
single cases needs on top of that. The exit status is the number of bad cases.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.serve.process import ServiceProcess, command

ROOT = Path(__file__).parent.parent
SECONDS = 600
SHOWN = 300  # characters of an output's end

# A refusal ends a script of Python by an uncaught UserError: that is one line for its user too.
CRASH = re.compile(r"Traceback \(most recent call last\)(?![\s\S]*\n\S*UserError: )")
BAD = (CRASH, re.compile(r"\bTRACEBACK\b"), re.compile(r"\bOTHER\b"))

# What an output must have, by the case's name.
MUST: dict[str, Sequence[str]] = {
    "02_gemma3n_second_turn": (r"status 0", r'(?s)("object":"chat.*){3}'),
    "09_default_max_tokens": (r"(?s)(-> 200.*){4}",),
    "10_tokenizing_blocks": (r"big prompt 400", r"/health took 0\.[0-4]"),
    "16_stop_across_special": (r"A stop .*'completion_tokens': [1-9]\b",),
    "17_sse_separators": (r"stream: False", r"broken events 0"),
    "18_recorder_stop_reason": (r"None -> 1 recorded", r"106 -> 1 recorded"),
    # Where a character is cut, transformers writes � for all bytes of its run, also for letters. A
    # stream has written those letters by then.
    "19_byte_fallback_cut": (r"2000 \{'stream': \d+, 'tokens': 0, 'answer k by k': 0\}",),
    "20_chat_encoding": (r"chat status 0", r"generate status 0"),
    "23_vlm_checkpoint": (r"(?s)(error: .*images.*\n){2}",),
    "csv_na_words": (r"train: 24 ",),
    "export_smaller_padding": (r'"vocab_size": 320',),
    "generate_prompt_too_long": (r"train\.jsonl:\d+",),
    "import_shard_missing": (r"error: .*\.safetensors",),
    "scaled_logits_gemma2_heads": (r"error: ",),
    "target_size_mismatch": (r"error: .*\[",),
    "yaml_placeholder": (r"error: .*config\.yaml",),
}
# What is run after a case's command, to see what it wrote, or in the place of its script.
AFTERWARDS = {
    "export_smaller_padding": "cat out/config.json",
    # What was left out is the second part of what `exchanges` returns.
    "18_recorder_stop_reason": "sed 's/stream=False))/stream=False)[0])/' {case} | python -",
}
# What an output may have that would be bad elsewhere.
MAY: dict[str, str] = {
    # The stream may end before the large prompt comes, so there are no pauses to take the most of.
    "10_tokenizing_blocks": r"(?s)Traceback.*ValueError: max\(\) arg is an empty sequence\n",
}
MUST_NOT: dict[str, Sequence[str]] = {
    "09_default_max_tokens": (r"memory \+\d{4}",),
    "11_temperature_underflow": (r"\[299, 299, 299", r"1e400 200"),
    "csv_na_words": (r"no response tokens",),
    "scaled_logits_gemma2_heads": (r"answers: 100%", r"stage answers"),
    "layers_of_smollm3": (r"quantised or offloaded",),
    "tool_arguments_as_text": (r"does not write",),
    "yaml_merge_key": (r"not valid YAML",),
}

# Requests: the body, the status that must come back, and a pattern of the answer.
HI = {"messages": [{"role": "user", "content": "hi"}]}
TEXT, IMAGE = {"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "data:,"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
HISTORY = [
    *HI["messages"],
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "1"},
]
REQUESTS: dict[str, Sequence[tuple[dict, int, str]]] = {
    "12_tiny_penalty": (
        ({"prompt": "hi", "repetition_penalty": 1e-45}, 400, "repetition_penalty"),
    ),
    "13_union_errors": (
        ({"messages": [{"role": "user", "content": [TEXT, IMAGE]}]}, 400, "image"),
        ({"prompt": "hi", "stop": ["a", "b", "c", "d", "e"]}, 200, "choices"),
        ({"prompt": [1, "a"]}, 400, r"prompt(\.|\[)1"),
    ),
    "14_tool_history": (
        ({"messages": HISTORY}, 400, "tool"),
        ({**HI, "logit_bias": {"5": 101}}, 400, r"logit_bias(?!.*Did you mean)"),
        ({**HI, "presence_penalty": 3}, 400, r"presence_penalty(?!.*Did you mean)"),
    ),
    "22_bearer": (({"prompt": "hi"}, 200, "choices"),),
}


def main(folder: str, names: Sequence[str]) -> int:
    bad = 0
    with tempfile.TemporaryDirectory() as place:
        # Scripts reach their own files as ../shared/cases, from the project's root.
        cases, project = Path(place, "shared", "cases"), Path(place, "project")
        shutil.copytree(folder, cases)
        project.mkdir()
        subprocess.run(["chmod", "-R", "u+w", place], check=True)
        for case in all_cases(cases):
            if names and not any(name in case.name for name in names):
                continue
            faults, output = judged(case, project)
            bad += bool(faults)
            verdict = "bad: " + "; ".join(faults) if faults else "good"
            print(f"{case.name:45} {verdict}", flush=True)
            if faults:
                print("    " + output[-SHOWN:].replace("\n", "\n    "), flush=True)
    print(f"{bad} bad" if bad else "all good")
    return bad


def all_cases(cases: Path) -> Iterator[Path]:
    yield from sorted((cases / "training").iterdir())
    yield from sorted((cases / "decoding" / "cases").iterdir())


def judged(case: Path, project: Path) -> tuple[list[str], str]:
    """What is wrong with a case, and its output."""
    if case.name in REQUESTS:
        return asked(case)
    status, output = ran(case, project)
    shortened = re.sub(MAY.get(case.name, r"$^"), "", output)
    refused = re.search(r"UserError: .*\s*\Z", output)  # by a script of Python
    if status == 1 and (refused or shortened != output):
        status, output = 0, shortened
    faults = [f"it prints {bad.pattern}" for bad in BAD if bad.search(output)]
    faults += [f"exit status {status}"] * (status not in (0, 2))
    lines = re.findall(r"^error: .*", output, re.MULTILINE)
    faults += ["exit status 2 without one line that says why"] * (status == 2 and len(lines) != 1)
    faults += [f"no {must}" for must in MUST.get(case.name, ()) if not re.search(must, output)]
    faults += [f"it prints {no}" for no in MUST_NOT.get(case.name, ()) if re.search(no, output)]
    return faults, output


def ran(case: Path, project: Path) -> tuple[int, str]:
    """The exit status and the output of a case's command."""
    words, folder = ["bash", "-c", tried(case)], case
    if (case / "case.py").exists():
        script, after = (
            case / "case.py",
            AFTERWARDS.get(case.name, "").format(case=case / "case.py"),
        )
        words, folder = ["bash", "-c", after or f"{sys.executable} {script}"], project
    elif (case / "run.sh").exists():
        words, folder = ["bash", str(case / "run.sh")], project
    binaries = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    found = f"{ROOT}:{ROOT / 'tests' / 'old_names'}"
    environment = {**os.environ, "PYTHONPATH": found, "PATH": binaries, "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            words,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        return -1, (error.output or b"").decode(errors="replace")
    return done.returncode, done.stdout.decode(errors="replace")


def tried(case: Path) -> str:
    """The command in a training case's README, without a remark in brackets behind it; then what
    shows its result."""
    readme = (case / "README.md").read_text()
    found = re.search(r"^Try .*?`([^`]+?)(?: \([^`]*)?`", readme, re.MULTILINE)
    words = found[1] if found else "false"
    return " && ".join([words, *([AFTERWARDS[case.name]] if case.name in AFTERWARDS else [])])


def asked(case: Path) -> tuple[list[str], str]:
    """Send a case's requests to a service."""
    import httpx2

    options = ("--api-key-env", "K") if case.name == "22_bearer" else ()
    model = case.parent.parent / "models" / "random"
    words = ("serve", "--target", str(model), "--drafter", "ngram", "--model-name", "tiny")
    os.environ["K"] = "secret"
    faults, answers = [], []
    with ServiceProcess(command(*words, *options)) as process:
        for body, status, pattern in REQUESTS[case.name]:
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            header = {"Authorization": "bearer secret"}
            body = {"model": "tiny", "max_tokens": 4, **body}
            answer = httpx2.post(process.url + path, json=body, headers=header, timeout=60)
            answers.append(f"{json.dumps(body)} -> {answer.status_code} {answer.text}")
            if answer.status_code != status or not re.search(pattern, answer.text):
                faults.append(f"no {status} with {pattern}")
    return faults, "\n".join(answers)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m tests.cases FOLDER [NAME …]")
    sys.exit(main(sys.argv[1], sys.argv[2:]))
