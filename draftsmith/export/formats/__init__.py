"""The layouts for exported drafters, by name. Each is one file that registers itself.

A user may name an engine instead, and gets the layout that this engine reads for the drafter.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, get_args

from decode.base.errors import UserError, nearest
from decode.base.registry import Registry, import_all
from decode.drafters import Drafter
from decode.model.loading import DTYPES, Target
from draftsmith.export.file_schema import require_none
from draftsmith.export.formats.published_keys import Keys, unknown_keys
from draftsmith.export.formats.readers import engine_names, require_read, up_to
from draftsmith.export.published import Checkpoint
from draftsmith.export.trained_drafter import TrainedDrafter, public_name, target_hub_id
from heads.heads_directory import write_heads
from heads.heads_module import Heads

EXPORT_FILE = "export.json"


@dataclass
class ExportJob:
    """The input of a format.

    target: the model that the drafter was trained for, loaded; None if neither the format nor the
    drafter needs it. target_spec: as `load_target` takes it. dtype: the dtype of the weights; None
    keeps the stored one. gamma: the default γ for readers. backbone: where readers find the target,
    if it was trained with the drafter.
    """

    drafter: TrainedDrafter
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
    def target_name(self) -> str:
        """The target's name for readers: its hub id, or its local name."""
        name = str(self.drafter.target["name"])
        return self.backbone or target_hub_id(name) or public_name(name)


@dataclass
class ImportJob:
    """The input of `Format.restored`.

    target: the model that the drafter was published for. depth: the max depth of a draft, None for
    the one that the checkpoint names or the usual one. layer_ids: `inputs` or `outputs`, what the
    numbers of captured layers mean; None for the convention of the layout. ignored: keys of the
    config that the user says change nothing, each as `unknown_keys` writes it.
    """

    checkpoint: Checkpoint
    target: Target
    depth: int | None = None
    layer_ids: str | None = None
    ignored: frozenset[str] = frozenset()

    def key_problems(self, known: Keys) -> list[str]:
        """Return a problem for each key of the config that is not known, by place."""
        unknown = unknown_keys(self.checkpoint.config, known)
        return [
            f"config.json has {key}, which this import does not know, and which may change what "
            f"the drafter computes. If it changes nothing: --ignore-keys {key}"
            for key in unknown
            if key not in self.ignored
        ]

    def require(self, problems: list[str], layout: str) -> None:
        """Raise UserError with all problems of the checkpoint, if there are any."""
        what = f"{self.checkpoint.source} is not a {layout} drafter for {self.target.name}"
        require_none(problems, what)


@dataclass
class Restored:
    """A published drafter, ready to be written as a drafter directory.

    kind: the kind of the drafter. write: writes the files that the kind's loader reads into a
    directory.
    depth: the max depth of a draft, None for any. options: the heads' options, None for a small
    LM. notes: what a user should know, a sentence each.
    """

    kind: str
    write: Callable[[Path], None]
    depth: int | None = None
    options: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of_heads(cls, heads: Heads, target: Target, notes: list[str]) -> "Restored":
        return cls(
            heads.options.type,
            partial(write_heads, heads=heads, target=target, tree=None),
            heads.depth,
            heads.options.model_dump(mode="json", exclude_defaults=True),
            notes,
        )


class Format(ABC):
    """A layout on disk.

    kinds: the kinds of drafters it can hold. instead: advice for the kinds it cannot hold.
    needs_target: whether writing needs the target. carries_vocabulary: whether a reduced draft
    vocabulary stays reduced, because all readers support it. holds_windows: whether all readers
    keep to the window of the text that a drafter was trained with. is_ours: draftsmith itself
    reads it, with windows and sinks.
    depth_option: the option of the heads that limits the depth of a draft; None for any depth.
    dtypes: those that its weights may have.
    vllm: the method of its speculative_config, with other options of it; sglang: its speculative
    algorithm. None: this engine does not serve it.
    """

    name: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]
    instead: ClassVar[dict[str, str]] = {}
    needs_target: ClassVar[bool] = False
    carries_vocabulary: ClassVar[bool] = False
    is_ours: ClassVar[bool] = False
    holds_windows: ClassVar[bool] = False
    depth_option: ClassVar[str | None] = None
    dtypes: ClassVar[tuple[str, ...]] = tuple(DTYPES)
    vllm: ClassVar[dict[str, Any] | None] = None
    sglang: ClassVar[str | None] = None

    @property
    def engines(self) -> tuple[str, ...]:
        """The names of its readers (`readers`); users may name one instead of the format."""
        return engine_names(self.name)

    def max_depth(self, drafter: TrainedDrafter) -> int | None:
        """Return the largest γ that the drafter can draft; None for any γ."""
        return getattr(drafter.options, self.depth_option) if self.depth_option else None

    def target_to_load(self, job: ExportJob) -> str:
        """Return the target to load, as `load_target` takes it."""
        return job.target_spec

    def refuse(self, job: ExportJob) -> None:  # noqa: B027 (most layouts hold all drafters)
        """Raise UserError for a drafter that this layout cannot hold, before loading anything."""

    def refuse_target(self, job: ExportJob) -> None:  # noqa: B027 (most layouts need no files)
        """Raise UserError for a target without the files that this layout copies from, before
        loading anything."""

    @abstractmethod
    def write(self, job: ExportJob, directory: Path) -> dict[str, Any]:
        """Fill an empty directory; return facts for `export.json` and the README, as JSON values.
        Among them: `size`, in words; for a reduced draft vocabulary also `kept`, its size, and
        `filled_from`, the source of the rows of all other tokens if it was filled up."""

    @abstractmethod
    def problems(self, directory: Path) -> list[str]:
        """Return all differences between the files and this layout's schema, a line each."""

    @abstractmethod
    def reload(self, directory: Path, target: Target) -> Drafter:
        """Load the exported drafter for our own loop, in the target's dtype and on its device, to
        measure it as engines use it: in chains. Raises UserError if it does not fit the target."""

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """Whether a published drafter has this layout, judged by its config and its tensors'
        names. Exactly one format should recognise a drafter."""
        return False

    def restored(self, job: ImportJob) -> Restored:
        """Read a published drafter. Raises UserError with everything in which it differs from what
        its target needs."""
        raise UserError(
            f"{job.checkpoint.source} is in format {self.name}, which can be written, but not "
            "imported"
        )

    def serving(self, target: str, repository: str, gamma: int) -> list[tuple[str, str, str]]:
        """Return how to serve it: (engine, language of the snippet, snippet) for the README.
        repository: the export's location, a directory or a hub id."""
        snippets = []
        if self.vllm is not None:
            drafter = {"method": "", "model": repository, "num_speculative_tokens": gamma}
            config = json.dumps(drafter | self.vllm)
            title = f"vLLM{up_to(self.name, 'vllm')}"
            snippets.append((title, f"vllm serve {target} --speculative-config '{config}'"))
        if self.sglang is not None:
            command = (
                f"python -m sglang.launch_server --model {target} \\\n"
                f"  --speculative-algorithm {self.sglang} \\\n"
                f"  --speculative-draft-model-path {repository} \\\n"
                f"  --speculative-num-steps {gamma} --speculative-eagle-topk 1 \\\n"
                f"  --speculative-num-draft-tokens {gamma + 1}"
            )
            snippets.append(("SGLang", command))
        return [(engine, "", snippet) for engine, snippet in snippets]


FORMATS: Registry[Format] = Registry("export format")


# Drafters that no inference engine supports, and what to train instead.
UNSERVED = {
    "blockwise": "no engine supports Blockwise heads; train EAGLE-3 heads",
    "hydra": "no engine supports Hydra heads; train EAGLE-3 heads",
    "hydra_plus": "no engine supports Hydra++ heads; train EAGLE-3 heads",
    "kangaroo": "no engine supports Kangaroo's adapter; train EAGLE-3 heads",
    "shared_vocabulary": "it drafts only the tokens that its tokenizer shares with the target's; "
    "train a drafter with the target's tokenizer",
    "skip": "its drafts run a part of the target, and no engine supports that; the target itself "
    "is a plain model directory",
}


def _require_window(layout: Format, drafter: TrainedDrafter) -> None:
    """Raise UserError for heads that see a window of the text, if the readers of the layout would
    let them see something else without a word."""
    window = getattr(drafter.options, "window", None)
    if window is None or layout.is_ours:
        return
    if drafter.options.sinks:
        raise UserError(
            f"{drafter} sees a window of {window} tokens and {drafter.options.sinks} sinks, "
            "and no engine keeps sinks; train it with sinks: 0"
        )
    if not layout.holds_windows:
        fitting = [
            name
            for name in FORMATS
            if drafter.kind in FORMATS[name].kinds and FORMATS[name].holds_windows
        ]
        advice = f"export it as {' or '.join(fitting)}" if fitting else "train it without window"
        raise UserError(
            f"{drafter} sees a window of {window} tokens, which not all readers of format "
            f"{layout.name} keep to; {advice}"
        )


def require_options(name: str, layout: Format, drafter: TrainedDrafter) -> None:
    """Raise UserError for heads with an option that the engine `name` does not know, although it
    reads the layout otherwise, for those with an output layer that it takes from the target, and
    for those with a window that not all readers of the layout keep to."""
    options = drafter.options
    if getattr(options, "output_rank", None) is not None and not layout.is_ours:
        kinds = get_args(type(options).model_fields["output"].annotation)
        if "shared" not in kinds:
            raise UserError(
                f"{drafter} has an output layer of its own (output_rank), but readers of format "
                f"{layout.name} use the target's; train it without output_rank"
            )
    require_read(name, layout.name, drafter.used_options, str(drafter))
    _require_window(layout, drafter)


def export_facts(directory: Path) -> dict[str, Any]:
    """Return the facts that `Format.write` gave for `export.json`."""
    return json.loads((directory / EXPORT_FILE).read_text(encoding="utf-8"))["facts"]


def layout_of(directory: Path) -> Format:
    """The layout of a sound export."""
    return FORMATS[json.loads((directory / EXPORT_FILE).read_text(encoding="utf-8"))["layout"]]


def format_for(name: str, kind: str) -> Format:
    """Return the format for a drafter of this kind. name: the name of a format or of an engine that
    reads it. Raises UserError with advice if there is none."""
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
    fitting = [other for other in fitting if FORMATS[other].engines] or fitting
    advice = UNSERVED.get(kind) or next(
        (layout.instead[kind] for layout in layouts if kind in layout.instead),
        f"use --format {' or '.join(fitting)}" if fitting else "no format can hold it yet",
    )
    raise UserError(f"format {name} cannot hold a {kind} drafter; {advice}")


import_all(__name__)
