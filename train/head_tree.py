"""The tree that a stage's heads are stored with, calibrated on the dev split."""

from pydantic import Field

from decode.calibrate_tree import NothingAccepted, TreeCalibration, calibrate_tree
from decode.drafters import Drafter
from decode.target import Target
from heads.base import Heads
from train.data.chat import prompt_tokens
from train.data.read import spread
from train.schema import Strict
from train.stage import StageContext


class TreeConfig(Strict):
    """The tree that the drafter is stored with, calibrated on the dev split (Medusa, section
    2.3.3): of `nodes` nodes (None: as many as pay at this machine's measured costs), from the
    acceptance of the `width` likeliest tokens of each head, over so many prompts (spread evenly
    over the split) and tokens of text."""

    nodes: int | None = Field(None, ge=1)
    width: int = Field(10, ge=1)
    prompts: int = Field(32, ge=1)
    max_new_tokens: int = Field(48, ge=2)


def calibrated_tree(
    settings: TreeConfig, context: StageContext, target: Target, drafter: Drafter, heads: Heads
) -> TreeCalibration | None:
    """The tree for a drafter made of `heads`; None where its first head was never right."""
    chosen = spread(context.examples["dev"], settings.prompts)
    try:
        found = calibrate_tree(
            target,
            drafter,
            [prompt_tokens(e, target.tokenizer, context.system) for e in chosen],
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
