"""The share of the processor that other processes use during a timing."""

import sys
import time

import psutil

# Above this share of the cores, other processes affect the measured times.
BUSY = 0.05
# Seconds. The system counts hundredths of a second per core: too coarse for shorter times.
SHORTEST = 1.0
_WORKING = ("user", "nice", "system", "irq", "softirq", "steal")


class OtherProcesses:
    """Measures from the moment it is created.

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
        seconds, taken, own = (b - a for a, b in zip(self._begin[:3], end[:3], strict=True))
        # In some sandboxes the counters do not move.
        if seconds < SHORTEST or taken < 0.5 * own:
            return None
        return min(max(taken - own, 0.0) / (seconds * end[3]), 1.0)

    @staticmethod
    def _now() -> tuple[float, float, float, int] | None:
        """(time, busy seconds of all processes on our cores, busy seconds of this process, number
        of cores)."""
        if not sys.platform.startswith("linux"):
            return None
        process = psutil.Process()
        every = psutil.cpu_times(percpu=True)
        ours = process.cpu_affinity()
        # If a container lists fewer cores than our core numbers need, the listed cores are ours.
        cores = [every[i] for i in ours] if max(ours) < len(every) else every
        busy = sum(getattr(core, part, 0.0) for core in cores for part in _WORKING)
        own = process.cpu_times()
        return time.perf_counter(), busy, own.user + own.system, len(cores)


def busy(share: float | None) -> bool:
    """Whether other processes used enough of the processor to affect the measured times."""
    return share is not None and share > BUSY
