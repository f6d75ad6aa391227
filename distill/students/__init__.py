"""Small language models in training: what differs between their kinds.

Each kind is a file here with one registration. `make_student` chooses the kind from the settings of
a stage, so the stage itself knows no kind. `Student` is the plain one.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from decode.base.errors import UserError
from decode.base.registry import Registry, import_all
from decode.drafters import Drafter
from decode.drafters.draft_vocabulary import (
    ReducedVocabulary,
    reduce_output,
    save_with_vocabulary,
)
from decode.drafters.pard import stored_mask_token
from decode.drafters.small_lm import SmallLMDrafter
from decode.model.cache.requirements import require_decoding
from decode.model.loading import Target
from decode.opening.directory import save_drafter
from distill.choose_vocabulary import most_frequent
from distill.distillation_loss import Distillation
from distill.losses import WeightedLoss
from distill.student_settings import refuse
from distill.students.student_start import start_model
from distill.teacher.linear_logits import require_linear_logits
from distill.teacher.top_k_cache import CachedTeacher
from distill.trainable_model import Trainable

STUDENTS: Registry[type["Student"]] = Registry("kind of student")


@STUDENTS.register("plain")
class Student:
    """A small language model that drafts one token after the other, with the target's tokenizer.

    model: float32, on the CPU until the caller moves it. vocabulary: the reduced draft vocabulary
    of its output layer, in the ids of its tokenizer. settings: the config of a `distill` stage.
    earlier: the directories of earlier stages by name. Raises UserError for a start that does not
    fit the target or this kind.
    """

    drafter_kind = "small_lm"  # of the drafter directories
    # {setting: the reason why it cannot be set for this kind}.
    refused: ClassVar[Mapping[str, str]] = {}
    vocabulary_in_words = "draft vocabulary"
    # Whether the FLOPs of a step are known from the shapes of the model.
    has_flops = True
    # The tokens that are read in training for each token of a text, and the entries of a mask of
    # its own for each pair of them.
    tokens_per_text_token = 1.0
    mask_pairs = 0.0

    def __init__(self, settings: Any, target: Target, earlier: Mapping[str, Path]) -> None:
        self.settings, self.target = settings, target
        self.tokenizer: Any = target.tokenizer
        self.model, self.vocabulary = start_model(settings.drafter, target, earlier)
        if settings.parallel is None and stored_mask_token(self.model.config) is not None:
            raise UserError(
                f"stage {settings.name}: the drafter starts as one that drafts in parallel (its "
                "config has pard_token), and this stage would train it to draft one token after "
                "the other; set parallel"
            )

    @classmethod
    def is_wanted(cls, settings: Any, *, encoder: bool) -> bool:
        """Whether the settings ask for this kind and no plain one. encoder: the target has one."""
        return False

    @property
    def target_ids(self) -> Tensor | None:
        """int64 [n]: the target's ids of the draft vocabulary. None: all tokens."""
        return None if self.vocabulary is None else self.vocabulary.ids

    @property
    def in_words(self) -> str:
        """For the plan, such as 'LlamaForCausalLM of 1.2M parameters'."""
        return f"{type(self.model).__name__} of {self.model.num_parameters() / 1e6:.1f}M parameters"

    def check(self) -> None:
        """Raise UserError for a model that cannot draft, or that cannot be trained."""
        require_decoding(self.model)
        require_linear_logits(self.model)

    def prepare(self, texts: Sequence[Any], cache: CachedTeacher | None) -> float | None:
        """Give the model its draft vocabulary, before it is trained on these samples.

        cache: of the target's likeliest tokens, if the student learns from one. Returns the share
        of the texts that the vocabulary covers, if it was chosen here. Raises UserError if the
        vocabularies of start, cache and settings do not fit together.
        """
        count = self.settings.draft_vocabulary
        if count is not None:
            if self.vocabulary is not None:
                refuse(self.settings, draft_vocabulary="the drafter's start already has one")
            ids, coverage = most_frequent(
                (text.tokens for text in texts),
                count,
                self.target.vocab_size,
                always=self.target.eos_token_ids,
            )
            self.vocabulary = reduce_output(self.model, ids, self.settings.output_rank)
            return coverage
        if cache is not None:
            self._take_vocabulary(cache)
        return None

    def _take_vocabulary(self, cache: CachedTeacher) -> None:
        expected, own = cache.vocabulary, self.vocabulary
        if own is None:
            if expected is not None:
                self.vocabulary = reduce_output(self.model, expected)
        elif expected is None or not torch.equal(own.ids, expected):
            raise UserError(
                f"the drafter has a draft vocabulary of {len(own.ids)} tokens, but the teacher "
                f"cache {cache.directory} has another one ("
                f"{'all tokens' if expected is None else f'{len(expected)} tokens'}); make the "
                "cache first, and let the drafter's first stage learn from it"
            )

    def read(self, texts: Sequence[Any]) -> dict[str, Sequence[int]] | None:
        """What the encoders of student and target read, by the id of the text. None: they have no
        encoder. Raises UserError for a text that is too long for the student."""
        return None

    def module(self, loss: WeightedLoss, vocabulary: Tensor | None, chunk: int) -> Distillation:
        """The model with its loss. vocabulary: `target_ids` on the model's device. chunk: the
        number of tokens whose logits are in memory at a time."""
        return Distillation(
            self.model, loss, chunk=chunk, vocabulary=vocabulary, tokens=self.target.token_count
        )

    def drafter(self, trained: Trainable, weights: dict[str, Tensor]) -> Drafter:
        """A drafter on the target's device, with these values of the trained weights."""
        target = self.target
        model, vocabulary = trained.merged_model(weights)
        model.to(target.device, target.dtype)
        ids = None if vocabulary is None else vocabulary.ids.to(target.device)
        return self._drafter(model, ids)

    def _drafter(self, model: Any, ids: Tensor | None) -> Drafter:
        return SmallLMDrafter.of_target(model, self.target, ids)

    def save(
        self,
        directory: Path,
        model: Any,
        vocabulary: ReducedVocabulary | None,
        provenance: Any,
        weights: str | None = None,
    ) -> None:
        """Write a drafter directory of this kind. model, vocabulary: from `Trainable.merged_model`.
        weights: as `save_drafter` takes them."""

        def write(path: Path) -> None:
            save_with_vocabulary(model, vocabulary, path)
            self.tokenizer.save_pretrained(path)

        save_drafter(
            directory,
            self.drafter_kind,
            write,
            target=self.target,
            provenance=provenance,
            weights=weights,
        )


def student_kind(settings: Any, *, encoder: bool) -> type[Student]:
    """The kind of student that the settings ask for. encoder: the target has one. Raises UserError
    for settings that this kind refuses."""
    wanted = [
        kind for name in STUDENTS if (kind := STUDENTS[name]).is_wanted(settings, encoder=encoder)
    ]
    for kind in wanted:
        refuse(settings, **kind.refused)
    return wanted[0] if wanted else Student


def make_student(settings: Any, target: Target, earlier: Mapping[str, Path]) -> Student:
    """The student of a stage. Raises UserError as `Student` and `student_kind`."""
    kind = student_kind(settings, encoder=target.has_encoder)
    return kind(settings, target, earlier)


import_all(__name__)
