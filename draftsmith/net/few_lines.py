"""Lines of a log that clients cannot fill."""

import logging
from time import monotonic

LINES, SECONDS = 20, 60.0


class FewLines(logging.Filter):
    """Lets through LINES lines of a kind in SECONDS. The next one says how many were left out. A
    kind: a message before its values are put in, so there are few."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[str, tuple[float, int]] = {}  # when it began, and the lines since then

    def filter(self, record: logging.LogRecord) -> bool:
        now = monotonic()
        begin, count = self._kinds.get(record.msg, (now, 0))
        kind = record.msg
        if now - begin >= SECONDS:
            if count > LINES:
                record.msg += f" ({count - LINES} more such lines were left out before)"
            begin, count = now, 0
        self._kinds[kind] = begin, count + 1
        return count < LINES


def server_logger(name: str) -> logging.Logger:
    """A logger for what requests can cause. To be called once for each name."""
    logger = logging.getLogger(name)
    logger.addFilter(FewLines())
    return logger
