"""Measures c and v(n) on a real target and drafter, in the one loop.

Shapes: n tokens fed to the target per row in one pass; the last committed one is one of them.
"""

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
    widths: Sequence[int] = (1, 2, 3, 4, 6, 8, 12, 16),
) -> Costs:
    """Costs for the rows of `prompts` (token ids) decoded together, by running the decoder's own
    loop: v from passes of the given widths, c from drafts of up to `most` steps.

    A few seconds at most: `REPEATS` passes per width and per depth. Raises UserError where the
    target's context has no room for that beside the prompts.
    """
    widths = sorted({1, *widths})
    depths = sorted({1, max(1, most // 2), most})
    longest = max(map(len, prompts))
    # Each pass may emit all it drafted.
    need = longest + REPEATS * (sum(widths) + sum(depths) + len(depths)) + max(widths)
    if need > decoder.lm.max_positions:
        raise UserError(
            f"measuring costs needs {need} tokens of context and the target's holds "
            f"{decoder.lm.max_positions}; give shorter prompts or smaller widths"
        )
    passes = _run(decoder, prompts, _Filler(), RULES["exact"](), [n - 1 for n in widths])
    seconds = {
        n: _quick([s.verify_s + s.overhead_s for s in passes if s.width == n]) for n in widths
    }
    step_s = seconds[1]
    drafts = _run(decoder, prompts, decoder.drafter, decoder.rule, depths)
    # The first draft of a text feeds the drafter the prompt as well.
    taken = [step.draft_s / step.depth for step in drafts[1:] if step.depth]
    return Costs(
        step_s,
        len(prompts),
        _quick(taken) / step_s if taken else 0.0,
        tuple(widths),
        tuple(float(x) for x in np.maximum.accumulate([seconds[n] / step_s for n in widths])),
    )


def _quick(seconds: list[float]) -> float:
    return float(np.mean(sorted(seconds)[:2]))


def _run(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    drafter: Drafter,
    rule: Rule,
    depths: Sequence[int],
) -> list[Step]:
    """Steps of a decode whose drafts take turns in depth, `REPEATS` times round, after one round
    that warms up."""
    other = copy.copy(decoder)
    other.drafter, other.rule = drafter, rule
    turns = [*depths] * (REPEATS + 1)
    other.policy = _Turns(turns)
    other.eos = np.zeros(0, dtype=np.int64)
    longest = sum(turns) + len(turns)
    steps = other.decode(prompts, longest + max(depths) + 1).steps
    return steps[len(depths) : len(turns)]


class _Turns(Policy):
    """Depths as in a list, one after the other."""

    def __init__(self, depths: Sequence[int]) -> None:
        super().__init__(max(1, *depths))
        self.turns = list(depths)

    def depths(self) -> np.ndarray:
        depth = self.turns.pop(0) if self.turns else self.most
        return np.full(self.rows, depth)


class _Filler(Drafter):
    """As many tokens as it is asked for; which does not matter."""

    def start(self, contexts: Contexts) -> None:
        return None

    def draft(self, contexts: Contexts, limits: Limits, sampling: Sampling, noise: Noise) -> Draft:
        tokens = torch.zeros(len(limits.depths), limits.deepest, dtype=torch.int64)
        return Draft(tokens, limits.depths.copy())
