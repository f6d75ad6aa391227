"""Turns tokens into text while they arrive a few at a time."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


class TextStream:
    """The text of one growing sequence, in pieces that never split a character.

    A token may end inside a character: its bytes are not valid UTF-8 yet and decode to U+FFFD. Its
    text is held back until the character is complete. The pieces add up to the text of all tokens.
    A call decodes only the last piece's tokens and the tokens since then.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        # The tokens of the last piece and the tokens that are held back. The last piece is needed
        # because some tokenizers write the space of a token only if another token precedes it.
        self._ids: list[int] = []
        self._given = 0  # number of tokens in the last piece
        self._length = 0  # number of characters they decode to

    def peek(self, tokens: Sequence[int]) -> str:
        """The rest of the text if it ended after these tokens. Changes nothing."""
        return self._decode([*self._ids, *tokens])[self._length :]

    def add(self, tokens: Sequence[int]) -> str:
        """The next piece, or '' if there is none yet."""
        piece = self.peek(tokens)
        self._ids += tokens
        if not piece or piece.endswith("�"):
            return ""
        self._ids = self._ids[self._given :]
        self._given, self._length = len(self._ids), len(self._decode(self._ids))
        return piece

    def end(self) -> str:
        """End the sequence and return the text that was held back."""
        piece = self.peek([])
        self._ids, self._given, self._length = [], 0, 0
        return piece

    def _decode(self, ids: list[int]) -> str:
        return decode(self._tokenizer, ids, skip_special_tokens=self._skip)


def decode(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, skip_special_tokens: bool = True
) -> str:
    """The text of token ids. Spaces are not cleaned up: that would change text already emitted."""
    text: str = tokenizer.decode(
        list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )
    return text
