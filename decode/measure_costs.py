"""Measures c and v(n) on a real target and drafter, in the one loop.

Shapes: n tokens fed to the target per row in one pass; the last committed one is one of them.
"""

import contextlib
import copy
from collections.abc import Sequence

import numpy as np
import torch

from decode.costs import Costs
from decode.draft import Draft
from decode.drafters import Contexts, Drafter, Limits
from decode.errors import UserError
from decode.loop import Decoder
from decode.policies import Policy
from decode.rules import RULES, Rule
from decode.sampling import Noise, Sampling
from decode.stats import Step

# Each width and each depth is timed so often, and the quickest two decide: what slows a pass down
# is something else on the machine.
REPEATS = 4


def measure_costs(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    most: int = 8,
    widest: int = 16,
    trees: bool = False,
) -> Costs:
    """Costs for the rows of `prompts` (token ids) decoded together, by running the decoder's own
    loop: v from passes of up to `widest` tokens, c from drafts of up to `most` steps. trees: the
    passes are over trees, which cost a mask and a walk more than chains.

    Takes `REPEATS` + 1 decodes, each with one pass per width. Where the target's context is too
    short for the widest passes beside the prompts they are left out; raises UserError where not
    even a pass of 2 tokens fits.
    """
    room = decoder.lm.max_positions - max(map(len, prompts)) - 1
    widths = _fitting(sorted({min(n, widest) for n in _WIDTHS}), room)
    depths = _fitting(sorted({1, max(1, most // 2), most}), room)
    if len(widths) < 2 or not depths:
        raise UserError(
            f"measuring costs needs a few tokens of context beside the prompt, and the target's "
            f"{decoder.lm.max_positions} leave {room}; give a shorter prompt"
        )
    passes = _run(decoder, prompts, _Filler(trees), RULES["exact"](), [n - 1 for n in widths])
    seconds = [
        _quick([step.verify_s + step.overhead_s for step in passes if step.width == n])
        for n in widths
    ]
    # The first draft of a text feeds the drafter the prompt as well.
    drafts = _run(decoder, prompts, decoder.drafter, decoder.rule, [1, *depths], skip=1)
    taken = [step.draft_s / step.depth for step in drafts if step.depth]
    return Costs(
        seconds[0],
        len(prompts),
        _quick(taken) / seconds[0] if taken else 0.0,
        tuple(widths),
        tuple(float(x) for x in np.maximum.accumulate(np.array(seconds) / seconds[0])),
    )


# Wider passes cost by the token, and a line goes on from here.
_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def _fitting(sizes: Sequence[int], room: int) -> list[int]:
    """As many of the sizes as fit together, each with a token of the target's own."""
    total = np.cumsum(np.array(sizes) + 1)
    return [size for size, end in zip(sizes, total, strict=True) if end < room]


def _quick(seconds: Sequence[float]) -> float:
    return float(np.mean(sorted(seconds)[:2])) if len(seconds) else float("nan")


def _run(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    drafter: Drafter,
    rule: Rule,
    depths: Sequence[int],
    *,
    skip: int = 0,
) -> list[Step]:
    """Steps of decodes whose drafts are as deep as `depths` says, one after the other, without the
    first `skip` of each; `REPEATS` decodes, after one that warms up."""
    turns = _Turns(depths)
    other = copy.copy(decoder)
    other.drafter, other.rule, other.policy = drafter, rule, turns
    other.eos = np.zeros(0, dtype=np.int64)
    steps: list[Step] = []
    for warm in (False, *[True] * REPEATS):
        with contextlib.suppress(_Enough):
            # Each pass may emit all that was drafted, and then a token more.
            other.decode(prompts, sum(depths) + len(depths) + 2)
        steps += turns.steps[skip:] if warm else []
    return steps


class _Enough(Exception):
    """All turns were taken: what is left of the text need not be decoded."""


class _Turns(Policy):
    """Depths as in a list, one after the other; keeps the steps."""

    def __init__(self, turns: Sequence[int]) -> None:
        super().__init__(max(1, *turns))
        self.turns = list(turns)
        self.steps: list[Step] = []

    def start(self, rows: int) -> None:
        super().start(rows)
        self.steps = []

    def depths(self) -> np.ndarray:
        if len(self.steps) == len(self.turns):
            raise _Enough
        return np.full(self.rows, self.turns[len(self.steps)])

    def observe(self, step: Step) -> None:
        self.steps.append(step)


class _Filler(Drafter):
    """As many tokens as it is asked for, one after the other or side by side; which does not
    matter."""

    def __init__(self, trees: bool) -> None:
        self.trees = trees

    @property
    def branches(self) -> bool:
        return self.trees

    def start(self, contexts: Contexts) -> None:
        return None

    def draft(self, contexts: Contexts, limits: Limits, sampling: Sampling, noise: Noise) -> Draft:
        tokens = torch.zeros(len(limits.depths), limits.deepest, dtype=torch.int64)
        parents = torch.full_like(tokens, -1) if self.trees else None
        return Draft(tokens, limits.depths.copy(), parents=parents)
