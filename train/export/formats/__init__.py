"""The layouts drafters are written in, by name; each is one file that registers itself.

A user may name an engine instead, and gets the layout in which that engine reads the drafter.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from decode.drafters import Drafter
from decode.errors import UserError, nearest
from decode.registry import Registry
from decode.target.loading import Target
from train.export.source import shown_name, target_hub_id

EXPORT_FILE = "export.json"


@dataclass
class ExportJob:
    """What a format writes.

    drafter: the directory it comes from. target: the model it was made for, loaded; None where
    neither the format nor the drafter needs it. target_spec: as `load_target` takes it. dtype: of
    the weights, or None, as they are stored. gamma: γ that readers shall draft with by default.
    backbone: where readers find the target, if it was trained with the drafter.
    """

    drafter: Path
    description: dict[str, Any]
    target: Target | None
    target_spec: str
    dtype: str | None
    gamma: int
    backbone: str | None = None

    @property
    def kind(self) -> str:
        return str(self.description["kind"])

    @property
    def target_name(self) -> str:
        """The target as readers may find it: its hub id, or what it is called here."""
        name = str(self.description["target"]["name"])
        return self.backbone or target_hub_id(name) or shown_name(name)


class Format(ABC):
    """A layout on disk.

    kinds: the drafters it can hold. engines: who reads it; what it may be asked for as, besides its
    own name. instead: for the kinds it cannot hold, what to do instead. needs_target: whether
    writing it takes something of the target. carries_vocabulary: a reduced draft vocabulary stays
    one, as all of its readers know it.
    """

    name: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]
    engines: ClassVar[tuple[str, ...]]
    instead: ClassVar[dict[str, str]] = {}
    needs_target: ClassVar[bool] = False
    carries_vocabulary: ClassVar[bool] = False

    def deepest(self, drafter: Path) -> int | None:
        """The largest γ that a drafter directory can draft; None: any."""
        return None

    def loads(self, job: ExportJob) -> str:
        """The target to load, as `load_target` takes it."""
        return job.target_spec

    @abstractmethod
    def refuse(self, job: ExportJob) -> None:
        """Raises UserError for what this layout cannot hold, before anything is loaded."""

    @abstractmethod
    def write(self, job: ExportJob, directory: Path) -> dict[str, Any]:
        """Fill an empty directory; returns facts of it for `export.json` and the README, as JSON
        values. Among them: `size`, in words; `kept`, how many tokens a reduced draft vocabulary
        had, and `filled_from`, where the rows of the others are from; both None if it had all."""

    @abstractmethod
    def problems(self, directory: Path) -> list[str]:
        """Everything in which the files differ from this layout's schema, a line each."""

    @abstractmethod
    def reload(self, directory: Path, target: Target) -> Drafter:
        """The exported drafter in our own loop, in the target's dtype and on its device, to be
        measured there as engines will have it: in chains. Raises UserError where it does not fit
        the target."""

    @abstractmethod
    def serving(self, target: str, repository: str, gamma: int) -> list[tuple[str, str, str]]:
        """How it is served: (engine, language of the snippet, snippet) for the README.
        repository: where the export is found, a directory or a hub id."""


FORMATS: Registry[Format] = Registry("export format")


# Drafters that no inference engine has, and what to train in their place.
UNSERVED = {
    "blockwise": "no inference engine has Blockwise heads; train Medusa heads for vLLM or TGI",
    "hydra": "no inference engine has Hydra heads; train Medusa or EAGLE heads for vLLM",
    "hydra_plus": "no inference engine has Hydra++ heads; train Medusa or EAGLE heads for vLLM",
}


def format_for(name: str, kind: str) -> Format:
    """The format of this name, or the one that the engine of this name reads, for a drafter of
    this kind. Raises UserError with what to do instead where there is none."""
    named = [FORMATS[other] for other in FORMATS if name in (other, *FORMATS[other].engines)]
    if not named:
        known = sorted({name for other in FORMATS for name in (other, *FORMATS[other].engines)})
        raise UserError(
            f"unknown export format {name!r}; known formats and engines: {', '.join(known)}."
            f"{nearest(name, known)}"
        )
    for found in named:
        if kind in found.kinds:
            return found
    fitting = [other for other in FORMATS if kind in FORMATS[other].kinds]
    advice = UNSERVED.get(kind) or next(
        (found.instead[kind] for found in named if kind in found.instead),
        f"use --format {' or '.join(fitting)}" if fitting else "no format holds it yet",
    )
    raise UserError(f"format {name} cannot hold a {kind} drafter; {advice}")


from train.export.formats import eagle1, eagle3, eagle3_gguf, gguf, hf, medusa, speculators  # noqa: E402, F401  (each registers itself)
