"""Calibrates the tree that a stage stores with its heads, on the dev split."""

from pydantic import Field

from decode.drafters import Drafter
from decode.errors import UserError
from decode.loop import require_prompts
from decode.measure.calibrate_tree import (
    MOST_NODES,
    NothingAccepted,
    TreeCalibration,
    calibrate_tree,
)
from decode.target.cached_model import require_slots, require_trees
from decode.target.loading import Target
from heads.base import Heads
from train.data.chat import prompt_tokens
from train.data.read import spread
from train.schema import Strict
from train.stage import StageContext


class TreeConfig(Strict):
    """The tree stored with the drafter, calibrated on the dev split (Medusa, section 2.3.3).

    nodes: the size of the tree. None: as many as pay off at this machine's measured costs.
    width: the calibration measures the acceptance of each head's `width` likeliest tokens.
    prompts: the number of prompts to measure on, spread evenly over the split. max_new_tokens: how
    many tokens to decode for each.
    """

    nodes: int | None = Field(None, ge=1)
    width: int = Field(10, ge=1)
    prompts: int = Field(32, ge=1)
    max_new_tokens: int = Field(48, ge=2)


def require_tree(settings: TreeConfig, context: StageContext, stage: str, heads: Heads) -> None:
    """Raise UserError before the training if the tree could not be planned after it: no dev split,
    prompts that do not fit, or a target that cannot verify trees.

    stage: the stage's name, for messages. heads: only the shapes matter, not the weights.
    """
    if "dev" not in context.examples:
        raise UserError(
            f"stage {stage} calibrates a tree, but data has no dev split; give one, or leave tree "
            "out"
        )
    target, prompts = context.target, _prompts(settings, context)
    require_prompts(prompts, target.max_positions, target.vocab_size)
    nodes = max(settings.width * heads.depth, settings.nodes or MOST_NODES)
    require_slots(target.model, max(map(len, prompts)) + settings.max_new_tokens + nodes)
    require_trees(target.model)


def _prompts(settings: TreeConfig, context: StageContext) -> list[list[int]]:
    chosen = spread(context.examples["dev"], settings.prompts)
    return [prompt_tokens(e, context.target.tokenizer, context.system) for e in chosen]


def calibrated_tree(
    settings: TreeConfig, context: StageContext, target: Target, drafter: Drafter, heads: Heads
) -> TreeCalibration | None:
    """The tree for a drafter made of `heads`; None if the first head was never right."""
    try:
        found = calibrate_tree(
            target,
            drafter,
            _prompts(settings, context),
            nodes=settings.nodes,
            depth=heads.depth,
            width=min(settings.width, heads.rows),
            max_new_tokens=settings.max_new_tokens,
            progress=lambda what: context.reporter.say(f"  tree: measuring {what}"),
        )
    except NothingAccepted as error:
        context.reporter.say(f"  {error} It drafts chains")
        return None
    context.reporter.say(f"  tree: {found.verdict}")
    return found
