"""The peak of known accelerators, for the share of it that a training uses."""

import torch

# TFLOP/s of dense products in bfloat16 (T4, V100: float16) that are added up in float32, from the
# makers' data sheets. The first part that the device's name has counts.
PEAKS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "A30": 165.0,
    "A40": 149.7,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "V100": 125.0,
    "T4": 65.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "MI300X": 1307.4,
}


def peak_of(name: str) -> float | None:
    """FLOP/s of the device with this name, as `torch.cuda.get_device_name` returns it. None: it is
    not in the table.

    >>> peak_of("NVIDIA A100-SXM4-80GB"), peak_of("NVIDIA A1000")
    (312000000000000.0, None)
    """
    words = name.replace("-", " ").split()
    for part, peak in PEAKS.items():
        wanted = part.split()
        if any(words[i : i + len(wanted)] == wanted for i in range(len(words))):
            return peak * 1e12
    return None


def device_peak(device: torch.device, precision: str) -> float | None:
    """The peak of `device` for matrix products in this precision (accelerate's name of it). None if
    it is not known, which is so for CPUs and for float32."""
    if device.type != "cuda" or precision != "bf16":
        return None
    return peak_of(torch.cuda.get_device_name(device))
