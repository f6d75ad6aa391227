"""The exit statuses of all commands, in one place."""

import signal
from enum import IntEnum


class ExitStatus(IntEnum):
    """What a command's exit status says. `meanings` is the list for people."""

    DONE = 0
    FAILED = 1
    BAD_INPUT = 2
    NOT_DUE = 3
    STOPPED = 128 + signal.SIGTERM

    @classmethod
    def meanings(cls) -> dict["ExitStatus", str]:
        """Every status with its meaning."""
        return {
            cls.DONE: "the command did what it was asked to",
            cls.FAILED: "a check failed: `doctor` says the machine cannot be trusted, or `export "
            "--verify` that an engine drafted nothing, or `audit` that a server's text is not the "
            "target's. Also a bug, with its traceback",
            cls.BAD_INPUT: "bad input or a missing package; the message says what was expected and "
            "what to do. Also an `audit` that could not judge",
            cls.NOT_DUE: "`learn --once`: no cycle is due",
            cls.STOPPED: "`train` and `learn`: stopped by SIGTERM or Ctrl-C after a checkpoint; "
            "the same command continues",
        }
