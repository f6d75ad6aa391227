"""Jobs of Python libraries that have an environment of their own.

That environment's Python runs a script of ours, which reads a job and writes an answer, both JSON
files.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decode.base.errors import UserError
from train.engines.child_process import log_ending, python_of, start_process, stop_process

# The longest time of a job.
HANG_SECONDS = 600.0


def run_job(
    name: str,
    script: Path,
    job: Mapping[str, Any],
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run `script` with the Python of engine `name` and return its answer. env: is added to our
    environment. Raises UserError if it fails or hangs. Leaves no process behind."""
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile() as log:
        job_file, answer_file = Path(directory, "job.json"), Path(directory, "answer.json")
        job_file.write_text(json.dumps(job), encoding="utf-8")
        # -I: ignore PYTHONPATH and this directory, whose file names clash with library names.
        command = [str(python_of(name)), "-I", *map(str, (script, job_file, answer_file))]
        environment = {**os.environ, **(env or {})}
        process = start_process(name, command, log, environment, guarded=True)
        try:
            process.wait(HANG_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise UserError(
                f"{name} did not end within {HANG_SECONDS:.0f} s. {log_ending(log)}"
            ) from error
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
