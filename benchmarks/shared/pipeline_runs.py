"""A run of the pipeline's config in processes of its own: unbroken, or killed and started again."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from decode.base.errors import UserError
from train.base.console import LOG_FILE
from train.engines.child_process import free_port

ROOT = Path(__file__).parents[2]
ENGINE_CONFIG = ROOT / "configs" / "accelerate" / "fsdp2.yaml"
EVALUATION = "evaluation"
# What a start writes that a later one goes on from.
SAVED = (
    "stages/*/part-*/manifest.json",
    "stages/*/open-part-*.jsonl",
    "stages/*/checkpoints/step-*/manifest.json",
    "stages/*/drafter/manifest.json",
    "stages/*/done.json",
    "evaluations/*/manifest.json",
)
# A line of the log that says what begins.
BEGINS = re.compile(r"stage (\S+) \(|(evaluating) ")
POLL_SECONDS = 0.1
GONE_SECONDS = 10.0  # for all that a killed command has started


@dataclass(frozen=True)
class Kill:
    """A kill of a run's command.

    phase: the stage, or `evaluation`. seconds: since this start began to work. lost: seconds since
    the last result that a later start goes on from. restart: seconds until the next start worked.
    left_behind: ranks and processes of an engine that were alive GONE_SECONDS later.
    """

    phase: str
    seconds: float
    lost: float
    restart: float
    left_behind: int

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


class PipelineRun:
    """A run directory, and the command that makes it. `console` is what the command prints.

    config: of the run. name: of the run, and of its directory in `runs`. overrides: `key=value`.
    processes, of the methods: above 1, that many under FSDP2.
    """

    def __init__(self, config: Path, name: str, runs: Path, overrides: Sequence[str]) -> None:
        self.directory = runs / name
        self.console = runs / f"{name}.log"
        self._train = [
            *("-m", "train", str(config), f"name={name}", f"output_dir={runs}"),
            *overrides,
        ]

    def unbroken(self, processes: int) -> float:
        """Run to the end. Returns the seconds. Raises UserError with the end of the console."""
        begin = time.monotonic()
        with self._started(processes) as process:
            self._finish(process)
        return time.monotonic() - begin

    def killed(self, processes: int, places: Sequence[tuple[str, float]]) -> list[Kill]:
        """Run to the end, with SIGKILL at each of these places, and start again each time.

        places: a phase, and the seconds of work in it, in the order of the work. A run that ends
        sooner is killed less often. Raises UserError as `unbroken` does.
        """
        kills: list[Kill] = []
        worked: dict[str, float] = {}  # seconds in a phase before earlier kills
        killed_at = 0.0
        for phase, seconds in [*places, ("", math.inf)]:  # the last start runs to the end
            log_begin = self._log_size()
            with self._started(processes) as process:
                self._wait_for(None, process, log_begin)
                if kills:
                    kills[-1] = replace(kills[-1], restart=time.time() - killed_at)
                reached = phase != "" and self._wait_for(phase, process, log_begin)
                began = time.time()
                if not reached or self._ends(process, seconds - worked.get(phase, 0.0)):
                    self._finish(process)
                    break
                killed_at = time.time()
                done, now = killed_at - began, self._phases(log_begin)[-1]
                lost = killed_at - max(self._saved_at(), began)
                kills.append(Kill(now, done, lost, 0.0, kill_group(process)))
                worked[phase] = worked.get(phase, 0.0) + done
        return kills

    def seconds_by_phase(self) -> dict[str, float]:
        """The seconds of each stage of the finished run, and of the evaluation."""
        seconds, end = {}, 0.0
        for file in sorted(self.directory.glob("stages/*/done.json")):
            name = file.parent.name.partition("-")[2]
            seconds[name] = float(json.loads(file.read_text())["summary"]["seconds"])
            end = file.stat().st_mtime
        (figures,) = self.directory.glob("evaluations/*/manifest.json")
        return seconds | {EVALUATION: figures.stat().st_mtime - end}

    def summary(self, stage: str) -> dict[str, Any]:
        """The summary of a finished stage."""
        (file,) = self.directory.glob(f"stages/*-{stage}/done.json")
        summary: dict[str, Any] = json.loads(file.read_text())["summary"]
        return summary

    def stage(self, stage: str) -> Path:
        """The directory of a stage."""
        (directory,) = self.directory.glob(f"stages/[0-9][0-9]-{stage}")
        return directory

    def evaluation(self) -> dict[str, Any]:
        """The figures of the run's one evaluation."""
        (file,) = self.directory.glob("evaluations/*/evaluation.json")
        figures: dict[str, Any] = json.loads(file.read_text())["evaluation"]
        return figures

    @contextmanager
    def _started(self, processes: int) -> Iterator["subprocess.Popen[bytes]"]:
        """The command's process. It is killed if this context is left by an error, such as
        Ctrl-C."""
        command = [sys.executable]
        if processes > 1:
            command += ["-m", "accelerate.commands.launch", "--config_file", str(ENGINE_CONFIG)]
            command += ["--mixed_precision", "no", "--num_processes", str(processes)]
            command += ["--main_process_port", str(free_port())]
        with self.console.open("ab") as console:
            process = subprocess.Popen(
                [*command, *self._train],
                cwd=ROOT,
                env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield process
        except BaseException:
            kill_group(process)
            raise

    def _finish(self, process: "subprocess.Popen[bytes]") -> None:
        if status := process.wait():
            end = self.console.read_text(errors="replace")[-2000:]
            raise UserError(f"{self.directory} ended with status {status}; {self.console}:\n{end}")

    def _ends(self, process: "subprocess.Popen[bytes]", seconds: float) -> bool:
        """Whether the process ends within so many seconds."""
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(seconds, POLL_SECONDS))
        return process.poll() is not None

    def _wait_for(
        self, phase: str | None, process: "subprocess.Popen[bytes]", log_begin: int
    ) -> bool:
        """Wait until this start works on the phase or a later one (None: on any). Returns False if
        the process ends before."""
        while not self._ends(process, POLL_SECONDS):
            phases = self._phases(log_begin)
            if phases and (phase is None or phase in phases or self._is_done(phase)):
                return True
        return False

    def _is_done(self, phase: str) -> bool:
        return any(self.directory.glob(f"stages/*-{phase}/done.json"))

    def _phases(self, log_begin: int) -> list[str]:
        """What has begun since the log had this size, in order."""
        try:
            text = (self.directory / "logs" / LOG_FILE).read_bytes()[log_begin:].decode()
        except OSError:
            return []
        return [match[1] or EVALUATION for match in BEGINS.finditer(text)]

    def _log_size(self) -> int:
        log = self.directory / "logs" / LOG_FILE
        return log.stat().st_size if log.exists() else 0

    def _saved_at(self) -> float:
        files = (file for pattern in SAVED for file in self.directory.glob(pattern))
        return max((file.stat().st_mtime for file in files), default=0.0)


def draw_places(
    seconds: Mapping[str, float], count: int, rng: np.random.Generator
) -> list[tuple[str, float]]:
    """`count` places, uniform over the time of all phases, in order: each a phase and the seconds
    after its begin."""
    names, ends = list(seconds), np.cumsum(list(seconds.values()))
    places = []
    for moment in np.sort(rng.uniform(0, ends[-1], count)):
        number = int(np.searchsorted(ends, moment, side="right"))
        begin = ends[number] - seconds[names[number]]
        places.append((names[number], float(moment - begin)))
    return places


def kill_group(process: "subprocess.Popen[bytes]") -> int:
    """SIGKILL for the process group of a run's command. All that it started, ranks and engines,
    must then end by itself. Returns how many of these processes did not, and kills them."""
    family: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess, ProcessLookupError):
        family = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(family, GONE_SECONDS)
    for member in alive:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    return len(alive)
