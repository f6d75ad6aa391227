"""What figures depend on beside the settings and the data."""

import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

PACKAGES = ("draftsmith", "torch", "transformers", "accelerate", "datasets", "safetensors", "numpy")
TIME = "%Y-%m-%dT%H:%M:%S%z"  # of a start


def describe_process() -> dict[str, Any]:
    """Everything else that figures depend on: versions, commit, machine, command."""
    return {
        "time": time.strftime(TIME),
        "argv": sys.argv,
        "python": platform.python_version(),
        "versions": {package: version_of(package) or "not installed" for package in PACKAGES},
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "machine": {
            "platform": platform.platform(),
            "processor": _processor(),
            "cores": psutil.cpu_count(),
            "threads": torch.get_num_threads(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        },
    }


def version_of(package: str) -> str | None:
    """The version of an installed package, None for one that is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    here = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=here,
            capture_output=True,
            encoding="utf-8",
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
