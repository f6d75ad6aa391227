"""Code that all benchmarks share: options, runs, fresh processes, files."""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from accelerate import Accelerator

from decode.base.errors import UserError
from decode.base.install_command import install_command
from draftsmith.cli.command import shows_errors, table
from train.base.console import Reporter, quieten
from train.base.launcher import cores
from train.base.provenance import describe_process, version_of
from train.run.config_checks import validate_config
from train.run.run import Run, make_directory

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

MIB = 2**20
# The `evaluation` of a run whose drafters the benchmark measures itself: as short as possible.
UNJUDGED = {
    "prompts": 1,
    "max_new_tokens": 2,
    "timed_prompts": 0,
    "generate": False,
    "baselines": [],
    "in_turn": [],
}
OUTPUT_CHARACTERS = 4000  # the length of the shown end of a failed process's output
TARGET = "embedded:smollm2-135m"
PROMPTS = Path(__file__).parents[1] / "configs" / "prompts"

JsonOption = Annotated[Path | None, typer.Option("--json", help="write all figures here")]
RunsOption = Annotated[Path, typer.Option(help="where trained drafters are kept")]
TargetOption = Annotated[str, typer.Option(help="as for `evaluate`")]
PromptsOption = Annotated[Path, typer.Option(help="held-out prompts")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N")]


class Unable(UserError):
    """A contestant cannot take part: what it needs is not installed, or it does not have the
    setting. Any other error of a contestant ends the benchmark with an error status."""


def run_command(main: Callable[..., None]) -> None:
    """Run a benchmark's `main` with the options of the command line."""
    app = typer.Typer(pretty_exceptions_show_locals=False)
    app.command()(shows_errors(main))
    app()


def start_benchmark() -> Reporter:
    """Set the number of threads, silence libraries, and return what reports progress."""
    quieten()
    torch.set_num_threads(cores())
    return Reporter()


def end_benchmark(broken: Mapping[str, str]) -> None:
    """End with an error status if contestants took part and broke, after all figures are written.
    broken: by contestant, how."""
    if broken:
        told = "; ".join(f"{name}: {how}" for name, how in broken.items())
        raise UserError(f"contestants broke: {told}")


def start_process() -> None:
    """Begin work in a process of `in_fresh_process`: its number of threads, silent libraries."""
    quieten()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores())


def run_config(
    name: str,
    runs: Path,
    stages: list[dict[str, Any]],
    *,
    target: str = TARGET,
    device: str = "cpu",
    data: dict[str, Any] | None = None,
    evaluation: dict[str, Any] = UNJUDGED,
) -> dict[str, Any]:
    """Return the config of a run: a target in bfloat16, trainings with float32 products. data: by
    default the shipped prompts."""
    return {
        "name": name,
        "output_dir": str(runs),
        "trackers": [],
        "precision": "no",
        "target": {"model": target, "dtype": "fastest", "device": device},
        "data": data or {split: f"{split}.jsonl" for split in ("train", "dev", "test")},
        "evaluation": evaluation,
        "stages": stages,
    }


def execute_run(config: dict[str, Any], reporter: Reporter) -> tuple[Run, dict[str, Any]]:
    """Execute a run, or the rest of it, and return it with its report."""
    on_cpu = config["target"]["device"] == "cpu"
    validated = validate_config(config, base_dir=PROMPTS)
    run = Run(validated, Accelerator(cpu=on_cpu), reporter)
    return run, run.execute()


def require(package: str, requirement: str, what: str) -> None:
    """Raise UserError with the pip command unless `package` is installed. what: what needs it."""
    if version_of(package) is None:
        raise UserError(
            f"{what} needs {package}, which is not installed. To install it: "
            f'pip install "{requirement}", or for all benchmarks: '
            f"{install_command('benchmarks')}"
        )


def rows_table(title: str, rows: Sequence[dict[str, str]], **options: Any) -> "Table":
    """Return a table for the terminal. rows: cells by column. options: as for `table`."""
    return table(
        title, list(rows[0]) if rows else [], [list(row.values()) for row in rows], **options
    )


def ratio_table(title: str, ratios: Mapping[str, float | dict[str, float]]) -> "Table":
    """A table of ratios by name. A dict is one with an interval."""
    rows = [
        [name, format_interval(ratio, 2) if isinstance(ratio, dict) else f"{ratio:.3g}"]
        for name, ratio in ratios.items()
    ]
    return table(title, ["what", "ratio"], rows)


def format_interval(ratio: Mapping[str, float] | None, digits: int) -> str:
    """'1.23 [1.18, 1.29]', or '1.23' without an interval. None: a dash."""
    if ratio is None:
        return "–"
    value = f"{ratio['value']:.{digits}f}"
    if "low" not in ratio:
        return value
    return f"{value} [{ratio['low']:.{digits}f}, {ratio['high']:.{digits}f}]"


def format_figure(value: float | None, form: str) -> str:
    """The figure in this format, or a dash if there is none."""
    return "–" if value is None else format(value, form)


def with_interval(row: dict[str, Any], figure: str, digits: int) -> str:
    """A figure with its interval over prompts, without it for a run from before there was one."""
    interval = row.get(f"{figure}_interval")
    if interval is not None:
        return format_interval(interval, digits)
    return format_figure(row[figure], f".{digits}f")


def describe_machine(packages: Sequence[str] = ()) -> dict[str, Any]:
    """Like `train.base.provenance.describe_process`, with the versions of these packages too."""
    process = describe_process()
    for package in packages:
        process["versions"][package] = version_of(package) or "not installed"
    return process


def write_json(path: Path, value: Any) -> None:
    """Write a benchmark's figures. Raises UserError if that fails."""
    make_directory(path.parent)
    try:
        path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a plot. Raises UserError if its directory cannot be created."""
    make_directory(path.parent)
    figure.savefig(path, dpi=150)


def in_fresh_process(function: str, **arguments: Any) -> Any:
    """Call `function` ("module:name") in a new process and return its result.

    Peak memory is measured per process, and the imports and allocator state of one contestant must
    not affect the next. Arguments and result are JSON. Raises RuntimeError with the end of the
    output if the process fails. A UserError of the function is raised as UserError.
    """
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"
        command = [sys.executable, "-m", "benchmarks.common", function, json.dumps(arguments)]
        process = subprocess.run(
            [*command, str(result)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
        )
        if process.returncode or not result.exists():
            output = process.stdout[-OUTPUT_CHARACTERS:]
            raise RuntimeError(f"{function} ended with status {process.returncode}:\n{output}")
        answer = json.loads(result.read_text("utf-8"))
    if "error" in answer:
        raise UserError(answer["error"])
    return answer["value"]


def _run_in_fresh_process() -> None:
    """Run in the new process of `in_fresh_process`."""
    # transformers asks the hub about model names. No benchmark may wait for a network.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    function, arguments, result = sys.argv[1:]
    module, _, name = function.partition(":")
    try:
        value = getattr(importlib.import_module(module), name)(**json.loads(arguments))
        answer = {"value": value}
    except UserError as error:
        answer = {"error": str(error)}
    Path(result).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    _run_in_fresh_process()
