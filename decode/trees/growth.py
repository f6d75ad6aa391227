"""Growing trees: a shape's interface to a drafter, and operations on the grown nodes.

The interface (`Growth`) gives the logits after the text and after any node. The operations remove
nodes, find equal ones and select the best.

Shapes: B rows, n nodes fed at once, m fed so far, V target vocabulary, V' ≤ V draft vocabulary, N
nodes of a tree. parents: int64 [B, N], −1 for the root, as in `Draft`.
"""

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from decode.draft import Contexts
from decode.logits import penalise, tokens_before
from decode.sampling import Sampling


class Growth(ABC):
    """A drafter in the middle of one draft.

    A shape (`decode.trees`) calls `first`, draws tokens, feeds those that get children with
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
        self.ancestors: Tensor | None = None  # bool [B, m, m]; None: the fed nodes are a chain

    @abstractmethod
    def _first(self) -> Tensor:
        """[B, V']: the drafter's logits after the committed text."""

    @abstractmethod
    def _extend(self, count: int) -> Tensor:
        """[B, n, V']: the logits after each of the last `count` fed nodes, which are new."""

    def first(self) -> Tensor:
        """[B, V']: the logits for the root's children, after the repetition penalty (float32)."""
        logits = self._first()
        return self._penalised(logits[:, None], 0)[:, 0]

    def extend(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        """Feeds n more nodes. Returns [B, n, V']: the logits for their children.

        tokens: int64 [B, n], as drawn (rows of the draft vocabulary). parents: int64 [B, n],
        numbers of fed nodes, −1 for the root; None: the n nodes continue a chain. In one draft,
        either all calls pass parents or none does.
        """
        count = tokens.shape[1]
        before = self.fed.shape[1]
        self.fed = torch.cat([self.fed, self.ids(tokens)], 1)
        if parents is not None:
            self.ancestors = self._with(parents, before)
        return self._penalised(self._extend(count), count)

    def ids(self, drawn: Tensor) -> Tensor:
        """Converts rows of the draft vocabulary to token ids."""
        return drawn if self.vocabulary is None else self.vocabulary[drawn]

    def whole(self, probs: Tensor) -> Tensor:
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

    def _with(self, parents: Tensor, before: int) -> Tensor:
        rows, count = parents.shape
        total = before + count
        seen = torch.zeros(rows, total, total, dtype=torch.bool, device=self.device)
        if before:
            assert self.ancestors is not None
            seen[:, :before, :before] = self.ancestors
            above = seen.gather(1, parents.clamp(min=0)[..., None].expand(-1, -1, total))
            seen[:, before:] = above & (parents >= 0)[..., None]
        new = torch.arange(before, total, device=self.device)
        seen[:, new, new] = True
        return seen

    def _penalised(self, logits: Tensor, count: int) -> Tensor:
        """Applies the repetition penalty, if there is one, to logits [B, n, V'] after the last
        `count` fed nodes (0: after the root). Penalised logits are float32."""
        penalty = self.sampling.repetition_penalty
        if penalty == 1:
            return logits
        if count:
            on_path = self.on_path(count)
        else:
            on_path = self.fed.new_zeros(self.rows, 1, self.fed.shape[1], dtype=torch.bool)
        ids = tokens_before(self.contexts.tokens, self.contexts.lengths, self.fed, on_path)
        size = logits.shape[-1]
        if self.vocabulary is None and size == self.vocab_size:
            return penalise(logits, ids, penalty)
        # Tokens outside the draft vocabulary go to an extra column, which is then removed.
        if self.vocabulary is None:
            columns = ids.clamp(max=size)
        else:
            columns = torch.searchsorted(self.vocabulary, ids).clamp(max=size - 1)
            columns = torch.where(self.vocabulary[columns] == ids, columns, size)
        return penalise(torch.nn.functional.pad(logits, (0, 1)), columns, penalty)[..., :-1]


def pack(keep: Tensor, parents: Tensor) -> tuple[Tensor, Tensor, np.ndarray]:
    """(order [B, n], parents [B, n], sizes [B] on the host) of the kept nodes, in the same order.

    keep: bool [B, N]. A node may be kept only with its parent. order: the old index of the node at
    each new index. n: the largest size of a row. Indices past a row's size are padding.
    """
    sizes = keep.sum(1).cpu().numpy()
    order = (
        keep.logical_not().long().sort(dim=1, stable=True).indices[:, : int(sizes.max(initial=0))]
    )
    new_index = keep.long().cumsum(1) - 1
    above = parents.gather(1, order)
    new_parents = new_index.gather(1, above.clamp(min=0)) if order.shape[1] else above
    # The parent of padding can be any kept node. The root is always kept.
    stands = keep.gather(1, order) & (above >= 0)
    return order, torch.where(stands, new_parents, -1), sizes


def first_equal(tokens: Tensor, parents: Tensor, depth: int) -> Tensor:
    """int64 [B, N]: the first node with the same token path as node i; i itself if it is the first.

    tokens: int64 [B, N], parents before children. depth: no node is deeper.
    """
    nodes = tokens.shape[1]
    order = torch.arange(nodes, device=tokens.device)
    first = order.expand_as(tokens)
    alike = (tokens[:, :, None] == tokens[:, None, :]) & (order <= order[:, None])
    # Nodes at depth d are final after d rounds, because those above them are final earlier.
    for _ in range(depth):
        above = torch.where(parents < 0, -1, first.gather(1, parents.clamp(min=0)))
        first = (alike & (above[:, :, None] == above[:, None, :])).long().argmax(2)
    return first


def merged(parents: Tensor, first: Tensor) -> Tensor:
    """int64 [B, N]: the parents, each replaced by its `first_equal` node."""
    return torch.where(parents < 0, -1, first.gather(1, parents.clamp(min=0)))


def best(scores: Tensor, allowed: Tensor, count: int) -> Tensor:
    """bool [B, N]: the `count` allowed nodes of each row with the highest scores.

    scores: [B, N]. A child's score is at most its parent's. Parents come before children, so that
    a parent is taken first if scores are equal. A node with score −inf is not allowed.
    """
    allowed = allowed & (scores > -torch.inf)
    order = (
        scores.masked_fill(~allowed, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    )
    taken = torch.zeros_like(allowed).scatter_(1, order[:, :count], True)
    return taken & allowed
