"""A small language model with another tokenizer than the target's drafts in the shared tokens.

Token-level intersection (TLI, 2502.05202): the drafter's distribution is restricted to the tokens
that both vocabularies have and renormalised. Then any rule judges its draws as usual.
"""

import logging
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.base.errors import UserError
from decode.drafters import DRAFTERS
from decode.drafters.tokenizers.other_tokenizer import OtherTokenizerDrafter, RowText
from decode.drafters.tokenizers.token_texts import TokenTexts, shared_tokens, spelled
from decode.model.loading import Target
from decode.shapes import Shape

logger = logging.getLogger(__name__)


@DRAFTERS.register("shared_vocabulary")
class SharedVocabularyDrafter(OtherTokenizerDrafter):
    """Draws only tokens that both vocabularies have, in any shape (TLI).

    q is the drafter's distribution over these tokens alone, after the sampling parameters, so it is
    the distribution of the draws, and the text keeps the target's distribution.

    Each token of the target is fed as the drafter's token with the same bytes, and a token that the
    drafter lacks as the longest drafter tokens that spell it. So a text is read in the same way
    whatever came in one step, but not always in the tokens into which the drafter's tokenizer
    would split it. The paper leaves open what is fed.

    pairs: int64 [n] each, the shared tokens in the target's ids, ascending, and the rows of the
    drafter's output layer that stand for them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        target_texts: TokenTexts,
        drafter_texts: TokenTexts,
        vocab_size: int,
        pairs: tuple[Tensor, Tensor],
        drafter_ids: Tensor,
        shape: Shape | None = None,
    ) -> None:
        super().__init__(model, target_texts, drafter_texts, vocab_size, shape=shape)
        device = self.lm.device
        self.vocabulary, self.columns = (ids.to(device) for ids in pairs)
        # [V]: the drafter's token of each shared token of the target.
        self._drafter_ids = drafter_ids.to(device)
        self._pieces: dict[int, list[int]] = {}  # of the tokens of the target met so far

    @classmethod
    def load(cls, path: Path, target: Target, *, dtype: str) -> "SharedVocabularyDrafter":
        """Loads a directory that a `distill` stage wrote for a student with another tokenizer: its
        model, its tokenizer, and its output layer of the shared tokens."""
        return cls.open(str(path), target, dtype=dtype)

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
        shared = shared_tokens(target_texts, drafter_texts)
        ids, theirs = torch.tensor(shared.target), torch.tensor(shared.drafter)
        columns = theirs
        if vocabulary is not None:
            vocabulary = vocabulary.cpu()
            columns = torch.searchsorted(vocabulary, theirs).clamp(max=len(vocabulary) - 1)
            kept = vocabulary[columns] == theirs
            ids, theirs, columns = ids[kept], theirs[kept], columns[kept]
        if not len(ids):
            raise UserError(
                "no token of the drafter's reduced vocabulary is in the target's; use a drafter "
                "with its full vocabulary"
            )
        logger.info(
            "%d tokens are shared: %.1f%% of the target's, %.1f%% of the drafter's",
            len(ids),
            100 * len(ids) / len(target_texts.ids),
            100 * len(ids) / len(drafter_texts.ids),
        )
        drafter_ids = torch.zeros(vocab_size, dtype=torch.int64).index_copy(0, ids, theirs)
        return cls(
            model, target_texts, drafter_texts, vocab_size, (ids, columns), drafter_ids, shape
        )

    def with_shape(self, shape: Shape) -> "SharedVocabularyDrafter":
        assert self.vocabulary is not None
        drafter = SharedVocabularyDrafter(
            self.lm.model,
            self.target_texts,
            self.drafter_texts,
            self.vocab_size,
            (self.vocabulary, self.columns),
            self._drafter_ids,
            shape,
        )
        drafter.lm.narrow(self.lm.window)
        return drafter

    def to_read(self, ids: Tensor) -> Tensor:
        return self._drafter_ids[ids]

    def draft_logits(self, logits: Tensor) -> Tensor:
        return logits.index_select(-1, self.columns)

    def extend(self, row: RowText, tokens: list[int]) -> int:
        first = len(row.tokens)
        pieces = [self._pieces_of(token) for token in tokens]
        prefix = self.drafter_texts.prefix
        if not first and pieces[0] != prefix:
            row.tokens += prefix
        row.tokens += [piece for each in pieces for piece in each]
        # All tokens of the target before the last one were drafted, or read before.
        row.unchanged = len(row.tokens) - len(pieces[-1])
        return first

    def _pieces_of(self, token: int) -> list[int]:
        """At least one token of the drafter: each committed token is a new token to read."""
        if token not in self._pieces:
            self._pieces[token] = spelled(self.target_texts, self.drafter_texts, token)
        return self._pieces[token]
