"""A small language model with another tokenizer than the target's drafts text.

String-level exact match (SLEM, 2502.05202): the drafter's greedy tokens become text, and the
target's tokenizer splits this text into draft tokens. They are chosen, not drawn.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from decode.base.errors import UserError
from decode.draft import Contexts, Draft, Limits, Siblings
from decode.drafters.tokenizers.other_tokenizer import OtherTokenizerDrafter, RowText
from decode.drafters.tokenizers.token_texts import CONTEXT_BYTES, TokenTexts
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling
from decode.shapes import Shape

# The last tokens of a text are split again with each step, because new text can join them.
TAIL_TOKENS = 4
# The most tokens between two places where a text can be split from.
LONGEST_PART = 16
_ALL = 1 << 60


@dataclass
class _Text(RowText):
    """text: its bytes. places: where it can be split from again, in order: (tokens, bytes)."""

    text: bytearray = field(default_factory=bytearray)
    places: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=16))


class RetokenisedDrafter(OtherTokenizerDrafter):
    """Drafts chains of the drafter's likeliest tokens, as text, in the target's tokens (SLEM).

    Any rule for chosen tokens judges them, so the text keeps the target's distribution. As many
    tokens of the drafter are drafted as the draft may have tokens of the target. If that text has
    more tokens, the rest is left out.

    The drafter reads the text in the tokens of its tokenizer. After each step only the end of the
    text is split again, from the beginning of a word if there is one. A character cut by the end of
    the text is read as tokens for its bytes. Each draft is read on the host, to split its text.
    A draft-length policy that looks at logits does not end these drafts, because it counts tokens
    of the target.
    """

    @classmethod
    def _of_texts(
        cls,
        model: PreTrainedModel,
        target_texts: TokenTexts,
        drafter_texts: TokenTexts,
        vocab_size: int,
        vocabulary: Tensor | None,
        shape: Shape | None,
    ) -> Self:
        for name, texts in (("target", target_texts), ("drafter", drafter_texts)):
            if texts.spelling == "plain":
                raise UserError(
                    f"the {name}'s tokenizer leaves out the spaces between its tokens, so text "
                    "cannot be put together from drafts; name the drafter with vocabulary=shared"
                )
        return cls(model, target_texts, drafter_texts, vocab_size, vocabulary)

    def siblings(self, sampling: Sampling) -> Siblings:
        return "chosen"

    def with_shape(self, shape: Shape) -> "RetokenisedDrafter":
        raise UserError(
            "a drafter with vocabulary=text drafts chains only; leave the shape out, or use "
            "vocabulary=shared"
        )

    def new_text(self) -> RowText:
        return _Text(unchanged=_ALL)

    def extend(self, row: RowText, tokens: list[int]) -> int:
        assert isinstance(row, _Text)
        row.text += b"".join(self._text_of(token) for token in tokens)
        known = len(row.tokens)
        if not known:
            self._begin_text(row)
        places = row.places
        while len(places) > 1 and len(row.tokens) - places[-1][0] < TAIL_TOKENS:
            places.pop()
        first, begin = places[-1]
        before = bytes(row.text[max(begin - CONTEXT_BYTES, 0) : begin])
        new = self.drafter_texts.encode(bytes(row.text[begin:]), before)
        if not first and not new:
            new = [self.drafter_texts.unknown]  # the model must read something
        old = row.tokens[first:]
        pairs = zip(old, new, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(old), len(new)))
        if same < len(old):
            row.unchanged = min(row.unchanged, first + same)
        row.tokens[first:] = new
        self._add_places(row, new, first, begin)
        return min(first + same, known)

    def unchanged(self, text: Contexts) -> np.ndarray:
        # The last token is always read again, for its logits.
        return np.minimum(super().unchanged(text), text.lengths - 1)

    def draft(
        self, contexts: Contexts, limits: Limits, sampling: Sampling, rng: CounterRNG
    ) -> Draft:
        drafted = super().draft(contexts, Limits(limits.depths), Sampling(), rng)
        for row in self._texts:
            row.unchanged = _ALL
        tokens = drafted.tokens.cpu().numpy()
        return Draft.chosen(
            [
                self._target_tokens(row, tokens[i, : drafted.sizes[i]].tolist())[:depth]
                for i, (row, depth) in enumerate(zip(self._texts, limits.depths, strict=True))
            ]
        )

    def _target_tokens(self, row: RowText, drafted: list[int]) -> list[int]:
        """The drafted text in the target's tokens. It ends at a special token, and before one that
        the target does not have."""
        assert isinstance(row, _Text)
        text = b""
        for token in drafted:
            special = self.drafter_texts.is_special(token)
            if special and self.drafter_texts.texts[token] not in self.target_texts.ids:
                break
            text += self.drafter_texts.texts[token]
            if special:
                break
        return self.target_texts.encode(text, bytes(row.text[-CONTEXT_BYTES:]))

    def _text_of(self, token: int) -> bytes:
        """The bytes of a target's token. The name of a special token that the drafter does not have
        is read as text."""
        texts = self.target_texts
        if token >= len(texts.texts):
            return b""
        text = texts.texts[token]
        return (
            text[1:-1] if texts.is_special(token) and text not in self.drafter_texts.ids else text
        )

    def _begin_text(self, row: _Text) -> None:
        """The token with which the drafter's texts begin may be in the target's text or not."""
        prefix = self.drafter_texts.prefix
        spelled = b"".join(self.drafter_texts.texts[token] for token in prefix)
        row.tokens = list(prefix)
        row.places.append((len(prefix), len(spelled) if row.text.startswith(spelled) else 0))

    def _add_places(self, row: _Text, new: list[int], first: int, begin: int) -> None:
        """Adds the places between these tokens, which are the text's from `first` and the byte
        `begin` on: before a word, or after many tokens."""
        texts = [self.drafter_texts.texts[token] for token in new]
        if sum(map(len, texts)) != len(row.text) - begin:
            # Some bytes have no token, so only the end is certain.
            row.places.append((len(row.tokens), len(row.text)))
            return
        for place, text in enumerate(texts, first):
            last = row.places[-1][0]
            if place > last and (text[:1].isspace() or place - last >= LONGEST_PART):
                row.places.append((place, begin))
            begin += len(text)
