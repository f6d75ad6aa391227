"""Checks that the ranks of a run work on the same files.

Ranks write parts of answers, caches and checkpoints into the run's directory, and read the parts of
other ranks. On machines that do not share its disk, each would have some of the parts only.
"""

import shutil
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from decode.base.errors import UserError
from train.measure.ranks import Ranks

# Seconds until a file of another machine must be there: network file systems show it late.
PATIENCE = 60.0


def require_shared(directory: Path, ranks: Ranks, *, patience: float = PATIENCE) -> None:
    """Check that `directory` is the same one for all ranks: each writes a file into it, and the
    first must see all of them.

    Every rank must call this. The directory must exist for the first rank. patience: in seconds.
    Raises UserError, on every rank, with the ranks that see or write another disk.
    """
    if ranks.world == 1:
        return
    # The name is the first rank's, so no file of an earlier start can have it.
    common = directory / f".ranks-{ranks.gather(uuid.uuid4().hex)[0]}"
    if ranks.is_main:
        common.mkdir()
    ranks.gather(None)
    problem = _write(common, ranks.rank, patience)
    views = ranks.gather((socket.gethostname(), str(directory), problem))
    wrote = [number for number, (_, _, problem) in enumerate(views) if problem is None]
    if ranks.is_main:
        _wait_for(lambda: all((common / str(number)).exists() for number in wrote), patience)
        seen = [number for number in wrote if (common / str(number)).exists()]
        shutil.rmtree(common, ignore_errors=True)
    else:
        seen = []
    seen = ranks.gather(seen)[0]
    others = [
        f"rank {number} on {machine} with {there} ({problem or 'its file does not arrive'})"
        for number, (machine, there, problem) in enumerate(views)
        if number not in seen
    ]
    if others:
        machine, there, _ = views[0]
        raise UserError(
            f"not all ranks work in the run's directory {there} of rank 0 on {machine}: "
            f"{'; '.join(others)}. Each would keep its parts of answers, caches "
            "and checkpoints on another disk. Set output_dir to a directory that all machines "
            "share, under the same path, or train on one machine"
        )


def _write(common: Path, rank: int, patience: float) -> str | None:
    """Write this rank's file. Returns why it cannot be written."""
    if not _wait_for(common.is_dir, patience):
        return "it does not see the files of rank 0"
    try:
        (common / str(rank)).touch()
    except OSError as error:
        return f"it cannot write there: {error.strerror}"
    return None


def _wait_for(happened: Callable[[], bool], patience: float) -> bool:
    end = time.monotonic() + patience
    while not happened():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
