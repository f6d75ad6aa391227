"""Heads and their losses as one module, so any engine can wrap the whole computation.

Here the target is frozen. `heads.joint_training` trains it too.

Shapes: B rows, T tokens, n trained tokens, H hidden size, V' draft vocabulary.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, linear
from transformers import PreTrainedModel

from decode.base.errors import UserError
from decode.model.hidden_states import FINAL
from decode.model.pretrained import replaced
from distill.choose_vocabulary import rows_of_tokens
from distill.chunked_loss import LossSum, TokenLoss
from distill.float32_products import product
from distill.losses import WeightedLoss
from distill.place_weights import label_shares, place_weights
from distill.teacher.linear_logits import output_rows
from distill.teacher.teacher_signal import Teacher, TeacherLogits
from heads.heads_module import HeadBatch, Heads, Prediction, output_layer, shift_left

TOP = 5


def captured_with(heads: Heads, loss: WeightedLoss) -> tuple[int, ...]:
    """The layers whose hidden states a training of heads reads: theirs, and those of a teacher."""
    reads_teacher = loss.needs_teacher and FINAL not in heads.captured_layers
    return (*heads.captured_layers, FINAL) if reads_teacher else heads.captured_layers


class HeadTraining(nn.Module):
    """Computes the losses of `heads` on a batch. The target is not trained here.

    weighted_loss: the loss of each head. Its terms compare the head's distribution with the token
    at t + d + 1 and with the target's distribution for this token, computed from the target's state
    at t + d.

    smoothing: a of D-PACE (2605.18810), whose weights then replace those of `forward` in training
    (`distill.place_weights`). None: the weights of `forward`.

    Raises UserError as `require_losses` does.
    """

    def __init__(
        self,
        heads: Heads,
        weighted_loss: WeightedLoss,
        model: PreTrainedModel,
        *,
        chunk: int = 256,
        smoothing: float | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.weighted_loss, self.chunk = heads, weighted_loss, chunk
        self.smoothing = smoothing
        require_losses(heads, weighted_loss)
        ids = heads.vocabulary
        layer = output_layer(model)
        rows = None if ids is None else rows_of_tokens(ids, layer.out_features)
        self.register_buffer("label_rows", rows, persistent=False)
        # A tuple, so that no parameter of the frozen target is registered in this module.
        self._teacher_layer = _detached(*output_rows(layer, ids))
        self._all_tokens = _detached(layer.weight, layer.bias)

    @contextmanager
    def following(self, layer: nn.Linear) -> Iterator[None]:
        """Use the current weights of `layer` as the target's output layer inside the context.

        For a target that is trained too. If the heads borrow this layer, their loss trains it.
        """
        weight, bias = output_rows(layer, self.heads.vocabulary)
        with (
            replaced(self, "_teacher_layer", _detached(weight, bias)),
            replaced(self, "_all_tokens", _detached(layer.weight, layer.bias)),
            self.heads.output.using(weight, bias),
        ):
            yield

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """The layers whose hidden states this module needs, including those of the heads."""
        return captured_with(self.heads, self.weighted_loss)

    @property
    def _names(self) -> tuple[str, ...]:
        """The names of each head's losses."""
        names = tuple(self.weighted_loss.names)
        return (*names, "confidence") if self.heads.estimates else names

    @property
    def sums(self) -> list[str]:
        """Names of the sums of `forward`, in order. `figures` turns the sums into metrics."""
        per_head = ["tokens", "top1", f"top{TOP}", *self._names]
        names = [f"head{d}/{name}" for d in range(1, self.heads.depth + 1) for name in per_head]
        return [*names, "positions", "accepted"]

    def forward(
        self,
        input_ids: Tensor,
        loss_mask: Tensor,
        features: Mapping[int, Tensor],
        losses: Mapping[int, float],
    ) -> tuple[Tensor, Tensor]:
        """The weighted loss summed over tokens and heads, and `sums`, float64.

        input_ids: int64 [B, T]. loss_mask: bool [B, T], True where the token is trained on.
        features: [B, T, H] by captured layer. losses: the heads to compute, with their loss
        weights. If it contains all heads, and they predict at all positions, the sums also count
        how many tokens in a row the heads get right.
        """
        batch = HeadBatch(input_ids, loss_mask, features)
        sums_per_head = 3 + len(self._names)
        sums = torch.zeros(
            self.heads.depth * sums_per_head + 2, dtype=torch.float64, device=input_ids.device
        )
        # One gradient for an output layer that several heads read.
        loss = LossSum(self.weighted_loss, chunk=self.chunk)
        further = torch.zeros((), dtype=torch.float64, device=input_ids.device)
        right: dict[int, Tensor] = {}  # bool [B, T] by depth
        predictions: Iterable[Prediction] = self.heads.predictions(batch, sorted(losses))
        dynamic: dict[int, Tensor] = {}
        if self.smoothing is not None and self.training:
            predictions = list(predictions)
            shares = {x.depth: self._shares(x, input_ids) for x in predictions}
            dynamic = place_weights(shares, self.smoothing)
        # With a teacher all heads together, because several predict the same tokens.
        reads_teacher = self.weighted_loss.needs_teacher
        for group in [list(predictions)] if reads_teacher else ([x] for x in predictions):
            teacher, places = self._teacher(batch, group) if reads_teacher else (None, [None])
            head_losses = [
                self._head_loss(
                    prediction,
                    input_ids,
                    weights=prediction.of(dynamic[prediction.depth]) if dynamic else None,
                    scale=1.0 if dynamic else losses[prediction.depth],
                    places=of_head,
                )
                for prediction, of_head in zip(group, places, strict=True)
            ]
            term_sums = loss.add(teacher, *head_losses)
            for prediction, head_loss, terms in zip(group, head_losses, term_sums, strict=True):
                depth, positions = prediction.depth, prediction.positions
                extra, head_sums, guessed = self._head_sums(prediction, batch, head_loss, terms)
                if extra is not None:
                    further = further + head_loss.scale * extra
                begin = (depth - 1) * sums_per_head
                sums[begin : begin + sums_per_head] = head_sums
                if depth == 1:
                    drafts = positions.sum()
                right[depth] = torch.zeros_like(positions)
                right[depth].view(-1)[prediction.places] = guessed
        if len(right) == self.heads.depth and self.heads.trains_all:
            in_a_row = torch.stack([right[d] for d in sorted(right)]).long().cumprod(0).sum()
            sums[-2:] = torch.stack([drafts, in_a_row])
        return loss.total + further, sums

    def _head_loss(
        self,
        prediction: Prediction,
        input_ids: Tensor,
        *,
        weights: Tensor | None,
        scale: float,
        places: Tensor | None,
    ) -> TokenLoss:
        """What `LossSum.add` takes for one head with n tokens."""
        states, weight, bias = self.heads.output.last_product(prediction.depth, prediction.states)
        labels = self._labels(prediction, input_ids)
        values: Tensor | None = None
        if prediction.confidence is not None:
            shape = len(labels), len(self.weighted_loss.names)
            values = torch.zeros(shape, device=labels.device)
        return TokenLoss(
            states,
            weight,
            bias,
            labels,
            scale=scale,
            weights=weights,
            added=prediction.added,
            places=places,
            ranks=torch.zeros_like(labels),
            values=values,
        )

    def _head_sums(
        self, prediction: Prediction, batch: HeadBatch, loss: TokenLoss, term_sums: Tensor
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """Of a head's loss, after it was added: what there is of other losses, without the factor;
        its part of `sums`; and bool [n], whether its likeliest token is the right one."""
        ranks, values, weights = loss.ranks, loss.values, loss.weights
        assert ranks is not None
        extra: list[Tensor] = []  # [n] each
        if prediction.confidence is not None and values is not None:
            accepted = self._accepted(prediction, batch, values)
            errors = self._confidence_errors(prediction.confidence, accepted)
            extra.append(errors)
            term_sums = torch.cat([term_sums, errors.detach().sum().double()[None]])
        if prediction.extra_loss is not None:
            extra.append(prediction.extra_loss)
        weighted = [(x if weights is None else x * weights).sum() for x in extra]
        counts = [torch.ones_like(ranks), ranks == 0, ranks < TOP]
        sums = [torch.stack([count.sum() for count in counts]).double(), term_sums]
        more = torch.stack(weighted).sum() if weighted else None
        return more, torch.cat(sums), ranks == 0

    def _confidence_errors(self, logits: Tensor, accepted: Tensor) -> Tensor:
        """float32 [n]: the cross-entropy of the estimated acceptance, whose logits are [n], with
        the acceptance rate `accepted`, [n]."""
        accepted = accepted.clamp(0, 1)
        return binary_cross_entropy_with_logits(logits.float(), accepted, reduction="none")

    @torch.no_grad()
    def _accepted(self, prediction: Prediction, batch: HeadBatch, values: Tensor) -> Tensor:
        """float32 [n]: the acceptance rate Σ min(p, q) of each token (2607.05147). values: [n,
        terms], those of `weighted_loss`.

        Over all tokens it is 1 − ½‖q − p‖₁. The losses over a draft vocabulary renormalise p, but
        the target accepts by the p of all its tokens.
        """
        ids = self.heads.vocabulary
        if ids is None:
            return 1 - values[:, list(self.weighted_loss.names).index("total_variation")]
        read, own, own_bias = self.heads.output.last_product(prediction.depth, prediction.states)
        weight, bias = self._all_tokens
        states = prediction.of(shift_left(batch.features[FINAL], prediction.depth))
        states = states.to(weight.dtype)
        accepted = states.new_zeros(len(states), dtype=torch.float32)
        for begin in range(0, len(states), self.chunk):
            part = slice(begin, begin + self.chunk)
            logits = linear(read[part], own, own_bias)
            if prediction.added is not None:
                rows, added = prediction.added
                logits = logits + linear(rows[part], added)
            p = linear(states[part], weight, bias).float().softmax(-1)[:, ids]
            accepted[part] = torch.minimum(logits.float().softmax(-1), p).sum(-1)
        return accepted

    def _labels(self, prediction: Prediction, input_ids: Tensor) -> Tensor:
        """int64 [n]: the output rows of the tokens that a head predicts; −100 for none."""
        labels = prediction.of(shift_left(input_ids, prediction.depth + 1))
        rows = self.label_rows
        return rows[labels] if isinstance(rows, Tensor) else labels

    def _shares(self, prediction: Prediction, input_ids: Tensor) -> Tensor:
        """float32 [B, T]: the head's probability of the token that it predicts; NaN where it is
        not trained."""
        shares = label_shares(
            *self.heads.output.last_product(prediction.depth, prediction.states),
            self._labels(prediction, input_ids),
            chunk=self.chunk,
            added=prediction.added,
        )
        placed = shares.new_full(prediction.positions.shape, float("nan"))
        placed.view(-1)[prediction.places] = shares
        return placed

    def _teacher(
        self, batch: HeadBatch, predictions: Sequence[Prediction]
    ) -> tuple[Teacher, list[Tensor | None]]:
        """The teacher of these heads together, and for each the `TokenLoss.places` of its tokens.
        A place is one of the text that at least one head predicts the next token of."""
        read = [x.places + x.depth for x in predictions]
        places = read[0]
        numbers: list[Tensor | None] = [None]
        if len(read) > 1:
            # By counting: to sort them, a GPU would be waited for.
            every = torch.cat(read)
            is_read = torch.zeros_like(batch.input_ids).flatten().index_fill_(0, every, 1)
            number = is_read.cumsum(0) - 1
            numbers = list(map(number.__getitem__, read))
            places = torch.zeros_like(every)
            places[number[every]] = every
        states = batch.features[FINAL].flatten(0, 1)
        weight, bias = self._teacher_layer

        @torch.no_grad()
        def teacher(part: slice) -> TeacherLogits:
            return TeacherLogits(product(states[places[part]].to(weight.dtype), weight, bias))

        return teacher, numbers

    def figures(self, sums: Mapping[str, float], tokens: int = 0) -> dict[str, float]:
        """Compute metrics from `sums`, which are added up over batches and ranks.

        For each computed head: the top-1 and top-5 accuracy, and the mean of each term.
        `tokens_per_step`: the tokens that greedy chains emit per step at these positions, if the
        text is the target's output. It is 1 plus the mean number of consecutive heads, from the
        first, that are right.
        """
        figures = {}
        for depth in range(1, self.heads.depth + 1):
            count = sums[f"head{depth}/tokens"]
            for name in ("top1", f"top{TOP}", *self._names) if count else ():
                figures[f"head{depth}/{name}"] = sums[f"head{depth}/{name}"] / count
        if sums["positions"]:
            figures["tokens_per_step"] = 1 + sums["accepted"] / sums["positions"]
        return figures


def require_losses(heads: Heads, weighted_loss: WeightedLoss) -> None:
    """Raise UserError for heads with estimates of acceptance if there is no `total_variation`."""
    if heads.estimates and "total_variation" not in weighted_loss.names:
        raise UserError(
            f"{heads.options.type} heads learn their confidence from the loss total_variation, but "
            f"the losses are {', '.join(weighted_loss.names)}; add total_variation to losses, or "
            "set confidence: false"
        )


def _detached(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return weight.detach(), None if bias is None else bias.detach()
