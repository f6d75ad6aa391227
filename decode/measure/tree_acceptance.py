"""Measures which of a drafter's candidates the target accepts: what trees are calibrated with.

The loop decodes dev prompts with a probe tree, whose nodes are the drafter's likeliest tokens, and
exact match; so what is counted is the share of the target's own tokens (greedy or drawn).
Shapes: D depths, K ranks, N nodes of the probe.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from decode.draft import Draft
from decode.drafters import Drafter
from decode.drafters.shaped import ShapedDrafter
from decode.errors import UserError
from decode.loop import Decoded, Decoder
from decode.rules import Verdict
from decode.rules.exact import ExactMatch
from decode.sampling import Noise, Sampling
from decode.scores import Scores
from decode.trees import require_whole
from decode.trees.static import FixedTree
from decode.trees.structure import Structure


@dataclass(frozen=True)
class Acceptance:
    """hits, reached: int [D, K]: how often the candidate of rank r at depth d + 1 was the token
    that followed, and how often one was judged with all before it accepted."""

    hits: np.ndarray
    reached: np.ndarray

    def table(self) -> list[list[float]]:
        """[D, K]: the share that was right, 0 where none was judged. For `calibrated`."""
        return _share(self.hits, self.reached)

    def by_rank(self) -> list[float]:
        """[K]: the share at all depths together. For `sequoia`."""
        return _share(self.hits.sum(0), self.reached.sum(0))

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the counts and the table."""
        return {
            "hits": self.hits.tolist(),
            "reached": self.reached.tolist(),
            "table": self.table(),
        }


def _share(hits: np.ndarray, reached: np.ndarray) -> Any:
    return (hits / np.maximum(reached, 1)).tolist()


def probe(width: int, depth: int) -> Structure:
    """`width` candidates at each depth, those below the first hanging on the likeliest path.

    >>> probe(2, 2).paths
    [(0,), (1,), (0, 0), (0, 1)]
    """
    require_whole(width=width, depth=depth)
    return Structure([(*[0] * above, rank) for above in range(depth) for rank in range(width)])


def require_shaped(drafter: Drafter) -> ShapedDrafter:
    """The drafter; UserError for one that does not draft in shapes."""
    if not isinstance(drafter, ShapedDrafter):
        raise UserError(
            f"{type(drafter).__name__} drafts in no shape, so there is no tree to calibrate"
        )
    return drafter


def measure_acceptance(
    model: PreTrainedModel,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    tree: Structure,
    max_new_tokens: int = 64,
    eos_token_ids: Sequence[int] = (),
    sampling: Sampling | None = None,
    batch_size: int = 16,
    seed: int = 0,
) -> Acceptance:
    """What the target accepts of `tree` (see `probe`) on these prompts; give it dev prompts.

    drafter: one that drafts in a shape; its own shape is put back afterwards. A path that the
    probe does not hold is not measured: with `probe` deeper candidates count after the likeliest
    ones alone. Tokens past the end of a text are not counted. Raises UserError for a drafter
    without a shape, and as `Decoder` does.
    """
    shaped = require_shaped(drafter)
    shape = shaped.shape
    if not prompts:
        raise UserError("there are no prompts to measure acceptance on")
    counts = np.zeros((2, tree.depth, int(tree.ranks.max()) + 1), dtype=np.int64)
    shaped.shape = FixedTree(tree)
    try:
        rule = _Watching()
        decoder = Decoder(
            model,
            drafter,
            eos_token_ids=eos_token_ids,
            gamma=tree.depth,
            rule=rule,
            sampling=sampling,
        )
        for begin in range(0, len(prompts), batch_size):
            rule.seen.clear()
            batch = prompts[begin : begin + batch_size]
            places = range(begin, begin + len(batch))
            run = decoder.decode(batch, max_new_tokens, seed=seed, row_ids=places)
            _count(counts, tree, rule.seen, run)
    finally:
        shaped.shape = shape
    return Acceptance(*counts)


class _Watching(ExactMatch):
    """Exact match that remembers its verdicts: sizes and accepted [B], paths [B, D]."""

    exact_when_greedy = False  # it is that already, and is not to be replaced

    def __init__(self) -> None:
        self.seen: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        verdict = super().verify(draft, scores, noise)
        self.seen.append((draft.sizes, verdict.accepted.cpu().numpy(), verdict.path.cpu().numpy()))
        return verdict


def _count(
    counts: np.ndarray,
    tree: Structure,
    seen: list[tuple[np.ndarray, np.ndarray, np.ndarray]],
    run: Decoded,
) -> None:
    """Add one decode's verdicts to counts, int [2, D, K]: hits and reached."""
    hits, reached = counts
    for (sizes, accepted, paths), step in zip(seen, run.steps, strict=True):
        for size, kept, path, emitted in zip(sizes, accepted, paths, step.emitted, strict=True):
            nodes = [-1, *path[:kept].tolist()]
            # The last emitted token ends the text where the block was cut: nothing follows it.
            for depth in range(min(kept + 1, int(emitted), tree.depth)):
                judged = np.flatnonzero(tree.parents[:size] == nodes[depth])
                reached[depth, tree.ranks[judged]] += 1
                if depth < kept:
                    hits[depth, tree.ranks[nodes[depth + 1]]] += 1
