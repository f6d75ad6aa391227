"""The student with an encoder, of a target with an encoder (T5, BART, Marian).

Both encoders read the source of a text. Then all is as for models without an encoder: each token of
the decoder's text is predicted from the hidden state before it.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from decode.base.errors import UserError
from distill.distillation_loss import Distillation
from distill.losses import WeightedLoss
from distill.students import STUDENTS, Student
from distill.teacher.decoder_states import PaddedSources, decoder_states
from distill.teacher.teacher_signal import Teacher, TeacherLogits

DECODER_ONLY = "it needs a decoder-only target, and this target has an encoder"


@STUDENTS.register("encoder_decoder")
class EncoderDecoderStudent(Student):
    """Reads the source of a text with its encoder, as the target does."""

    refused = dict.fromkeys(
        (
            "on_policy",
            "lora",
            "parallel",
            "draft_vocabulary",
            "drafter.vocabulary",
            "teacher",
        ),
        DECODER_ONLY,
    )
    has_flops = False

    @classmethod
    def is_wanted(cls, settings: Any, *, encoder: bool) -> bool:
        return encoder

    def read(self, texts: Sequence[Any]) -> dict[str, Sequence[int]]:
        longest = max(len(text.source) for text in texts)
        for name, encoded in (("the drafter", self.model), ("the target", self.target.model)):
            positions = getattr(encoded.get_encoder().config, "max_position_embeddings", None)
            if positions is not None and longest > positions:
                raise UserError(
                    f"stage {self.settings.name}: a source has {longest} tokens, but the encoder "
                    f"of {name} reads at most {positions}; use text with shorter prompts"
                )
        return {text.id: text.source for text in texts}

    def module(self, loss: WeightedLoss, vocabulary: Tensor | None, chunk: int) -> Distillation:
        return EncoderDecoderDistillation(
            self.model, loss, chunk=chunk, vocabulary=vocabulary, tokens=self.target.token_count
        )


class EncoderDecoderDistillation(Distillation):
    """Computes the distillation loss of a student with an encoder."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        loss_mask: Tensor,
        teacher: Teacher | None = None,
        agreement_with: Callable[[slice], TeacherLogits] | None = None,
        sources: PaddedSources | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `Distillation.forward`. sources: what the encoder reads for each row."""
        assert sources is not None, "a student with an encoder reads sources"
        states = decoder_states(self.student, sources, self.known(input_ids), attention_mask)
        return self.of_states(states, input_ids, loss_mask, teacher, agreement_with)
