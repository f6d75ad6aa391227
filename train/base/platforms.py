"""The systems that draftsmith runs on."""

import os
import platform

from decode.base.errors import UserError

_SUPPORT = {
    "Linux": "tried: all tests run here",
    "Darwin": "not tried: written for it too",
    "Windows": "not tried: decoding, training and serving are written for it too, engines are not; "
    "WSL 2 is Linux",
}


def support() -> str:
    """Whether draftsmith was tried on this system."""
    system = platform.system()
    return f"{system}, {_SUPPORT.get(system, 'not tried, and not written for')}"


def require_posix(what: str) -> None:
    """Raise UserError for what needs Linux or macOS: process groups, and programs with paths as
    theirs. what: begins the message."""
    if os.name != "posix":
        raise UserError(
            f"{what} needs Linux or macOS, and this is {platform.system()}; run it under WSL 2, or "
            "start the engine yourself and give its address where there is a setting for it"
        )
