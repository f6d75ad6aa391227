"""The student that drafts several tokens in one pass (PARD, 2504.18583).

It reads each text in copies with mask tokens (`distill.masked_copies`).

Shapes: B rows, T tokens of the text, K copies, n predictions.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.base.errors import UserError
from decode.drafters import Drafter
from decode.drafters.pard import (
    ParallelLMDrafter,
    mark_parallel,
    stored_mask_token,
    unused_token,
)
from decode.model.cache.requirements import require_trees
from decode.model.loading import Target
from distill.agreement import Agreement
from distill.distillation_loss import Distillation
from distill.losses import WeightedLoss
from distill.masked_copies import drawn_copies, require_full_attention, taken_mask
from distill.place_weights import label_shares, place_weights, teacher_shares
from distill.student_settings import ParallelConfig
from distill.students import STUDENTS, Student
from distill.teacher.teacher_signal import Signal, Teacher, TeacherLogits
from distill.teacher.top_k_cache import CachedTeacher

S = TypeVar("S", bound=Signal)


@STUDENTS.register("parallel")
class ParallelStudent(Student):
    """Drafts all tokens in one pass. mask_token: the id of its mask token."""

    drafter_kind = "pard"
    has_flops = False

    def __init__(self, settings: Any, target: Target, earlier: Mapping[str, Path]) -> None:
        super().__init__(settings, target, earlier)
        self.parallel: ParallelConfig = settings.parallel
        self.tokens_per_text_token = self.parallel.tokens_per_text_token
        self.mask_pairs = self.tokens_per_text_token**2
        self.mask_token = self._mask_token()
        mark_parallel(self.model.config, self.mask_token)

    @classmethod
    def is_wanted(cls, settings: Any, *, encoder: bool) -> bool:
        return settings.parallel is not None

    def _mask_token(self) -> int:
        """The wanted mask token, that of the model's start, or an unused one. Raises UserError for
        a token in use."""
        wanted, config = self.parallel.mask_token, self.model.config
        stored = stored_mask_token(config)
        if wanted is None and stored is not None:
            return stored
        try:
            return unused_token(wanted, self.target, config.get_text_config().vocab_size)
        except UserError as error:
            raise UserError(f"stage {self.settings.name}: parallel: {error}") from error

    def check(self) -> None:
        super().check()
        require_full_attention(self.model)
        require_trees(self.model)  # training feeds masks and positions of the same kind

    def prepare(self, texts: Sequence[Any], cache: CachedTeacher | None) -> float | None:
        """As `Student.prepare`. Raises UserError for a text that contains the mask token too."""
        for text in texts:
            if self.mask_token in text.tokens:
                name = self.target.tokenizer.convert_ids_to_tokens(self.mask_token)
                raise UserError(
                    f"stage {self.settings.name}: the mask token {self.mask_token} ({name!r}) is "
                    f"in use: the sample {text.id} contains it; set parallel.mask_token to an id "
                    "that no text contains"
                )
        return super().prepare(texts, cache)

    def module(self, loss: WeightedLoss, vocabulary: Tensor | None, chunk: int) -> Distillation:
        return ParallelDistillation(
            self.model,
            loss,
            self.parallel,
            self.mask_token,
            chunk=chunk,
            vocabulary=vocabulary,
            tokens=self.target.token_count,
        )

    def _drafter(self, model: PreTrainedModel, ids: Tensor | None) -> Drafter:
        return ParallelLMDrafter.of_target(model, self.target, ids)


class ParallelDistillation(Distillation):
    """Computes the distillation loss of a student that drafts in parallel.

    The loss of a text is the mean over the predictions of all copies, times the number of
    predictions of copy 0. So it has the scale of `Distillation`, and it does not depend on the
    other texts of the batch. Each prediction of a text has the same weight (section 3.2), or with
    `place_smoothing` that of D-PACE (2605.18810) for its place, or with `confidence` that of PARD-2
    (2605.08632): then the mean is weighted.

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
    ) -> tuple[Tensor, Tensor]:
        """As `Distillation.forward`. With `agreement_with`, the second value has the
        `agreement_sums` of each copy, float64 [4K].

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
        of_copies = share[row]
        if self.parallel.confidence and self.training:
            assert teacher is not None, "the losses compare with the target"
            reached = self._reached(teacher, input_ids, predicted)
            before = reached[place] - reached[place - copies]
            sums_of_rows = reached.new_zeros(len(predicted)).index_add(0, row, before.exp())
            of_text = predicted.sum(1) / sums_of_rows
            of_copies = of_text[row] * before.exp()
        if self.parallel.place_smoothing is not None and self.training:
            of_places = self._place_weights(
                hidden, labels, (copies, row, place - row * length - copies), loss_mask.shape
            )
            of_copies = of_copies * of_places
        loss, sums = self.loss(hidden, labels, shared, of_copies)
        return loss, sums * (predicted.sum() / max(len(number), 1))

    def _reached(self, teacher: Teacher, input_ids: Tensor, predicted: Tensor) -> Tensor:
        """float64 [B·T]: the sum of the target's log-probabilities of all predicted tokens up to a
        token of the flattened texts, this one included. predicted: bool [B, T], the tokens whose
        next one is predicted."""
        following = torch.nn.functional.pad(input_ids[:, 1:], (0, 1))[predicted]
        rows = self.tokens if self.target_ids is None else len(self.target_ids)
        shares = teacher_shares(teacher, self.output_rows(following), rows, chunk=self.chunk)
        log_p = shares.new_zeros(predicted.numel())
        # A probability of 0 must stay one that can be subtracted.
        log_p[torch.nn.functional.pad(predicted, (1, 0))[:, :-1].flatten()] = shares.log().clamp(
            min=-1e3
        )
        return log_p.cumsum(0)

    def _place_weights(
        self,
        hidden: Tensor,
        labels: Tensor,
        places: tuple[Tensor, Tensor, Tensor],
        shape: torch.Size,
    ) -> Tensor:
        """float32 [n]: D-PACE's weights of the predictions. places: the copy, row and anchor of
        each, int64 [n]. shape: B, T."""
        last = self.last_product(hidden)
        shares = label_shares(*last, self.output_rows(labels), chunk=self.chunk)
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
