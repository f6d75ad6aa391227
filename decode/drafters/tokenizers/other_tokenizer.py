"""The base of drafters on a small language model whose tokenizer is not the target's."""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from decode.base.paths import from_home
from decode.draft import Contexts, Draft, Limits
from decode.drafters.draft_vocabulary import load_vocabulary
from decode.drafters.small_lm import SmallLMDrafter
from decode.drafters.tokenizers.token_texts import TokenTexts, compared_texts
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling
from decode.model.loading import Target, load_model_and_tokenizer
from decode.shapes import Shape
from decode.shapes.static import stored_shape


@dataclass
class RowText:
    """One text in the drafter's tokens.

    count: how many of the target's tokens are in it. tokens: the drafter's tokens. unchanged: how
    many of these, from the start, are surely the same as at the last draft, or were drafted.
    """

    count: int = 0
    tokens: list[int] = field(default_factory=list)
    unchanged: int = 0


class OtherTokenizerDrafter(SmallLMDrafter):
    """The base of drafters on a model with another tokenizer. It keeps each text in the drafter's
    tokens. What is fed changes only which tokens are drafted, never the distribution of the text.

    target_texts, drafter_texts: the tokens of both as bytes. vocab_size: rows of the target's
    output layer. vocabulary: as for `of_models`.
    """

    decoder_only = True

    def __init__(
        self,
        model: PreTrainedModel,
        target_texts: TokenTexts,
        drafter_texts: TokenTexts,
        vocab_size: int,
        vocabulary: Tensor | None = None,
        shape: Shape | None = None,
    ) -> None:
        super().__init__(model, vocabulary, shape, tokens=len(drafter_texts.texts))
        self.vocab_size = vocab_size
        self.target_texts, self.drafter_texts = target_texts, drafter_texts
        self._texts: list[RowText] = []
        self._read = Contexts.of((), 0)

    @classmethod
    def open(cls, spec: str, target: Target, *, dtype: str) -> Self:
        """Loads the model and the tokenizer. spec: as for `load_model_and_tokenizer`, or the
        directory of a trained small language model. Raises UserError as `of_models`."""
        loaded = load_model_and_tokenizer(spec, dtype=dtype, device=str(target.device))
        path = from_home(spec)
        reduced = load_vocabulary(path, loaded.model) if path.is_dir() else None
        return cls.of_models(
            loaded.model,
            loaded.tokenizer,
            target,
            None if reduced is None else reduced.ids,
            stored_shape(path) if path.is_dir() else None,
        )

    @classmethod
    def of_models(
        cls,
        model: PreTrainedModel,
        tokenizer: Any,
        target: Target,
        vocabulary: Tensor | None = None,
        shape: Shape | None = None,
    ) -> Self:
        """For a model with its tokenizer. vocabulary: int64 [n], ascending, the drafter's tokens of
        the rows of a reduced output layer. Raises UserError if the tokenizers do not fit."""
        rows = model.config.get_text_config().vocab_size
        ours, theirs = compared_texts((target.tokenizer, target.vocab_size), (tokenizer, rows))
        return cls._of_texts(model, ours, theirs, target.vocab_size, vocabulary, shape)

    @classmethod
    @abstractmethod
    def _of_texts(
        cls,
        model: PreTrainedModel,
        target_texts: TokenTexts,
        drafter_texts: TokenTexts,
        vocab_size: int,
        vocabulary: Tensor | None,
        shape: Shape | None,
    ) -> Self:
        """The drafter for `of_models`."""

    @property
    def rewinds(self) -> bool:
        return False  # nor does it `verify`, because its model reads other tokens

    def new_text(self) -> RowText:
        """An empty text."""
        return RowText()

    @abstractmethod
    def extend(self, row: RowText, tokens: list[int]) -> int:
        """Adds tokens of the target, at least one, to a text, and sets `unchanged`. Returns the
        index of the first of the drafter's tokens that is new."""

    def start(self, contexts: Contexts) -> None:
        self._texts, self._read = [], Contexts.of((), 0)
        super().start(contexts)

    def unchanged(self, text: Contexts) -> np.ndarray:
        return np.array([row.unchanged for row in self._texts], dtype=np.int64)

    def read(self, contexts: Contexts) -> Contexts:
        rows, space = contexts.tokens.shape
        new = rows - len(self._texts)
        self._texts += [self.new_text() for _ in range(new)]
        firsts: dict[int, int] = {}
        for row, (text, length) in enumerate(zip(self._texts, contexts.lengths, strict=True)):
            if text.count < length:
                firsts[row] = self.extend(text, contexts.tokens[row, text.count : length].tolist())
                text.count = int(length)
        lengths = np.array([len(text.tokens) for text in self._texts], dtype=np.int64)
        # As much space after the longest text as the target's text has.
        width = int((lengths + space - contexts.lengths).max(initial=0))
        width = max(width, self._read.tokens.shape[1])
        if new or width > self._read.tokens.shape[1]:
            self._read.add_rows(Contexts.of([()] * new, width))
        for row, first in firsts.items():
            self._read.tokens[row, first : lengths[row]] = self._texts[row].tokens[first:]
        self._read.lengths = lengths
        return self._read

    def _make_slots(self, contexts: Contexts) -> None:
        """A text can grow faster in the drafter's tokens than in the target's."""
        slots = self.read(contexts).tokens.shape[1]
        if min(slots, self.lm.max_positions) > self._capacity:
            self._capacity = min(slots, self.lm.max_positions)
            self.lm.add_rows(0, slots)

    def prefill(self, contexts: Contexts, first: int = 0) -> None:
        self._make_slots(contexts)
        super().prefill(contexts, first)

    def draft(
        self, contexts: Contexts, limits: Limits, sampling: Sampling, rng: CounterRNG
    ) -> Draft:
        self._make_slots(contexts)
        return super().draft(contexts, limits, sampling, rng)

    def keep_rows(self, rows: np.ndarray) -> None:
        self._texts = [self._texts[row] for row in rows]
        self._read.keep_rows(rows)
        super().keep_rows(rows)
