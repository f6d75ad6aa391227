"""The tree that a stage's heads are stored with, calibrated on the dev split."""

from pydantic import Field

from decode.drafters import Drafter
from decode.measure_tree import measure_acceptance, probe
from decode.shapes.calibrated import grow_greedily
from decode.shapes.structure import Structure
from decode.target import Target
from heads.base import Heads
from train.data.chat import prompt_tokens
from train.data.read import spread
from train.schema import Strict
from train.stage import StageContext


class TreeConfig(Strict):
    """The tree that the drafter is stored with, calibrated on the dev split (Medusa, section
    2.3.3): of `nodes` nodes, from the acceptance of the `width` likeliest tokens of each head, over
    so many prompts (spread evenly over the split) and tokens of text."""

    nodes: int = Field(32, ge=1)
    width: int = Field(10, ge=1)
    prompts: int = Field(32, ge=1)
    max_new_tokens: int = Field(48, ge=2)


def calibrated_tree(
    settings: TreeConfig, context: StageContext, target: Target, drafter: Drafter, heads: Heads
) -> Structure | None:
    """The tree for a drafter made of `heads`; None where its first head was never right."""
    context.reporter.say("  calibrating the tree on dev prompts")
    chosen = spread(context.examples["dev"], settings.prompts)
    found = measure_acceptance(
        target.model,
        drafter,
        [prompt_tokens(e, target.tokenizer, context.system) for e in chosen],
        tree=probe(min(settings.width, heads.rows), heads.depth),
        max_new_tokens=settings.max_new_tokens,
        eos_token_ids=target.eos_token_ids,
    )
    if not found.hits[0].any():
        context.reporter.say("  no draft of the first head was right; it drafts chains")
        return None
    return grow_greedily(found.table(), settings.nodes)
