"""The settings of a `generate` stage."""

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from decode.draw.sampling_config import SamplingConfig
from train.settings.schema import Seed, StageConfig
from train.settings.server_config import ServerConfig


class SelfPromptSampling(SamplingConfig):
    """How prompts are drawn, with temperature 1 as the default."""

    temperature: float = Field(1.0, gt=0)
    """Divides the logits."""


class GenerateConfig(StageConfig):
    """The target answers prompts. No stage trains on answers to the test split."""

    kind: Literal["generate"] = "generate"
    split: Literal["train", "dev", "test"] = "train"
    """The split whose prompts are answered."""
    prompts: int | None = Field(None, ge=1)
    """The number of prompts, spread evenly over the split. None: all."""
    turns: Literal["last", "every"] = "last"
    """The turns of a chat that are answered: the last one, or each turn of the assistant, after the
    chat's own messages before it."""
    self_prompts: int | None = Field(None, ge=1)
    """The number of prompts that the target writes itself (Magpie, 2406.08464) and then answers, in
    place of those of a split. None: the split's prompts."""
    prompt_sampling: SelfPromptSampling = SelfPromptSampling()
    """How the target draws its own prompts."""
    max_prompt_tokens: int = Field(96, ge=1)
    """The length limit of a prompt that the target writes. A longer one is left out."""
    max_new_tokens: int = Field(128, ge=1)
    """The length limit of an answer in tokens."""
    batch_size: int = Field(16, ge=1)
    """The number of prompts that a process answers together."""
    sampling: SamplingConfig = SamplingConfig()
    """How answers are drawn."""
    samples: int = Field(1, ge=1)
    """Answers per prompt. They differ if the temperature is above 0."""
    num_beams: int = Field(1, ge=1)
    """Above 1: beam search by `generate()` of `transformers`, for Blockwise distillation."""
    part_prompts: int = Field(64, ge=1)
    """The number of answers that a process makes before it saves them. A kill loses at most so many
    of each process; those of a server are saved one by one."""
    seed: Seed = 0
    """The seed of the draws."""
    server: ServerConfig | None = None
    """A server that answers in place of our own loop. None: our own loop."""

    takes_device_map: ClassVar[bool] = True

    def needs_complete_target(self) -> str | None:
        if self.server is None:
            return "generate without a server"
        if self.self_prompts:
            return "self_prompts"
        return "server.probe_prompts above 0" if self.server.probe_prompts else None

    @model_validator(mode="after")
    def _fits(self) -> "GenerateConfig":
        if self.sampling.temperature == 0 and self.samples > 1:
            raise ValueError(
                "samples > 1 needs sampling.temperature > 0; without it all answers are the same"
            )
        if self.num_beams > 1 and self.sampling.temperature > 0:
            raise ValueError("beam search (num_beams > 1) needs sampling.temperature 0")
        if self.num_beams > 1 and self.server:
            raise ValueError("a server draws answers, it does not search beams; leave one out")
        if self.self_prompts and (self.prompts or self.split != "train" or self.turns != "last"):
            raise ValueError(
                "self_prompts takes the place of a split's prompts; leave split, prompts and turns "
                "out"
            )
        return self
