"""A drafter's input and output: the committed texts, the limits, and one token tree per row.

Shapes: B rows, N nodes (padded to the largest row), K children of a node, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from decode.base.device import reads_are_free, surely_none, to_device
from decode.draw.constraint import Guide
from decode.draw.penalties import AnswerSpans
from decode.tree_structure import (
    ancestors_of,
    children_of,
    counts_by_depth,
    counts_of_children,
    path_of,
    with_root,
)

# How the children of one node were drawn. independent: all from the same q, with replacement (also
# the only child of a node in a chain). distinct: from the same q, without replacement. mixed: with
# replacement, each from a different q, as with several drafters. If a drafter chose its token
# without drawing, q is 1 for that token.
Drawn = Literal["independent", "distinct", "mixed"]
# chosen: nothing was drawn, so q = 1 for each child.
Siblings = Literal["chosen", "independent", "distinct", "mixed"]
# See `Limits.stops`.
Stops = Callable[[int, Tensor, Tensor, Tensor | None], Tensor]
# See `Limits.grows`.
Grows = Callable[[int, Tensor, Tensor | None, int], bool]


class Asked(NamedTuple):
    """What one of several drafters that are asked in turn did for a draft. seconds: of the host, in
    which it drafted; 0: it was not asked. reading: before that, in which it read new texts. levels:
    how deep its drafts are."""

    seconds: float = 0.0
    levels: int = 0
    reading: float = 0.0


@dataclass
class Contexts:
    """The committed tokens of the B rows that are being decoded, on the host.

    tokens: int64 [B, C]. Row b holds lengths[b] tokens, the rest is free space. There is space for
        a draft past the end of the longest text.
    sources: the tokens that the target's encoder read for each row. None: it has no encoder.
    labels: the labels of the rows' settings (`decode.loop.rows.RowSettings`). None: no row has one.
    guides: what follows the constraints of the rows. None: no row has one.
    answers: which tokens are generated. None: all.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    sources: Sequence[Sequence[int]] | None = None
    labels: Sequence[str | None] | None = None
    guides: Sequence[Guide | None] | None = None
    answers: AnswerSpans | None = None

    @classmethod
    def of(
        cls,
        texts: Sequence[Sequence[int]],
        capacity: int,
        sources: Sequence[Sequence[int]] | None = None,
    ) -> "Contexts":
        """These texts, with space for `capacity` tokens in each row."""
        tokens = np.zeros((len(texts), capacity), dtype=np.int64)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
        return cls(tokens, np.array([len(text) for text in texts], dtype=np.int64), sources)

    def append(self, block: np.ndarray, counts: np.ndarray) -> None:
        """Append the first counts[b] tokens of block[b], int64 [B, n], to each text."""
        row, column = (np.arange(block.shape[1])[None, :] < counts[:, None]).nonzero()
        self.tokens[row, self.lengths[row] + column] = block[row, column]
        self.lengths = self.lengths + counts

    def last_tokens(self, device: torch.device) -> Tensor:
        """int64 [B, 1]: the last token of each text."""
        last = self.tokens[np.arange(len(self.lengths)), self.lengths - 1]
        return to_device(last, device)[:, None]

    def unchanged_lengths(self, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """int [B]: how many first tokens of each text are still those of an earlier state. In that
        state, the first lengths[b] tokens, int [B], were followed by tokens[b], int64 [B, D]."""
        columns = lengths[:, None] + np.arange(tokens.shape[1])
        same = np.take_along_axis(self.tokens, columns, axis=1) == tokens
        return np.minimum(lengths + same.cumprod(1).sum(1), self.lengths)

    def rows_from(self, first: int, end: int | None = None) -> "Contexts":
        """The rows first … end−1, or all from `first` on. Shares the memory of the tokens."""
        some = slice(first, end)
        sources = None if self.sources is None else self.sources[some]
        labels = None if self.labels is None else self.labels[some]
        guides = None if self.guides is None else self.guides[some]
        answers = None if self.answers is None else self.answers.of_rows(some)
        return Contexts(self.tokens[some], self.lengths[some], sources, labels, guides, answers)

    def of_rows(self, rows: np.ndarray) -> "Contexts":
        """A copy of these rows, int [B']."""
        some = replace(self)
        some.keep_rows(rows)
        return some

    def keep_rows(self, rows: np.ndarray) -> None:
        self.tokens, self.lengths = self.tokens[rows], self.lengths[rows]
        if self.sources is not None:
            self.sources = [self.sources[row] for row in rows.tolist()]
        if self.labels is not None:
            self.labels = [self.labels[row] for row in rows.tolist()]
        if self.guides is not None:
            guides = [self.guides[row] for row in rows.tolist()]
            self.guides = guides if any(guides) else None
        if self.answers is not None:
            self.answers = self.answers.of_rows(rows)

    def add_rows(self, other: "Contexts") -> None:
        """Append the rows of another object. All rows get the larger space."""
        for name in ("labels", "guides"):
            values = [getattr(x, name) or [None] * len(x.lengths) for x in (self, other)]
            if getattr(self, name) is not None or getattr(other, name) is not None:
                setattr(self, name, [one for some in values for one in some])
        room = max(self.tokens.shape[1], other.tokens.shape[1])
        tokens = [np.pad(x, ((0, 0), (0, room - x.shape[1]))) for x in (self.tokens, other.tokens)]
        self.tokens = np.concatenate(tokens)
        self.lengths = np.concatenate([self.lengths, other.lengths])
        if self.answers is not None and other.answers is not None:
            self.answers = self.answers.joined(other.answers)
        if self.sources is not None and other.sources is not None:
            self.sources = [*self.sources, *other.sources]


@dataclass
class Limits:
    """Limits on the depth of a draft.

    depths: int [B] on the host, the max depth per row. 0: draft nothing in that row.
    stops: called before each token of a chain is chosen. Its arguments are the index of the token
        (0, 1, …), the drafter's logits for it, [B, V'], the rows that are still drafting, bool [B],
        and the drafter's estimate of its acceptance, float32 [B] or None, all on one device. It
        returns the rows whose draft ends before that token, bool [B].
        The logits of rows that are not drafting mean nothing. It is never called for a token that
        is already chosen: dropping a token because of its own probability would change the
        distribution of the text.
    stops_after: the draft ends after that token, which is still drafted, and not before it.
    grows: whether drafts that are so deep get another level, given how sure the drafter is of each
        node of the last level, float32 [B, n], 0 where the row's draft ends, the parents of these,
        int64 [B, n], or None for chains, and `source`. It is asked of each level in turn. A draft
        then says how sure the drafter was (`Draft.confidence`), if it can.
    source: the number of this drafter among several that are asked in turn.
    by_source: the max depth of each of several that this drafter asks in turn, beside `depths`. 0:
        it rests. Those past the end have `depths` alone.
    """

    depths: np.ndarray
    stops: Stops | None = None
    stops_after: bool = False
    grows: Grows | None = None
    source: int = 0
    by_source: Sequence[int] = ()

    @cached_property
    def max_depth(self) -> int:
        return int(self.depths.max(initial=0))

    def ends(self, depth: int, confidence: Tensor, parents: Tensor | None = None) -> bool:
        """Whether drafts end that are so deep, if there is `grows`. confidence, parents: of their
        last level, as for it. On an accelerator they do not: reading would take longer than
        drafting."""
        assert self.grows is not None
        if not reads_are_free(confidence.device):
            return False
        deeper = self.depths > depth
        if not deeper.all():
            confidence = confidence * torch.from_numpy(deeper)[:, None]
        return not self.grows(depth, confidence, parents, self.source)


@dataclass
class Draft:
    """B token trees. A chain is a tree without branches: node i−1 is the parent of node i.

    tokens: int64 [B, N], shallow nodes before deeper ones, siblings in the order they were drawn.
    sizes: int [B] on the host; row b has nodes 0 … sizes[b]−1, the rest is padding.
    q: float32 [B, R, V] or None: the distributions the drafter drew from. None: the tokens were
        chosen, not drawn (q = 1 for each).
    parents: int64 [B, N] or None. −1 is the last committed token; None means a chain.
    q_rows: int64 [B, N] or None: the row of q that node i was drawn from. None: row parent(i)+1,
        as if q had a row for the context that ends at each node (row 0: the committed context).
    _host_parents: the parents on the host, if the shape knows them. Else they are read.
    _chosen_rows: bool [B] on the host, rows whose tokens were all chosen although there is a q.
        None: no row.
    confidence: float32 [B, N] or None: how likely the target accepts a node if it accepts those
        above it, as the drafter knew it before the node was drawn. None: the drafter does not say.
    sources: int [B] on the host or None: which of several drafters that are asked in turn drafted
        each row, −1: none. asked: what each of them did.
    went: the depth that the drafter drafted to, if nodes were left out since. Else 0.
    drawn: how siblings were drawn, if there is a q. Each distinct sibling was drawn from q without
        the tokens of its earlier siblings, renormalised. q itself still holds all tokens.

    >>> Draft.none(2, "cpu").tokens.shape
    torch.Size([2, 0])
    """

    tokens: Tensor
    sizes: np.ndarray
    q: Tensor | None = None
    parents: Tensor | None = None
    q_rows: Tensor | None = None
    drawn: Drawn = "independent"
    _chosen_rows: np.ndarray | None = None
    confidence: Tensor | None = field(default=None, kw_only=True)
    sources: np.ndarray | None = field(default=None, kw_only=True)
    asked: Sequence[Asked] = field(default=(), kw_only=True)
    went: int = field(default=0, kw_only=True)
    _ancestors: Tensor | None = field(default=None, repr=False)
    _with_root: tuple[Tensor, Tensor] | None = field(default=None, repr=False, kw_only=True)
    _host_parents: np.ndarray | None = field(default=None, repr=False)
    _valid: Tensor | None = field(default=None, repr=False)
    _children: Tensor | None = field(default=None, repr=False)
    _by_depth: np.ndarray | None = field(default=None, repr=False)
    # Of `_by_depth`: a rule that is traced can read a number, and no array of the host.
    _levels: int | None = field(default=None, repr=False)

    @classmethod
    def none(cls, rows: int, device: torch.device | str) -> "Draft":
        """An empty draft: the verification pass is a plain decoding step."""
        return cls(
            torch.zeros(rows, 0, dtype=torch.int64, device=device), np.zeros(rows, dtype=np.int64)
        )

    @classmethod
    def chosen(cls, chains: Sequence[Sequence[int]]) -> "Draft":
        """One chain per row, on the host, of tokens that were looked up, not drawn. A chain may be
        empty."""
        sizes = np.array([len(tokens) for tokens in chains])
        padded = np.zeros((len(chains), int(sizes.max())), dtype=np.int64)
        for row, tokens in enumerate(chains):
            padded[row, : len(tokens)] = tokens
        return cls(torch.as_tensor(padded), sizes)

    def to(self, device: torch.device) -> "Draft":
        """The same draft with its tensors on `device`."""
        if self.tokens.device == device:
            return self

        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else to_device(tensor, device)

        return Draft(
            to_device(self.tokens, device),
            self.sizes,
            move(self.q),
            move(self.parents),
            move(self.q_rows),
            self.drawn,
            self._chosen_rows,
            move(self._ancestors),
            self._host_parents,
            confidence=move(self.confidence),
            sources=self.sources,
            asked=self.asked,
            went=self.went,
        )

    def confidences(self) -> Tensor:
        """float32 [B, N]: `confidence`, or one half where the drafter does not say."""
        if self.confidence is None:
            return torch.full(self.tokens.shape, 0.5, device=self.tokens.device)
        return self.confidence

    @property
    def is_chain(self) -> bool:
        return self.parents is None

    @property
    def siblings(self) -> Siblings:
        if self.q is None:
            return "chosen"
        return self.drawn

    def chosen_rows(self) -> np.ndarray:
        """bool [B]: the rows whose tokens were all chosen."""
        if self.q is None or self._chosen_rows is None:
            return np.full(len(self.sizes), self.q is None)
        return self._chosen_rows

    def limit_depth(self, depths: np.ndarray) -> None:
        """Remove the nodes of row b that are deeper than depths[b], int [B]."""
        if self.parents is None:
            self.cut(np.minimum(self.sizes, depths))
            return
        by_depth = self.nodes_by_depth()
        if (by_depth.shape[1] <= depths).all():
            return
        sizes = (by_depth * (np.arange(by_depth.shape[1]) < depths[:, None])).sum(1)
        if (sizes < self.sizes).any():
            self.cut(sizes)

    def cut(self, sizes: np.ndarray) -> None:
        """Keep only the first sizes[b] nodes of each row, int [B]."""
        self.sizes, self._valid, self._children = sizes, None, None
        self._by_depth, self._levels = None, None

    def drop(self, rows: np.ndarray, stand_in: Tensor) -> None:
        """These rows, bool [B], have no draft. The padding in its place is their token in
        `stand_in`, int64 [B, 1]."""
        at = to_device(rows, self.tokens.device)[:, None]
        self.tokens = torch.where(at, stand_in, self.tokens)
        self.cut(np.where(rows, 0, self.sizes))

    def valid(self) -> Tensor:
        """bool [B, N]: nodes that are not padding."""
        if self._valid is None:
            nodes_N = torch.arange(self.tokens.shape[1], device=self.tokens.device)
            self._valid = nodes_N < to_device(self.sizes, self.tokens.device)[:, None]
        return self._valid

    def parent_rows(self) -> Tensor:
        """int64 [B, N]: the row of p in which node i's token is judged, parent(i) + 1."""
        rows, nodes = self.tokens.shape
        if self.parents is None:
            return torch.arange(nodes, device=self.tokens.device).expand(rows, -1)
        return self.parents + 1

    def before(self, values: Tensor) -> Tensor:
        """[B, N]: of values at all positions, [B, N+1], those at the positions of p in which the
        nodes' tokens are judged."""
        return values[:, :-1] if self.parents is None else values.gather(1, self.parent_rows())

    def rows_of_q(self) -> Tensor:
        """int64 [B, N]: the row of q that node i was drawn from."""
        return self.parent_rows() if self.q_rows is None else self.q_rows

    def q_of(self, nodes: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
        """The weights that one node of each row, int64 [B], was drawn from: (float32 [B, vocab],
        their sums float64 [B]). They are q, for distinct siblings without the earlier siblings, and
        one-hot for chosen tokens."""
        row = torch.arange(len(nodes), device=nodes.device)
        one = torch.ones(len(nodes), dtype=torch.float64, device=nodes.device)
        if self.q is None:
            token = self.tokens[row, nodes][:, None]
            zeros = torch.zeros(len(nodes), vocab, dtype=torch.float32, device=row.device)
            return zeros.scatter_(1, token, 1.0), one
        q = self.q[row, self.rows_of_q()[row, nodes]]
        if self.drawn != "distinct" or self.parents is None:
            return q, one
        order = torch.arange(self.tokens.shape[1], device=row.device)
        elder = (self.parents == self.parents[row, nodes][:, None]) & (order < nodes[:, None])
        if surely_none(elder):
            return q, one
        gone = torch.zeros_like(q).scatter_reduce_(1, self.tokens, elder.to(q.dtype), "amax")
        q = q.masked_fill(gone > 0, 0.0)
        # A node without earlier siblings has sum 1 by definition. Otherwise a row would depend on
        # the other rows of the batch.
        return q, torch.where(elder.any(1), q.sum(1, dtype=torch.float64), one)

    def q_of_tokens(self) -> Tensor:
        """float64 [B, N]: the probability of each node's token in the q it was drawn from."""
        if self.q is None:
            return torch.ones_like(self.tokens, dtype=torch.float64)
        rows = torch.arange(len(self.tokens), device=self.tokens.device)[:, None]
        return self.q[rows, self.rows_of_q(), self.tokens].double()

    def path_to(self, nodes: Tensor) -> Tensor:
        """int64 [B, N]: node nodes[b], int64 [B], and its ancestors, from the root down. Entries
        past its depth are padding. −1 means the root, which has an empty path."""
        return path_of(self.ancestors(), nodes)

    def ancestors(self) -> Tensor:
        """bool [B, N, N]: [b, i, j] is True if node j is node i or one of its ancestors."""
        if self._ancestors is None:
            rows, nodes = self.tokens.shape
            if self.parents is None:
                chain = torch.ones(nodes, nodes, dtype=torch.bool, device=self.tokens.device)
                self._ancestors = chain.tril().expand(rows, -1, -1)
            else:
                ancestors = torch.as_tensor(ancestors_of(self.parents_on_host()))
                self._ancestors = to_device(ancestors, self.tokens.device)
        return self._ancestors

    def with_root(self) -> tuple[Tensor, Tensor]:
        """Of the last committed token and the nodes of a tree: which of them each one may see, bool
        [B, N+1, N+1], and how many places each one is behind that token, int64 [B, N+1]."""
        if self._with_root is None:
            self._with_root = with_root(self.ancestors())
        return self._with_root

    def children(self) -> Tensor:
        """int64 [B, N+1, K], K ≥ 1: row r lists the valid children of node r−1 in order (row 0: of
        the last committed token), filled up with −1."""
        if self._children is None:
            if self.parents is None:
                valid = self.valid()
                below = torch.arange(valid.shape[1] + 1, device=valid.device)
                ends = torch.nn.functional.pad(valid, (0, 1))
                self._children = torch.where(ends, below, -1)[..., None]
            else:
                table = children_of(self.parents_on_host(), self.sizes)
                self._children = to_device(table, self.tokens.device)
        return self._children

    def nodes_by_depth(self) -> np.ndarray:
        """int [B, D] on the host: how many nodes row b has at depth 1, 2, … D."""
        if self._by_depth is None:
            if self.parents is None:
                inside = np.arange(self.tokens.shape[1])[None, :] < self.sizes[:, None]
                self._by_depth = inside.astype(np.int64)
            else:
                self._by_depth = counts_by_depth(self.parents_on_host(), self.sizes)
        return self._by_depth

    def levels(self) -> int:
        """The depth of the deepest nodes. Known to the host, as the sizes are."""
        if self._levels is None:
            self._levels = self.nodes_by_depth().shape[1]
        return self._levels

    def child_counts(self) -> np.ndarray:
        """int [B, N+1] on the host: how many valid children node i−1 of row b has (i = 0: the last
        committed token)."""
        return counts_of_children(self.parents_on_host(), self.sizes)

    def parents_on_host(self) -> np.ndarray:
        """int [B, N]: `parents` on the host. Waits for a device if the shape did not know them."""
        rows, nodes = self.tokens.shape
        if self._host_parents is None:
            if self.parents is None:
                self._host_parents = np.broadcast_to(np.arange(-1, nodes - 1), (rows, nodes))
            else:
                self._host_parents = self.parents.cpu().numpy()
        return self._host_parents
