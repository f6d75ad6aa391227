"""How many small things a client may send in a second."""

import time


class Pace:
    """A client's share, as a bucket that fills by `rate` a second, to `_BURST` of it at most."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._left, self._at = rate * _BURST, time.monotonic()

    def take(self, count: int) -> None:
        """So many things have come, also if there was no room for them."""
        self._left = self._now() - count

    def wait(self) -> float:
        """Seconds until more may be read."""
        return max(0.0, -self._now() / self._rate)

    def _now(self) -> float:
        now = time.monotonic()
        self._left = min(self._rate * _BURST, self._left + (now - self._at) * self._rate)
        self._at = now
        return self._left


_BURST = 1 / 8  # of a second
