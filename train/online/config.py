"""The settings of an `online` stage."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from decode.rules import RULES
from train.online.learning import OnlineConfig
from train.schema import Losses, SamplingConfig, StageConfig, name_in
from train.training.load_student import StudentConfig


class OnlineStageConfig(StageConfig):
    """A drafter serves a stream of prompts and learns from what the target rejects (Online
    Speculative Decoding, 2310.07177)."""

    kind: Literal["online"] = "online"
    drafter: StudentConfig
    """Where the drafter starts, as in a `distill` stage; its `stage` may also be a heads stage."""
    split: Literal["stream", "train", "dev"] = "stream"
    """The split whose prompts are served, in their order."""
    prompts: int | None = Field(None, ge=1)
    """The number of prompts, from the first one on. None: all."""
    batch_size: int = Field(8, ge=1)
    """The number of prompts that are decoded together."""
    gamma: int = Field(4, ge=1)
    """The depth of a draft in tokens. Ignored for trees, which have a fixed depth."""
    rule: Annotated[str, name_in(RULES)] = "speculative"
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
            raise ValueError("background and device say how to learn, and learning is null")
        return self
