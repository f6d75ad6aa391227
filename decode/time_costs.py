"""Measures the costs of drafts and v(n) on a real target and drafter, in the normal decoding loop.

Shapes: n tokens fed to the target per row in one pass, including the last committed token.
"""

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from decode.base.errors import UserError
from decode.costs import Costs, OtherProcesses, draft_parts
from decode.draft import Contexts, Draft, Limits
from decode.drafters import Drafter
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling
from decode.lengths import Policy
from decode.loop.decoding import Decoder
from decode.rules import RULES, Rule
from decode.verification import Verification

# The number of times that each width and each depth is timed, in turns. The mean of the fastest
# third counts, because slow passes come from other load on the machine.
REPEATS = 4
# Used if the costs decide something that is kept, such as a tree.
CAREFUL_REPEATS = 12


def measure_costs(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_depth: int = 8,
    max_width: int = 16,
    trees: bool = False,
    repeats: int = REPEATS,
) -> Costs:
    """Measures costs with the decoder's loop, for the rows of `prompts` (token ids) decoded
    together: v from passes of up to `max_width` tokens, the two parts of a draft's cost from drafts
    of depth 1, `max_depth` / 2 and `max_depth`.
    trees: the passes are over trees, which need a mask and a walk in addition.

    Takes 2 · (`repeats` + 1) decodes. Each has one pass per width, or one draft per depth. The
    widest passes are left out if the target's context is too short for them and the prompts.
    Raises UserError if not even a pass of 2 tokens fits.
    """
    room = decoder.lm.max_positions - max(map(len, decoder.lm.texts_and_sources(prompts)[0])) - 1
    widths = _that_fit(sorted({min(n, max_width) for n in _WIDTHS}), room)
    depths = _that_fit(sorted({1, max(1, max_depth // 2), max_depth}), room)
    if len(widths) < 2 or not depths:
        raise UserError(
            f"measuring costs needs a few tokens of context after the prompt, but the target's "
            f"context of {decoder.lm.max_positions} tokens leaves {room}; give a shorter prompt"
        )
    filler, exact = _FillerDrafter(trees), RULES["exact"]()
    verifying = _PlannedDepths([n - 1 for n in widths])
    # The first draft of a text is cold and is left out.
    drafting = _PlannedDepths([1, *depths])
    other_processes = OtherProcesses()
    passes: list[list[Verification]] = []
    drafts: list[list[Verification]] = []
    # In turns, so that other load on the machine affects both kinds of passes.
    for _ in range(1 + repeats):
        passes.append(_steps(decoder, prompts, filler, exact, verifying))
        drafts.append(_steps(decoder, prompts, decoder.drafter, decoder.parts.rule, drafting)[1:])
    passes, drafts = passes[1:], drafts[1:]  # the first of each warms up
    step_s, (fixed, per_depth), v = _estimate(passes, drafts, widths)
    halves = [_estimate(passes[half::2], drafts[half::2], widths)[1:] for half in (0, 1)]
    return Costs(
        step_s,
        len(prompts),
        per_depth,
        tuple(widths),
        tuple(v.tolist()),
        _noise([parts[0] + max_depth * parts[1] + v for parts, v in halves]),
        other_processes.share(),
        fixed,
    )


def _estimate(
    passes: Sequence[Sequence[Verification]],
    drafts: Sequence[Sequence[Verification]],
    widths: Sequence[int],
) -> tuple[float, tuple[float, float], np.ndarray]:
    """Seconds of a plain step, the fixed part of a draft's cost and that per depth, and v by width,
    float64 [W], from the steps of several decodes."""
    seconds = np.array(
        [
            _mean_of_fastest(
                [s.verify_s + s.overhead_s for run in passes for s in run if s.width == n]
            )
            for n in widths
        ]
    )
    # The fastest at each depth. The fastest overall could all be of one depth.
    depths = sorted({step.draft_steps for run in drafts for step in run if step.draft_steps})
    draft_seconds = [
        _mean_of_fastest([s.draft_s for run in drafts for s in run if s.draft_steps == n])
        for n in depths
    ]
    step_s = float(seconds[0])
    parts = draft_parts(depths, [s / step_s for s in draft_seconds]) if depths else (0.0, 0.0)
    return step_s, parts, np.maximum.accumulate(seconds / step_s)


def _noise(halves: Sequence[np.ndarray]) -> float:
    """The relative standard error of the mean of two measurements, float64 [W] each: the root mean
    square over the W widths."""
    one, other = halves
    differences = (one - other) / (one + other)
    return float(np.sqrt(np.mean(differences**2)))


# The last committed token and 1, 2, 4, … draft tokens: trees of these sizes are compared. Beyond
# the last width the cost grows with the tokens, and a line continues from here.
_WIDTHS = (1, 2, 3, 5, 9, 17, 33, 65, 129)


def _that_fit(sizes: Sequence[int], room: int) -> list[int]:
    """The first sizes that fit into `room` together, each with one more token from the target."""
    total = np.cumsum(np.array(sizes) + 1)
    return [size for size, end in zip(sizes, total, strict=True) if end < room]


def _mean_of_fastest(seconds: Sequence[float]) -> float:
    return float(np.mean(sorted(seconds)[: -(-len(seconds) // 3)]))


def _steps(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    drafter: Drafter,
    rule: Rule,
    turns: "_PlannedDepths",
) -> list[Verification]:
    """The steps of one decode. The depths of its drafts come from `turns`."""
    other = copy.copy(decoder)
    # Without `use`: the target goes on capturing what the decoder's own drafter reads.
    other.parts = replace(decoder.parts, drafter=drafter, rule=rule, policy=turns)
    other.drafter, other.policy = drafter, turns
    # The text goes on past its end, which a grammar would ask for.
    other.eos, usual = np.zeros(0, dtype=np.int64), decoder.usual
    other.usual = replace(
        usual,
        sampling=usual.sampling.without_grammar,
        draft_sampling=usual.drafts.without_grammar,
    )
    with contextlib.suppress(_AllDepthsTimed):
        # Each pass can emit all draft tokens and one more.
        other.decode(prompts, sum(turns.turns) + len(turns.turns) + 2)
    return turns.steps


class _AllDepthsTimed(Exception):
    """All turns are done. The rest of the text is not decoded."""


class _PlannedDepths(Policy):
    """Takes the depths from a list, one per step, and keeps the steps."""

    def __init__(self, turns: Sequence[int]) -> None:
        super().__init__(max(1, *turns))
        self.turns = list(turns)
        self.steps: list[Verification] = []

    def start(self, rows: int) -> None:
        super().start(rows)
        self.steps = []

    def depths(self) -> np.ndarray:
        if len(self.steps) == len(self.turns):
            raise _AllDepthsTimed
        return np.full(self.rows, self.turns[len(self.steps)])

    def observe(self, step: Verification) -> None:
        self.steps.append(step)


class _FillerDrafter(Drafter):
    """Drafts as many tokens as requested, as a chain or as siblings: those of the text from its
    beginning on. In a mixture of experts, the time of a pass depends on how many experts its tokens
    choose, so they must differ as tokens of a text do."""

    def __init__(self, trees: bool) -> None:
        self.trees = trees

    @property
    def branches(self) -> bool:
        return self.trees

    def draft(
        self, contexts: Contexts, limits: Limits, sampling: Sampling, rng: CounterRNG
    ) -> Draft:
        columns = np.arange(limits.max_depth) % contexts.lengths[:, None]
        tokens = torch.from_numpy(np.take_along_axis(contexts.tokens, columns, axis=1))
        parents = torch.full_like(tokens, -1) if self.trees else None
        return Draft(tokens, limits.depths.copy(), parents=parents)
