"""Drafts of tokens that were looked up: trees of the likeliest continuations, by counts."""

import heapq
import itertools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch

from decode.base.errors import require_whole
from decode.draft import Contexts, Draft, Limits
from decode.drafters import Drafter
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling

P = TypeVar("P")

# The most nodes of a looked-up tree. The target reads all of them in each pass.
MOST_NODES = 1024

# The tokens that were seen after a place: (token, its share of them, the place after it).
Followers = Callable[[P], Sequence[tuple[int, float, P]]]


@dataclass
class LookupTree:
    """The nodes of one row's draft, parents before children. parents: −1 is the last committed
    token. depths: 1 for its children. score: the sum of the nodes' estimated probabilities, which
    is the number of tokens that are expected to be accepted. shares: of each node, how likely it is
    after its parent; of some only, if that is not known."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    score: float = 0.0
    shares: list[float] = field(default_factory=list)
    _children: dict[tuple[int, int], int] = field(default_factory=dict)

    @classmethod
    def path(cls, tokens: list[int], found: int = 0) -> "LookupTree":
        """These tokens, one after the other. found: how many tokens before them were found again;
        0 if that is not known. Each doubles the odds that a token after them is right."""
        count = len(tokens)
        shares = [1 / (1 + 2.0**-found)] * count
        return cls(tokens, [*range(-1, count - 1)], [*range(1, count + 1)], shares=shares)

    def add(self, token: int, parent: int) -> int:
        """Appends a node and returns its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(1 if parent < 0 else self.depths[parent] + 1)
        return len(self.tokens) - 1

    def child(self, token: int, parent: int) -> int:
        """The number of the node that has this token after its parent. It is appended once."""
        if (parent, token) not in self._children:
            self._children[parent, token] = self.add(token, parent)
        return self._children[parent, token]

    def places(self) -> np.ndarray:
        """int [N+1]: where each node stands in a draft, which has shallow nodes first. The last
        entry, −1, is the root's, so that a parent's number is an index."""
        return np.append(np.argsort(np.argsort(self.depths, kind="stable")), -1)


def require_tree_nodes(tree_nodes: int | None) -> None:
    """Raises UserError unless this is a number of nodes of a tree, or None for a path."""
    if tree_nodes is not None:
        require_whole(1, MOST_NODES, tree_nodes=tree_nodes)


def grow_likeliest(
    start: P,
    followers: Followers[P],
    *,
    nodes: int,
    depth: int,
    least: float = 0.0,
    branches: bool = True,
) -> LookupTree:
    """The `nodes` likeliest nodes after a place, at most `depth` deep, by best-first search.

    The probability of a node is the product of the shares on its path, so a node never comes before
    its parent. Of equal nodes, shallow ones come first, then those that `followers` gives first.
    Nodes with a probability below `least` are left out. branches: False: only the likeliest
    follower of each node, which gives a path.
    """
    tree, order, chances = LookupTree(), itertools.count(), list[float]()
    heap: list[tuple[float, int, int, int, int, P]] = []

    def offer(probability: float, parent: int, level: int, place: P) -> None:
        options = followers(place)
        if not branches:
            options = [max(options, key=lambda option: option[1])] if options else []
        elif len(options) > nodes:
            options = heapq.nlargest(nodes, options, key=lambda option: option[1])
        for token, share, after in options:
            if probability * share >= least:
                entry = (-probability * share, level, next(order), parent, token, after)
                heapq.heappush(heap, entry)

    if nodes and depth:
        offer(1.0, -1, 1, start)
    while heap and len(tree.tokens) < nodes:
        minus, level, _, parent, token, place = heapq.heappop(heap)
        node = tree.add(token, parent)
        chances.append(-minus)
        tree.shares.append(-minus / (chances[parent] if parent >= 0 else 1.0))
        tree.score -= minus
        if level < depth:
            offer(-minus, node, level + 1, place)
    return tree


def as_draft(trees: Sequence[LookupTree], branches: bool) -> Draft:
    """One tree per row, on the host, of tokens that were chosen and not drawn. branches: False: all
    of them are paths, and the draft is one of chains."""
    sizes = np.array([len(tree.tokens) for tree in trees])
    tokens = np.zeros((len(trees), int(sizes.max())), dtype=np.int64)
    parents, confidence = np.full_like(tokens, -1), np.zeros(tokens.shape, dtype=np.float32)
    known = all(len(tree.shares) == len(tree.tokens) for tree in trees)
    for row, tree in enumerate(trees):
        places = tree.places() if branches else np.arange(sizes[row] + 1)
        nodes = places[:-1]
        if branches:
            parents[row, nodes] = places[np.array(tree.parents, dtype=np.int64)]
        tokens[row, nodes] = tree.tokens
        if known:
            confidence[row, nodes] = tree.shares
    return Draft(
        torch.as_tensor(tokens),
        sizes,
        parents=torch.as_tensor(parents) if branches else None,
        confidence=torch.as_tensor(confidence) if known else None,
        _host_parents=parents if branches else None,
    )


class LookupDrafter(Drafter):
    """Looks up what follows each text, on the host. Tokens are chosen, not drawn."""

    @abstractmethod
    def look_up(self, row: int, text: np.ndarray, depth: int) -> LookupTree:
        """The draft of a row after its text, int64 [L]: a path, or a tree if the drafter
        `branches`. It is cut where it is more than `depth` deep."""

    def draft(
        self, contexts: Contexts, limits: Limits, sampling: Sampling, rng: CounterRNG
    ) -> Draft:
        each = zip(contexts.tokens, contexts.lengths.tolist(), limits.depths.tolist(), strict=True)
        trees = [
            self.look_up(row, tokens[:length], depth)
            for row, (tokens, length, depth) in enumerate(each)
        ]
        return as_draft(trees, self.branches)
