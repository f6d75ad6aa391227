"""The student whose tokenizer is not the target's: it learns over the tokens of both.

It is trained as it is asked when it drafts with `vocabulary=shared` (token-level
intersection, TLI, 2502.05202; `decode.drafters.tokenizers.shared_tokens`). It reads the
target's tokens: each as the same token, or as the longest tokens that spell it. Its hidden state
after a token of the target predicts the target's next token. Both distributions are over the shared
tokens, renormalised. So no text is split again, and nothing has to be aligned: a token of the
target is one prediction. In ULD (2402.12030) and DSKD (2406.17328) the student reads the text in
the tokens of its tokenizer. ULD compares sorted probabilities, and DSKD aligns the two sequences by
attention.

Shapes: B rows, T tokens of the target per row, R tokens of the student per row, V rows of the
target's output layer, n shared tokens, H hidden size.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.base.errors import UserError
from decode.drafters import Drafter
from decode.drafters.draft_vocabulary import reduce_output
from decode.drafters.tokenizers.shared_tokens import SharedVocabularyDrafter
from decode.drafters.tokenizers.token_texts import compared_texts, shared_tokens, spelled
from decode.model.loading import Target
from decode.model.without_weights import load_tokenizer
from distill.distillation_loss import Distillation
from distill.losses import WeightedLoss
from distill.students import STUDENTS, Student
from distill.teacher.top_k_cache import CachedTeacher

# A drafter of fewer shared tokens has nothing to choose from.
FEWEST_TOKENS = 2
# The smallest share of a text's tokens that are shared. The share is the most that can be accepted.
LEAST_COVERAGE = 0.1


@dataclass(frozen=True)
class SharedVocabulary:
    """The tokens that a target and a student with another tokenizer share, and how the student
    reads the target's tokens.

    tokenizer: the student's. drafter_ids: int64 [n], ascending, the student's ids of the shared
    tokens: the rows of its reduced output layer. target_ids: int64 [n], the target's ids of the
    same tokens, in the same order. pieces: int64 [m], the student's tokens that are read for the
    target's tokens 0, 1, …, V − 1, one after the other. counts: int64 [V], how many each token has.
    prefix: the student's token before each text; None: none.
    """

    tokenizer: Any
    drafter_ids: Tensor
    target_ids: Tensor
    pieces: Tensor
    counts: Tensor
    prefix: int | None

    @classmethod
    def of(cls, target: Target, tokenizer: Any, rows: int, what: str) -> "SharedVocabulary":
        """tokenizer, rows: the student's, and the rows of its full output layer. what: names the
        student, for messages. Raises UserError as `shared_tokens`, and for too few tokens."""
        ours, theirs = compared_texts((target.tokenizer, target.vocab_size), (tokenizer, rows))
        shared = shared_tokens(ours, theirs)
        if len(shared.target) < FEWEST_TOKENS:
            raise UserError(
                f"{what} shares {len(shared.target)} token with the target; expected at least "
                f"{FEWEST_TOKENS}; use a model whose tokenizer is closer to the target's"
            )
        drafter_ids, order = torch.tensor(shared.drafter).sort()
        pieces = [spelled(ours, theirs, token) for token in range(target.vocab_size)]
        return cls(
            tokenizer,
            drafter_ids,
            torch.tensor(shared.target)[order],
            torch.tensor([piece for each in pieces for piece in each]),
            torch.tensor([len(each) for each in pieces]),
            theirs.prefix[0] if theirs.prefix else None,
        )

    @classmethod
    def of_model(cls, spec: str, target: Target) -> "SharedVocabulary":
        """What the target shares with a model that has another tokenizer. spec: names the model.
        Raises UserError as `of`."""
        tokenizer, identity = load_tokenizer(spec)
        return cls.of(target, tokenizer, identity.vocab_size, f"drafter {spec}")

    def coverage(self, texts: Iterable[tuple[Sequence[int], Sequence[bool]]]) -> float:
        """The share of the predicted tokens of texts, (tokens, mask) each, that are shared. Raises
        UserError if it is less than `LEAST_COVERAGE`."""
        shared, known, count = set(self.target_ids.tolist()), 0, 0
        for tokens, mask in texts:
            predicted = [
                token for token, wanted in zip(tokens[1:], mask[1:], strict=True) if wanted
            ]
            known += sum(token in shared for token in predicted)
            count += len(predicted)
        share = known / max(count, 1)
        if share < LEAST_COVERAGE:
            raise UserError(
                f"the drafter shares {len(shared)} tokens with the target, but they are only "
                f"{share:.1%} of the tokens of the text; expected at least {LEAST_COVERAGE:.0%}. "
                "Use a model whose tokenizer is closer to the target's"
            )
        return share

    def lengths(self, texts: Iterable[Sequence[int]]) -> list[int]:
        """How many tokens the student reads for each of these texts, in the target's tokens."""
        prefixed = self.prefix is not None
        return [int(self.counts[torch.tensor(text)].sum()) + prefixed for text in texts]


@STUDENTS.register("shared_vocabulary")
class SharedVocabularyStudent(Student):
    """Drafts the tokens that its tokenizer shares with the target's."""

    drafter_kind = "shared_vocabulary"
    vocabulary_in_words = "shared vocabulary"
    has_flops = False

    def __init__(self, settings: Any, target: Target, earlier: Mapping[str, Path]) -> None:
        super().__init__(settings, target, earlier)
        self.spec = settings.drafter.spec(earlier)
        self.shared = SharedVocabulary.of_model(self.spec, target)
        self.tokenizer = self.shared.tokenizer

    @classmethod
    def is_wanted(cls, settings: Any, *, encoder: bool) -> bool:
        return settings.drafter.vocabulary is not None

    @property
    def target_ids(self) -> Tensor:
        return self.shared.target_ids

    @property
    def in_words(self) -> str:
        return f"{super().in_words}; {len(self.shared.target_ids)} shared tokens"

    def prepare(self, texts: Sequence[Any], cache: CachedTeacher | None) -> float:
        """As `Student.prepare`: the output layer gets the rows of the shared tokens only."""
        coverage = self.shared.coverage((text.tokens, text.mask) for text in texts)
        name, ids = self.settings.name, self.shared.drafter_ids
        if cache is not None and (
            cache.vocabulary is None or not torch.equal(cache.vocabulary, self.target_ids)
        ):
            raise UserError(
                f"stage {name}: the teacher cache {cache.directory} is not over the tokens that "
                f"the drafter {self.spec} shares with the target; make the cache with "
                "shared_with, and name there the model that the drafter starts from"
            )
        if self.vocabulary is None:
            self.vocabulary = reduce_output(self.model, ids)
        elif not torch.equal(self.vocabulary.ids, ids):
            raise UserError(
                f"stage {name}: the drafter {self.spec} has a draft vocabulary of "
                f"{len(self.vocabulary.ids)} tokens, which are not the {len(ids)} that it shares "
                "with the target; start from a model with its complete output layer"
            )
        return coverage

    def read(self, texts: Sequence[Any]) -> None:
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        longest = max(self.shared.lengths(text.tokens for text in texts))
        if positions is not None and longest > positions:
            raise UserError(
                f"stage {self.settings.name}: the longest sample has {longest} tokens as the "
                f"drafter reads it, but {type(self.model).__name__} has a context of {positions}; "
                "set a lower max_length"
            )

    def module(self, loss: WeightedLoss, vocabulary: Tensor | None, chunk: int) -> Distillation:
        return SharedVocabularyDistillation(self.model, loss, self.shared, chunk=chunk)

    def _drafter(self, model: PreTrainedModel, ids: Tensor | None) -> Drafter:
        return SharedVocabularyDrafter.of_models(model, self.tokenizer, self.target, ids)


class _Retokeniser(nn.Module):
    """Turns the target's tokens into those that the student reads."""

    pieces: Tensor
    counts: Tensor
    firsts: Tensor

    def __init__(self, shared: SharedVocabulary) -> None:
        super().__init__()
        ends = shared.counts.cumsum(0)
        self.register_buffer("pieces", shared.pieces, persistent=False)
        self.register_buffer("counts", shared.counts, persistent=False)
        self.register_buffer("firsts", ends - shared.counts, persistent=False)
        self.prefix = shared.prefix

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """int64 [B, R] twice: the student's tokens and their attention mask; and int64 [B, T], the
        place in them where each token of the target ends. input_ids, attention_mask: int64 [B, T],
        padded on the right."""
        counts = self.counts[input_ids] * attention_mask
        # A text begins with the prefix, unless it begins with a token that is read as the prefix.
        prefixed = torch.zeros_like(input_ids[:, :1])
        if self.prefix is not None:
            first = input_ids[:, :1]
            is_prefix = (self.pieces[self.firsts[first]] == self.prefix) & (counts[:, :1] == 1)
            prefixed = 1 - is_prefix.long()
        ends = counts.cumsum(1) + prefixed
        places = torch.arange(int(ends[:, -1].max()), device=ends.device)
        places = places.expand(len(ends), -1).contiguous()
        token = torch.searchsorted(ends, places, right=True).clamp(max=ends.shape[1] - 1)
        # The number of each place within its token. −1: the prefix.
        number = places - (ends - counts).gather(1, token)
        piece = self.firsts[input_ids.gather(1, token)] + number
        read = self.pieces[piece.clamp(min=0, max=len(self.pieces) - 1)]
        if self.prefix is not None:
            read = torch.where(number < 0, self.prefix, read)
        return read, (places < ends[:, -1:]).long(), ends - 1


class SharedVocabularyDistillation(Distillation):
    """Computes the distillation loss of a student with another tokenizer than the target's.

    The batches are in the target's tokens. The student's output layer has the rows of
    `shared.drafter_ids`. The teacher's logits must be those of `shared.target_ids`.
    """

    def __init__(
        self,
        student: PreTrainedModel,
        weighted_loss: WeightedLoss,
        shared: SharedVocabulary,
        *,
        chunk: int = 256,
    ) -> None:
        rows = len(shared.counts)
        super().__init__(
            student, weighted_loss, chunk=chunk, vocabulary=shared.target_ids, text_ids=rows
        )
        self.reader = _Retokeniser(shared)

    def hidden_states(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """[B, T, H]: after the last of the tokens that are read for each token of the target."""
        read, mask, ends = self.reader(input_ids, attention_mask)
        hidden: Tensor = self.student.base_model(
            input_ids=read, attention_mask=mask, use_cache=False
        ).last_hidden_state
        return hidden[torch.arange(len(hidden), device=hidden.device)[:, None], ends]
