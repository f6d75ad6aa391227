"""The trained drafters that come with draftsmith, by the name a user gives."""

from pathlib import Path

import configs
from decode.base.errors import UserError, nearest
from decode.model.model_names import EMBEDDED, EMBEDDED_PREFIX

SHIPPED = Path(configs.__file__).parent / "drafters"


def shipped_drafter(spec: str) -> Path | None:
    """The directory of `embedded:NAME`; None if `spec` is no such name, has options, or is that of
    an embedded target. Raises UserError with the names there are for any other name."""
    if not spec.startswith(EMBEDDED_PREFIX):
        return None
    name = spec.removeprefix(EMBEDDED_PREFIX)
    names = shipped_names()
    if ":" in name:
        return None  # `open_drafter` reads the options first, and asks again
    if name in names:
        return SHIPPED / name
    if name in EMBEDDED:
        return None
    listed = ", ".join(EMBEDDED_PREFIX + name for name in [*names, *EMBEDDED])
    raise UserError(
        f"there is no {spec}; expected one of {listed}.{nearest(spec, listed.split(', '))}"
    )


def shipped_names() -> list[str]:
    """The names of the drafters, without the prefix."""
    return sorted(path.name for path in SHIPPED.glob("*") if path.is_dir())
