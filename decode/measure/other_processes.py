"""What other processes take of the processor while something is timed."""

import sys
import time

import psutil

# Above this share of the cores times are not those of a machine that was alone.
BUSY = 0.05
# Seconds; the system counts in hundredths of a second per core, which says little of less.
SHORTEST = 1.0
_WORKING = ("user", "nice", "system", "irq", "softirq", "steal")


class OtherProcesses:
    """Watches from the moment it is made.

    On Linux only, and only the cores that this process may run on; what another guest of the same
    host takes counts where the host tells (steal). In a container the system's counters are those
    of the whole host: limited to a set of cores (cpuset), only these are looked at; limited by a
    quota, all cores of the host are, and processes outside the container count too. A GPU's other
    users are not seen.
    """

    def __init__(self) -> None:
        self._begin = self._now()

    def share(self) -> float | None:
        """The share of the cores, 0 to 1, that other processes took since; None where that is not
        known."""
        if self._begin is None:
            return None
        end = self._now()
        assert end is not None
        seconds, taken, own = (b - a for a, b in zip(self._begin[:3], end[:3], strict=True))
        # Some sandboxes have counters that stand still.
        if seconds < SHORTEST or taken < 0.5 * own:
            return None
        return min(max(taken - own, 0.0) / (seconds * end[3]), 1.0)

    @staticmethod
    def _now() -> tuple[float, float, float, int] | None:
        """(time, busy seconds of all processes on our cores, of this process, cores)."""
        if not sys.platform.startswith("linux"):
            return None
        process = psutil.Process()
        every = psutil.cpu_times(percpu=True)
        ours = process.cpu_affinity()
        # Where a container shows fewer cores than there are numbers, those shown are ours.
        cores = [every[i] for i in ours] if max(ours) < len(every) else every
        busy = sum(getattr(core, part, 0.0) for core in cores for part in _WORKING)
        own = process.cpu_times()
        return time.perf_counter(), busy, own.user + own.system, len(cores)


def busy(share: float | None) -> bool:
    """Whether others took so much that times are not those of a machine that was alone."""
    return share is not None and share > BUSY
