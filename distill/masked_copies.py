"""Copies of a text in which mask tokens stand for drafts of several tokens (PARD, 2504.18583).

Each text is read in K copies at once. Copy 0 is the text. Copy i has mask tokens only, at the
positions of the text. Its token at position p stands for a draft that begins after position
a = p − i, the anchor: it sees the text up to a and the mask tokens of the copies 1 … i with the
same anchor. So one pass trains on what decoding feeds for every anchor. All copies predict the
token at p + 1, and the teacher's distribution there serves them all.

Conditional drop (section 3.3) keeps few mask tokens in later copies: an anchor can stay in copy i
only if it is in copy i − 1. So each kept mask token sees a complete chain.

Shapes: B rows, T tokens of the text, M mask tokens of a row, N = T + M.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.base.errors import UserError
from decode.model.kinds.layer_kinds import layer_windows, recurrent_layers
from distill.row_numbers import row_numbers
from distill.student_settings import ParallelConfig, kept_share


@dataclass
class MaskedCopies:
    """The mask tokens of a batch, without the text.

    copies, anchors: int64 [B, M], i and a of each mask token; its position is a + i. exists: bool
    [B, M]; the others are padding.
    """

    copies: Tensor
    anchors: Tensor
    exists: Tensor

    @classmethod
    def drawn(cls, loss_mask: Tensor, parallel: ParallelConfig, scores: Tensor) -> "MaskedCopies":
        """Conditional drop: copy i keeps ⌊n · max(rⁱ, r_min)⌋ of a text's n predictions, drawn from
        the anchors that copy i − 1 keeps.

        An anchor a is in copy i only if all tokens from a + 1 to a + i + 1 are predicted. The paper
        draws from all tokens of a text, prompt included. loss_mask: bool [B, T]. scores: float
        [B, T], random; low ones stay longest.
        """
        rows, length = loss_mask.shape
        following = torch.nn.functional.pad(loss_mask[:, 1:], (0, 1))  # t + 1 is predicted
        count = following.sum(1)
        kept = [following]
        for copy in range(1, parallel.tokens):
            share = kept_share(copy, parallel.keep, parallel.keep_min)
            shifted = torch.nn.functional.pad(following[:, copy:], (0, min(copy, length)))
            possible = kept[-1] & shifted[:, :length]
            order = scores.masked_fill(~possible, torch.inf).argsort(1).argsort(1)
            kept.append(possible & (order < (count * share).floor()[:, None]))
        flat = torch.stack(kept[1:], 1).flatten(1)
        most = int(flat.sum(1).amax()) if rows else 0
        order = flat.long().argsort(dim=1, descending=True, stable=True)[:, :most]
        return cls(order // length + 1, order % length, flat.gather(1, order))

    def positions(self, length: int) -> Tensor:
        """int64 [B, N]: the positions of the text's tokens and of the mask tokens."""
        text = torch.arange(length, device=self.copies.device).expand(len(self.copies), -1)
        # Padding must not index past the end of a learned table.
        return torch.cat([text, (self.anchors + self.copies).clamp(max=length - 1)], 1)

    def visible(self, attention_mask: Tensor) -> Tensor:
        """bool [B, 1, N, N]: what each token sees, the text's first, then the mask tokens.

        attention_mask: int64 [B, T].
        """
        rows, length = attention_mask.shape
        text = torch.arange(length, device=attention_mask.device)
        ends = torch.cat([text.expand(rows, -1), self.anchors], 1)  # of the text that is seen
        seen_text = (text <= ends[..., None]) & (attention_mask > 0)[:, None]
        same = self.anchors[:, :, None] == self.anchors[:, None, :]
        earlier = self.copies[:, None, :] <= self.copies[:, :, None]
        seen_masks = same & earlier & self.exists[:, None]
        seen_masks = torch.nn.functional.pad(seen_masks, (0, 0, length, 0))
        return torch.cat([seen_text, seen_masks], 2)[:, None]


def drawn_copies(predicted: Tensor, parallel: ParallelConfig, *, training: bool) -> MaskedCopies:
    """`MaskedCopies.drawn` with `row_numbers`. predicted: bool [B, T]."""
    scores = row_numbers(*predicted.shape, training=training, device=predicted.device)
    return MaskedCopies.drawn(predicted, parallel, scores)


def copies_of_depths(
    predicted: Tensor, depths: Sequence[int], keep: float, keep_min: float, *, training: bool
) -> MaskedCopies:
    """The copies that heads at these depths are trained on; outside of training, all of them."""
    share = keep if training else 1.0
    parallel = ParallelConfig(tokens=max(2, *depths), keep=share, keep_min=keep_min)
    return drawn_copies(predicted, parallel, training=training)


def copies_of_anchors(anchors: Tensor, depth: int) -> MaskedCopies:
    """The copies 1 … depth − 1 of these anchors, bool [B, T]; copy 1 at least."""
    kept, count = max(1, depth - 1), int(anchors.sum(1).max())
    places = anchors.long().argsort(dim=1, descending=True, stable=True)[:, :count]
    exists = anchors.gather(1, places).repeat_interleave(kept, 1)
    copies = torch.arange(1, kept + 1, device=anchors.device).repeat(count)
    return MaskedCopies(copies.expand(exists.shape), places.repeat_interleave(kept, 1), exists)


def taken_mask(model: PreTrainedModel, visible: Tensor) -> Tensor:
    """The mask `visible`, bool [B, 1, n, S], as the model's attention takes it."""
    if model.config._attn_implementation == "sdpa":
        return visible
    lowest = torch.finfo(model.dtype).min
    return torch.zeros_like(visible, dtype=model.dtype).masked_fill(~visible, lowest)


def require_full_attention(model: PreTrainedModel, otherwise: str = "leave out parallel") -> None:
    """Raise UserError for a model that cannot take one mask for all of its layers. otherwise: what
    a user can do about it, other than use another model."""
    attention = str(model.config._attn_implementation)
    windows = {window for window in layer_windows(model) if window is not None}
    recurrent = bool(recurrent_layers(model))
    if windows or recurrent or "flash" in attention or "flex" in attention:
        what = f"a sliding window of {min(windows)} tokens" if windows else f"{attention} attention"
        what = "a running state in some layers" if recurrent else what
        raise UserError(
            f"{type(model).__name__} has {what}, which does not take the mask of a parallel "
            "drafter's training; use a model whose layers see the full text, with sdpa or eager "
            f"attention, or {otherwise}"
        )
