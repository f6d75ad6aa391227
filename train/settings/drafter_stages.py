"""Which kind of drafter an earlier stage makes, from the settings of the stages."""

from collections.abc import Iterator, Sequence
from typing import Any

from decode.base.errors import UserError
from train.settings.schema import StageConfig, closest_stage

# Kinds of stages that make small language models, which later stages can continue to train.
DRAFTER_STAGES = ("distill", "online")
# Kinds of stages whose drafters can continue to learn.
STARTS = ("heads", *DRAFTER_STAGES)


def heads_stage(name: str, earlier: Sequence[StageConfig]) -> StageConfig | None:
    """The `heads` stage that the drafter of stage `name` comes from, directly or through other
    stages. None if the drafter is a small language model. Raises UserError if there is no such
    stage."""
    closest_stage(name, earlier, *STARTS)
    return next((stage for stage in _line(name, earlier) if stage.kind == "heads"), None)


def require_own_weights(config: Any) -> None:
    """Raise UserError if a stage writes adapters alone, and says how weights are read."""
    if config.weights is not None and config.lora is not None and not config.lora.merge:
        raise UserError(
            f"stage {config.name}: weights is {config.weights}, but with lora.merge false only "
            "adapters are written, and their base says how its weights are read; set it in the "
            "stage that trains the base, or leave it out"
        )


def require_merged(stage: str, start: str, earlier: Sequence[StageConfig]) -> None:
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
    line = _line(name, earlier)
    return any(getattr(stage, "parallel", None) is not None for stage in line)


def has_other_tokenizer(name: str, earlier: Sequence[StageConfig]) -> bool:
    """Whether the drafter of stage `name`, a small language model, has another tokenizer than the
    target. A stage that continues such a drafter says so too."""
    stage = next(_line(name, earlier), None)
    return stage is not None and stage.drafter.vocabulary is not None


def _line(name: str, earlier: Sequence[StageConfig]) -> Iterator[Any]:
    """Stage `name`, the one whose drafter it continues, and so on."""
    by_name: dict[str, Any] = {stage.name: stage for stage in earlier}
    while name in by_name:
        yield by_name[name]
        name = by_name[name].drafter.stage or ""
