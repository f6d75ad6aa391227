"""What the processors of this machine can do."""

from pathlib import Path

import torch

CPU_FLAGS = Path("/proc/cpuinfo")  # Linux only


def computes_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 itself. Others are faster in float32."""
    if device.type != "cpu":
        return device.type == "cuda"
    try:
        return bool({"avx512_bf16", "amx_bf16"} & cpu_flags())
    except OSError:
        return False


def cpu_flags() -> set[str]:
    """The words of the processors' description, among them their instructions. Raises OSError
    elsewhere than on Linux."""
    return set(CPU_FLAGS.read_text(encoding="utf-8").split())
