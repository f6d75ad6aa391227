"""The student and its loss as one module, so any engine can wrap the whole computation.

Shapes: B rows, T tokens, n predicted tokens, H hidden size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import asdict

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from decode.model.forward.low_rank_output import LowRankLinear
from distill.agreement import Agreement, agreement_sums
from distill.choose_vocabulary import rows_of_tokens
from distill.chunked_loss import chunked_loss
from distill.losses import WeightedLoss
from distill.short_attention import trained_attention
from distill.teacher.linear_logits import LinearLogits, added_bias, linear_logits
from distill.teacher.teacher_signal import Teacher, TeacherLogits
from distill.tied_gradient import TiedWeight

AttentionInterface.register("sdpa", trained_attention)


class Distillation(nn.Module):
    """Computes the distillation loss of `student` on a batch.

    The output layer is used only inside `forward`, because engines that shard weights (FSDP, ZeRO)
    gather them only there.

    vocabulary: int64 [n], the token ids of a reduced output layer (`distill.choose_vocabulary`).
    tokens: the number of ids that are tokens. The student's output rows after them are padding.
    Padding rows get no gradient, and the student's probabilities are renormalised over the other
    rows. The teacher's must be renormalised in the same way. text_ids: the number of ids that a
    text can have, if the text is not in the student's tokens.
    """

    def __init__(
        self,
        student: PreTrainedModel,
        weighted_loss: WeightedLoss,
        *,
        chunk: int = 256,
        vocabulary: Tensor | None = None,
        tokens: int | None = None,
        text_ids: int | None = None,
    ) -> None:
        super().__init__()
        linear_logits(student)  # raises if logits need more than a linear layer
        self.student = student
        self.vocab_size: int = student.config.get_text_config().vocab_size
        ids = text_ids or self.vocab_size
        self.tokens = min(ids, tokens or ids)
        rows = None if vocabulary is None else rows_of_tokens(vocabulary, ids)
        self.register_buffer("label_rows", rows, persistent=False)
        self.register_buffer("vocabulary", vocabulary, persistent=False)
        self.weighted_loss = weighted_loss
        self.chunk = chunk
        self.tied = TiedWeight()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        loss_mask: Tensor,
        teacher: Teacher | None = None,
        agreement_with: Callable[[slice], TeacherLogits] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The weighted loss summed over the predicted tokens, and each term's sum, float64 [terms].

        input_ids, attention_mask: int64 [B, T]. loss_mask: bool [B, T], True where the token is
        predicted, from the hidden state before it.

        agreement_with: returns the target's logits over its full vocabulary. If given, the loss is
        0 and the second value is `agreement_sums`.
        """
        with self.tied.following(self.student):
            states = self.hidden_states(input_ids, attention_mask)
            return self.of_states(states, input_ids, loss_mask, teacher, agreement_with)

    def of_states(
        self,
        states: Tensor,
        input_ids: Tensor,
        loss_mask: Tensor,
        teacher: Teacher | None,
        agreement_with: Callable[[slice], TeacherLogits] | None,
    ) -> tuple[Tensor, Tensor]:
        """`forward` of the student's hidden states after each token, [B, T, H]."""
        # A GPU is waited for here only: a mask as an index would be a wait for each use.
        rows, columns = loss_mask[:, 1:].nonzero(as_tuple=True)
        hidden = states[rows, columns]
        if agreement_with is not None:
            return hidden.new_zeros(()), self.agreement(hidden, agreement_with)
        return self.loss(hidden, input_ids[rows, columns + 1], teacher)

    def hidden_states(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """[B, T, H]: the student's hidden state after each token. int64 [B, T] each.

        The mask is not read: rows are padded on the right, so no token sees padding before it. Some
        kernels are faster without a mask (`distill.short_attention`).
        """
        hidden: Tensor = self.student.base_model(
            input_ids=self.known(input_ids), use_cache=False
        ).last_hidden_state
        return hidden

    def known(self, input_ids: Tensor) -> Tensor:
        """The same ids. A target with more rows may emit ids for which the student has no
        embedding; these become its last one."""
        return input_ids.clamp(max=self.vocab_size - 1)

    def loss(
        self,
        hidden: Tensor,
        labels: Tensor,
        teacher: Teacher | None,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`chunked_loss` of hidden states [n, H] that predict the tokens `labels`, int64 [n], with
        these weights in the loss, float [n]."""
        inputs, weight, bias = self.last_product(hidden)
        return chunked_loss(
            inputs,
            weight,
            bias,
            teacher,
            self.output_rows(labels),
            self.weighted_loss,
            chunk=self.chunk,
            weights=weights,
        )

    def output_rows(self, labels: Tensor) -> Tensor:
        """int64 [n]: the rows of the output layer for tokens, int64 [n]; −100 for a token without
        a row."""
        labels = torch.where(labels < self.tokens, labels, -100)
        rows = self.label_rows
        if isinstance(rows, Tensor):
            labels = torch.where(labels < 0, labels, rows[labels.clamp(min=0)])
        return labels

    def agreement(self, hidden: Tensor, target: Callable[[slice], TeacherLogits]) -> Tensor:
        """`agreement_sums` of hidden states [n, H]."""
        inputs, weight, bias = self.last_product(hidden)
        return agreement_sums(inputs, weight, bias, target, self.target_ids, chunk=self.chunk)

    def figures(self, sums: Tensor) -> dict[str, float]:
        """The figures of `Agreement` from the sums that `forward` returns with `agreement_with`,
        added up over batches."""
        return asdict(Agreement.from_sums(sums))

    def last_product(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The product that makes the logits of the tokens from hidden states [n, H]: its input
        [n, R], weight [V', R] and bias [V']. R is H, or the rank of the output layer."""
        # A reduced layer has no padding.
        padded = self.target_ids is None and self.tokens < self.vocab_size
        rows = slice(self.tokens) if padded else None
        layer = self.student.get_output_embeddings()
        if isinstance(layer, LowRankLinear):
            hidden, layer = layer.down(hidden), layer.up
        weight, bias = LinearLogits(layer, added_bias(self.student)).rows(rows)
        tied = self.tied.tensor
        if tied is not None:
            weight = tied if rows is None else tied[rows]
        return hidden, weight, bias

    @property
    def target_ids(self) -> Tensor | None:
        """int64 [V']: the token of each row of a reduced output layer. None: it is not reduced."""
        return self.vocabulary if isinstance(self.vocabulary, Tensor) else None
