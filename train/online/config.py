"""The settings of an `online` stage."""

from typing import Any, Literal

from pydantic import Field, model_validator

from train.online.learning import OnlineConfig
from train.schema import StageConfig
from train.training.load_student import StudentConfig


class OnlineStageConfig(StageConfig):
    """split, prompts: serve this many prompts of this split, in order (None: all). They are decoded
    batch_size at a time with gamma, rule, temperature, top_k and top_p.

    drafter: as in a `distill` stage; its `stage` may also be a heads stage. learning: the schedule
    and the data of learning; null: the drafter does not learn. losses: as in a `distill` stage.
    train_embeddings: if off, a small language model's token embeddings and output layer are frozen.
    Heads are always trained completely. background: learn in a thread while requests are served.
    Timing then decides which version drafts a request, so a second run may differ.
    device: where to learn, such as cuda:1; null: the stage's device. keep_versions: how many of the
    newest versions stay on disk. window: the number of requests per window of the summary.
    """

    kind: Literal["online"] = "online"
    drafter: StudentConfig
    split: Literal["stream", "train", "dev"] = "stream"
    prompts: int | None = Field(None, ge=1)
    batch_size: int = Field(8, ge=1)
    gamma: int = Field(4, ge=1)
    rule: str = "speculative"
    temperature: float = Field(0.0, ge=0)
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    max_new_tokens: int = Field(128, ge=2)
    seed: int = 0
    learning: OnlineConfig | None = OnlineConfig()
    losses: dict[str, Any] = {"forward_kl": 1.0}
    train_embeddings: bool = False
    background: bool = False
    device: str | None = None
    chunk_tokens: int = Field(256, ge=1)
    keep_versions: int = Field(2, ge=1)
    window: int = Field(32, ge=1)

    @model_validator(mode="after")
    def _fits(self) -> "OnlineStageConfig":
        if self.learning is None and (self.background or self.device):
            raise ValueError("background and device say how to learn, and learning is null")
        return self
