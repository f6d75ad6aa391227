"""What `accelerate launch` tells its processes, and the end of a process whose launcher is gone."""

import os
import signal
import threading
import time

# The beginnings of the names of the variables that it sets.
_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "GROUP_",
    "ACCELERATE_",
    "TORCHELASTIC",
)
WATCH_SECONDS = 0.5


def local_processes() -> int:
    """The number of processes of this run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def on_several_machines() -> bool:
    """Whether the processes of this run are on more than one machine."""
    world = os.environ.get("WORLD_SIZE", "1")
    return int(world) > int(os.environ.get("LOCAL_WORLD_SIZE", world))


def environment_of_one(cores: int) -> dict[str, str]:
    """The environment for a program that is no process of this run. The launcher gives each process
    its share of the threads; this program gets all of them, but no more than `cores`."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(_VARIABLES)}
    threads = env.get("OMP_NUM_THREADS", "")
    if local_processes() > 1 and threads.isdigit():
        env["OMP_NUM_THREADS"] = str(max(1, min(int(threads) * local_processes(), cores)))
    return env


def end_with_launcher() -> None:
    """From now on, kill this process when its parent ends, if a launcher started it.

    A launcher that is killed cannot end its processes. They would go on, and write to the run's
    directory while the next start writes there too.
    """
    if "LOCAL_RANK" in os.environ:
        parent = os.getppid()
        threading.Thread(target=_watch, args=(parent,), name="launcher", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def cores() -> int:
    """Return the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
