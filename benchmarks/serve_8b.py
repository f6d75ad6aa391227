"""Follows docs/serve_8b.md to its last line, on a small model and vLLM's build for CPUs.

    python -m benchmarks.serve_8b --python PYTHON [--quick] [--json FILE] [--page FILE]
                                  [--keep DIRECTORY]

The commands are those in the page's own blocks. Only model, machine and sizes are others, each by
a rule below. What follows a published head uses the walk's own export in its place, so it comes
last. PYTHON is that of an environment with vLLM. --page writes the commands with what they printed.
"""

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.common import (
    PROMPTS,
    TARGET,
    JsonOption,
    describe_machine,
    run_command,
    start_benchmark,
    write_json,
)
from benchmarks.shared.walks import (
    KeepOption,
    PageOption,
    as_page,
    as_time,
    empty_place,
    on_this_machine,
    page_commands,
    run_step,
    times_table,
)
from decode.base.errors import UserError
from decode.model.loading import load_target
from train.engines.child_process import free_port
from train.engines.programs import VLLM_ENVIRONMENT

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "serve_8b.md"
MODEL = "meta-llama/Llama-3.1-8B-Instruct"
# Commands of the page that are not run, by their beginnings.
NOT_RUN = ("python3 -m venv", "export PATH=", "make engine-vllm", "python -m benchmarks.")
# What a small model on a CPU needs in place of the page's words.
REPLACED = {
    MODEL: TARGET,
    "~/vllm/bin/python": "PYTHON",
    "$HOME/vllm/bin/python": "PYTHON",
    "--engine-dtype bfloat16": "--engine-dtype float32",
    "--concurrency 1,8,32": "--concurrency 1,4",
    "ORG/EAGLE3-HEAD": "exported",
    "configs/recipes/": f"{ROOT}/configs/recipes/",
}
# float32, because a CPU may compute bfloat16 slowly.
PLANNED = "target.dtype=float32 precision=null"
TRAINED = (
    f"{PLANNED} stages.answers.max_new_tokens=64 stages.answers.server.concurrency=16 "
    "'stages.answers.server.options={enforce_eager: true, max_num_seqs: 16}' "
    "stages.dev-answers.max_new_tokens=32 stages.heads.loop.tokens_per_batch=1024 "
    "stages.heads.dev.every=20 evaluation.prompts=6 evaluation.max_new_tokens=32 "
    "evaluation.timed_prompts=2 evaluation.timed_tokens=24 'evaluation.baseline_gammas=[2]'"
)
QUESTION = '{"model": "target", "max_tokens": 48, "messages": [{"role": "user", "content": "Hi!"}]}'


def main(
    python: Annotated[Path, typer.Option(help="the Python of an environment with vLLM")],
    quick: Annotated[bool, typer.Option("--quick", help="train on fewer prompts")] = False,
    json_file: JsonOption = None,
    page: PageOption = None,
    keep: KeepOption = None,
) -> None:
    """Run every command of the page, and print how long each took."""
    reporter = start_benchmark()
    with empty_place(keep) as place:
        _prepare(place, quick)
        env = dict(os.environ) | {
            "PYTHONPATH": str(ROOT),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        steps = []
        for title, command in walk(PAGE.read_text("utf-8"), python.absolute(), quick):
            reporter.say(f"$ {command}")
            steps.append(run_step(title, command, place, env, ""))
            reporter.say(as_time(steps[-1].seconds))
    reporter.table(times_table("docs/serve_8b.md on a small model", steps))
    if page is not None:
        written = as_page(steps, opening(quick)).replace(str(ROOT), "~/clone")
        page.write_text(written.replace(str(python.absolute()), "~/vllm/bin/python"), "utf-8")
    if json_file is not None:
        found = {"machine": describe_machine(), "steps": [asdict(step) for step in steps]}
        write_json(json_file, found)


def _prepare(place: Path, quick: bool) -> None:
    """The user's chats, prompts that are held out, and the target as the directory that vLLM
    takes."""
    for name, source, every in (("mine", "train", 6 if quick else 2), ("held_out", "test", 4)):
        lines = (PROMPTS / f"{source}.jsonl").read_text("utf-8").splitlines(keepends=True)
        (place / f"{name}.jsonl").write_text("".join(lines[::every]), "utf-8")
    target = load_target(TARGET, dtype="float32", device="cpu")
    target.model.save_pretrained(place / "target")
    target.tokenizer.save_pretrained(place / "target")


def walk(text: str, python: Path, quick: bool = False) -> list[tuple[str, str]]:
    """The steps: (title, command for bash). Raises UserError if a rule changes nothing, or if the
    page has a command that this walk does not know."""
    used: set[str] = set()
    steps: list[tuple[str, str]] = []
    last: list[tuple[str, str]] = []  # what needs the walk's own export
    for title, written in page_commands(text):
        if written.startswith(NOT_RUN):
            continue
        command = written
        for old, new in REPLACED.items():
            if old in command:
                used.add(old)
                command = command.replace(old, str(python) if new == "PYTHON" else new)
        name = f"{title}: {' '.join(written.split()[:2])}"
        if command.startswith("draftsmith train"):
            sized = TRAINED if "--dry-run" not in command else PLANNED
            epochs = f" stages.heads.loop.epochs={1 if quick else 3}"
            command += f" {sized}" + (epochs if sized == TRAINED else "")
            command += f" target.model={TARGET}" if "/recipes/" in command else ""
            name += ", the plan" if sized == PLANNED else ""
        elif command.startswith("vllm serve"):
            command = _served(command.removeprefix(f"vllm serve {TARGET} "), python)
        elif not command.startswith("draftsmith"):
            raise UserError(f"{PAGE.name} has {written!r}, which this walk cannot run")
        (last if "draftsmith import" in command else steps).append((name, command))
    if unused := REPLACED.keys() - used:
        raise UserError(f"{PAGE.name} does not have {', '.join(sorted(unused))} any more")
    further = "draftsmith train my.yaml name=further stages.heads.start=start "
    trained = next(command for _, command in steps if TRAINED in command)
    last.append(("From a published head: draftsmith train", f"{further}{trained.split(' ', 3)[3]}"))
    return steps + last


def _served(options: str, python: Path) -> str:
    """Serve, ask once, and stop. The build for CPUs has no command `vllm`."""
    kept = {key: value for key, value in VLLM_ENVIRONMENT.items() if "MULTIPROC" not in key}
    port = free_port()
    settings = " ".join(f"{key}={value}" for key, value in kept.items())
    server = (
        f"{settings} {python} -m vllm.entrypoints.openai.api_server --model target "
        f"--dtype float32 --max-model-len 512 --enforce-eager --port {port} {options}"
    )
    url = f"http://127.0.0.1:{port}"
    return (
        f"{server} > vllm.log 2>&1 & server=$!; "
        f"until curl -sf {url}/health || ! kill -0 $server; do sleep 1; done; "
        f"curl -sf {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{QUESTION}'; "
        f"asked=$?; echo; curl -s {url}/metrics | grep -E '^vllm:spec_decode_num_.*_total'; "
        "kill $server; wait $server; exit $asked"
    )


def opening(quick: bool) -> list[str]:
    """The first lines of the page of results."""
    sizes = " --quick" if quick else ""
    return [
        "# An 8B model in vLLM: the page followed on a small model",
        "",
        f"Written by `python -m benchmarks.serve_8b --python PYTHON{sizes} --page",
        "docs/results/serve_8b.md`: the commands of [the page](../serve_8b.md), with SmolLM2-135M",
        "in the place of the 8B model, vLLM's build for CPUs, and small sizes. They show that the",
        "path has no gap. The sizes are too small for a good drafter.",
        on_this_machine(),
    ]


if __name__ == "__main__":
    run_command(main)
