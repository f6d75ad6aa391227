"""How a target is spread over devices."""

from collections.abc import Mapping
from typing import Any

from decode.base.errors import UserError, nearest

# What transformers knows as a device_map by name.
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def require_sound_map(
    device_map: str | Mapping[str, Any] | None,
    max_memory: Mapping[int | str, int | str] | None,
    device: str,
    sharded: bool,
) -> None:
    """Raise UserError for an unknown device_map, and for settings beside which it has no sense."""
    if max_memory is not None and not isinstance(device_map, str):
        raise UserError(
            "max_memory limits what a device_map places, but no device_map was named; set it to "
            f"one of {', '.join(DEVICE_MAPS)}, or leave max_memory out"
        )
    if device_map is None:
        return
    if isinstance(device_map, str) and device_map not in DEVICE_MAPS:
        raise UserError(
            f"unknown device_map {device_map!r}; expected one of {', '.join(DEVICE_MAPS)}, or the "
            f"device of each part by its name.{nearest(device_map, DEVICE_MAPS)}"
        )
    if device != "auto":
        raise UserError(
            f"device {device!r} and a device_map were given; a device_map says where each layer "
            "goes, so leave the device out"
        )
    if sharded:
        raise UserError(
            "a device_map places the target in one process, and target.sharded shares it out over "
            "several; leave one of them out"
        )
