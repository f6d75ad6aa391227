"""Measures c and v(n) on a real target and drafter, in the one loop.

Shapes: n tokens fed to the target per row in one pass; the last committed one is one of them.
"""

import contextlib
import copy
from collections.abc import Sequence

import numpy as np
import torch

from decode.draft import Draft
from decode.drafters import Contexts, Drafter, Limits
from decode.errors import UserError
from decode.loop import Decoder
from decode.measure.costs import Costs
from decode.measure.other_processes import OtherProcesses
from decode.policies import Policy
from decode.rules import RULES, Rule
from decode.sampling import Noise, Sampling
from decode.stats import Step

# Each width and each depth is timed so often, in turns. The quickest third decides: what slows
# a pass down is something else on the machine.
REPEATS = 4
# Where something is chosen by the costs that is kept, such as a tree.
CAREFUL = 12


def measure_costs(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    most: int = 8,
    widest: int = 16,
    trees: bool = False,
    repeats: int = REPEATS,
) -> Costs:
    """Costs for the rows of `prompts` (token ids) decoded together, by running the decoder's own
    loop: v from passes of up to `widest` tokens, c from drafts of up to `most` steps. trees: the
    passes are over trees, which cost a mask and a walk more than chains.

    Takes twice `repeats` + 1 decodes: each has one pass per width, or one draft per depth. Where
    the target's context is too short for the widest passes beside the prompts they are left out;
    raises UserError where not even a pass of 2 tokens fits.
    """
    room = decoder.lm.max_positions - max(map(len, prompts)) - 1
    widths = _fitting(sorted({min(n, widest) for n in _WIDTHS}), room)
    depths = _fitting(sorted({1, max(1, most // 2), most}), room)
    if len(widths) < 2 or not depths:
        raise UserError(
            f"measuring costs needs a few tokens of context beside the prompt, and the target's "
            f"{decoder.lm.max_positions} leave {room}; give a shorter prompt"
        )
    filler, exact = _Filler(trees), RULES["exact"]()
    verifying = _Turns([n - 1 for n in widths])
    # A text's first draft is cold, and is left out.
    drafting = _Turns([1, *depths])
    watch = OtherProcesses()
    passes: list[list[Step]] = []
    drafts: list[list[Step]] = []
    # By turns, so that what else happens on the machine slows both kinds of passes down.
    for _ in range(1 + repeats):
        passes.append(_steps(decoder, prompts, filler, exact, verifying))
        drafts.append(_steps(decoder, prompts, decoder.drafter, decoder.rule, drafting)[1:])
    passes, drafts = passes[1:], drafts[1:]  # the first of each warms up
    step_s, c, v = _estimate(passes, drafts, widths)
    halves = [_estimate(passes[half::2], drafts[half::2], widths)[1:] for half in (0, 1)]
    return Costs(
        step_s,
        len(prompts),
        c,
        tuple(widths),
        tuple(v.tolist()),
        _noise([most * c + v for c, v in halves]) if repeats > 1 else 0.0,
        watch.share(),
    )


def _estimate(
    passes: Sequence[Sequence[Step]], drafts: Sequence[Sequence[Step]], widths: Sequence[int]
) -> tuple[float, float, np.ndarray]:
    """Seconds of a plain step, c, and v by width, float64 [W], of several decodes' steps."""
    seconds = np.array(
        [
            _quick([s.verify_s + s.overhead_s for run in passes for s in run if s.width == n])
            for n in widths
        ]
    )
    # The quickest at each depth: of all together they would be those of one depth.
    depths = sorted({step.depth for run in drafts for step in run if step.depth})
    taken = [_quick([s.draft_s / n for run in drafts for s in run if s.depth == n]) for n in depths]
    c = float(np.mean(taken)) / seconds[0] if taken else 0.0
    return float(seconds[0]), c, np.maximum.accumulate(seconds / seconds[0])


def _noise(halves: Sequence[np.ndarray]) -> float:
    """The relative standard error of the mean of two measurements, float64 [W] each: the root mean
    square over the W places."""
    one, other = halves
    apart = (one - other) / (one + other)
    return float(np.sqrt(np.mean(apart**2)))


# The last committed token, and 1, 2, 4, … drafted ones: trees of so many nodes are compared. Wider
# passes cost by the token, and a line goes on from here.
_WIDTHS = (1, 2, 3, 5, 9, 17, 33, 65, 129)


def _fitting(sizes: Sequence[int], room: int) -> list[int]:
    """As many of the sizes as fit together, each with a token of the target's own."""
    total = np.cumsum(np.array(sizes) + 1)
    return [size for size, end in zip(sizes, total, strict=True) if end < room]


def _quick(seconds: Sequence[float]) -> float:
    return float(np.mean(sorted(seconds)[: -(-len(seconds) // 3)]))


def _steps(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    drafter: Drafter,
    rule: Rule,
    turns: "_Turns",
) -> list[Step]:
    """The steps of one decode with drafts as deep as `turns` says."""
    other = copy.copy(decoder)
    other.drafter, other.rule, other.policy = drafter, rule, turns
    other.eos = np.zeros(0, dtype=np.int64)
    with contextlib.suppress(_Enough):
        # Each pass may emit all that was drafted, and then a token more.
        other.decode(prompts, sum(turns.turns) + len(turns.turns) + 2)
    return turns.steps


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
