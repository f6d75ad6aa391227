"""The teacher signal: the target's distributions that losses compare the drafter with.

A signal for a few tokens has two forms: full logits, or top-k with a tail. The losses compare
teacher and drafter over a set of outcomes. A signal converts the drafter's log-probabilities over
its vocabulary to log-probabilities over these outcomes. It also converts a gradient over the
outcomes back to a gradient over the vocabulary.

The signal of a batch comes from the live target (`LiveTeacher`), from hidden states that are stored
or made for several batches together (`StatesTeacher`), or from stored top-k log-probabilities
(`distill.teacher.top_k_cache`).

Shapes: B rows, T tokens, n predicted tokens, H hidden size, V vocabulary, k cached tokens.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.base.errors import UserError
from decode.model.hidden_states import FINAL
from decode.model.pretrained import has_encoder, input_device, require_present
from distill.teacher.decoder_states import decoder_states
from distill.teacher.feature_sources import FeatureSource


class Signal(Protocol):
    """The teacher signal for n tokens."""

    def outcomes(self, log_q: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return (log q, log p) over the outcomes.

        log_q: [n, V], the drafter's. The result is differentiable in it. temperature: the
        teacher's.
        """
        ...

    def pull_back(self, gradient: Tensor, logits: Tensor, temperature: float) -> Tensor:
        """Return the gradient of a loss in logits / temperature, [n, V].

        gradient: the gradient of the loss in the outcomes' logits. logits, temperature: the
        drafter's.
        """
        ...

    def __getitem__(self, rows: slice | Tensor) -> Self:
        """The signal for some of the tokens. rows: a slice, or int64 [m], their numbers."""
        ...


# Maps a slice of a batch's predicted tokens to its teacher signal, computed on each call.
Teacher = Callable[[slice], Signal]


@dataclass(frozen=True)
class TeacherLogits:
    """The teacher's logits over the full (draft) vocabulary, [n, V]."""

    logits: Tensor

    def outcomes(self, log_q: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logits = self.logits.to(log_q.dtype)
        return log_q, (logits if temperature == 1 else logits / temperature).log_softmax(-1)

    def pull_back(self, gradient: Tensor, logits: Tensor, temperature: float) -> Tensor:
        return gradient

    def __getitem__(self, rows: slice | Tensor) -> "TeacherLogits":
        return TeacherLogits(self.logits[rows])


@dataclass(frozen=True)
class TopK:
    """The teacher's k most likely tokens, and all other tokens merged into one outcome, the tail.

    ids int64 [n, k], log_p [n, k] and log_tail [n], float. A divergence over these k + 1 outcomes
    is at most the divergence over the vocabulary, because merging outcomes never increases it. Both
    are equal if q and p are proportional within the tail.
    """

    ids: Tensor
    log_p: Tensor
    log_tail: Tensor

    def outcomes(self, log_q: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        assert temperature == 1, "the teacher temperature of a cache is fixed"
        # Sum over all other tokens. For a small tail, 1 − Σ would be only rounding error.
        tail = log_q.exp().scatter(1, self.ids, 0.0).sum(-1)
        log_tail = tail.clamp(min=torch.finfo(tail.dtype).tiny).log()
        log_p = torch.cat([self.log_p, self.log_tail[:, None]], 1).to(log_q.dtype)
        return torch.cat([log_q.gather(1, self.ids), log_tail[:, None]], 1), log_p

    def pull_back(self, gradient: Tensor, logits: Tensor, temperature: float) -> Tensor:
        # Each token of the tail gets a share of the gradient equal to its share of q.
        tail_share = (logits / temperature).scatter(1, self.ids, float("-inf")).softmax(-1)
        return tail_share.mul_(gradient[:, -1:]).scatter_(1, self.ids, gradient[:, :-1])

    def __getitem__(self, rows: slice | Tensor) -> "TopK":
        return TopK(self.ids[rows], self.log_p[rows], self.log_tail[rows])


@dataclass
class SplitModel:
    """A model in two parts.

    `stack` maps token ids to hidden states after the final norm. `output` maps these to logits, and
    `added`, [V], is added to them. A model with an encoder has no `stack`; `decoder_states` gives
    its hidden states.
    """

    stack: nn.Module | None
    output: nn.Linear
    added: Tensor | None = None

    def rows(self, rows: Tensor | slice | None) -> tuple[Tensor, Tensor | None]:
        """The weight [d, H] and the bias [d] of some rows of the output; None means all."""
        weight, bias = output_rows(self.output, rows)
        if self.added is None:
            return weight, bias
        added = (self.added if rows is None else self.added[rows]).to(weight.dtype)
        return weight, added if bias is None else bias + added

    def hidden(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return [B, T, H] for int64 ids and mask [B, T]."""
        assert self.stack is not None, "a model with an encoder reads sources too"
        return self.stack(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False
        ).last_hidden_state


def split_model(model: PreTrainedModel) -> SplitModel:
    """Split a causal LM, so that logits can be computed for a few tokens at a time.

    Raises UserError if the model does more than a linear layer between hidden states and logits
    (soft capping, scaling). Without these steps the logits would not be the model's, and a loss on
    them would teach something else. Also raises UserError if the weights are offloaded.
    """
    require_present(model, "training on the target's distribution")
    output = model.get_output_embeddings()
    stack = None if has_encoder(model) else model.base_model
    if not isinstance(output, nn.Linear) or stack is model:
        raise UserError(f"{type(model).__name__} has no linear output layer to distil through")
    split = SplitModel(stack, output, added_bias(model))
    was_training = model.training
    model.eval()
    with torch.no_grad():
        probe = (
            torch.arange(4, device=input_device(model))[None]
            % model.config.get_text_config().vocab_size
        )
        ones = torch.ones_like(probe)
        if stack is None:
            direct = model(input_ids=probe, decoder_input_ids=probe, use_cache=False).logits
            hidden = decoder_states(model, (probe, ones), probe, ones)
        else:
            direct = model(input_ids=probe, attention_mask=ones, use_cache=False).logits
            hidden = split.hidden(probe, ones)
        if hidden.shape[-1] != output.in_features:
            raise UserError(_more_than_linear(model, "another layer before the output layer"))
        halves = output(hidden) if split.added is None else output(hidden) + split.added
    model.train(was_training)
    if not torch.equal(direct, halves):
        raise UserError(_more_than_linear(model, _scales(model) or "soft capping or scaling"))
    return split


def require_linear_logits(model: PreTrainedModel) -> None:
    """Raises UserError if `split_model` would for logits that are scaled or capped. For a model
    without weights, its config tells."""
    if all(p.device.type != "meta" for p in model.parameters()):
        split_model(model)
    elif scales := _scales(model):
        raise UserError(_more_than_linear(model, scales))


# Settings that change logits: final_logit_softcapping, logit_scale, lm_head_multiplier …
_SCALE = re.compile(
    r"(?<!attn_)(?<!router_)logits?_(soft_?cap(ping)?|scal(e|ing))$|^(output|lm_head)_multiplier$"
)


def _scales(model: PreTrainedModel) -> str:
    """The settings by which the config says that logits are scaled or capped."""
    config = model.config.get_text_config().to_dict()
    found = {key: value for key, value in config.items() if _SCALE.search(key)}
    return ", ".join(f"{key}: {value}" for key, value in found.items() if value not in (None, 0, 1))


def _more_than_linear(model: PreTrainedModel, what: str) -> str:
    return (
        f"{type(model).__name__} does more than a linear layer between hidden states and logits "
        f"({what}); distillation through it is not supported. Use another target, or a drafter "
        "that is not trained on it"
    )


def added_bias(model: PreTrainedModel) -> Tensor | None:
    """[V]: what BART and Marian add to the logits of the output layer."""
    bias = getattr(model, "final_logits_bias", None)
    return bias[0] if isinstance(bias, Tensor) else None


def output_rows(layer: nn.Linear, rows: Tensor | slice | None) -> tuple[Tensor, Tensor | None]:
    """Return the weight [d, H] and the bias [d] of some rows of an output layer; None means all."""
    if rows is None:
        return layer.weight, layer.bias
    return layer.weight[rows], None if layer.bias is None else layer.bias[rows]


class TeacherSource(Protocol):
    """A source of the teacher signal for a batch."""

    def signal(
        self, input_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor, ids: Sequence[str]
    ) -> Teacher:
        """Return the teacher for a batch [B, T] of samples `ids`.

        The teacher returns the signal for a slice of the n predicted tokens.
        """
        ...


class LiveTeacher:
    """Runs the frozen target over each batch, once and without gradients.

    With `remember`, the last hidden states of every predicted token are kept on the CPU after
    their first use (H numbers per token in the target's dtype, not V). Later epochs over the same
    samples then need no forward and still see the target's full distribution.

    vocabulary: int64 [n], the draft vocabulary. The logits then cover only its tokens, and their
    softmax is the target's distribution p renormalised over it. tokens: used without a vocabulary,
    the number of ids that are tokens. The logits then cover only the first `tokens` rows, without
    the padding.

    timed(): a context in which the teacher does its work, so that callers can time it.
    """

    def __init__(
        self,
        target: SplitModel,
        *,
        remember: bool = False,
        vocabulary: Tensor | None = None,
        tokens: int | None = None,
        timed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.target = target
        self._timed = timed
        rows: Tensor | slice | None = vocabulary
        if rows is None and tokens is not None and tokens < len(target.output.weight):
            rows = slice(tokens)
        self._weight, self._bias = target.rows(rows)
        self._remembered: dict[str, Tensor] | None = {} if remember else None

    @torch.no_grad()
    def signal(
        self, input_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor, ids: Sequence[str]
    ) -> Callable[[slice], TeacherLogits]:
        """See `TeacherSource`. The logits of a slice are computed on request."""
        with self._timed():
            hidden = self.hidden(input_ids, attention_mask, loss_mask, ids)

        @torch.no_grad()
        def teacher(part: slice) -> TeacherLogits:
            with self._timed():
                return TeacherLogits(F.linear(hidden[part], self._weight, self._bias))

        return teacher

    def hidden(
        self, input_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor, ids: Sequence[str]
    ) -> Tensor:
        """[n, H]: the hidden states for the predicted tokens, from memory or from a forward."""
        hidden = self._recall(ids, input_ids.device)
        if hidden is None:
            predicted = loss_mask[:, 1:]
            hidden = self.target.hidden(input_ids, attention_mask)[:, :-1][predicted]
            if self._remembered is not None:
                counts = predicted.sum(1).tolist()
                self._remembered.update(zip(ids, hidden.cpu().split(counts), strict=False))
        return hidden

    def _recall(self, ids: Sequence[str], device: torch.device) -> Tensor | None:
        if not self._remembered or not ids or any(sample not in self._remembered for sample in ids):
            return None
        return torch.cat([self._remembered[sample] for sample in ids]).to(device)


class StatesTeacher(LiveTeacher):
    """A `LiveTeacher` that runs only the target's output layer, on the hidden states of a source.

    states: must contain the layer `FINAL`. vocabulary, tokens, timed: as for `LiveTeacher`.
    """

    def __init__(
        self,
        target: SplitModel,
        states: FeatureSource,
        *,
        vocabulary: Tensor | None = None,
        tokens: int | None = None,
        timed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__(target, vocabulary=vocabulary, tokens=tokens, timed=timed)
        self._states = states

    def hidden(
        self, input_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor, ids: Sequence[str]
    ) -> Tensor:
        states = self._states.features(input_ids, attention_mask, ids)[FINAL]
        return states[:, :-1][loss_mask[:, 1:]]
