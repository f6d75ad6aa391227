"""A profile of a training's steps by torch.profiler: a trace, and its slowest operations."""

from pathlib import Path
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from decode.base.artifact import write_file
from train.base.console import Reporter

# The steps before the profile. In the first ones memory is allocated and kernels are chosen; in the
# last one the profiler runs, but its figures are dropped.
WARM_UP = 3
ROWS, SPOKEN_ROWS = 20, 5
# What the profiler calls a step. Its own time is that of Python between operations.
STEP_NAME = "ProfilerStep"


class StepProfiler:
    """Profiles `steps` steps after WARM_UP ones, and writes two files into `directory`.

    `from-step-N.pt.trace.json` opens in Perfetto, chrome://tracing and TensorBoard's profiler.
    `from-step-N.txt` is the table of the operations that take most time. N is the first step that
    is profiled. A training that ends earlier is profiled up to its end.
    """

    def __init__(
        self, directory: Path, steps: int, device: torch.device, reporter: Reporter
    ) -> None:
        self.directory, self.steps, self.reporter = directory, steps, reporter
        self._on_device = device.type == "cuda"
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self._on_device
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=WARM_UP - 1, warmup=1, active=steps, repeat=1),
            on_trace_ready=self._write,
        )
        self._first: int | None = None
        self._ended = 0
        self._is_written = False

    def __enter__(self) -> Self:
        self._profile.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._profile.stop()
        if kind is None and not self._is_written:
            self.reporter.say(
                f"  no profile: only {self._ended} steps were left; expected more than {WARM_UP}"
            )

    def end_step(self, step: int) -> None:
        """To be called after each optimizer step, with its number."""
        self._ended += 1
        if self._first is None:
            self._first = step + WARM_UP
        self._profile.step()

    def _write(self, finished: Any) -> None:
        steps = min(self._ended - WARM_UP, self.steps)
        if steps < 1:
            return
        name = f"from-step-{self._first}"
        self.directory.mkdir(parents=True, exist_ok=True)
        finished.export_chrome_trace(str(self.directory / f"{name}.pt.trace.json"))
        where = "GPU" if self._on_device else "CPU"
        lines = slowest_operations(finished.key_averages(), steps, on_device=self._on_device)
        title = f"{where} time of {steps} steps by operation, without what it calls"
        write_file(self.directory / f"{name}.txt", "\n".join([title, *lines]) + "\n")
        self.reporter.say(f"  {title} (trace: {self.directory / name}.pt.trace.json):")
        for line in lines[:SPOKEN_ROWS]:
            self.reporter.say(f"    {line}")
        self._is_written = True


def slowest_operations(averages: Any, steps: int, *, on_device: bool) -> list[str]:
    """A line for each of the ROWS operations that take most time themselves: the share of the time,
    the milliseconds and the calls of one step, the name. averages: the averages of torch.profiler.
    on_device: count the time on the GPU."""
    attribute = "self_device_time_total" if on_device else "self_cpu_time_total"
    times: list[tuple[float, int, str]] = []
    for event in averages:
        is_step = event.key.startswith(STEP_NAME)
        if is_step and on_device:
            continue  # it spans the kernels that are counted by themselves
        key = "Python between operations" if is_step else event.key
        times.append((getattr(event, attribute), event.count, key))
    total = sum(time for time, _, _ in times) or 1.0
    slowest = sorted(times, reverse=True)[:ROWS]
    return [
        f"{time / total:6.1%} {time / steps / 1e3:10.3f} ms {count / steps:8.1f} calls  {key}"
        for time, count, key in slowest
        if time > 0
    ]
