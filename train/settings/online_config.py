"""The settings of an `online` stage, and of learning beside a service."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Literal

from pydantic import Field, model_validator

from decode.base.errors import UserError
from decode.base.registry import registered_names
from decode.base.strict import Strict
from decode.draw.sampling_config import SamplingConfig
from distill.student_settings import StudentConfig
from train.settings.drafter_stages import (
    drafts_in_parallel,
    has_other_tokenizer,
    heads_stage,
    require_merged,
)
from train.settings.optimizer_config import OptimizerConfig
from train.settings.schema import Check, Losses, NameIn, StageConfig

# Why a drafter with another tokenizer does not learn while it serves.
OTHER_TOKENIZER = (
    "has another tokenizer than the target, and rejected tokens are stored in the target's tokens; "
    "use a drafter with the target's tokenizer"
)
# Why a parallel drafter does not learn while it serves.
PARALLEL = (
    "drafts all tokens in one pass, and learning from rejected tokens would train it to draft one "
    "token after the other; train a drafter without `parallel`"
)


class OnlineConfig(Strict):
    """The schedule and the data of online learning. At least one of every_requests and
    every_rejected is set."""

    every_requests: int | None = Field(16, ge=1)
    """Start a round after this many requests, or at `every_rejected`, whichever comes first. None:
    requests are not counted."""
    every_rejected: int | None = Field(None, ge=1)
    """Start a round after this many rejected tokens. None: they are not counted."""
    steps: int = Field(4, ge=1)
    """Optimizer steps of a round."""
    tokens_per_batch: int = Field(1024, ge=2)
    """Tokens of text for each step and process, padding included."""
    accepted: float = Field(0.25, ge=0, le=1)
    """Also learn from this share of the tokens that were not rejected."""
    k: int = Field(64, ge=1)
    """How many of the target's likeliest tokens are kept of each distribution."""
    buffer_mib: float = Field(64.0, gt=0)
    """The maximum size of the replay buffer in MiB."""
    holdout_every: int = Field(8, ge=2)
    """One request in holdout_every is held out. Held-out requests are used to judge versions, not
    to learn."""
    holdout_requests: int = Field(16, ge=1)
    """The number of the newest held-out requests that count."""
    max_length: int = Field(1024, ge=2)
    """The maximum length of a text in tokens. A longer text keeps the last tokens before each
    position."""
    seed: int = 0
    """The seed of the choice of recorded tokens and of their order."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-3, warmup_steps=4, schedule="constant")
    """AdamW. The schedule is constant and there is no EMA."""

    @model_validator(mode="after")
    def _fits(self) -> "OnlineConfig":
        if self.every_requests is None and self.every_rejected is None:
            raise ValueError("set every_requests or every_rejected; without both no round starts")
        if self.optimizer.schedule != "constant":
            raise ValueError("optimizer.schedule must be constant: a stream has no known end")
        if self.optimizer.ema is not None:
            raise ValueError(
                "optimizer.ema cannot be set: versions have the last weights, not averaged ones"
            )
        return self


class OnlineStageConfig(StageConfig):
    """A drafter serves a stream of prompts and learns from what the target rejects (Online
    Speculative Decoding, 2310.07177)."""

    kind: Literal["online"] = "online"
    drafter: StudentConfig
    """Where the drafter starts, as in a `distill` stage; its `stage` may also be a heads stage."""
    split: Literal["stream", "train", "dev"] = "stream"
    """The split whose prompts are served, in their order."""
    kinds: list[str] | None = Field(None, min_length=1)
    """Serve only prompts of these kinds (`kind` or `task` of a row). So a stage for each kind makes
    a drafter that learns from its own traffic. None: prompts of all kinds."""
    prompts: int | None = Field(None, ge=1)
    """The number of prompts, from the first one on. None: all."""
    batch_size: int = Field(8, ge=1)
    """The number of prompts that are decoded together."""
    gamma: int = Field(4, ge=1)
    """The depth of a draft in tokens. Ignored for trees, which have a fixed depth."""
    rule: Annotated[str, NameIn(registered_names("decode.rules"))] = "speculative"
    """The verification rule, by name."""
    sampling: SamplingConfig = SamplingConfig()
    """How served answers are drawn."""
    max_new_tokens: int = Field(128, ge=2)
    """The length limit of an answer in tokens."""
    seed: int = 0
    """The seed of the draws, and of random init weights."""
    learning: OnlineConfig | None = OnlineConfig()
    """The schedule and the data of learning. None: the drafter does not learn."""
    losses: Losses = {"forward_kl": 1.0}
    """The weighted sum that is minimised, as in a `distill` stage."""
    train_embeddings: bool = False
    """Train a small language model's token embeddings and output layer too. Heads are always
    trained completely."""
    background: bool = False
    """Learn in a thread while requests are served. Timing then decides which version drafts a
    request, so a second run may differ."""
    device: str | None = None
    """Where to learn, such as cuda:1. None: the stage's device."""
    chunk_tokens: int = Field(256, ge=1)
    """The number of tokens whose logits are in memory at a time."""
    keep_versions: int = Field(2, ge=1)
    """How many of the newest versions stay on disk."""
    window: int = Field(32, ge=1)
    """The number of requests per window of the summary."""

    @model_validator(mode="after")
    def _fits(self) -> "OnlineStageConfig":
        if self.learning is None and (self.background or self.device):
            raise ValueError("background and device need learning, but learning is null")
        return self

    def checks(self, earlier: Sequence[StageConfig]) -> Iterator[Check]:
        if self.drafter.vocabulary is not None or self.drafter.stage is not None:
            yield partial(self._check_drafter, earlier)

    def _check_drafter(self, earlier: Sequence[StageConfig]) -> None:
        start = self.drafter.stage
        if self.drafter.vocabulary is not None:
            raise UserError(f"stage {self.name}: the drafter {OTHER_TOKENIZER}")
        if start is None:
            return
        require_merged(self.name, start, earlier)
        if heads_stage(start, earlier) is None:
            if drafts_in_parallel(start, earlier):
                raise UserError(f"stage {self.name}: the drafter of {start} {PARALLEL}")
            if has_other_tokenizer(start, earlier):
                raise UserError(f"stage {self.name}: the drafter of {start} {OTHER_TOKENIZER}")
        elif self.train_embeddings:
            raise UserError(
                f"stage {self.name}: heads are always trained completely, so train_embeddings "
                "would do nothing; leave it out"
            )
