"""The costs of drafting and verifying on this machine, and how busy the machine is meanwhile.

The costs are those of a draft by its depth, and v(n), in plain steps. `decode.time_costs`
measures them.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import psutil

# Above this share of the cores, other processes affect the measured times.
BUSY = 0.05
# Seconds. The system counts hundredths of a second per core: too coarse for shorter times.
SHORTEST = 1.0
_WORKING = ("user", "nice", "system", "irq", "softirq", "steal")


@dataclass(frozen=True)
class Costs:
    """Measured costs of one target with one drafter.

    step_s: seconds of a plain decoding step of `rows` rows. per_depth, fixed: a draft of depth γ
    costs fixed + γ · per_depth plain steps, without the drafter's pass over the prompt. For a small
    language model `fixed` is almost 0. For a drafter that computes all depths in one pass
    `per_depth` is almost 0. widths, v: verifying widths[i] tokens per row costs v[i] plain steps; v
    at width 1 is 1. noise: the relative standard error of the cost of a draft and its verification,
    estimated from two halves of the measurement; 0 if unknown. others: the share of the processor
    that other processes used during the measurement (`OtherProcesses`).

    >>> costs = Costs(0.05, 1, 0.1, (1, 2, 4), (1.0, 1.1, 1.3), fixed=0.2)
    >>> costs.draft([0, 1, 4]).round(2).tolist()
    [0.0, 0.3, 0.6]
    >>> costs.verify([3, 8]).round(2).tolist()
    [1.2, 1.7]
    """

    step_s: float
    rows: int
    per_depth: float
    widths: tuple[int, ...]
    v: tuple[float, ...]
    noise: float = 0.0
    others: float | None = None
    fixed: float = 0.0

    def draft(self, depth: Sequence[int] | np.ndarray | int) -> np.ndarray:
        """The cost of a draft of these depths, in plain steps, float64, same shape as `depth`. No
        draft costs nothing."""
        depths = np.asarray(depth)
        return np.where(depths > 0, self.fixed + depths * self.per_depth, 0.0)

    def c(self, depth: int) -> float:
        """c: the cost of a draft of this depth, at least 1, divided by the depth."""
        return self.per_depth + self.fixed / depth

    def verify(self, width: Sequence[int] | np.ndarray | int) -> np.ndarray:
        """v at these widths, float64, same shape as `width`. Linear between measured widths and
        beyond the last."""
        return extrapolated(np.asarray(width), np.array(self.widths), np.array(self.v))

    def doubt(self) -> str:
        """A last sentence for a verdict if other processes affected the costs, else nothing."""
        if not busy(self.others):
            return ""
        return (
            f". Other processes took {self.others:.0%} of the processor while the costs were "
            "measured: calibrate again on an idle machine"
        )

    def to_dict(self) -> dict[str, object]:
        """Converts to JSON values."""
        return {
            "step_ms": 1000 * self.step_s,
            "rows": self.rows,
            "draft_fixed": self.fixed,
            "draft_per_depth": self.per_depth,
            "v": {str(n): cost for n, cost in zip(self.widths, self.v, strict=True)},
            "noise": self.noise,
            "others_share": self.others,
        }


def draft_parts(depths: Sequence[int], costs: Sequence[float]) -> tuple[float, float]:
    """The fixed part and the part per depth of the costs of drafts, both at least 0, by least
    squares. One depth does not separate them: all of it then counts per depth.

    >>> [round(part, 6) for part in draft_parts([1, 4, 8], [0.5, 0.8, 1.2])]
    [0.4, 0.1]
    """
    depth, cost = np.array(depths, dtype=np.float64), np.array(costs, dtype=np.float64)
    if len(set(depths)) > 1:
        beside = depth - depth.mean()
        per_depth = float(beside @ cost / (beside @ beside))
        fixed = float(cost.mean() - per_depth * depth.mean())
        if per_depth < 0:
            return float(cost.mean()), 0.0
        if fixed >= 0:
            return fixed, per_depth
    return 0.0, float((depth @ cost) / (depth @ depth))


def extrapolated(x: np.ndarray, known: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Values at x of a function that never falls. It is linear between the known places
    (ascending), and continues beyond the last with the mean slope over all of them."""
    rising = np.maximum.accumulate(values)
    slope = (rising[-1] - rising[0]) / (known[-1] - known[0]) if len(known) > 1 else 0.0
    beyond = np.maximum(x - known[-1], 0)
    interpolated: np.ndarray = np.interp(x, known, rising)
    return interpolated + slope * beyond


class OtherProcesses:
    """The share of the processor that other processes use, measured from the moment this object is
    created.

    Works only on Linux, and only for the cores that this process may run on. Time used by other
    guests of the same host counts if the host reports it (steal). In a container, the system's
    counters are those of the host. If the container is limited to a set of cores (cpuset), only
    these count. If it is limited by a quota, all cores of the host count, and so do processes
    outside the container. Other users of a GPU are not counted.
    """

    def __init__(self) -> None:
        self._begin = self._now()

    def share(self) -> float | None:
        """The share of the cores, 0 to 1, that other processes used since then. None if unknown."""
        if self._begin is None:
            return None
        end = self._now()
        assert end is not None
        seconds, busy, ours = (b - a for a, b in zip(self._begin[:3], end[:3], strict=True))
        # In some sandboxes the counters do not move.
        if seconds < SHORTEST or busy < 0.5 * ours:
            return None
        return min(max(busy - ours, 0.0) / (seconds * end[3]), 1.0)

    @staticmethod
    def _now() -> tuple[float, float, float, int] | None:
        """(time, busy seconds of all processes on our cores, busy seconds of this process, number
        of cores)."""
        if not sys.platform.startswith("linux"):
            return None
        process = psutil.Process()
        all_cores = psutil.cpu_times(percpu=True)
        numbers = process.cpu_affinity()
        # If a container lists fewer cores than our core numbers need, the listed cores are ours.
        fits = max(numbers) < len(all_cores)
        cores = [all_cores[i] for i in numbers] if fits else all_cores
        busy = sum(getattr(core, part, 0.0) for core in cores for part in _WORKING)
        ours = process.cpu_times()
        return time.perf_counter(), busy, ours.user + ours.system, len(cores)


def busy(share: float | None) -> bool:
    """Whether other processes used enough of the processor to affect the measured times."""
    return share is not None and share > BUSY
