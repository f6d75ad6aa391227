"""Child processes of engines. Stopping one also stops all processes that it started."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from decode.errors import UserError

STOP_SECONDS = 10.0


def start(
    name: str, command: Sequence[str], log: Any, env: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Start `command` in a new process group, with its output in the file `log`. Raises UserError
    if it cannot be started."""
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=None if env is None else dict(env),
            start_new_session=True,
        )
    except OSError as error:
        raise UserError(f"{name} cannot be started ({error})") from error


def stop(process: "subprocess.Popen[bytes]") -> None:
    """Stop a process started by `start`, and all processes that it started."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ending(log: Any) -> str:
    """Return the last lines that a process has printed into `log` so far."""
    log.flush()
    log.seek(0)
    text = log.read().decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()][-8:]
    return "Its log ends:\n" + "\n".join(lines) if lines else "It printed nothing."
