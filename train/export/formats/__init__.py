"""The layouts for exported drafters, by name. Each is one file that registers itself.

A user may name an engine instead, and gets the layout that this engine reads for the drafter.
"""

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from decode.drafters import Drafter
from decode.errors import UserError, nearest
from decode.registry import Registry
from decode.target.loading import Target
from train.export.trained_drafter import public_name, target_hub_id

EXPORT_FILE = "export.json"


@dataclass
class ExportJob:
    """The input of a format.

    drafter: the drafter's directory. target: the model it was trained for, loaded; None if neither
    the format nor the drafter needs it. target_spec: as `load_target` takes it. dtype: of the
    weights; None keeps the stored one. gamma: the default γ for readers. backbone: where readers
    find the target, if it was trained with the drafter.
    """

    drafter: Path
    description: dict[str, Any]
    target: Target | None
    target_spec: str
    dtype: str | None
    gamma: int
    backbone: str | None = None

    @property
    def loaded_target(self) -> Target:
        """The target, for formats and measurements that need it."""
        assert self.target is not None
        return self.target

    @property
    def kind(self) -> str:
        return str(self.description["kind"])

    @property
    def target_name(self) -> str:
        """The target's name for readers: its hub id, or its local name."""
        name = str(self.description["target"]["name"])
        return self.backbone or target_hub_id(name) or public_name(name)


class Format(ABC):
    """A layout on disk.

    kinds: the kinds of drafters it can hold. engines: its readers; users may name one instead of
    the format. instead: advice for the kinds it cannot hold. needs_target: whether writing needs
    the target. carries_vocabulary: whether a reduced draft vocabulary stays reduced, because all
    readers support it.
    """

    name: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]
    engines: ClassVar[tuple[str, ...]]
    instead: ClassVar[dict[str, str]] = {}
    needs_target: ClassVar[bool] = False
    carries_vocabulary: ClassVar[bool] = False

    def max_depth(self, drafter: Path) -> int | None:
        """Return the largest γ that a drafter directory can draft; None for any γ."""
        return None

    def target_to_load(self, job: ExportJob) -> str:
        """Return the target to load, as `load_target` takes it."""
        return job.target_spec

    def refuse(self, job: ExportJob) -> None:  # noqa: B027 (most layouts hold all drafters)
        """Raise UserError for a drafter that this layout cannot hold, before loading anything."""

    @abstractmethod
    def write(self, job: ExportJob, directory: Path) -> dict[str, Any]:
        """Fill an empty directory; return facts for `export.json` and the README, as JSON values.
        Among them: `size`, in words; `kept`, the size of a reduced draft vocabulary, and
        `filled_from`, the source of the rows of all other tokens. Both are None for a full
        vocabulary."""

    @abstractmethod
    def problems(self, directory: Path) -> list[str]:
        """Return all differences between the files and this layout's schema, a line each."""

    @abstractmethod
    def reload(self, directory: Path, target: Target) -> Drafter:
        """Load the exported drafter for our own loop, in the target's dtype and on its device, to
        measure it as engines use it: in chains. Raises UserError if it does not fit the target."""

    @abstractmethod
    def serving(self, target: str, repository: str, gamma: int) -> list[tuple[str, str, str]]:
        """Return how to serve it: (engine, language of the snippet, snippet) for the README.
        repository: the export's location, a directory or a hub id."""


FORMATS: Registry[Format] = Registry("export format")


def vllm_serving(method: str, target: str, repository: str, gamma: int) -> tuple[str, str, str]:
    """Return how vLLM serves a drafter, as `Format.serving` does. method: of its
    speculative_config."""
    speculative = json.dumps(
        {"method": method, "model": repository, "num_speculative_tokens": gamma}
    )
    return "vLLM", "", f"vllm serve {target} --speculative-config '{speculative}'"


# Drafters that no inference engine supports, and what to train instead.
UNSERVED = {
    "blockwise": "no engine supports Blockwise heads; train Medusa heads for vLLM or TGI",
    "hydra": "no engine supports Hydra heads; train Medusa or EAGLE heads for vLLM",
    "hydra_plus": "no engine supports Hydra++ heads; train Medusa or EAGLE heads for vLLM",
}


def format_for(name: str, kind: str) -> Format:
    """Return the format for a drafter of this kind. name: of a format or of an engine that reads
    it. Raises UserError with advice if there is none."""
    layouts = [FORMATS[other] for other in FORMATS if name in (other, *FORMATS[other].engines)]
    if not layouts:
        known = sorted({name for other in FORMATS for name in (other, *FORMATS[other].engines)})
        raise UserError(
            f"unknown export format {name!r}; known formats and engines: {', '.join(known)}."
            f"{nearest(name, known)}"
        )
    for layout in layouts:
        if kind in layout.kinds:
            return layout
    fitting = [other for other in FORMATS if kind in FORMATS[other].kinds]
    advice = UNSERVED.get(kind) or next(
        (layout.instead[kind] for layout in layouts if kind in layout.instead),
        f"use --format {' or '.join(fitting)}" if fitting else "no format can hold it yet",
    )
    raise UserError(f"format {name} cannot hold a {kind} drafter; {advice}")


from train.export.formats import (  # noqa: E402, F401  (each registers itself)
    eagle3_gguf,
    eagle3_layer,
    eagle_layer,
    hugging_face,
    medusa_heads,
    small_lm_gguf,
)
