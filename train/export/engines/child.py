"""Runs an engine that is a Python library in a separate environment: one job in a child process.

The child is a script beside this file. That environment's Python runs it, and it shares no code
with us. It reads a job and writes an answer, both JSON files. It appends to a third file whenever
it makes progress, so we can tell a child that hangs from one that is slow.
"""

import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decode.errors import UserError
from train.export.engines import EngineTask, home
from train.export.engines.process import ending, start, stop

# The longest time without progress. Loading a model counts as one step of progress.
HANG_SECONDS = 600.0
POLL_SECONDS = 0.1


def run_child(
    name: str, script: Path, job: Mapping[str, Any], env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run `script` with the Python of engine `name`, with `env` added to our environment, and
    return its answer. Raises UserError if it fails or hangs. Leaves no process behind."""
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryFile() as log:
        files = [Path(place) / part for part in ("job.json", "answer.json", "progress")]
        asked, answer, progress = files
        asked.write_text(json.dumps(job))
        progress.touch()
        # -I: ignore PYTHONPATH and this directory, whose file names clash with library names.
        command = [str(python_of(name)), "-I", str(script)]
        process = start(name, [*command, *map(str, files)], log, {**os.environ, **(env or {})})
        try:
            seen, idle = 0, 0
            while process.poll() is None:
                time.sleep(POLL_SECONDS)
                # Count polls instead of clock time, so a pause of this process is no timeout.
                size = progress.stat().st_size
                seen, idle = (size, 0) if size > seen else (seen, idle + 1)
                if idle * POLL_SECONDS > HANG_SECONDS:
                    raise UserError(
                        f"{name} made no progress for {HANG_SECONDS:.0f} s. {ending(log)}"
                    )
        finally:
            stop(process)
        if process.returncode:
            raise UserError(f"{name} ended with exit status {process.returncode}. {ending(log)}")
        try:
            found: dict[str, Any] = json.loads(answer.read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"{name} left no answer ({error}). {ending(log)}") from error
        return found


def python_of(name: str) -> Path:
    return home(name) / "bin" / "python"


def version_of(name: str, package: str) -> str | None:
    """Return the version of a package in engine `name`'s environment; None if not installed."""
    places = home(name).glob(f"lib/python*/site-packages/{package}-*.dist-info")
    return next(
        (place.name.removesuffix(".dist-info").rpartition("-")[2] for place in places), None
    )


def model_directory(task: EngineTask, place: Path) -> Path:
    """Return the target as a Hugging Face directory: the one it was loaded from, else `place`, into
    which the loaded weights are saved."""
    given = Path(task.target_spec).expanduser()
    if given.is_dir():
        return given.resolve()
    task.target.model.save_pretrained(place)
    task.target.tokenizer.save_pretrained(place)
    return place
