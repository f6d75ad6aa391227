"""Measures how often the target accepts each candidate of a drafter.

The loop decodes the prompts with exact match and a tree of the drafter's likeliest tokens. So the
counts are about the tokens that the target emits (greedy or drawn).

Shapes: D depths, K ranks, N nodes of the tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from decode.base.errors import UserError, require_whole
from decode.drafters import Drafter
from decode.drafters.trained import ShapedDrafter
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder
from decode.shapes.static import FixedTree
from decode.shapes.structure import Structure
from decode.verification import Verification
from train.measure.ranks import ALONE, Ranks


@dataclass(frozen=True)
class TreeAcceptance:
    """hits, reached: int [D, K], for candidates of rank r at depth d + 1. hits: how often the
    candidate was the next token. reached: how often one was judged after all before it were
    accepted."""

    hits: np.ndarray
    reached: np.ndarray

    def table(self) -> list[list[float]]:
        """[D, K]: the share of right candidates, 0 if none was judged. For `calibrated`."""
        return _share(self.hits, self.reached)

    def by_rank(self) -> list[float]:
        """[K]: the same share over all depths. For `sequoia`."""
        return _share(self.hits.sum(0), self.reached.sum(0))

    def to_dict(self) -> dict[str, Any]:
        """Converts the counts and the table to JSON values."""
        return {
            "hits": self.hits.tolist(),
            "reached": self.reached.tolist(),
            "table": self.table(),
        }


def _share(hits: np.ndarray, reached: np.ndarray) -> Any:
    return (hits / np.maximum(reached, 1)).tolist()


def probe(width: int, depth: int) -> Structure:
    """A tree with `width` candidates at each depth, all children of nodes on the likeliest path.

    >>> probe(2, 2).paths
    [(0,), (1,), (0, 0), (0, 1)]
    """
    require_whole(width=width, depth=depth)
    return Structure([(*[0] * above, rank) for above in range(depth) for rank in range(width)])


def require_shaped(drafter: Drafter) -> ShapedDrafter:
    """Returns the drafter. Raises UserError if it does not take shapes."""
    if not isinstance(drafter, ShapedDrafter):
        raise UserError(
            f"{type(drafter).__name__} does not take a shape, so no tree can be calibrated for it"
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
    ranks: Ranks = ALONE,
) -> TreeAcceptance:
    """Measures the acceptance of the nodes of `tree` (see `probe`) on these prompts. Use dev
    prompts.

    drafter: a drafter that takes shapes. Its shape is restored afterwards. ranks: the processes
    that share the prompts; all of them get the sums. Paths outside `tree` are not measured: with
    `probe`, deeper candidates are counted only after the likeliest ones. Tokens past the end of a
    text are not counted. Raises UserError for a drafter without a shape, for no prompts, and as
    `Decoder` does.
    """
    shaped = require_shaped(drafter)
    shape = shaped.shape
    if not prompts:
        raise UserError("there are no prompts to measure acceptance on")
    counts = np.zeros((2, tree.depth, int(tree.ranks.max()) + 1), dtype=np.int64)
    shaped.shape = FixedTree(tree)
    try:
        decoder = Decoder(
            model,
            drafter,
            eos_token_ids=eos_token_ids,
            gamma=tree.depth,
            rule="exact",
            sampling=sampling,
            observers=[partial(_count, counts, tree)],
        )
        for rows in batches_of(len(prompts), batch_size, ranks):
            batch = [prompts[row] for row in rows]
            decoder.decode(batch, max_new_tokens, seed=seed, row_ids=rows)
    finally:
        shaped.shape = shape
    return TreeAcceptance(*sum(ranks.gather(counts), np.zeros_like(counts)))


def batches_of(prompts: int, size: int, ranks: Ranks) -> list[Sequence[int]]:
    """The numbers of the prompts that this process decodes, in batches."""
    rows = ranks.own(range(prompts))
    return [rows[begin : begin + size] for begin in range(0, len(rows), size)]


def _count(counts: np.ndarray, tree: Structure, verification: Verification) -> None:
    """Adds what was accepted and judged in one pass to counts, int [2, D, K]: hits and reached."""
    hits, reached = counts
    by_row = (
        verification.drafted,
        verification.accepted,
        verification.nodes,
        verification.emitted,
    )
    for size, kept, path, emitted in zip(*by_row, strict=True):
        nodes = [-1, *path[:kept].tolist()]
        # If the block was cut, the last emitted token ends the text and nothing follows it.
        for depth in range(min(kept + 1, int(emitted), tree.depth)):
            judged = np.flatnonzero(tree.parents[:size] == nodes[depth])
            reached[depth, tree.ranks[judged]] += 1
            if depth < kept:
                hits[depth, tree.ranks[nodes[depth + 1]]] += 1
