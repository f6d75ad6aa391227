"""Text from tokens that come a few at a time."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


class TextStream:
    """The text of one growing sequence, handed out in pieces that never split a character.

    A token may end inside a character (bytes that are no UTF-8 yet, shown as U+FFFD); its text is
    held back until the character is whole. The pieces add up to the text of all tokens. A call
    decodes the tokens since the last piece and no more of the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        # The tokens of the last piece, as some tokenizers write a token's space only after another
        # one, and those that are held back.
        self._ids: list[int] = []
        self._given = 0  # how many of these, and
        self._length = 0  # how many characters that is

    def peek(self, tokens: Sequence[int]) -> str:
        """What the text would go on with if it ended after these tokens."""
        return self._decode([*self._ids, *tokens])[self._length :]

    def add(self, tokens: Sequence[int]) -> str:
        """The next piece, '' while there is none."""
        piece = self.peek(tokens)
        self._ids += tokens
        if not piece or piece.endswith("�"):
            return ""
        self._ids = self._ids[self._given :]
        self._given, self._length = len(self._ids), len(self._decode(self._ids))
        return piece

    def end(self) -> str:
        """What was held back, now that nothing more comes."""
        piece = self.peek([])
        self._ids, self._given, self._length = [], 0, 0
        return piece

    def _decode(self, ids: list[int]) -> str:
        return decode(self._tokenizer, ids, skip_special_tokens=self._skip)


def decode(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, skip_special_tokens: bool = True
) -> str:
    """The text of token ids as it stands, no spaces tidied up: that would take text back."""
    text: str = tokenizer.decode(
        list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )
    return text
