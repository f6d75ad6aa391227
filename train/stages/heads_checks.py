"""Which settings of a `heads` stage fit together."""

from collections.abc import Sequence
from pathlib import Path

from decode.base.errors import UserError
from distill.students import refuse
from train.base.drafter_stages import require_own_weights
from train.loop.head_start import check_start
from train.settings.heads_config import HeadsConfig
from train.settings.schema import StageConfig, closest_stage
from train.settings.training import BackboneConfig


def check_settings(config: HeadsConfig, earlier: Sequence[StageConfig]) -> None:
    """Raise UserError for settings that do not fit together, or an earlier stage that does not."""
    config.loop.require_dev(config.name, config.dev, earlier)
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
