"""Runs a command that must not outlive its parent: `guard.py COMMAND…`, with a pipe as its input.

The parent holds the pipe's other end, and the system closes it when the parent ends, whatever ends
it. SIGKILL leaves the parent no time to stop what it started, so this process does it: it kills its
process group, which the parent made for it. It exits with the command's status, or with 128 plus
the number of the signal that ended the command. It uses the standard library only.
"""

import os
import signal
import subprocess
import sys
import threading

NOT_STARTED = 127  # as in a shell


def main(command: list[str]) -> int:
    """Run the command. Returns its exit status."""
    threading.Thread(target=kill_with_parent, daemon=True).start()
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"it cannot be started ({error})", flush=True)
        return NOT_STARTED
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    status = child.wait()
    return status if status >= 0 else 128 - status


def kill_with_parent() -> None:
    """Wait until the parent has ended, then kill this process and all that it started."""
    os.read(sys.stdin.fileno(), 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    # Not sys.exit, which may wait for the thread.
    os._exit(main(sys.argv[1:]))
