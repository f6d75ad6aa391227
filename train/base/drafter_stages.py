"""Which kind of drafter an earlier stage makes, from the settings of the stages."""

from collections.abc import Sequence
from typing import Any

from decode.base.errors import UserError
from train.base.schema import StageConfig, closest_stage

# Kinds of stages that make small language models, which later stages can continue to train.
DRAFTER_STAGES = ("distill", "online")
# Kinds of stages whose drafters can continue to learn.
STARTS = ("heads", *DRAFTER_STAGES)


def heads_stage(name: str, earlier: Sequence[StageConfig]) -> StageConfig | None:
    """The `heads` stage that the drafter of stage `name` comes from, directly or through other
    stages. None if the drafter is a small language model. Raises UserError if there is no such
    stage."""
    closest_stage(name, earlier, *STARTS)
    by_name = {stage.name: stage for stage in earlier}
    while name in by_name:
        stage: Any = by_name[name]
        if stage.kind == "heads":
            return by_name[name]
        name = stage.drafter.stage or ""
    return None


def require_own_weights(config: Any) -> None:
    """Raise UserError if a stage writes adapters alone, and says how weights are read."""
    if config.weights is not None and config.lora is not None and not config.lora.merge:
        raise UserError(
            f"stage {config.name}: weights is {config.weights}, but with lora.merge false only "
            "adapters are written, and their base says how its weights are read; set it in the "
            "stage that trains the base, or leave it out"
        )


def require_whole(stage: str, start: str, earlier: Sequence[StageConfig]) -> None:
    """Raise UserError if stage `start` writes only an adapter, which `stage` cannot read."""
    found: Any = next((config for config in earlier if config.name == start), None)
    lora = getattr(found, "lora", None)
    if lora is not None and not getattr(lora, "merge", True):
        raise UserError(
            f"stage {stage} cannot read the drafter of {start}, which is an adapter on another "
            f"drafter; set lora.merge: true in {start}, or name the drafter that {start} starts "
            "from"
        )


def drafts_in_parallel(name: str, earlier: Sequence[StageConfig]) -> bool:
    """Whether the drafter of stage `name`, a small language model, drafts all tokens in one pass:
    this stage, or one that it continues, has `parallel`."""
    by_name: dict[str, Any] = {stage.name: stage for stage in earlier}
    while name in by_name:
        if getattr(by_name[name], "parallel", None) is not None:
            return True
        name = by_name[name].drafter.stage or ""
    return False


def has_other_tokenizer(name: str, earlier: Sequence[StageConfig]) -> bool:
    """Whether the drafter of stage `name`, a small language model, has another tokenizer than the
    target. A stage that continues such a drafter says so too."""
    stage: Any = next((stage for stage in earlier if stage.name == name), None)
    return stage is not None and stage.drafter.vocabulary is not None
