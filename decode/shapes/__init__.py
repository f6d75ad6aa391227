"""Shapes of drafts by name: the nodes of a drafter's tree, and how their tokens are chosen.

A shape is one file with one registration. It sees a drafter only as a `Growth`, so any drafter
that gives logits after a node works with any shape. It knows nothing about rules or the loop.

Shapes: B rows, n nodes fed at once, m fed so far, V target vocabulary, V' ≤ V draft vocabulary.
"""

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from decode.base.device import reads_are_free, to_device
from decode.base.registry import Registry, import_all
from decode.draft import Contexts, Draft, Limits, Siblings, Stops
from decode.draw.logits import change_drafts
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling, draw
from decode.draw.top import argmax
from decode.tree_nodes import largest
from decode.tree_structure import grown_ancestors


class Growth(ABC):
    """A drafter in the middle of one draft.

    A shape (`decode.shapes`) calls `first`, draws tokens, feeds those that get children with
    `extend`, and so on. Fed nodes are numbered in the order in which they are fed.

    vocab_size: V. vocabulary: int64 [V'], ascending, the token ids of the draft vocabulary's rows;
    None: row i is token i. In that case V' can still be less than V, because the drafter's output
    layer may be padded to fewer rows than the target's.
    """

    def __init__(
        self,
        contexts: Contexts,
        sampling: Sampling,
        device: torch.device,
        vocab_size: int,
        vocabulary: Tensor | None = None,
    ) -> None:
        self.contexts, self.sampling, self.device = contexts, sampling, device
        self.rows, self.vocab_size, self.vocabulary = len(contexts.lengths), vocab_size, vocabulary
        self.fed = torch.zeros(self.rows, 0, dtype=torch.int64, device=device)
        self.depth = 0  # of the nodes of a tree that were fed last
        self.ancestors: Tensor | None = None  # bool [B, m, m]; None: the fed nodes are a chain
        self.parents: Tensor | None = None  # int64 [B, n], of those nodes, as `extend` gets them
        # int [B], the max depth of each row's draft. None: no row ends before another.
        self.depths: np.ndarray | None = None
        self._changes = sampling.penalises or contexts.guides is not None

    @abstractmethod
    def _first(self) -> Tensor:
        """[B, V']: the drafter's logits after the committed text."""

    @abstractmethod
    def _extend(self, count: int) -> Tensor:
        """[B, n, V']: the logits after each of the last `count` fed nodes, which are new. Those of
        rows that `needed` leaves out may be any finite numbers."""

    def estimate(self) -> Tensor | None:
        """float32 [B]: how likely the target accepts the next token of a chain, as the drafter
        estimates it before the token is drawn. None: it has no estimates."""
        return None

    def first(self) -> Tensor:
        """[B, V']: the logits for the root's children, after the penalties (float32) and the
        constraints of the texts."""
        logits = self._first()
        return self._processed(logits[:, None], 0)[:, 0]

    def extend(
        self, tokens: Tensor, parents: Tensor | None = None, ancestors: Tensor | None = None
    ) -> Tensor:
        """Feeds n more nodes. Returns [B, n, V']: the logits for their children.

        tokens: int64 [B, n], as drawn (rows of the draft vocabulary). parents: int64 [B, n],
        numbers of fed nodes, −1 for the root; None: the n nodes continue a chain. In one draft,
        either all calls pass parents or none does. The k-th call that passes parents feeds nodes at
        depth k. ancestors: bool [B, m, m], of all fed nodes then; None: they follow from the
        parents.
        """
        count = tokens.shape[1]
        self.fed = torch.cat([self.fed, self.ids(tokens)], 1)
        if parents is not None:
            self.depth, self.parents = self.depth + 1, parents
            known = ancestors is not None
            self.ancestors = ancestors if known else grown_ancestors(self.ancestors, parents)
        return self._processed(self._extend(count), count)

    def needed(self, count: int) -> np.ndarray | None:
        """int [B]: how many of the last `count` fed nodes have children in each row: all, or none
        where the draft ends before. None: all in all rows."""
        if self.depths is None:
            return None
        deeper = self.depths > (self.fed.shape[1] if self.parents is None else self.depth)
        return None if deeper.all() else count * deeper

    def ids(self, drawn: Tensor) -> Tensor:
        """Converts rows of the draft vocabulary to token ids."""
        return drawn if self.vocabulary is None else self.vocabulary[drawn]

    def over_vocabulary(self, probs: Tensor) -> Tensor:
        """Converts probabilities over the draft vocabulary [..., V'] to q over the full one
        [..., V]."""
        if self.vocabulary is None:
            missing = self.vocab_size - probs.shape[-1]
            return torch.nn.functional.pad(probs, (0, missing)) if missing else probs
        return probs.new_zeros(*probs.shape[:-1], self.vocab_size).index_copy_(
            -1, self.vocabulary, probs
        )

    def on_path(self, count: int) -> Tensor:
        """bool [B, n, m]: for each of the last `count` fed nodes, the fed nodes on its path,
        itself included."""
        if self.ancestors is not None:
            return self.ancestors[:, -count:]
        fed = self.fed.shape[1]
        chain = torch.ones(fed, fed, dtype=torch.bool, device=self.device).tril()
        return chain[-count:].expand(self.rows, -1, -1)

    def _processed(self, logits: Tensor, count: int) -> Tensor:
        """Applies the penalties and the constraints, if there are any, to logits
        [B, n, V'] after the last `count` fed nodes (0: after the root). Penalised logits are
        float32."""
        if not self._changes:
            return logits
        if count:
            on_path = self.on_path(count)
        else:
            on_path = self.fed.new_zeros(self.rows, 1, self.fed.shape[1], dtype=torch.bool)
        text = (self.contexts.tokens, self.contexts.lengths, self.fed, on_path)
        known = (self.contexts.guides, self.contexts.answers, self.vocabulary, self.vocab_size)
        return change_drafts(logits, self.sampling, *known, *text)


class Shape(ABC):
    """Base class of shapes. Options are keyword arguments with JSON values, so that a config can
    name a shape.

    branches: its drafts can be trees, not only chains. depth: the max depth of its drafts; None:
    the requested depth.
    """

    branches: bool = True
    depth: int | None = None

    def describe(self, max_depth: int | None = None) -> str:
        """A short description, such as `chain`. max_depth: None: not limited."""
        return type(self).__name__.lower()

    @abstractmethod
    def siblings(self, sampling: Sampling) -> Siblings:
        """How the children of one node are picked under this sampling."""

    @abstractmethod
    def max_nodes(self, gamma: int) -> int:
        """The number of nodes to make room for, for drafts at most `gamma` deep: the nodes of the
        draft or the nodes fed to the drafter, whichever is larger."""

    @abstractmethod
    def grow(self, growth: Growth, limits: Limits, sampling: Sampling, rng: CounterRNG) -> Draft:
        """A draft for each row, at most `limits` deep.

        Draws come from `rng.uniforms(CounterRNG.DRAFT, position, …)`. Each position is used once in
        a round, so that a row's draft does not depend on the other rows.
        """


SHAPES: Registry[type[Shape]] = Registry("shape")


@SHAPES.register("chain")
class Chain(Shape):
    """A tree without branches: γ tokens, one after the other, drawn or, if greedy, the argmax.
    With coupled random numbers the noise of the text chooses them, so there is no q.

    The only shape that a draft-length policy can stop while it grows.
    """

    branches = False

    def siblings(self, sampling: Sampling) -> Siblings:
        return "chosen" if sampling.greedy else "independent"

    def max_nodes(self, gamma: int) -> int:
        return gamma

    def grow(self, growth: Growth, limits: Limits, sampling: Sampling, rng: CounterRNG) -> Draft:
        ends = None if limits.stops is None else _Ends(limits.stops, limits, growth)
        sure: list[Tensor] = []
        drawn, q = chain_of(growth, limits, sampling, rng, ends, sure)
        sizes = limits.depths if ends is None else ends.lengths.cpu().numpy()
        sizes = np.minimum(sizes, len(drawn))
        width = int(sizes.max(initial=0))
        if not width:
            return Draft.none(growth.rows, growth.device)
        tokens = growth.ids(torch.stack(drawn[:width], 1))
        confidence = torch.cat(sure[:width], 1) if sure else None
        if not q:
            return Draft(tokens, sizes, confidence=confidence)
        chosen, drawn_from = sampling.greedy_rows(growth.rows), torch.stack(q[:width], 1)
        return Draft(tokens, sizes, drawn_from, _chosen_rows=chosen, confidence=confidence)


class _Ends:
    """Where the chains of a draft end, as a policy decides token by token. lengths: int64 [B]."""

    def __init__(self, stops: Stops, limits: Limits, growth: Growth) -> None:
        self._stops, self._after, self._growth = stops, limits.stops_after, growth
        self._depth = limits.max_depth
        self.lengths = to_device(limits.depths.copy(), growth.device)

    def at(self, position: int, logits: Tensor) -> int:
        """The depth of the draft, as far as the host knows it, before the token at `position` is
        chosen. A tensor on an accelerator is read once, at the end. Tokens past it are left out."""
        drafting = self.lengths > position
        stopped = self._stops(position, logits, drafting, self._growth.estimate()) & drafting
        self.lengths = self.lengths.masked_fill(stopped, position + self._after)
        return int(self.lengths.max()) if reads_are_free(self.lengths.device) else self._depth


def greedy_among(sampling: Sampling, growth: Growth) -> Tensor | None:
    """bool [B]: the greedy rows among rows that draw. They have the draft that they have alone.
    None: there are none."""
    greedy = sampling.greedy_rows(growth.rows)
    return to_device(greedy, growth.device) if greedy.any() else None


def chain_of(
    growth: Growth,
    limits: Limits,
    sampling: Sampling,
    rng: CounterRNG,
    ends: _Ends | None,
    sure: list[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """Choose tokens, one after the other: rows of the draft vocabulary, int64 [B] each; and what
    each was drawn from, float32 [B, V] each, without tokens that were not drawn. sure: gets how
    likely each is accepted, float32 [B, 1], as the drafter knows it before it is drawn, if the
    limits ask for it.

    Without `ends` it is work for the device only.
    """
    tokens: list[Tensor] = []
    q: list[Tensor] = []
    logits, depth = growth.first(), limits.max_depth
    for position in range(depth):
        if ends is not None:
            depth = ends.at(position, logits)
            if depth <= position:
                break
        if limits.grows is not None:
            sure.append(largest(logits)[:, None])
        if sampling.greedy:
            drawn = argmax(logits)
        elif rng.couples:
            place = torch.arange(position, position + 1, device=growth.device)
            drawn = sampling.race(logits, rng.text_keys(place)[:, 0], growth.vocabulary)
        else:
            probs = sampling.probs(logits)
            drawn = draw(probs, rng.uniforms(CounterRNG.DRAFT, position, 1)[:, 0])
            q.append(growth.over_vocabulary(probs))
        tokens.append(drawn)
        if position + 1 < depth:
            if limits.grows is not None and limits.ends(position + 1, sure[-1]):
                break
            logits = growth.extend(drawn[:, None])[:, 0]
    return tokens, q


import_all(__name__)
