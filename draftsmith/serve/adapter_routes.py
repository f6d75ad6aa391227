"""Adapters of a service: each is a drafter for the rows whose requests have its name as label."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from decode.base.errors import UserError
from decode.drafters import Drafter
from decode.drafters.several.routed import RoutedDrafter
from decode.model.loading import Target
from decode.opening.adapters import KIND
from decode.opening.directory import DRAFTER_FILE, describe_drafter, open_drafter
from decode.settings import DecodeSettings


def path_below(directory: Path | None, path: str) -> Path | None:
    """A path below a directory, complete. None: it is outside, or there is no directory."""
    if directory is None:
        return None
    inside = directory.resolve()
    found = (inside / path).resolve()
    return found if found.is_relative_to(inside) else None


@dataclass(frozen=True)
class AdapterRoutes:
    """The adapters that are loaded. It does not change; `with_adapter` and `without` return others.

    directory: where those are that may be loaded. None: none may. alive: a drafter whose weights
    adapters may share, as it was opened. loaded: the drafters by label.
    """

    directory: Path | None
    target: Target
    alive: Drafter | None
    loaded: dict[str, Drafter] = field(default_factory=dict)

    def around(self, drafter: Drafter) -> Drafter:
        """The drafter of a decode. A row whose label is not that of an adapter has `drafter`."""
        if not self.loaded:
            return drafter
        return RoutedDrafter([drafter, *self.loaded.values()], ["", *self.loaded])

    def with_adapter(self, name: str, path: str, decode: DecodeSettings) -> "AdapterRoutes":
        """The same with one more. path: below `directory`. decode: has the shape of its drafts.
        Raises UserError for a name that is taken, for a path that is no adapter's or is outside,
        and as `open_drafter`."""
        directory = self.located(path)
        if name in self.loaded:
            raise UserError(
                f"the adapter {name!r} has already been loaded; choose another name, or unload it "
                "first"
            )
        opened = decode.shaped(open_drafter(str(directory), self.target))
        return replace(self, loaded=self.loaded | {name: opened})

    def without(self, name: str) -> "AdapterRoutes":
        """The same without one. Raises KeyError if it is not loaded."""
        if name not in self.loaded:
            raise KeyError(name)
        return replace(self, loaded={k: x for k, x in self.loaded.items() if k != name})

    def located(self, path: str) -> Path:
        """The directory of an adapter. Raises UserError as `with_adapter`."""
        found = path_below(self.directory, path)
        if found is None:
            raise UserError(
                f"the adapter {path!r} is not below the directory of --adapters; give a path in it"
            )
        if not (found / DRAFTER_FILE).is_file() or describe_drafter(found)["kind"] != KIND:
            raise UserError(
                f"there is no adapter {path!r} in the directory of --adapters; expected one that "
                "a stage with lora.merge: false wrote"
            )
        return found
