"""The systems that draftsmith runs on."""

import os
import platform

from decode.base.errors import UserError

_TRIED_ON = ("x86_64", "AMD64")
_SUPPORT = {
    "Linux": "tried: all tests run here",
    "Linux on other processors": "never tried; kernels that cannot be compiled are left out",
    "WSL 2": "never tried; it is Linux",
    "macOS": "written for it, never tried; the processor computes",
    "Windows": "written for decoding, training and serving, never tried; nothing that starts an "
    "engine, which WSL 2 can",
}


def platform_support() -> str:
    """Whether draftsmith was tried on this system: what README and docs/platforms.md say too."""
    system = {"Darwin": "macOS"}.get(platform.system(), platform.system())
    if system == "Linux" and "microsoft" in platform.release().lower():
        system = "WSL 2"
    elif system == "Linux" and platform.machine() not in _TRIED_ON:
        system = "Linux on other processors"
    return f"{system}, {_SUPPORT.get(system, 'never tried, and not written for')}"


def require_posix(what: str) -> None:
    """Raise UserError for what needs Linux or macOS: process groups, and programs with paths as
    theirs. what: begins the message."""
    if os.name != "posix":
        raise UserError(
            f"{what} needs Linux or macOS, and this is {platform.system()}; run it under WSL 2, or "
            "start the engine yourself and give its address where there is a setting for it"
        )
