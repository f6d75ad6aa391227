"""Follows docs/tutorial.md to its last line, from a wheel, and says how long each step takes.

    python -m benchmarks.first_steps [--quick] [--json FILE] [--page FILE] [--data FILE]
                                     [--python PYTHON] [--keep DIRECTORY]

The commands are those in the page's own blocks. An environment is made in an empty directory, the
wheel is built from a copy of the sources and installed there with the embedded target, and all else
runs beside that copy, from the wheel. --quick trains on fewer prompts and measures less. --page
writes the commands with what they printed, as Markdown.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from benchmarks.common import (
    PROMPTS,
    JsonOption,
    describe_machine,
    rows_table,
    run_command,
    start_benchmark,
    write_json,
)
from decode.base.errors import UserError

ROOT = Path(__file__).parents[1]
SOURCES = ("configs", "decode", "distill", "draftsmith", "heads", "train")
FILES = ("pyproject.toml", "README.md", "LICENSE")
PAGE = ROOT / "docs" / "tutorial.md"
# How the commands of the page begin that are run as they stand, or by a rule of `walk`.
KNOWN = ("python", "pip", "echo", "draftsmith", "accelerate")
PageOption = Annotated[Path | None, typer.Option(help="write the walk here, as Markdown")]
KeepOption = Annotated[
    Path | None, typer.Option(help="work here, and keep it; default: a temporary directory")
]
# Lines of a command's output that the page shows, from its end.
LINES = 24
COLUMNS = 110
# What --quick sets in the runs: the path is the same, and most of the time goes into measuring.
QUICK = (
    " data.limit=60 stages.answers.max_new_tokens=40 evaluation.max_new_tokens=24"
    " evaluation.timed_prompts=2 evaluation.timed_tokens=16"
)


@dataclass
class Step:
    """A command, its wall time in seconds, and what it printed, without progress."""

    title: str
    command: str
    seconds: float
    output: str


def main(
    quick: Annotated[
        bool, typer.Option("--quick", help="train on fewer prompts, and measure less")
    ] = False,
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
        held_out = (PROMPTS / "test.jsonl").read_text("utf-8").splitlines(keepends=True)[::10]
        (place / "held_out.jsonl").write_text("".join(held_out), "utf-8")
        (place / "first.py").write_text(readme_python(), "utf-8")
        env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        env.pop("VIRTUAL_ENV", None)
        env["PIP_QUIET"] = "2"
        steps: list[Step] = []
        for title, command in walk(PAGE.read_text("utf-8"), python, quick):
            reporter.say(f"$ {command}")
            # A step after the first is in the environment that the first one made.
            before = ". venv/bin/activate; " if (place / "venv").exists() else ""
            steps.append(run_step(title, command, place, env, before))
        drafted = next(step for step in steps if "draftsmith chat" in step.command)
    reporter.table(times_table("first steps from a wheel", steps))
    ratios = {"first_answer_speedup": first_speedup(drafted.output)}
    if page is not None:
        page.write_text(as_page(steps, opening(quick)), "utf-8")
    if json_file is not None:
        machine = describe_machine()
        write_json(
            json_file,
            {"machine": machine, "steps": [asdict(step) for step in steps], "ratios": ratios},
        )


def walk(text: str, python: str, quick: bool = False) -> list[tuple[str, str]]:
    """The steps: (title, command for bash). Raises UserError if a rule changes nothing, or if the
    page has a command that this walk does not know."""
    torch = next(
        line
        for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines()
        if line.startswith("torch==")
    )
    replaced = {
        "python3 -m venv": f"{Path(python).name} -m venv",
        # The clone is beside the walk's place of work.
        "pip wheel --no-deps --wheel-dir dist .": "cd clone && {} && mv dist ..",
        # torch by its exact version: asked for by a range, pip takes the newest build.
        'pip install "$(ls dist/draftsmith-*.whl)': f"pip install {torch} && {{}}",
    }
    used: set[str] = set()
    steps = []
    for title, written in page_commands(text):
        if not written.startswith(KNOWN):
            raise UserError(f"{PAGE.name} has {written!r}, which this walk cannot run")
        command = written
        for old, new in replaced.items():
            if written.startswith(old):
                used.add(old)
                command = new.format(written) if "{}" in new else written.replace(old, new)
        limited = quick and ("draftsmith train" in written or "-m train" in written)
        words = re.sub(r"^.*\| ", "", written).split()
        name = " ".join(words[: 4 if words[0] == "accelerate" else 2])
        steps.append((f"{title}: {name}", command + QUICK * limited))
    if unused := replaced.keys() - used:
        raise UserError(f"{PAGE.name} does not have {', '.join(sorted(unused))} any more")
    return steps


def readme_python() -> str:
    """The README's example in Python."""
    return (ROOT / "README.md").read_text("utf-8").split("```python\n")[1].split("```")[0]


def copy_sources(clone: Path) -> None:
    """What a wheel is built from."""
    for package in SOURCES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, clone / package, ignore=ignored)
    for file in FILES:
        shutil.copy(ROOT / file, clone / file)


def opening(quick: bool) -> list[str]:
    """The first lines of the page."""
    return [
        "# Your first drafter: what was printed, with times",
        "",
        f"Written by `python -m benchmarks.first_steps{' --quick' * quick} --page",
        "docs/results/first_steps.md`: the commands of [Your first drafter](../tutorial.md), in an",
        f"empty directory and a new environment. {on_this_machine()}",
        "Of long outputs only the end is shown.",
    ]


def first_speedup(output: str) -> float:
    """The speed of the first answer over plain decoding, as `chat` prints it."""
    speedup = re.search(r"([0-9.]+)× plain decoding", output)
    if speedup is None:
        raise UserError(f"the first answer has no speed-up:\n{output}")
    return float(speedup[1])


def page_commands(text: str) -> list[tuple[str, str]]:
    """The commands of a page, each on one line, with the sections they are in."""
    sections = re.split(r"^## (.*)$", text, flags=re.MULTILINE)[1:]
    found = []
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        for block in re.findall(r"^```\n(.*?)^```$", body, re.DOTALL | re.MULTILINE):
            joined = re.sub(r"\\\n\s*", "", block)
            lines = (re.sub(r"\s{2,}#.*", "", line).strip() for line in joined.splitlines())
            found += [(title, line) for line in lines if line]
    return found


@contextmanager
def empty_place(keep: Path | None) -> Iterator[Path]:
    """The directory of a walk: `keep`, or else a temporary one. Raises UserError if `keep` is not
    empty."""
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise UserError(f"{keep} is not empty; expected a new directory")
    with tempfile.TemporaryDirectory() as temporary:
        place = (keep or Path(temporary)).absolute()
        place.mkdir(parents=True, exist_ok=True)
        yield place


def times_table(title: str, steps: Sequence[Step]) -> Table:
    """A row for each step."""
    rows = [{"step": step.title, "wall time": as_time(step.seconds)} for step in steps]
    return rows_table(title, rows)


def run_step(title: str, command: str, place: Path, env: Mapping[str, str], before: str) -> Step:
    """Run a command as a user's shell would, in `place`. before: a command that is not shown.
    Raises UserError with its output if it fails."""
    begin = time.perf_counter()
    done = subprocess.run(
        ["bash", "-c", f"{before}{command}"],
        cwd=place,
        env={**env, "COLUMNS": str(COLUMNS)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        check=False,
    )
    seconds = time.perf_counter() - begin
    output = without_progress(done.stdout).replace(str(place), "~")
    if done.returncode:
        raise UserError(f"{command} ended with status {done.returncode}:\n{output[-4000:]}")
    return Step(title, command, seconds, output)


def without_progress(text: str) -> str:
    """The lines of an output that stay: no colours, no bars, no counts of what is done."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    lines = [line.rpartition("\r")[2].rstrip() for line in plain.splitlines()]
    counting = re.compile(r"^\s+\S.*: \d+/\d+\b")
    return "\n".join(line for line in lines if line.strip() and not counting.match(line))


def as_time(seconds: float) -> str:
    """'45 s', '3 min 05 s'."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def as_page(steps: Sequence[Step], opening: Sequence[str]) -> str:
    """The walk as Markdown: a table of times, then each command with the end of its output.
    opening: the lines before the table."""
    lines = [
        *opening,
        "",
        "| step | wall time |",
        "|---|---|",
        *(f"| {step.title} | {as_time(step.seconds)} |" for step in steps),
    ]
    report: list[str] = []  # the last one that a step printed
    for step in steps:
        last = step.output.splitlines()[-LINES:]
        if report and last[-len(report) :] == report:
            last[-len(report) :] = ["[the same report as above]"]
        elif "run my" in last:
            report = last[last.index("run my") :]
        lines += ["", f"## {step.title[0].upper()}{step.title[1:]}", "", "```", f"$ {step.command}"]
        lines += [*last, "```"]
    return "\n".join(lines) + "\n"


def on_this_machine() -> str:
    """Processor, cores and month, for the opening of a page."""
    process = describe_machine()
    machine = process["machine"]
    return (
        f"Python {process['python']}, {machine['processor']}, {machine['cores']} cores, "
        f"{date.today():%B %Y}."
    )


if __name__ == "__main__":
    run_command(main)
