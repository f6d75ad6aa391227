"""Runs an engine's server as a child process on the loopback interface, inside a `with` block."""

import json
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from decode.errors import UserError
from train.export.engines.process import ending, start, stop

READY_SECONDS = 180.0
ANSWER_SECONDS = 300.0


class Server:
    """A server that answers JSON with JSON at http://127.0.0.1:PORT."""

    def __init__(self, name: str, port: int, process: "subprocess.Popen[bytes]", log: Any) -> None:
        self.name, self.port = name, port
        self._process, self._log = process, log

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """POST `body`, or GET without one, and return the JSON answer. Raises UserError with the
        last lines of the log if the server has died or does not answer in time."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
                return json.loads(answer.read())
        except (OSError, ValueError) as error:
            reason = error
            if isinstance(error, urllib.error.HTTPError):
                reason = ValueError(f"{error}: {error.read()[:500].decode(errors='replace')}")
            raise UserError(f"{self.name} gave no answer ({reason}). {self.ending()}") from error

    def wait(self, health: str) -> None:
        """Wait until `health` answers. Raises UserError if the server ends or takes too long."""
        begin = time.monotonic()
        while time.monotonic() - begin < READY_SECONDS:
            if self._process.poll() is not None:
                raise UserError(
                    f"{self.name} ended before it was ready, with exit status "
                    f"{self._process.returncode}. {self.ending()}"
                )
            try:
                with urllib.request.urlopen(
                    f"http://127.0.0.1:{self.port}{health}", timeout=5
                ) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                pass  # Not listening yet, or still loading (503).
            time.sleep(0.2)
        raise UserError(f"{self.name} was not ready after {READY_SECONDS:.0f} s. {self.ending()}")

    def ending(self) -> str:
        """Return the last lines of the server's log."""
        return ending(self._log)


@contextmanager
def serving(
    name: str, command: Sequence[str], health: str, env: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Start `command` with {port} filled in, wait until it is ready, and always stop it at the end.
    Raises UserError if it cannot be started."""
    port = free_port()
    with tempfile.TemporaryFile() as log:
        command = [part.replace("{port}", str(port)) for part in command]
        process = start(name, command, log, env)
        try:
            server = Server(name, port, process, log)
            server.wait(health)
            yield server
        finally:
            stop(process)


def free_port() -> int:
    """Return a port that nothing listens on, chosen by the system."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
