"""An engine's server as a child process on the loopback interface, gone when its block is left."""

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

READY_SECONDS = 180.0
ANSWER_SECONDS = 300.0
STOP_SECONDS = 10.0


class Server:
    """A server that answers JSON with JSON at http://127.0.0.1:PORT."""

    def __init__(self, name: str, port: int, process: "subprocess.Popen[bytes]", log: Any) -> None:
        self.name, self.port = name, port
        self._process, self._log = process, log

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON answer to a POST of `body`, or to a GET. Raises UserError when the server has
        died or does not answer in time, with the last lines of its log."""
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
        """Until `health` answers. Raises UserError when the server ends, or takes too long."""
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

    def log(self) -> str:
        """Everything it printed so far."""
        self._log.flush()
        self._log.seek(0)
        return str(self._log.read().decode(errors="replace"))

    def ending(self) -> str:
        lines = [line for line in self.log().splitlines() if line.strip()][-8:]
        return "Its log ends:\n" + "\n".join(lines) if lines else "It printed nothing."


@contextmanager
def serving(
    name: str, command: Sequence[str], health: str, env: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Start `command` (with {port} in its place), wait until it is ready, and stop it at the end,
    whatever happens in between. Raises UserError when it cannot be started."""
    port = free_port()
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                [part.replace("{port}", str(port)) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=None if env is None else dict(env),
            )
        except OSError as error:
            raise UserError(f"{name} cannot be started ({error})") from error
        try:
            server = Server(name, port, process, log)
            server.wait(health)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_port() -> int:
    """A port that nothing listens on; chosen by the system, so none has to be agreed on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
