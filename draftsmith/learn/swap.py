"""Engines side by side: a new process is started, the recorder switches, the old one is stopped."""

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from decode.base.errors import UserError
from draftsmith.learn.learn_config import EngineConfig
from train.base.platforms import require_posix
from train.engines.child_process import ask, free_port, log_ending, start_process

STOP_SECONDS = 30.0
PID_FILE, LOG_FILE = "engine.pid", "engine.log"
# Writes the process's id to a file, then becomes the engine: a kill of this process at any moment
# leaves no engine that the next start does not know.
_LAUNCH = 'echo $$ > "$0" && exec "$@"'


class EngineProcesses:
    """Starts and stops the engines of versions, as processes of this machine made from a command.
    key: the key that they ask for. directory: a version's, which keeps its engine's files. Raises
    UserError on a system without process groups."""

    def __init__(self, config: EngineConfig, gamma: int, key: str = "") -> None:
        require_posix("draftsmith learn")
        self.config, self.gamma, self._key = config, gamma, key
        self._children: dict[Path, subprocess.Popen[bytes]] = {}

    def start(self, directory: Path, export: Path) -> str:
        """Start an engine with this drafter and wait until it is ready; its address. An engine
        that an earlier call left in the directory is stopped first. Raises UserError."""
        self.stop(directory)
        directory.mkdir(parents=True, exist_ok=True)
        port = free_port()
        values = {"{drafter}": str(export), "{gamma}": str(self.gamma), "{port}": str(port)}
        command = [_replaced(word, values) for word in self.config.command]
        launch = ["/bin/sh", "-c", _LAUNCH, str(directory / PID_FILE), *command]
        url = f"http://127.0.0.1:{port}"
        with (directory / LOG_FILE).open("w+b") as log:
            process = start_process(command[0], launch, log, os.environ | self.config.env)
            self._children[directory] = process
            try:
                self._wait(process, url)
            except UserError as error:
                self.stop(directory)
                raise UserError(f"{error}. {log_ending(log)}") from None
        return url

    def stop(self, directory: Path) -> bool:
        """Stop the engine of a version. Returns False if this class did not start it."""
        process = _engine_of(directory / PID_FILE)
        if process is not None:
            _stop_family(process)
            (directory / PID_FILE).unlink(missing_ok=True)
        child = self._children.pop(directory, None)
        if child is not None:
            child.kill()
            child.wait()
        return process is not None

    def _wait(self, process: "subprocess.Popen[bytes]", url: str) -> None:
        end, reason = time.monotonic() + self.config.ready_seconds, ""
        while time.monotonic() < end:
            if process.poll() is not None:
                raise UserError(f"the engine ended with exit status {process.returncode}")
            try:
                ask(f"{url}{self.config.health}", key=self._key, seconds=5)
                return
            except UserError as error:
                reason = str(error)
            time.sleep(0.2)
        raise UserError(f"not ready after {self.config.ready_seconds:g} s: {reason}")


class RecorderSwitch:
    """The recorder's `/admin/upstream`."""

    def __init__(self, url: str, key: str) -> None:
        self._address, self._key = f"{url.rstrip('/')}/admin/upstream", key

    @property
    def serving(self) -> str:
        """The address of the engine that gets new requests."""
        return str(self._ask()["url"])

    def switch(self, url: str) -> None:
        """Send new requests to another engine."""
        self._ask({"url": url})

    def drain(self, url: str, seconds: float, sleep: Callable[[float], None]) -> bool:
        """Wait until an earlier engine has no request left, at most these seconds. Returns
        whether it has none."""
        end = time.monotonic() + seconds
        while any(old["url"] == url for old in self._ask()["draining"]):  # type: ignore[attr-defined]
            if time.monotonic() > end:
                return False
            sleep(0.2)
        return True

    def _ask(self, body: dict[str, str] | None = None) -> dict[str, object]:
        answer: dict[str, object] = json.loads(ask(self._address, body, self._key, 30))
        return answer


def _stop_family(process: psutil.Process) -> None:
    """Ask a process to end, and kill what is left of it and of the processes that it started."""
    family = [process]
    with contextlib.suppress(psutil.NoSuchProcess):
        family += process.children(recursive=True)
        process.terminate()
    _, alive = psutil.wait_procs(family, STOP_SECONDS)
    for member in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(alive, STOP_SECONDS)


def _engine_of(file: Path) -> psutil.Process | None:
    """The engine whose process wrote the file. The time tells it from a later process that got the
    same id."""
    try:
        process = psutil.Process(int(file.read_text(encoding="utf-8")))
        # The file is written within a moment of the start. Clocks of the two differ by rounding.
        return process if abs(process.create_time() - file.stat().st_mtime) < 5 else None
    except (OSError, ValueError, psutil.Error):
        return None


def _replaced(word: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(name, value)
    return word
