"""Walks: commands that are run one after the other, as a user would, with their times."""

import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from benchmarks.common import describe_machine, rows_table
from decode.base.errors import UserError

PageOption = Annotated[Path | None, typer.Option(help="write the walk here, as Markdown")]
KeepOption = Annotated[
    Path | None, typer.Option(help="work here, and keep it; default: a temporary directory")
]
# Lines of a command's output that the page shows, from its end.
LINES = 24
COLUMNS = 110


@dataclass
class Step:
    """A command, its wall time in seconds, and what it printed, without progress."""

    title: str
    command: str
    seconds: float
    output: str


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
