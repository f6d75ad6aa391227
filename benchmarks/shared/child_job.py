"""Jobs of Python libraries that have an environment of their own.

That environment's Python runs a script of ours, which shares no code with us. The script reads a
job and writes an answer, both JSON files. It appends to a third file whenever it makes progress, so
a process that hangs can be told from one that is slow.
"""

import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decode.base.errors import UserError
from train.engines.child_process import log_ending, python_of, start_process, stop_process

# The longest time without progress. Loading a model counts as one step of progress.
HANG_SECONDS = 600.0
POLL_SECONDS = 0.1


def run_job(
    name: str,
    script: Path,
    job: Mapping[str, Any],
    env: Mapping[str, str] | None = None,
    python: Path | None = None,
) -> dict[str, Any]:
    """Run `script` with a Python, by default that of engine `name`, with `env` added to our
    environment, and return its answer. Raises UserError if it fails or hangs. Leaves no process
    behind."""
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile() as log:
        files = [Path(directory) / file for file in ("job.json", "answer.json", "progress")]
        job_file, answer_file, progress_file = files
        job_file.write_text(json.dumps(job), encoding="utf-8")
        progress_file.touch()
        # -I: ignore PYTHONPATH and this directory, whose file names clash with library names.
        command = [str(python or python_of(name)), "-I", str(script), *map(str, files)]
        environment = {**os.environ, **(env or {})}
        process = start_process(name, command, log, environment, guarded=True)
        try:
            last_size, idle_polls = 0, 0
            while process.poll() is None:
                time.sleep(POLL_SECONDS)
                # Count polls instead of clock time, so a pause of this process is no timeout.
                size = progress_file.stat().st_size
                idle_polls = 0 if size > last_size else idle_polls + 1
                last_size = max(size, last_size)
                if idle_polls * POLL_SECONDS > HANG_SECONDS:
                    raise UserError(
                        f"{name} made no progress for {HANG_SECONDS:.0f} s. {log_ending(log)}"
                    )
        finally:
            stop_process(process)
        if process.returncode:
            raise UserError(
                f"{name} ended with exit status {process.returncode}. {log_ending(log)}"
            )
        try:
            return json.loads(answer_file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{name} wrote no valid answer ({error}). {log_ending(log)}") from error
