"""Code that all benchmarks share: fresh processes, peak memory, the machine, JSON files."""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from decode.errors import UserError
from train.run import describe_process, make_directory
from train.training.trainer import peak_memory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
_SHOWN = 4000  # characters shown of a failed process's output


def require(package: str, requirement: str, what: str) -> None:
    """Raise UserError with the pip command unless `package` is installed. what: who needs it."""
    try:
        version(package)
    except PackageNotFoundError:
        raise UserError(
            f"{what} needs {package}, which is not installed. To install it: "
            f'pip install "{requirement}", or all that the benchmarks use: '
            'pip install "draftsmith[benchmarks]"'
        ) from None


def describe_machine(packages: Sequence[str] = ()) -> dict[str, Any]:
    """Like `train.run.describe_process`, with the versions of these packages too."""
    process = describe_process()
    process["versions"] |= {package: version(package) for package in packages}
    return process


def write_json(path: Path, value: Any) -> None:
    """Write a benchmark's figures. Raises UserError if that fails."""
    make_directory(path.parent)
    try:
        path.write_text(json.dumps(value, indent=2) + "\n")
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
        done = subprocess.run(
            [*command, str(result)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode or not result.exists():
            raise RuntimeError(
                f"{function} ended with status {done.returncode}:\n{done.stdout[-_SHOWN:]}"
            )
        answer = json.loads(result.read_text())
    if "error" in answer:
        raise UserError(answer["error"])
    return answer["value"]


def resident_memory() -> int:
    """Return the bytes of this process that are in memory now."""
    return psutil.Process().memory_info().rss


def forget_peak() -> None:
    """Reset the peak if the system supports it (Linux). Else the process's peak stays."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_resident_memory() -> int:
    """Return the most bytes in memory since `forget_peak`.

    Linux: read from VmHWM. getrusage's figure starts at the memory of the process that started this
    one, and cannot be reset.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return peak_memory()
    found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else peak_memory()


def _called() -> None:
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
    Path(result).write_text(json.dumps(answer))


if __name__ == "__main__":
    _called()
