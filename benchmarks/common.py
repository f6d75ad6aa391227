"""What all benchmarks share: fresh processes, peak memory, the machine, JSON files."""

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
from train.training.memory import peak_memory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIB = 2**20
# The `evaluation` of a run whose drafters a benchmark measures itself: as short as can be.
UNJUDGED = {
    "prompts": 1,
    "max_new_tokens": 2,
    "timed_prompts": 0,
    "generate": False,
    "baselines": [],
    "in_turn": [],
}
_SHOWN = 4000  # of a failed process's output, characters


def require(package: str, requirement: str, what: str) -> None:
    """Raises UserError with the pip command unless `package` is installed. what: who needs it."""
    try:
        version(package)
    except PackageNotFoundError:
        raise UserError(
            f"{what} needs {package}, which is not installed. To install it: "
            f'pip install "{requirement}", or all that the benchmarks use: '
            'pip install "draftsmith[benchmarks]"'
        ) from None


def describe_machine(packages: Sequence[str] = ()) -> dict[str, Any]:
    """`train.run.describe_process`, with the versions of these packages too."""
    process = describe_process()
    process["versions"] |= {package: version(package) for package in packages}
    return process


def write_json(path: Path, value: Any) -> None:
    """Write a benchmark's figures; UserError when that cannot be done."""
    make_directory(path.parent)
    try:
        path.write_text(json.dumps(value, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a plot; UserError when its directory cannot be made."""
    make_directory(path.parent)
    figure.savefig(path, dpi=150)


def in_fresh_process(function: str, **arguments: Any) -> Any:
    """What `function` ("module:name") returns, called in a process of its own.

    Peak memory is a process's, and what one contestant imports or leaves in the allocator must not
    be the next one's. Arguments and result are JSON. Raises RuntimeError with the end of the
    output when the process fails; a UserError of the function stays one.
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
    """Bytes of this process that are in memory now."""
    return psutil.Process().memory_info().rss


def forget_peak() -> None:
    """Let the peak begin anew where the system can do that (Linux), else it stays the process's."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_resident_memory() -> int:
    """Most bytes in memory since `forget_peak`.

    On Linux from VmHWM: getrusage's figure starts at the memory of the process that started this
    one, and cannot be set back.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return peak_memory()
    found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else peak_memory()


def _called() -> None:
    """The other end of `in_fresh_process`."""
    # transformers asks the hub about names it meets; nothing here is to wait for a network.
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
