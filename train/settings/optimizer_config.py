"""The settings of the optimizer of every training stage."""

from typing import Literal

from pydantic import Field

from decode.base.strict import Strict


class GroupConfig(Strict):
    """Settings of the parameters whose dotted names match a pattern."""

    lr: float | None = Field(None, gt=0)
    """Their learning rate. None: `optimizer.lr`."""
    weight_decay: float | None = Field(None, ge=0)
    """Their weight decay. None: `optimizer.weight_decay`."""


class OptimizerConfig(Strict):
    """AdamW. The learning rate is warmed up linearly, then lowered by a schedule."""

    lr: float = Field(3e-4, gt=0)
    """The learning rate after the warm-up."""
    weight_decay: float = Field(0.0, ge=0)
    """The decoupled weight decay of AdamW (1711.05101). It also holds for norms and biases, which
    Hugging Face's Trainer leaves out; `groups` with `*norm*` and `*bias` does the same here."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """The decay of the mean of the gradients."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """The decay of the mean of the squared gradients."""
    clip: float = Field(1.0, gt=0)
    """The maximum norm of a step's gradient. A larger gradient is scaled down."""
    warmup_steps: int = Field(10, ge=0)
    """Optimizer steps until the learning rate reaches `lr`."""
    warmup_ratio: float | None = Field(None, gt=0, lt=1)
    """The warm-up as a share of a training's steps, in place of `warmup_steps`."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after the warm-up."""
    min_lr_ratio: float = Field(0.02, ge=0, le=1)
    """The learning rate at the end of the schedule, as a share of `lr`."""
    groups: dict[str, GroupConfig] = {}
    """{pattern: settings}, with patterns such as `*embed_tokens*`. The first match counts."""
    ema: float | None = Field(None, gt=0, lt=1)
    """The decay, such as 0.999, of an exponential moving average (EMA) of the weights. The averaged
    weights are then evaluated and saved. None: the last weights are evaluated and saved. Under
    DeepSpeed the forward pass has only the last weights, so figures on a dev slice use these."""

    def warm_up(self, total: int) -> int:
        """The steps of the warm-up of a training of `total` steps."""
        return self.warmup_steps if self.warmup_ratio is None else int(self.warmup_ratio * total)
