"""The settings of a `distill` stage."""

from typing import Literal

from pydantic import Field

from distill.settings import DrafterLora, ParallelConfig, StudentConfig
from train.settings.optimizer_config import OptimizerConfig
from train.settings.schema import Losses
from train.settings.text_settings import LossConfig
from train.settings.training import DevConfig, LoopConfig, OnPolicyConfig


class DistillConfig(LossConfig):
    """A small language model learns the target's distribution (DistillSpec, 2310.08461)."""

    kind: Literal["distill"] = "distill"
    drafter: StudentConfig
    """Where the drafter starts."""
    losses: Losses = {"forward_kl": 1.0}
    """The weighted sum that is minimised: {name: weight}, or {name: {weight: …, option: …}}; see
    `distill.losses`."""
    teacher: str = "live"
    """live, or the name or directory of a teacher_cache stage (the target's likeliest tokens) or of
    a feature_cache stage (its complete distribution)."""
    on_policy: OnPolicyConfig | None = None
    """The drafter generates a part of the text itself. None: the text is fixed."""
    dev: DevConfig | None = None
    """Figures on a dev slice during the training. None: no figures."""
    train_embeddings: bool = True
    """Train the token embeddings and the output layer too. If false, they keep their init
    weights. The factors of an output layer (`output_rank`) are trained in any case."""
    lora: DrafterLora | None = None
    """Train adapters. None: train the weights themselves."""
    gradient_checkpointing: bool = False
    """Recompute the layers' activations in the backward pass: less memory, more time."""
    parallel: ParallelConfig | None = None
    """Train a drafter that drafts all tokens in one pass (PARD, 2504.18583). None: it drafts one
    token after the other."""
    draft_vocabulary: int | None = Field(None, ge=1)
    """Draft only this many of the text's most frequent tokens. None: all tokens, or the vocabulary
    of the stage that this stage continues, or of the cache."""
    output_rank: int | None = Field(None, ge=1)
    """r; the output layer of the draft vocabulary is then two trained factors, [r, H] and [V', r]
    (SlimSpec, 2605.10453), which start as near to the full layer as that rank can be. None: a full
    layer, or the one of the stage that this stage continues."""
    weights: Literal["int8"] | None = None
    """int8: the drafter reads one byte a weight, on machines that can. Its files keep all bits.
    None: it reads its weights as they are."""
    chunk_tokens: int = Field(256, ge=1)
    """The number of tokens whose logits are in memory at a time."""
    loop: LoopConfig = LoopConfig()
    """The length of the training and the size of its batches."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its learning rate."""
