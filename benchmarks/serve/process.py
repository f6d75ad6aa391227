"""A service in a process of its own."""

import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from benchmarks.common import OUTPUT_CHARACTERS, start_benchmark
from benchmarks.serve.client import CHAT, ClientAnswer, ask
from decode.model.loading import Target, load_target
from train.base.console import Reporter
from train.data.read import Example, read_examples
from train.engines.child_process import Server, free_port, start_process

MODEL = "target"  # what requests call it


def command(*words: str) -> list[str]:
    """The command `draftsmith` with these words, of this Python."""
    return [sys.executable, "-m", "draftsmith.cli.main", *words]


def serve_command(target: str, drafter: str, *options: str) -> list[str]:
    """The command `draftsmith serve`, which calls its model `MODEL`. The port is added."""
    words = ("serve", "--target", target, "--drafter", drafter, "--model-name", MODEL)
    return command(*words, *options)


def prepare(
    target: str, prompts: Path, *, dtype: str, device: str, gamma: int, policy: str
) -> tuple[Reporter, Target, list[Example], list[str]]:
    """What reports progress, the loaded target, the rows that have a prompt, and the options of
    services of the same target. Services that start later have as many threads as this process, and
    end with it."""
    reporter = start_benchmark()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    examples = [example for example in read_examples(str(prompts))[0] if example.prompt]
    loaded = load_target(target, dtype=dtype, device=device)
    options = ["--dtype", dtype, "--device", str(loaded.device)]
    return reporter, loaded, examples, [*options, "--gamma", str(gamma), "--policy", policy]


class ServiceProcess:
    """A service that a command starts, with `--port` and a port added. Its context begins when it
    listens, and ends it.

    port: None: any that is free. The context raises UserError with the end of the service's output
    if it ends before it listens, or does not listen in time.
    """

    def __init__(self, command: Sequence[str], port: int | None = None) -> None:
        self.command, self.port = list(command), port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (closed in __exit__)
        # transformers asks the hub about model names. No benchmark may wait for a network.
        environment = {"HF_HUB_OFFLINE": "1", **os.environ}
        command = [*command, "--port", str(self.port)]
        self._process = start_process(command[0], command, self._output, environment)
        self._server = Server(" ".join(command), self.port, self._process, self._output)

    @property
    def process(self) -> psutil.Process:
        """For its memory, threads and files."""
        return psutil.Process(self._process.pid)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let it run within this context only: some services keep a core busy while they wait."""
        self.signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.signal(signal.SIGSTOP)

    def wait(self, seconds: float) -> int:
        """Its exit status. Raises subprocess.TimeoutExpired."""
        return self._process.wait(seconds)

    def kill(self) -> None:
        """End it at once, as a machine that fails does."""
        self._process.kill()
        self._process.wait()

    def output(self) -> str:
        """The end of what it has written."""
        self._output.seek(0)
        return self._output.read().decode(errors="replace")[-OUTPUT_CHARACTERS:]

    def warm_up(self, model: str = MODEL) -> ClientAnswer:
        """Ask for a few tokens: a service may load its model at the first request."""
        message = {"role": "user", "content": "Hello"}
        return ask(self.url, {"model": model, "messages": [message], "max_tokens": 2}, CHAT)

    def __enter__(self) -> "ServiceProcess":
        try:
            self._server.wait("/health")
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._output.close()
