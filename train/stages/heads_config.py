"""The settings of a `heads` stage, and which of them fit together."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from decode.base.errors import UserError
from distill.students import refuse
from distill.trainable_model import DrafterLora
from heads import HEADS
from heads.heads_module import HeadOptions
from train.base.drafter_stages import require_own_weights
from train.base.schema import Losses, StageConfig, closest_stage, one_of
from train.data.corpus import stages_of
from train.engines.server_config import ServedFeatures
from train.loop.dev_slice import DevConfig
from train.loop.head_start import check_start
from train.loop.head_tree import TreeConfig
from train.loop.optimizer import OptimizerConfig
from train.loop.trained_backbone import BackboneConfig
from train.loop.training_task import LoopConfig
from train.stages.text_stages import LossConfig

if TYPE_CHECKING:
    AnyHeads = HeadOptions
else:
    AnyHeads = one_of((HEADS[kind].Options for kind in HEADS), "type")


class HeadsConfig(LossConfig):
    """Small modules on the target learn to predict the tokens after its next token."""

    kind: Literal["heads"] = "heads"
    heads: AnyHeads
    """The type of heads and its options, as {type: medusa, heads: 5}; see `heads`."""
    start: str | None = None
    """An earlier heads stage on the same target, or the directory of a drafter, such as an imported
    one, or `embedded:NAME` of one that comes along; this stage continues to train its heads. None:
    new heads."""
    lora: DrafterLora | None = None
    """Train adapters on the heads of `start`. None: train the heads themselves."""
    backbone: BackboneConfig | None = None
    """Train the target too and write the new target to `target/`. None: the target does not
    change."""
    losses: Losses = {"cross_entropy": 1.0}
    """{name: weight}, between each head and the token it predicts. A loss that reads the teacher
    distils the target's distribution of that same token."""
    place_smoothing: float | None = Field(None, ge=0, le=1)
    """a of D-PACE (2605.18810; the paper's is 0.5): each place of a draft is weighted by how likely
    the drafter now gets all places before it right. None: the weights of the kind of heads."""
    draft_vocabulary: int | None = Field(None, ge=1)
    """Draft only this many of the text's most frequent tokens. None: all tokens, or the vocabulary
    of `start`."""
    features: str | ServedFeatures = "live"
    """The source of hidden states: live, the name or directory of a feature_cache stage, or a
    server, as {server: {launch: vllm}}."""
    dev: DevConfig | None = None
    """Figures on a dev slice during the training. None: no figures."""
    tree: TreeConfig | None = None
    """Calibrate a tree after the drafter is written, and store it with the drafter. A target that
    cannot verify trees is refused before the training. None: the drafter drafts chains."""
    weights: Literal["int8"] | None = None
    """int8: the drafter reads one byte a weight, on machines that can. Its files keep all bits.
    None: it reads its weights as they are."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass, one step, layer or head at a time: less memory,
    more time. For heads that train several of them."""
    chunk_tokens: int = Field(256, ge=1)
    """The number of tokens whose logits are in memory at a time."""
    loop: LoopConfig = LoopConfig()
    """The length of the training and the size of its batches."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-3)
    """AdamW and its learning rate."""


def check_settings(config: HeadsConfig, earlier: Sequence[StageConfig]) -> None:
    """Raise UserError for settings that do not fit together, or an earlier stage that does not."""
    config.loop.require_dev(config.name, measured=config.dev is not None)
    for name in stages_of(config.dev.text) if config.dev else []:
        closest_stage(name, earlier, "generate")
    if config.start is not None:
        check_start(config, config.start, earlier)
    if config.lora is not None:
        _check_lora(config)
    require_own_weights(config)
    if config.backbone is not None:
        _check_backbone(config, config.backbone, earlier)
    if config.features != "live":
        source = "a server"
        if isinstance(config.features, str):
            source = "a cache"
            if not Path(config.features).is_dir():
                closest_stage(config.features, earlier, "feature_cache")
        refuse(config, tokens_per_pass=f"{source} replaces the live target")


def require_decoder_only_parts(config: HeadsConfig) -> None:
    """Raise UserError for settings that do not work if the target has an encoder."""
    used = {
        "backbone": config.backbone is not None,
        "dev": config.dev is not None,
        "another source of features than the live target": config.features != "live",
        "a loss that reads the teacher": config.weighted_loss.needs_teacher,
    }
    for name, is_used in used.items():
        if is_used:
            raise UserError(
                f"stage {config.name}: {name} needs a decoder-only target, and this target has an "
                "encoder; leave it out"
            )


def _check_lora(config: HeadsConfig) -> None:
    if config.start is None:
        raise UserError(
            f"stage {config.name}: lora trains adapters on heads that exist; set start to an "
            "earlier heads stage or to the directory of a drafter"
        )
    if config.backbone is not None:
        raise UserError(
            f"stage {config.name}: lora cannot be set with backbone: the heads then belong to a "
            "new target, and not to the one of their base; leave one of them out"
        )


def _check_backbone(
    config: HeadsConfig, backbone: BackboneConfig, earlier: Sequence[StageConfig]
) -> None:
    backbone.check(config.name, earlier)
    reason = "the target is trained, so its hidden states change with every step"
    refuse(config, tokens_per_pass=reason, features=reason)
