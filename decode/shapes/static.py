"""Trees of fixed structure (Medusa 2401.10774; SpecInfer 2305.09781), and those in directories.

A drafter directory may hold a tree: the drafter's default shape.

Shapes: B rows, N nodes, n nodes of one level, e expanded nodes of one level (those with children),
V' vocabulary of the drafter.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from decode.base.artifact import MANIFEST, verify_directory, write_directory
from decode.base.device import to_device
from decode.base.errors import UserError
from decode.draft import Draft, Limits, Siblings
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling, draw
from decode.shapes import SHAPES, Growth, Shape, greedy_among
from decode.shapes.structure import Structure
from decode.tree_nodes import likeliest, likeliest_with_q, pack
from decode.tree_structure import with_root

TREE = "tree.json"  # the tree of a drafter directory
PLANS = 64  # the most that are kept

# How the tokens of a node's children are picked.
Draws = Literal["top", "distinct", "independent"]


@dataclass
class _Level:
    """The nodes of one depth, as index tensors.

    first: the index of the first node in `Structure`. parents: int64 [n], the column of each node's
    parent in the logits, which cover the expanded nodes of the level above. ranks, orders: int64
    [n], as in `Structure`. places: int64 [n], where the node's token is among the `rank_count`
    likeliest of each parent, of all parents one after the other. with_order: the nodes with 0, 1, …
    earlier siblings. expanded: int64 [e], the expanded nodes. fed_parents: int64 [B, e], their
    parents, as numbers of fed nodes. fed_ancestors: bool [B, m, m], of the nodes that are fed down
    to this depth. above: int64 [B, n], the parents of the nodes, as in `Draft`.
    """

    first: int
    parents: Tensor
    ranks: Tensor
    rank_count: int  # the highest rank + 1
    places: Tensor
    orders: Tensor
    with_order: list[Tensor]
    expanded: Tensor
    fed_parents: Tensor
    fed_ancestors: Tensor
    above: Tensor


class _Plan:
    """A structure down to some depth, for B rows on a device. Built once and used in every round.

    parents [B, N], host_parents, ancestors [B, N, N] and with_root: as in `Draft`. q_rows: int64
    [B, N], the parent of node i as a number among the expanded nodes; the root is 0. by_depth: int
    [D] on the host, how many nodes there are at depth 1, 2, …. totals: int [D+1], how many there
    are down to depth 0, 1, ….
    """

    def __init__(self, structure: Structure, depth: int, rows: int, device: torch.device) -> None:
        def on_device(values: np.ndarray) -> Tensor:
            return to_device(values, device)

        def of_rows(values: np.ndarray) -> Tensor:
            return on_device(values).expand(rows, *values.shape)

        nodes = structure.within(depth)
        above = structure.parents[:nodes]
        # −1 for the root, then the fed nodes in feeding order. The index of a node here is its row
        # of q; its number as a fed node is one less.
        expanded = np.concatenate([[-1], np.unique(above[above >= 0])]).astype(np.int64)
        q_rows = np.searchsorted(expanded, above)
        self.parents, self.q_rows = of_rows(above), of_rows(q_rows)
        self.host_parents = np.broadcast_to(above, (rows, nodes))
        ancestors = structure.ancestors()[:nodes, :nodes]
        self.ancestors = of_rows(ancestors)
        seen, depths = with_root(self.ancestors[:1])
        self.with_root = seen.expand(rows, -1, -1), depths.expand(rows, -1)
        by_depth = np.bincount(structure.depths[:nodes], minlength=1)
        self.by_depth, self.totals = by_depth[1:], by_depth.cumsum()
        self.levels = []
        before = 0  # row of q of the first expanded node of the level above
        for level in range(1, min(depth, structure.depth) + 1):
            at = np.flatnonzero(structure.depths[:nodes] == level)
            inner = np.flatnonzero(np.isin(at, expanded))
            orders, ranks = structure.orders[at], structure.ranks[at]
            count = int(ranks.max()) + 1
            fed = expanded[(expanded >= 0) & (expanded <= at[-1])]
            self.levels.append(
                _Level(
                    int(at[0]),
                    on_device(q_rows[at] - before),
                    on_device(ranks),
                    count,
                    on_device((q_rows[at] - before) * count + ranks),
                    on_device(orders),
                    [on_device(np.flatnonzero(orders == i)) for i in range(orders.max() + 1)],
                    on_device(inner),
                    of_rows(q_rows[at[inner]] - 1).contiguous(),
                    of_rows(ancestors[np.ix_(fed, fed)]),
                    of_rows(above[at]),
                )
            )
            before = int(q_rows[at].max()) + 1


class FixedTree(Shape):
    """The same structure in every round.

    draw: how the tokens of a node's children are picked. "top": the likeliest ones, by rank;
    nothing is drawn. "distinct": drawn from q without replacement, one per child (fewer if q has
    fewer tokens). "independent": drawn from q, each draw independent. For drawn tokens, ranks only
    define the order. At temperature 0 tokens are always the likeliest. Raises UserError for a
    structure without nodes, or an unknown `draw`.
    """

    def __init__(self, structure: Structure, draw: Draws = "top") -> None:
        if draw not in get_args(Draws):
            raise UserError(
                f"a tree's draw is {draw!r}; expected one of {', '.join(get_args(Draws))}"
            )
        if not len(structure):
            raise UserError("a tree has no nodes; give it at least one, or use drafter none")
        self.structure, self.draw = structure, draw
        self.depth = structure.depth
        self._plans: dict[tuple[int, int, torch.device], _Plan] = {}

    def describe(self, max_depth: int | None = None) -> str:
        text = f"tree of {len(self.structure)} nodes, {self.depth} deep"
        if max_depth is None or max_depth >= self.structure.depth:
            return text
        return f"{text}, cut to {self.structure.within(max_depth)} nodes, {max_depth} deep"

    def siblings(self, sampling: Sampling) -> Siblings:
        if sampling.greedy or self.draw == "top":
            return "chosen"
        return "distinct" if self.draw == "distinct" else "independent"

    def max_nodes(self, gamma: int) -> int:
        return self.structure.within(gamma)

    def grow(self, growth: Growth, limits: Limits, sampling: Sampling, rng: CounterRNG) -> Draft:
        rows = growth.rows
        plan = self._plan(limits.max_depth, rows, growth.device)
        if not plan.levels:
            return Draft.none(rows, growth.device)
        weighs = limits.grows is not None
        children = _Children(self.siblings(sampling), growth, sampling, rng, weighs)
        logits = growth.first()[:, None]
        drawn: list[Tensor] = []
        for depth, level in enumerate(plan.levels, 1):
            drawn.append(children.of(logits, level))
            if level.fed_parents.shape[1]:
                if children.sure and limits.ends(depth, children.sure[-1], level.above):
                    plan = self._plan(depth, rows, growth.device)
                    break
                fed = drawn[-1][:, level.expanded]
                logits = growth.extend(fed, level.fed_parents, level.fed_ancestors)
        tokens = growth.ids(torch.cat(drawn, 1))
        sizes = plan.totals[np.minimum(limits.depths, len(drawn))]
        q = torch.cat(children.q, 1) if children.q else None
        draft = Draft(
            tokens,
            sizes,
            q,
            plan.parents,
            None if q is None else plan.q_rows,
            drawn="distinct" if children.siblings == "distinct" else "independent",
            _chosen_rows=None if q is None else sampling.greedy_rows(rows),
            _ancestors=plan.ancestors,
            _with_root=plan.with_root,
            _host_parents=plan.host_parents,
            _by_depth=plan.by_depth * (np.arange(len(plan.by_depth)) < limits.depths[:, None]),
            confidence=torch.cat(children.sure, 1) if children.sure else None,
        )
        return _without(draft, torch.cat(children.lacking, 1)) if children.lacking else draft

    def _plan(self, depth: int, rows: int, device: torch.device) -> _Plan:
        key = min(depth, self.structure.depth), rows, device
        if key not in self._plans:
            if len(self._plans) == PLANS:  # a service has many numbers of rows
                self._plans.clear()
            self._plans[key] = _Plan(self.structure, *key)
        return self._plans[key]


class _Children:
    """Chooses or draws a level's tokens.

    greedy: bool [B], rows that get the likeliest tokens beside rows that draw. None: no row.
    q: float32 [B, e, V] for each expanded level; empty if tokens are chosen. lacking: bool [B, n]
    for each level, the nodes for which q had no token left; only without replacement.
    sure: float32 [B, n] for each level if the drafter `weighs` its nodes: the probability at
    temperature 1 of the token of a node's rank, which is known before a token is drawn.
    """

    def __init__(
        self,
        siblings: Siblings,
        growth: Growth,
        sampling: Sampling,
        rng: CounterRNG,
        weighs: bool,
    ) -> None:
        self.siblings, self.growth, self.sampling, self.rng = siblings, growth, sampling, rng
        self.weighs, self.sure = weighs, list[Tensor]()
        self.greedy = None if siblings == "chosen" else greedy_among(sampling, growth)
        self.q: list[Tensor] = []
        self.lacking: list[Tensor] = []

    def of(self, logits: Tensor, level: _Level) -> Tensor:
        """int64 [B, n], rows of the draft vocabulary. logits: [B, e, V'], those of the parents."""
        if self.siblings == "chosen":
            return self._likeliest(logits, level, level.rank_count)
        tokens = self._drawn(logits, level)
        if self.greedy is not None:
            chosen = self._likeliest(logits, level, level.rank_count)
            return torch.where(self.greedy[:, None], chosen, tokens)
        if self.weighs:
            self._likeliest(logits, level, min(level.rank_count, logits.shape[-1]))
        return tokens

    def _likeliest(self, logits: Tensor, level: _Level, count: int) -> Tensor:
        at = level.places
        if count < level.rank_count:
            at = level.parents * count + level.ranks.clamp(max=count - 1)
        if not self.weighs:
            return likeliest(logits, count).flatten(1)[:, at]
        tokens, q = likeliest_with_q(logits, count)
        self.sure.append(q.flatten(1)[:, at])
        return tokens.flatten(1)[:, at]

    def _drawn(self, logits: Tensor, level: _Level) -> Tensor:
        probs = self.sampling.probs(logits)
        self.q.append(self.growth.over_vocabulary(probs))
        uniforms = self.rng.uniforms(CounterRNG.DRAFT, level.first, len(level.orders))
        tokens = torch.zeros_like(level.orders.expand(len(probs), -1))
        if self.siblings == "independent":
            for at in level.with_order:
                tokens[:, at] = draw(probs[:, level.parents[at]], uniforms[:, at])
            return tokens
        # One draw after the other, each without the tokens of the earlier siblings. This gives the
        # order of an exponential race on q (1903.06059), with one uniform per child, not per token.
        left = probs.clone()
        rows = torch.arange(len(probs), device=probs.device)[:, None]
        support = (probs > 0).sum(-1)
        for order, at in enumerate(level.with_order):
            parents = level.parents[at]
            some = (order < support[:, parents])[..., None]
            weights = torch.where(some, left[:, parents], probs[:, parents])
            tokens[:, at] = draw(weights, uniforms[:, at])
            left[rows, parents, tokens[:, at]] = 0.0
        lacking = level.orders >= support[:, level.parents]
        self.lacking.append(lacking if self.greedy is None else lacking & ~self.greedy[:, None])
        return tokens


def _without(draft: Draft, lacking: Tensor) -> Draft:
    """The draft without the nodes that q had no token for, and without their descendants.

    The number of children of a node depends only on q, not on the draws.
    """
    assert draft.parents is not None
    assert draft.q_rows is not None
    dropped = (draft.ancestors() & lacking[:, None, :]).any(2)
    keep = draft.valid() & ~dropped
    packed = pack(keep, draft.parents)
    if (packed.sizes == draft.sizes).all():
        return draft
    known = draft.chosen_rows(), draft.confidence
    return packed.draft(draft.tokens, draft.q, draft.q_rows, "distinct", *known)


@SHAPES.register("static")
class Static(FixedTree):
    """A tree given by exactly one of: paths of ranks, widths (the number of children of each node
    at depth 0, 1, …), or a file written by `Structure.save`.

    >>> Static(widths=[2, 1]).structure == Static(paths=[[0], [1], [0, 0], [1, 0]]).structure
    True
    """

    def __init__(
        self,
        *,
        paths: Sequence[Sequence[int]] | None = None,
        widths: Sequence[int] | None = None,
        file: str | None = None,
        draw: Draws = "top",
    ) -> None:
        sources: dict[str, tuple[Callable[[Any], Structure], Any]] = {
            "paths": (Structure, paths),
            "widths": (Structure.of_widths, widths),
            "file": (Structure.load, file),
        }
        given = [name for name, (_, value) in sources.items() if value is not None]
        if len(given) != 1:
            raise UserError(
                f"a static tree is given by {' and '.join(given) or 'nothing'}; expected exactly "
                "one of paths, widths, file"
            )
        make, value = sources[given[0]]
        super().__init__(make(value), draw)


def stored_shape(path: Path) -> Static | None:
    """The shape stored in a drafter directory, with the likeliest tokens as children. None if there
    is no such file. Raises UserError if the file is not a tree."""
    return Static(file=str(path / TREE)) if (path / TREE).exists() else None


def store_tree(path: Path, tree: Structure, about: dict[str, Any]) -> None:
    """Stores this tree in the drafter directory `path`, in place of an existing one. The directory
    and its manifest are rewritten atomically.

    about: how the tree was made, as JSON values. Raises UserError (CorruptArtifact) if the
    directory does not match its manifest, and then changes nothing.
    """
    meta = verify_directory(path)

    def fill(directory: Path) -> None:
        replaced = shutil.ignore_patterns(MANIFEST, TREE)
        shutil.copytree(path, directory, ignore=replaced, dirs_exist_ok=True)
        tree.save(directory / TREE, about)

    write_directory(path, fill, meta=meta)
