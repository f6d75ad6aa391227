"""The settings of a `layer_skip` stage."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal

from pydantic import Field

from distill.student_settings import refuse
from train.settings.optimizer_config import OptimizerConfig
from train.settings.schema import Check, Losses, StageConfig
from train.settings.text_settings import LossConfig
from train.settings.training import AdapterConfig, LoopConfig, TrainedTargetConfig


class LayerSkipConfig(TrainedTargetConfig, LossConfig):
    """The target learns to predict after its early layers too (LayerSkip, 2404.16710)."""

    kind: Literal["layer_skip"] = "layer_skip"
    exit_layer: int = Field(8, ge=2)
    """The number of the new target's layers that its drafter runs, from the first on. The state
    after the first layer alone has no loss weight."""
    losses: Losses = {"cross_entropy": 1.0}
    """{name: weight}, after each layer that counts. cross_entropy compares with the text. A loss
    that reads the teacher compares with the original target."""
    lora: AdapterConfig | None = None
    """Adapters on the target, merged at the end. None: all of its weights are trained."""
    layer_dropout: float = Field(0.1, ge=0, lt=1)
    """p_max, the rate at which a row leaves out the last layer. It falls to 0 for the first."""
    exit_scale: float = Field(0.2, gt=0)
    """The weight of early layers against the last one's."""
    rotation: int | None = Field(8, ge=1)
    """At each step one of this number of layers counts, another one at the next step. None: at
    first only the last layer counts, and one more after each 1 / (2 · layers) of the steps."""
    chunk_tokens: int = Field(256, ge=1)
    """The number of tokens whose logits are in memory at a time."""
    loop: LoopConfig = LoopConfig()
    """The length of the training and the size of its batches."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=5e-5)
    """AdamW and its learning rate."""

    def checks(self, earlier: Sequence[StageConfig]) -> Iterator[Check]:
        yield from super().checks(earlier)
        yield partial(self.require_sound, self.name, earlier, "")
        yield partial(self.loop.require_dev, self.name, None, earlier)
        reason = "the original target runs over each batch of the training"
        yield partial(refuse, self, tokens_per_pass=reason)
