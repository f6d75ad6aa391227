"""The base class of stages: a stage's config and inputs, its checks, plan and run.

Each stage is one file in `train/stages` and registers itself in STAGES.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from accelerate import Accelerator

from decode.base.registry import Registry
from decode.model.hidden_states import layer_list_name
from decode.model.loading import Target
from train.base.console import Reporter
from train.data.corpus import Corpus
from train.settings.schema import StageConfig


@dataclass(frozen=True)
class StageMemory:
    """The bytes of a stage's tensors in one process, by what they are.

    target: its weights. weights: those that are trained, and copies of them, in float32. optimizer:
    gradients, AdamW's moments and the average. activations: what a forward pass of the target
    needs, and what the training keeps for the backward pass. states: keys and values, hidden states
    that are kept, and what a stage sorts or records. logits: the logits of the tokens that have
    them at a time.
    """

    target: int = 0
    weights: int = 0
    optimizer: int = 0
    activations: int = 0
    states: int = 0
    logits: int = 0

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def __add__(self, other: "StageMemory") -> "StageMemory":
        theirs = asdict(other)
        return StageMemory(**{part: size + theirs[part] for part, size in asdict(self).items()})


@dataclass
class StagePlan:
    """What a stage will do; sizes are estimates.

    tokens: the most tokens that it writes or learns from. text_tokens: the tokens of the text that
    it writes, prompts included. max_seconds: the limit of its time, if it has one. memory: the
    memory of one of the processes, which shards nothing but, with `target.sharded`, the target's
    layers. disk_bytes: the bytes on disk of its directory. drafters: the drafters that it leaves
    for the evaluation, the one before its training included. captured_layers: the layers whose
    hidden states it stores. runs_target: the target runs over its tokens. training_flops: the FLOPs
    of a training for each token without that pass; 0: six for each trained weight. linear_sizes:
    the inputs and outputs of its drafter's linear layers by name, without the output layer; empty
    if they are not known.
    """

    what: str
    trained_parameters: int = 0
    tokens: int = 0
    memory: StageMemory = StageMemory()
    disk_bytes: int = 0
    text_tokens: int = 0
    max_seconds: float = math.inf
    drafters: int = 0
    captured_layers: Sequence[int] = ()
    runs_target: bool = True
    training_flops: float = 0.0
    linear_sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass
class StageInputs:
    """What a run gives to a stage.

    directory: this stage's directory. earlier: the directories of earlier stages by name. corpus:
    the run's examples as tokens. run_name: for provenance. allow_changes: continue a run that began
    with other settings or another number of ranks. processes: the number that a plan is for; None:
    those that run now. sharded: whether they share the target's layers. profile_steps: the number
    of steps of each training to profile; None: no profile. later: the settings of the stages after
    this one.
    """

    target: Target
    accelerator: Accelerator
    reporter: Reporter
    directory: Path
    earlier: Mapping[str, Path]
    corpus: Corpus
    run_name: str
    allow_changes: bool = False
    processes: int | None = None
    sharded: bool = False
    profile_steps: int | None = None
    later: Sequence[StageConfig] = ()


@dataclass
class StageWork:
    """What this process computed for a stage: a training in all starts of its run, other stages in
    this one.

    dtype: of the products. flops: theirs, by the rule of `distill.flops`; 0 if they are not known.
    seconds: of the steps of a training, or of the parts that another stage wrote.
    """

    dtype: torch.dtype
    flops: float = 0.0
    seconds: float = 0.0


@dataclass
class StageResult:
    """The results of a stage. drafter: the directory of the trained drafter; the run evaluates it
    next. target: the directory of the drafter's new target, if the target was trained too. work:
    None if its FLOPs are not known."""

    drafter: Path | None = None
    summary: dict[str, Any] = field(default_factory=dict)
    target: Path | None = None
    work: StageWork | None = None


@dataclass(frozen=True)
class StagePlot:
    """A plot on the report's page. name: unique on that page. svg: "" if there is nothing to
    plot."""

    name: str
    caption: str
    svg: str


@dataclass(frozen=True)
class ReportSection:
    """A stage's part of the report.

    figures: strings and JSON values by name. The end of the name sets the format of a JSON value:
    `_share` as a percentage, `seconds` as a time, `_bytes` as a size. plots: from top to bottom.
    """

    figures: dict[str, Any]
    plots: list[StagePlot] = field(default_factory=list)


C = TypeVar("C", bound=StageConfig)


class Stage(ABC, Generic[C]):
    """One kind of stage with its config and its inputs.

    `run` writes only into `directory`. It writes each item completely or not at all, and continues
    where a killed run stopped.
    """

    # Whether the target may have an encoder.
    with_encoder: ClassVar[bool] = False

    def __init__(self, config: C, inputs: StageInputs) -> None:
        self.config = config
        self.target, self.corpus = inputs.target, inputs.corpus
        self.accelerator, self.reporter = inputs.accelerator, inputs.reporter
        self.directory, self.earlier = inputs.directory, inputs.earlier
        self.run_name, self.allow_changes = inputs.run_name, inputs.allow_changes
        self.processes = inputs.processes or inputs.accelerator.num_processes
        self.sharded, self.profile_steps = inputs.sharded, inputs.profile_steps
        self.later = inputs.later

    @property
    def origin(self) -> dict[str, Any]:
        """What the provenance of each drafter of this stage says."""
        settings = self.config.model_dump(mode="json")
        return {"stage": self.config.name, "run": self.run_name, "settings": settings}

    @property
    def target_bytes(self) -> int:
        """The size of the target's weights in the memory of one process. Of a sharded target: its
        part of the layers, two gathered layers, and the other weights."""
        total = self.target.weight_bytes
        name = layer_list_name(self.target.model) if self.sharded else None
        if name is None:
            return total
        layers = self.target.model.get_submodule(name)
        size, count = sum(p.nbytes for p in layers.parameters()), len(list(layers.children()))
        return total - size + size // self.processes + 2 * size // count

    @classmethod
    def check(cls, config: C, earlier: Sequence[StageConfig]) -> None:
        """Raise UserError for what only the code of parts knows of the settings, such as which
        heads learn, and the files of drafters. `config.checks` came before; no model is loaded
        yet."""
        return None

    @abstractmethod
    def plan(self, plans: Mapping[str, StagePlan]) -> StagePlan:
        """What `run` will do. plans: the plans of earlier stages by name. Nothing is written.

        Every stage of a run is planned before the first one begins. Raise UserError here for every
        problem that would make `run` fail and that can be detected now.
        """

    @abstractmethod
    def run(self) -> StageResult:
        """Do the stage's work."""

    @classmethod
    def show(cls, summary: dict[str, Any], number: int) -> ReportSection:
        """The report's part for a stage of this kind. summary: returned by `run`. number: the
        stage's number in its run, for the names of plots."""
        return ReportSection(summary)


STAGES: Registry[type[Stage[Any]]] = Registry("stage kind")
