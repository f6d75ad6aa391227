"""Distillation of a student with an encoder, from a target with an encoder (T5, BART, Marian).

Both encoders read the source of a text. Then all is as for models without an encoder: each token of
the decoder's text is predicted from the hidden state before it.
"""

from collections.abc import Callable

from torch import Tensor

from distill.distillation_loss import Distillation
from distill.teacher.decoder_states import Sources, decoder_states
from distill.teacher.teacher_signal import Teacher, TeacherLogits


class EncoderDecoderDistillation(Distillation):
    """Computes the distillation loss of a student with an encoder."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        loss_mask: Tensor,
        teacher: Teacher | None = None,
        agreement_with: Callable[[slice], TeacherLogits] | None = None,
        weights: Tensor | None = None,
        sources: Sources | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `Distillation.forward`. sources: what the encoder reads for each row."""
        assert sources is not None, "a student with an encoder reads sources"
        states = decoder_states(self.student, sources, self.known(input_ids), attention_mask)
        return self.of_states(states, input_ids, loss_mask, teacher, agreement_with, weights)
