"""The student and its loss as one module, so any engine can wrap the whole computation."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.agreement import agreement_sums
from distill.choose_vocabulary import rows_of_tokens
from distill.chunked_loss import chunked_loss
from distill.losses import WeightedLoss
from distill.teacher.teacher_signal import Teacher, TeacherLogits, split_model


class Distillation(nn.Module):
    """Computes the distillation loss of `student` on a batch.

    The output layer is used only inside `forward`, because engines that shard weights (FSDP, ZeRO)
    gather them only there.

    vocabulary: int64 [n], the token ids of a reduced output layer (`distill.choose_vocabulary`).
    tokens: the number of ids that are tokens. The student's output rows after them are padding.
    Padding rows get no gradient, and the student's probabilities are renormalised over the other
    rows. The teacher's must be renormalised in the same way.
    """

    def __init__(
        self,
        student: PreTrainedModel,
        weighted_loss: WeightedLoss,
        *,
        chunk: int = 256,
        vocabulary: Tensor | None = None,
        tokens: int | None = None,
    ) -> None:
        super().__init__()
        split_model(student)  # raises if logits need more than a linear layer
        self.student = student
        self.vocab_size: int = student.config.get_text_config().vocab_size
        self.tokens = min(self.vocab_size, tokens or self.vocab_size)
        rows = None if vocabulary is None else rows_of_tokens(vocabulary, self.vocab_size)
        self.register_buffer("label_rows", rows, persistent=False)
        self.register_buffer("vocabulary", vocabulary, persistent=False)
        self.weighted_loss = weighted_loss
        self.chunk = chunk

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
        labels = input_ids[:, 1:]
        # A target with more rows may emit ids for which the student has no embedding.
        input_ids = input_ids.clamp(max=self.vocab_size - 1)
        hidden = self.student.base_model(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False
        ).last_hidden_state
        predicted = loss_mask[:, 1:]
        hidden = hidden[:, :-1][predicted]
        output = self.student.get_output_embeddings()
        weight, bias = output.weight, output.bias
        ids = self.vocabulary
        if not isinstance(ids, Tensor) and self.tokens < self.vocab_size:
            weight = weight[: self.tokens]
            bias = None if bias is None else bias[: self.tokens]
        if agreement_with is not None:
            return hidden.new_zeros(()), agreement_sums(
                hidden,
                weight,
                bias,
                agreement_with,
                ids if isinstance(ids, Tensor) else None,
                chunk=self.chunk,
            )
        labels = labels[predicted]
        labels = torch.where(labels < self.tokens, labels, -100)
        rows = self.label_rows
        if isinstance(rows, Tensor):
            labels = torch.where(labels < 0, labels, rows[labels.clamp(min=0)])
        return chunked_loss(
            hidden,
            weight,
            bias,
            teacher,
            labels,
            self.weighted_loss,
            chunk=self.chunk,
        )
