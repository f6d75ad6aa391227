"""Distillation of a drafter that predicts several tokens in one pass (PARD, 2504.18583).

Each text is read in K copies at once. Copy 0 is the text. Copy i has mask tokens only, at the
positions of the text. Its token at position p stands for a draft that begins after position
a = p − i, the anchor: it sees the text up to a and the mask tokens of the copies 1 … i with the
same anchor. So one pass trains on what decoding feeds for every anchor. All copies predict the
token at p + 1, and the teacher's distribution there serves them all.

Conditional drop (section 3.3) keeps few mask tokens in later copies: an anchor can stay in copy i
only if it is in copy i − 1. So each kept mask token sees a complete chain.

Shapes: B rows, T tokens of the text, M mask tokens of a row, N = T + M, K copies, n predictions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from transformers import PreTrainedModel

from decode.base.errors import UserError
from decode.model.kinds.layer_kinds import layer_windows, recurrent_layers
from distill.agreement import Agreement
from distill.distillation_loss import Distillation
from distill.losses import WeightedLoss
from distill.place_weights import label_shares, place_weights
from distill.row_numbers import row_numbers
from distill.teacher.teacher_signal import Signal, Teacher, TeacherLogits

S = TypeVar("S", bound=Signal)


class ParallelConfig(BaseModel):
    """A drafter that drafts all tokens in one pass (PARD, 2504.18583)."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True
    )

    tokens: int = Field(8, ge=2)
    """K, the number of tokens that one pass predicts in training. A draft may be deeper."""
    keep: float = Field(0.7, gt=0, le=1)
    """r; copy i of a text keeps rⁱ of its predictions."""
    keep_min: float = Field(0.2, ge=0, le=1)
    """r_min; each copy keeps at least this share."""
    mask_token: int | str | None = None
    """The mask token: an id that no text contains, or the text of an unused special token. None:
    that of the stage that this stage continues, or the first row of the embeddings that is no
    token."""
    place_smoothing: float | None = Field(None, ge=0, le=1)
    """a of D-PACE (2605.18810; the paper's is 0.5): each place of a draft is weighted by how likely
    the drafter now gets all places before it right. null: the same weight for all places."""

    @property
    def tokens_per_text_token(self) -> float:
        """The tokens that all copies have, at most, for each token of a text."""
        return sum(kept_share(copy, self.keep, self.keep_min) for copy in range(self.tokens))


def kept_share(copy: int, keep: float, keep_min: float) -> float:
    """The share of its predictions that copy i keeps: max(rⁱ, r_min)."""
    return max(keep**copy, keep_min)


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


class ParallelDistillation(Distillation):
    """Computes the distillation loss of a student that drafts in parallel.

    The loss of a text is the mean over the predictions of all copies, times the number of
    predictions of copy 0. So it has the scale of `Distillation`, and it does not depend on the
    other texts of the batch. Each prediction of a text has the same weight (section 3.2), or with
    `place_smoothing` that of D-PACE (2605.18810) for its place.

    mask_token: the id of the mask token. Raises UserError for a student with a sliding window, or
    with attention that takes no mask.
    """

    def __init__(
        self,
        student: PreTrainedModel,
        weighted_loss: WeightedLoss,
        parallel: ParallelConfig,
        mask_token: int,
        *,
        chunk: int = 256,
        vocabulary: Tensor | None = None,
        tokens: int | None = None,
    ) -> None:
        super().__init__(student, weighted_loss, chunk=chunk, vocabulary=vocabulary, tokens=tokens)
        require_full_attention(student)
        self.parallel, self.mask_token = parallel, mask_token

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        loss_mask: Tensor,
        teacher: Teacher | None = None,
        agreement_with: Callable[[slice], TeacherLogits] | None = None,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `Distillation.forward`. With `agreement_with`, the second value has the
        `agreement_sums` of each copy, float64 [4K]. All predictions of a token have its weight.

        What is dropped depends on torch's random state, which checkpoints store. In eval mode it is
        always the same.
        """
        masks = drawn_copies(loss_mask, self.parallel, training=self.training)
        length = input_ids.shape[1]
        positions = masks.positions(length)
        hidden = self.student.base_model(
            input_ids=torch.cat(
                [self.known(input_ids), torch.full_like(masks.copies, self.mask_token)], 1
            ),
            attention_mask=taken_mask(self.student, masks.visible(attention_mask)),
            position_ids=positions,
            use_cache=False,
        ).last_hidden_state
        predicted = torch.nn.functional.pad(loss_mask[:, 1:], (0, 1))
        row, column = torch.cat([predicted, masks.exists], 1).nonzero(as_tuple=True)
        place = row * length + positions[row, column]
        # Rows of the teacher's signal. Sorted, so that predictions of one token are neighbours.
        order = place.argsort(stable=True)
        row, column, place = row[order], column[order], place[order]
        number = predicted.flatten().cumsum(0)[place] - 1
        hidden = hidden[row, column]
        copies = torch.nn.functional.pad(masks.copies, (length, 0))[row, column]
        if agreement_with is not None:
            return hidden.new_zeros(()), self._agreements(hidden, copies, number, agreement_with)
        labels = torch.nn.functional.pad(input_ids[:, 1:], (0, 1)).flatten()[place]
        shared = None if teacher is None else shared_signal(teacher, number)
        share = predicted.sum(1) / (predicted.sum(1) + masks.exists.sum(1)).clamp(min=1)
        of_copies = share[row] if weights is None else share[row] * weights[number]
        if self.parallel.place_smoothing is not None and self.training:
            of_places = self._place_weights(
                hidden, labels, (copies, row, place - row * length - copies), loss_mask.shape
            )
            of_copies = of_copies * of_places
        loss, sums = self.loss(hidden, labels, shared, of_copies)
        return loss, sums * (predicted.sum() / max(len(number), 1))

    def _place_weights(
        self,
        hidden: Tensor,
        labels: Tensor,
        places: tuple[Tensor, Tensor, Tensor],
        shape: torch.Size,
    ) -> Tensor:
        """float32 [n]: D-PACE's weights of the predictions. places: the copy, row and anchor of
        each, int64 [n]. shape: B, T."""
        weight, bias, _ = self._output()
        shares = label_shares(hidden, weight, bias, self.output_rows(labels), chunk=self.chunk)
        placed = shares.new_full((self.parallel.tokens, *shape), float("nan"))
        placed[places] = shares
        assert self.parallel.place_smoothing is not None
        weights = place_weights(dict(enumerate(placed)), self.parallel.place_smoothing)
        return torch.stack([weights[copy] for copy in range(len(placed))])[places]

    def _agreements(
        self,
        hidden: Tensor,
        copies: Tensor,
        number: Tensor,
        target: Callable[[slice], TeacherLogits],
    ) -> Tensor:
        sums = []
        for copy in range(self.parallel.tokens):
            chosen = copies == copy
            sums.append(self.agreement(hidden[chosen], shared_signal(target, number[chosen])))
        return torch.cat(sums)

    def figures(self, sums: Tensor) -> dict[str, float]:
        """The figures of `Agreement` for the first token of a draft, from `agreement_with`'s sums.
        `place{k}/acceptance` and `place{k}/top1`: those of its k-th token, k > 1, given that the
        tokens before it are those of the text."""
        first, *others = sums.unflatten(0, (self.parallel.tokens, 4))
        figures = super().figures(first)
        for place, of_place in enumerate(others, 2):
            if of_place[3]:
                agreement = Agreement.from_sums(of_place)
                figures[f"place{place}/acceptance"] = agreement.expected_acceptance
                figures[f"place{place}/top1"] = agreement.top1
        return figures


def taken_mask(model: PreTrainedModel, visible: Tensor) -> Tensor:
    """The mask `visible`, bool [B, 1, n, S], as the model's attention takes it."""
    if model.config._attn_implementation == "sdpa":
        return visible
    lowest = torch.finfo(model.dtype).min
    return torch.zeros_like(visible, dtype=model.dtype).masked_fill(~visible, lowest)


def shared_signal(teacher: Callable[[slice], S], number: Tensor) -> Callable[[slice], S]:
    """The teacher signal of predictions that share rows of `teacher`'s signal.

    number: int64 [n], ascending, the row of each prediction. The teacher computes each row of a
    slice once.
    """
    on_host = number.tolist()

    def signal(part: slice) -> S:
        first, last = on_host[part][0], on_host[part][-1]
        return teacher(slice(first, last + 1))[number[part] - first]

    return signal


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
