"""Servers in child processes of ours: they listen on the loopback interface inside a `with` block.

Stopping a process also stops all processes that it started. None of them outlives our process, not
even if that is killed (`guard.py`).
"""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException, InvalidURL
from pathlib import Path
from typing import Any

from decode.base.errors import UserError
from decode.model.loading import Target, stored_directory
from train.base.platforms import require_posix

STOP_SECONDS = 10.0
READY_SECONDS = 180.0
ANSWER_SECONDS = 300.0
GUARD = Path(__file__).with_name("guard.py")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Answers of status 3xx are errors: urllib would send the key on to the other address."""

    def redirect_request(self, *_: Any) -> None:
        return None


# Without the proxy of the environment, which cannot reach a server of this machine.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)


class NoAnswer(UserError):
    """A server that cannot be reached, breaks off its answer, or has a fault of its own (status
    5xx). It may answer later; any other UserError stays."""


def ask(
    url: str, body: Mapping[str, Any] | None = None, key: str = "", seconds: float = ANSWER_SECONDS
) -> bytes:
    """POST `body` as JSON, or GET without one; the body of the answer. Raises NoAnswer, and
    UserError for a status 4xx or an invalid address."""
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        if key:
            request.add_header("Authorization", f"Bearer {key}")
        with OPENER.open(request, timeout=seconds) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        detail = b""
        with suppress(OSError, HTTPException):
            detail = error.read()[:300]
        reason = f"{url} does not answer: {error}: {detail.decode(errors='replace')}"
        if error.code >= 500:
            raise NoAnswer(reason) from error
        if error.code in (401, 403):
            reason += ". Check the key: engine.key_env and recorder.key_env name its variable"
        raise UserError(reason) from error
    except (ValueError, OverflowError, InvalidURL) as error:
        raise UserError(f"{url!r} is no address: {error}; expected http://HOST:PORT") from error
    except (OSError, HTTPException) as error:
        raise NoAnswer(f"{url} does not answer: {str(error) or type(error).__name__}") from error


def start_process(
    name: str,
    command: Sequence[str],
    log: Any,
    env: Mapping[str, str] | None = None,
    *,
    guarded: bool = False,
) -> "subprocess.Popen[bytes]":
    """Start `command` in a new process group, with its output in the file `log`. Raises UserError
    if it cannot be started. guarded: kill the group when this process ends, whatever ends it. The
    process is then the guard (`guard.py`), which exits with the command's status."""
    require_posix(f"starting {name}")
    if guarded:
        command = [sys.executable, "-I", "-S", str(GUARD), *command]
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE if guarded else subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=None if env is None else dict(env),
            start_new_session=True,
        )
    except OSError as error:
        raise UserError(f"{name} cannot be started ({error})") from error


def stop_process(process: "subprocess.Popen[bytes]") -> None:
    """Stop a process started by `start_process`, and all processes that it started."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def log_ending(log: Any) -> str:
    """Return the last lines that a process has printed into `log` so far."""
    log.flush()
    log.seek(0)
    text = log.read().decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()][-8:]
    return "Its log ends:\n" + "\n".join(lines) if lines else "It printed nothing."


class Server:
    """A server that answers JSON with JSON at http://127.0.0.1:PORT."""

    def __init__(self, name: str, port: int, process: "subprocess.Popen[bytes]", log: Any) -> None:
        self.name, self.port = name, port
        self._process, self._log = process, log

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """POST `body`, or GET without one, and return the JSON answer. Raises UserError with the
        last lines of the log if the server has died or does not answer in time."""
        try:
            return json.loads(ask(f"http://127.0.0.1:{self.port}{path}", body))
        except (UserError, ValueError) as error:
            raise UserError(
                f"{self.name} did not answer ({error}). {log_ending(self._log)}"
            ) from error

    def wait(self, health: str, seconds: float | None = None) -> None:
        """Wait until `health` answers. seconds: READY_SECONDS by default. Raises UserError if the
        server ends or takes too long."""
        seconds = READY_SECONDS if seconds is None else seconds
        begin = time.monotonic()
        while time.monotonic() - begin < seconds:
            if self._process.poll() is not None:
                raise UserError(
                    f"{self.name} ended before it was ready, with exit status "
                    f"{self._process.returncode}. {log_ending(self._log)}"
                )
            try:
                url = f"http://127.0.0.1:{self.port}{health}"
                with OPENER.open(url, timeout=5) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                pass  # Not listening yet, or still loading (503).
            time.sleep(0.2)
        raise UserError(f"{self.name} was not ready after {seconds:.0f} s. {log_ending(self._log)}")


@contextmanager
def serving(
    name: str,
    command: Sequence[str],
    health: str,
    env: Mapping[str, str] | None = None,
    *,
    log_file: Path | None = None,
    ready_seconds: float | None = None,
) -> Iterator[Server]:
    """Start `command` with {port} filled in, wait until it is ready, and always stop it at the end.
    log_file: keeps what it prints, and errors name it. ready_seconds: as for `Server.wait`. Raises
    UserError if it cannot be started."""
    port = free_port()
    with tempfile.TemporaryFile() if log_file is None else open(log_file, "w+b") as log:
        command = [part.replace("{port}", str(port)) for part in command]
        process = start_process(name, command, log, env, guarded=True)
        try:
            server = Server(name, port, process, log)
            server.wait(health, ready_seconds)
            yield server
        except UserError as error:
            if log_file is None:
                raise
            raise UserError(f"{error}\nThe log of {name}: {log_file}") from error
        finally:
            stop_process(process)


def free_port() -> int:
    """Return a port that nothing listens on. It is none of those that systems give to connections:
    one of these could be taken before an engine that starts for a minute listens."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def environment_of(name: str) -> Path:
    """Return the path of an engine's environment, whether or not it exists."""
    return Path(os.environ.get("DRAFTSMITH_ENGINES", ".engines")).resolve() / name


def python_of(name: str) -> Path:
    return environment_of(name) / "bin" / "python"


def package_version(name: str, package: str) -> str | None:
    """Return the version of a package in engine `name`'s environment; None if not installed."""
    infos = environment_of(name).glob(f"lib/python*/site-packages/{package}-*.dist-info")
    return next((info.name.removesuffix(".dist-info").rpartition("-")[2] for info in infos), None)


def model_directory(target: Target, directory: Path) -> Path:
    """Return the target as a Hugging Face directory: the one it was loaded from, or that of its hub
    repository in the cache. Else, for a GGUF file, `directory`, into which the loaded weights are
    saved. Raises UserError if there is no room for them."""
    if (stored := stored_directory(target)) is not None:
        return stored
    size = sum(x.nbytes for x in target.model.state_dict().values())
    free = shutil.disk_usage(directory.parent).free
    if size > free:
        raise UserError(
            f"{target.name} is no model directory, so its weights are written for the engine: "
            f"{size / 1e9:.1f} GB, but {directory.parent} has {free / 1e9:.1f} GB left. Give the "
            "target as a directory or a hub id, or set TMPDIR"
        )
    target.model.save_pretrained(directory)
    target.tokenizer.save_pretrained(directory)
    return directory
