"""Runs stored inputs that once failed, and says of each whether it is right now.

`python -m tools.cases FOLDER [NAME …]` runs all, or those that have a NAME in what the table shows
of them, such as training or decoding/10. FOLDER has one folder a case, each with a README.md:
- `training/NAME`: the README has the command to try, in backquotes after "Try".
- `decoding/cases/NAME`: `case.py`, `run.sh` or `request.txt`, run beside `scripts` and `models`.
- any other `KIND/NAME`: `case.py` or `run.sh`, run in the case's folder.

Each case runs in a copy. Its verdict is by rules that hold for all:
- right: it ends with an answer, or with one line that refuses;
- wrong: it prints a traceback, a text that is not the target's, a message that the README quotes
  under "Happens", or none or several lines with an exit status that refuses;
- cannot judge: it takes too long, needs a package that is not installed, or ends with an answer
  where the README's fault is one too, and no pattern here tells the two apart.
`MUST` and `MUST_NOT` have what single READMEs ask for on top of that. The table ends with the
number of each verdict. The exit status is 1 if a case is wrong.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.serve.process import ServiceProcess, command

ROOT = Path(__file__).parent.parent
SECONDS = 600
SHOWN = 300  # characters of an output's end
TOO_LONG = -1
RUN = ("case.py", "run.sh", "request.txt", "config.yaml")

# A refusal ends a script of Python by an uncaught UserError: that is one line for its user too.
CRASH = re.compile(r"Traceback \(most recent call last\)(?![\s\S]*\n\S*UserError: )")
BAD = (CRASH, re.compile(r"\bTRACEBACK\b"), re.compile(r"\bOTHER\b"))

# What an output must have, by the case's name.
MUST: dict[str, Sequence[str]] = {
    "02_gemma3n_second_turn": (r"status 0", r'(?s)("object":"chat.*){3}'),
    "09_default_max_tokens": (r"(?s)(-> 200.*){3}",),
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
    "dflash_sample_from_anchor": (r"sample_from_anchor",),
    "forced_call_added_token": (r'"tool_calls": ?\[',),
    "mtp_count_missing": (r"None (opened|.*(?:lacks|has the tensors))",),
    "path_brackets_other_file": (r"train: 20 ",),
}
# What is run after a case's command, to see what it wrote, or in the place of its script.
AFTERWARDS = {
    "export_smaller_padding": "cat out/config.json",
    # What was left out is the second part of what `exchanges` returns.
    "18_recorder_stop_reason": "sed 's/stream=False))/stream=False)[0])/' {case} | python -",
}
# What an output may have that would be bad elsewhere.
MAY: dict[str, str] = {
    # Its last request sets no limit, and its random model goes on for more than the client's 120 s.
    "09_default_max_tokens": r"(?s)Traceback.*TimeoutError: timed out\n",
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
    "recorder_hidden_reasoning": (r"(?m)^recorded ",),
    # Two questions get one answer. Lines of figures begin with a bracket.
    "template_of_parts": (r"(?m)^(?!\[)(.*\w.*)\n(?:.*\n)*?\1$",),
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
    verdicts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as place:
        # Scripts reach their own files as ../shared/cases, from the project's root.
        cases, project = Path(place, "shared", "cases"), Path(place, "project")
        shutil.copytree(folder, cases)
        project.mkdir()
        subprocess.run(["chmod", "-R", "u+w", place], check=True)
        for case in all_cases(cases):
            listed = f"{case.relative_to(cases).parts[0]}/{case.name}"
            if names and not any(name in listed for name in names):
                continue
            verdict, reasons, output = judged(case, project)
            verdicts[verdict] += 1
            said = f"{verdict}: {'; '.join(reasons)}" if reasons else verdict
            print(f"{listed:50} {said}", flush=True)
            if reasons:
                print(f"    wanted: {wanted(case)}")
                print("    " + output.strip()[-SHOWN:].replace("\n", "\n    "), flush=True)
    print(
        ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items())) or "no case"
    )
    return int(verdicts["wrong"] > 0 or not verdicts)


def all_cases(cases: Path) -> Iterator[Path]:
    """The folders of cases: those with a README.md and something to run."""
    for readme in sorted(cases.rglob("README.md")):
        if any((readme.parent / name).exists() for name in RUN):
            yield readme.parent


def judged(case: Path, project: Path) -> tuple[str, list[str], str]:
    """The verdict on a case, the reasons if it is not right, and the output."""
    if case.name in REQUESTS:
        faults, output = asked(case)
        return ("wrong" if faults else "right"), faults, output
    status, output = ran(case, project)
    if status == TOO_LONG:
        return "cannot judge", [f"no end after {SECONDS} s"], output
    if re.search(r"\bstatus 124\b", output):
        return "cannot judge", ["a time limit of the script was reached"], output
    if missing := re.search(
        r"ModuleNotFoundError: No module named '(\w+)|(\S+): not found", output
    ):
        return "cannot judge", [f"{missing[1] or missing[2]} is not installed"], output
    shortened = re.sub(MAY.get(case.name, r"$^"), "", output)
    refused = re.search(r"UserError: .*\s*\Z", output)  # by a script of Python
    if status == 1 and (refused or shortened != output):
        status, output = 0, shortened
    faults = [f"it prints {bad.pattern}" for bad in BAD if bad.search(output)]
    faults += [f"exit status {status}"] * (status not in (0, 2))
    lines = re.findall(r"^error: .*", output, re.MULTILINE)
    faults += ["exit status 2 without one line that says why"] * (status == 2 and len(lines) != 1)
    must = MUST.get(case.name, ())
    faults += [f"no {pattern}" for pattern in must if not re.search(pattern, output)]
    forbidden = MUST_NOT.get(case.name, ())
    faults += [f"it prints {no}" for no in forbidden if re.search(no, output)]
    quoted = quotes(case)
    faults += [f"it still says '{said}'" for said in quoted if said in " ".join(output.split())]
    if faults:
        return "wrong", faults, output
    can_tell = quoted or must or forbidden or refused or lines or happens(case) is None
    if not can_tell and "assert " not in source(case):
        return "cannot judge", ["no rule tells this answer from the fault"], output
    return "right", [], output


def happens(case: Path) -> str | None:
    """What the README says happens, if it has a line for that."""
    found = re.search(r"^Happens: (.*)", (case / "README.md").read_text("utf-8"), re.MULTILINE)
    return found[1] if found else None


def quotes(case: Path) -> list[str]:
    """The messages of the fault: in single quotes in what happens; its longest part between
    ellipses, which stand for values."""
    texts = re.findall(r"(?<!\w)'(.+?)'(?=[\s.,;:)]|$)", happens(case) or "")
    parts = [max(text.split("…"), key=len).strip() for text in texts]
    return [part for part in parts if len(part) >= 5]


def wanted(case: Path) -> str:
    """What the README wants."""
    found = re.search(
        r"^(?:Right|Expected): (.*)", (case / "README.md").read_text("utf-8"), re.MULTILINE
    )
    return found[1] if found else "see its README.md"


def source(case: Path) -> str:
    script = case / "case.py"
    return script.read_text("utf-8") if script.exists() else ""


def ran(case: Path, project: Path) -> tuple[int, str]:
    """The exit status and the output of a case's command."""
    folder = project if case.parent.parent.name == "decoding" else case
    if (case / "case.py").exists():
        after = AFTERWARDS.get(case.name, "").format(case=case / "case.py")
        words = ["bash", "-c", after or f"{sys.executable} {case / 'case.py'}"]
    elif (case / "run.sh").exists():
        words = ["bash", str(case / "run.sh")]
    else:
        words = ["bash", "-c", tried(case)]
    binaries = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    found = f"{ROOT}:{ROOT / 'tools' / 'old_names'}"
    environment = {**os.environ, "PYTHONPATH": found, "PATH": binaries, "HF_HUB_OFFLINE": "1"}
    # A session of its own: what a script leaves running ends with it.
    process = subprocess.Popen(
        words,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
        status = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        status = TOO_LONG
    return status, output.decode(errors="replace")


def tried(case: Path) -> str:
    """The command in a training case's README, without a remark in brackets behind it; then what
    shows its result."""
    readme = (case / "README.md").read_text("utf-8")
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
        sys.exit("usage: python -m tools.cases FOLDER [NAME …]")
    sys.exit(main(sys.argv[1], sys.argv[2:]))
