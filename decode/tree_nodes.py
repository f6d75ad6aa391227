"""The nodes of token trees: how likely they are, which are kept, and what their numbers are then.

Shapes: B rows, N nodes, n kept nodes.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from decode.base.device import to_device
from decode.base.errors import UserError
from decode.draft import Draft, Drawn
from decode.draw.top import places_of_top, top_with_shares


@dataclass
class Packed:
    """The kept nodes of trees, in the same order.

    order: int64 [B, n], the old index of the node at each new index. n is the largest size of a
    row. Indices past a row's size are padding. parents: int64 [B, n]. host_parents: the same on the
    host. sizes: int [B] on the host.
    """

    order: Tensor
    parents: Tensor
    host_parents: np.ndarray
    sizes: np.ndarray

    def draft(
        self,
        tokens: Tensor,
        q: Tensor | None = None,
        q_rows: Tensor | None = None,
        drawn: Drawn = "independent",
        chosen: np.ndarray | None = None,
        confidence: Tensor | None = None,
    ) -> Draft:
        """The draft of the kept nodes. tokens, q_rows, confidence: [B, N], of all nodes."""
        return Draft(
            tokens.gather(1, self.order),
            self.sizes,
            q,
            self.parents,
            None if q_rows is None else q_rows.gather(1, self.order),
            drawn,
            chosen,
            confidence=None if confidence is None else confidence.gather(1, self.order),
            _host_parents=self.host_parents,
        )


def pack(keep: Tensor, parents: Tensor) -> Packed:
    """Leaves out the nodes that are not kept. Reads their structure from a device, once.

    keep: bool [B, N]. A node may be kept only with its parent. parents: int64 [B, N].
    """
    host = torch.cat([keep.long(), parents], 1).cpu().numpy()
    kept, above = np.split(host, 2, 1)
    return packed_on_host(kept > 0, above, keep.device)


def packed_on_host(keep: np.ndarray, parents: np.ndarray, device: torch.device) -> Packed:
    """`pack`, for trees whose structure the host knows. device: of what it returns."""
    order = np.argsort(~keep, axis=1, kind="stable")
    above = np.take_along_axis(parents, order, 1)
    number = keep.cumsum(1) - 1
    new_parents = np.take_along_axis(number, above.clip(min=0), 1) if keep.size else above
    # The parent of padding can be any kept node. The root is always kept.
    stands = np.take_along_axis(keep, order, 1) & (above >= 0)
    sizes: np.ndarray = keep.sum(1)
    n = int(sizes.max(initial=0))
    order, new_parents = order[:, :n], np.where(stands, new_parents, -1)[:, :n]
    return Packed(to_device(order, device), to_device(new_parents, device), new_parents, sizes)


def leave_out(draft: Draft, keep: np.ndarray) -> None:
    """Keep only some nodes of a draft, bool [B, N]: none without its parent, nor, if siblings were
    drawn without replacement, without its elder siblings.

    The law of the text stays what it is if it was known before a node was drawn whether it is kept.
    """
    draft.went = draft.went or draft.levels()
    sizes: np.ndarray = keep.sum(1)
    width = int(sizes.max(initial=0))
    if draft.parents is None:  # the first nodes of each row
        draft.tokens, draft._ancestors, draft._host_parents = draft.tokens[:, :width], None, None
        draft.q_rows = None if draft.q_rows is None else draft.q_rows[:, :width]
        draft.confidence = None if draft.confidence is None else draft.confidence[:, :width]
    else:
        packed = packed_on_host(keep, draft.parents_on_host(), draft.tokens.device)
        q_rows = None if draft.q is None else draft.rows_of_q()
        some = packed.draft(draft.tokens, draft.q, q_rows, confidence=draft.confidence)
        draft.tokens, draft.parents, draft.q_rows = some.tokens, some.parents, some.q_rows
        draft.confidence, draft._host_parents = some.confidence, some._host_parents
        draft._ancestors = draft._with_root = None
    if not width:
        draft.q = draft.q_rows = draft.parents = draft._host_parents = None
    draft.cut(sizes)


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
        above = renumbered(parents, first)
        first = (alike & (above[:, :, None] == above[:, None, :])).long().argmax(2)
    return first


def renumbered(parents: Tensor, numbers: Tensor) -> Tensor:
    """int64 [B, N]: the parents, where node i is now called numbers[b, i]. −1, the root, stays."""
    return torch.where(parents < 0, -1, numbers.gather(1, parents.clamp(min=0)))


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


def likeliest(logits: Tensor, count: int) -> Tensor:
    """int64 [..., count]: the drafter's likeliest tokens (rows of its vocabulary), best first.

    Raises UserError if its vocabulary has fewer than `count` tokens.
    """
    if count > logits.shape[-1]:
        raise UserError(
            f"a node of the tree has {count} children, but the drafter's vocabulary has only "
            f"{logits.shape[-1]} tokens; make the tree narrower"
        )
    return places_of_top(logits, count)


def likeliest_with_q(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The same, and q of these tokens at temperature 1, float32 [..., count]."""
    found = top_with_shares(logits, count)
    if found is not None:
        return found
    tokens = likeliest(logits, count)
    return tokens, log_q(logits, tokens).exp()


def largest(logits: Tensor) -> Tensor:
    """float32 [...]: the largest probability at temperature 1. logits: [..., V']."""
    logits = logits.float()
    return (logits.amax(-1) - logits.logsumexp(-1)).exp()


def log_q(logits: Tensor, tokens: Tensor) -> Tensor:
    """float32 [..., k] ≤ 0: log q of tokens [..., k] at temperature 1. logits: [..., V']."""
    scores = logits.float()
    # Rounding must not make a path likelier than its prefix.
    return (scores.gather(-1, tokens) - scores.logsumexp(-1, keepdim=True)).clamp(max=0.0)
