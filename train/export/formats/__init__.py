"""The layouts drafters are written in, by name; each is one file that registers itself."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from decode.drafters import Drafter
from decode.errors import UserError
from decode.registry import Registry
from decode.target import Target

EXPORT_FILE = "export.json"


@dataclass
class ExportJob:
    """What a format writes.

    drafter: the directory it comes from. target: the model it was made for, loaded; None where
    neither the format nor the drafter needs it. target_spec: as `load_target` takes it. dtype: of
    the weights, or None, as they are stored. gamma: γ that readers shall draft with by default.
    """

    drafter: Path
    description: dict[str, Any]
    target: Target | None
    target_spec: str
    dtype: str | None
    gamma: int

    @property
    def kind(self) -> str:
        return str(self.description["kind"])


class Format(ABC):
    """A layout on disk.

    kinds: the drafters it can hold. engines: who reads it. instead: for the kinds it cannot hold,
    what to do instead. needs_target: whether writing it takes something of the target.
    """

    name: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]
    engines: ClassVar[tuple[str, ...]]
    instead: ClassVar[dict[str, str]] = {}
    needs_target: ClassVar[bool] = False

    @abstractmethod
    def refuse(self, job: ExportJob) -> None:
        """Raises UserError for what this layout cannot hold, before anything is loaded."""

    @abstractmethod
    def write(self, job: ExportJob, directory: Path) -> dict[str, Any]:
        """Fill an empty directory; returns facts of it for `export.json` and the README, as JSON
        values, among them `kept` and `filled_from` for a draft vocabulary that was filled up."""

    @abstractmethod
    def problems(self, directory: Path) -> list[str]:
        """Everything in which the files differ from this layout's schema, a line each."""

    @abstractmethod
    def reload(self, directory: Path, *, dtype: str, device: str) -> Drafter:
        """The exported drafter in our own loop, to be measured there as engines will have it."""

    @abstractmethod
    def serving(self, target: str, repository: str, gamma: int) -> list[tuple[str, str, str]]:
        """How it is served: (engine, language of the snippet, snippet) for the README.
        repository: where the export is found, a directory or a hub id."""


FORMATS: Registry[Format] = Registry("export format")


def format_for(name: str, kind: str) -> Format:
    """The format of this name, if it can hold a drafter of this kind.

    Raises UserError with what to do instead, also for an engine's name in place of a format's.
    """
    if name not in FORMATS:
        for other in FORMATS:
            found = FORMATS[other]
            if name in found.engines and kind in found.kinds:
                raise UserError(
                    f"{name} is an engine that reads a {kind} drafter in format {other}; use "
                    f"--format {other}"
                )
    chosen = FORMATS[name]
    if kind not in chosen.kinds:
        fitting = [other for other in FORMATS if kind in FORMATS[other].kinds]
        advice = chosen.instead.get(kind) or (
            f"use --format {' or '.join(fitting)}" if fitting else "no format holds it yet"
        )
        raise UserError(f"format {name} cannot hold a {kind} drafter; {advice}")
    return chosen


from train.export.formats import gguf, hf  # noqa: E402, F401  (each registers itself)
