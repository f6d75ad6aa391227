"""The settings that trainings share: length, optimizer, text, figures on a dev slice, a target that
is trained too."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from decode.base.errors import UserError
from decode.base.strict import Strict
from decode.draw.sampling_config import SamplingConfig
from distill.student_settings import LoraConfig
from train.settings.optimizer_config import GroupConfig, OptimizerConfig
from train.settings.schema import Losses, Seed, StageConfig, closest_stage

if TYPE_CHECKING:
    from distill.losses import WeightedLoss


class LoopConfig(Strict):
    """The length of the training and the size of its batches."""

    epochs: int = Field(3, ge=1)
    """The number of passes over the text."""
    max_steps: int | None = Field(None, ge=1)
    """The training stops after this many optimizer steps, even if `epochs` are not complete. None:
    no limit."""
    max_minutes: float | None = Field(None, gt=0)
    """The training stops after this many minutes. The learning rate follows the time if a greater
    share of the minutes than of the steps is over. Time for figures on dev text counts too. The
    number of steps then depends on the machine. None: no limit."""
    tokens_per_batch: int = Field(2048, ge=1)
    """The size of a batch, for all ranks together: rows times the longest row's length."""
    accumulation: int = Field(1, ge=1)
    """Batches per optimizer step."""
    save_every: int = Field(100, ge=1)
    """Optimizer steps between two checkpoints."""
    keep_checkpoints: int = Field(2, ge=1)
    """The number of checkpoints that are kept, the newest ones. With two, one is left if the newest
    is damaged."""
    keep_best: bool = False
    """The stage's drafter is the version with the best figure on the dev slice, not the last one.
    The figure is `expected_acceptance` of a small LM and `tokens_per_step` of heads. Needs `dev`.
    """
    patience: int | None = Field(None, ge=1)
    """The training ends after this many measurements in a row on the dev slice that are not better
    than the best one. Needs `keep_best`. None: it does not end early."""
    max_skipped_steps: int = Field(10, ge=0)
    """A step whose loss or gradient is not finite is not taken, and the training goes on with the
    next batch. It ends with an error at one more than this many of them."""
    log_every: int = Field(5, ge=1)
    """Optimizer steps between two logged figures."""
    seed: Seed = 0
    """The seed of the order of batches, of init weights, and of text that the drafter generates."""

    def require_dev(
        self, stage: str, dev: "DevConfig | None", earlier: Sequence[StageConfig]
    ) -> None:
        """Raise UserError for settings that would do nothing without figures on a dev slice, and
        for figures on text that is trained on, or on test text that would choose the best version.
        dev: those figures, if there are any."""
        if dev is not None and dev.text != "data":
            answers: Any = closest_stage(dev.text, earlier, "generate")
            faults = {"train": "is trained on"}
            if self.keep_best:
                faults["test"] = "may choose nothing, as loop.keep_best would"
            if fault := faults.get(answers.split):
                raise UserError(
                    f"stage {stage}: dev.text {dev.text} answered the {answers.split} split, which "
                    f"{fault}; name a generate stage that answers dev"
                )
        if self.keep_best and dev is None:
            raise UserError(
                f"stage {stage}: loop.keep_best compares figures on dev text, and the stage has "
                "none; leave keep_best out, or set dev if the stage has that setting"
            )
        if self.patience is not None and not self.keep_best:
            raise UserError(
                f"stage {stage}: loop.patience ends the training after its best version; set "
                "loop.keep_best too, or leave patience out"
            )


class DevConfig(Strict):
    """Figures of a drafter during its training, on a slice of the dev split."""

    text: str = "data"
    """A generate stage that answered the dev split, or `data` for the split's own responses."""
    samples: int = Field(32, ge=1)
    """The number of samples, spread evenly over the text."""
    every: int = Field(50, ge=1)
    """Optimizer steps between two measurements."""
    decode_prompts: int = Field(0, ge=0)
    """The number of dev prompts to decode greedily at each measurement, for the acceptance rate of
    real decoding. 0: none."""
    gamma: int = Field(4, ge=1)
    """The depth of a draft in tokens, for figures on drafts. For heads it is at most their
    number."""
    max_new_tokens: int = Field(48, ge=2)
    """The length limit of a decoded answer in tokens."""


class OnPolicySampling(SamplingConfig):
    """How text is drawn, with temperature 1 as the default."""

    temperature: float = Field(1.0, ge=0)
    """Divides the logits. 0: greedy decoding."""


class OnPolicyConfig(Strict):
    """Text that the drafter generates during its training (GKD, 2306.13649)."""

    fraction: float = Field(0.5, gt=0, le=1)
    """λ, the share of samples that the drafter generates; the others come from the text."""
    samples: int = Field(128, ge=1)
    """The number of samples of a round. Each round generates new text with the current drafter."""
    max_new_tokens: int = Field(128, ge=1)
    """The length limit of a generated answer in tokens."""
    sampling: OnPolicySampling = OnPolicySampling()
    """How the text is drawn."""
    batch_size: int = Field(32, ge=1)
    """The number of prompts that a process answers together."""
    drafter: Literal["auto", "none", "ngram"] = "auto"
    """The drafter that speeds up the generation: none, ngram (speculative decoding), or auto, the
    faster of the two on the first batch. It does not change the text."""


class TreeConfig(Strict):
    """The tree stored with the drafter, calibrated on the dev split (Medusa 2401.10774, section
    2.3.3)."""

    nodes: int | None = Field(None, ge=1)
    """The size of the tree. None: as many nodes as pay off at this machine's measured costs."""
    width: int = Field(10, ge=1)
    """The calibration measures the acceptance of each head's `width` likeliest tokens."""
    prompts: int = Field(32, ge=1)
    """The number of prompts to measure on, spread evenly over the split."""
    max_new_tokens: int = Field(48, ge=2)
    """How many tokens are decoded for each prompt."""


PREFIX = "backbone."


class AdapterConfig(LoraConfig):
    """LoRA adapters on the target. The defaults are those of Medusa's experiments, which also
    adapted the output layer."""

    r: int = Field(32, ge=1)
    """The rank of an adapter."""
    alpha: float = Field(16.0, gt=0)
    """The scale of an adapter is alpha / r."""
    dropout: float = Field(0.05, ge=0, lt=1)
    """The dropout rate of an adapter's input."""


class TrainedTargetConfig(Strict):
    """The settings of a stage that trains a copy of the target."""

    lora: AdapterConfig | None = AdapterConfig()
    """Adapters on the target, merged at the end. None: all of its weights are trained."""
    held_out: str = "data"
    """The text for measuring drift: `data` for the test split's own responses, or a generate stage
    that answered the dev split."""
    held_out_samples: int = Field(64, ge=1)
    """How many samples of `held_out` are used, spread evenly."""

    def require_sound(self, stage: str, earlier: Sequence[StageConfig], key: str) -> None:
        """Raise UserError for settings that do not fit together. key: where these settings are in
        the stage, such as `backbone.`."""
        if self.held_out == "data":
            return
        answers: Any = closest_stage(self.held_out, earlier, "generate")
        if answers.split == "train":
            raise UserError(
                f"stage {stage}: {key}held_out {self.held_out} answered the train split, which "
                "is not held out; name a generate stage that answers the dev or the test split, or "
                "leave held_out out"
            )


class BackboneConfig(TrainedTargetConfig):
    """Trains the target together with its heads: Medusa-2 (2401.10774, section 2.2.2), and
    Blockwise's fine-tuned variant (1811.03115, section 6)."""

    losses: Losses = {"cross_entropy": 1.0}
    """The target's own losses, {name: weight}. cross_entropy compares it with the text. A loss
    that reads the teacher, such as forward_kl, is self-distillation from the original target."""
    heads_weight: float | None = Field(None, gt=0)
    """λ₀, the weight of the heads' loss. None: the value in the heads' paper."""
    lr_ratio: float = Field(0.25, gt=0)
    """The target's learning rate divided by `optimizer.lr`, the heads' learning rate."""
    ramp: float = Field(0.0, ge=0, le=1)
    """λ₀ rises from 0 over this share of the steps, or of `max_minutes` if more of that is over, as
    a quarter of a sine wave."""

    @property
    def weighted_loss(self) -> "WeightedLoss":
        from distill.losses import WeightedLoss  # imports torch

        return WeightedLoss(self.losses)

    def check(self, stage: str, earlier: Sequence[StageConfig]) -> None:
        """Raise UserError for settings that do not fit together."""
        self.require_sound(stage, earlier, PREFIX)

    def optimizer(self, config: OptimizerConfig) -> OptimizerConfig:
        """The config with a group for the target's learning rate. Its other groups come first."""
        group = GroupConfig(lr=config.lr * self.lr_ratio)
        return config.model_copy(update={"groups": config.groups | {f"{PREFIX}*": group}})
