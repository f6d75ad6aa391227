"""Tokens to text while they arrive a few at a time, and stop strings that end the text.

A text also ends with an end-of-text id and at the length limit.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from decode.errors import UserError


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
        self._piece_tokens = 0  # number of tokens in the last piece
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
        self._ids = self._ids[self._piece_tokens :]
        self._piece_tokens, self._length = len(self._ids), len(self._decode(self._ids))
        return piece

    def end(self) -> str:
        """End the sequence and return the text that was held back."""
        piece = self.peek([])
        self._ids, self._piece_tokens, self._length = [], 0, 0
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


class Stop(ABC):
    """Decides whether a text ends among its new tokens.

    Call order within one decode: start → cut*, one `cut` each time a row has new tokens. Then
    `leave` for each row that leaves. A row has one number from its first token to its last."""

    @abstractmethod
    def start(self) -> None:
        """A new decode begins. Drop all state of the last one."""

    def leave(self, row: int) -> None:
        """A row leaves: its text has ended, or was given up. Drop its state."""
        return None

    @abstractmethod
    def cut(self, row: int, tokens: list[int]) -> int | None:
        """How many of the row's new tokens to keep if the text ends among them, else None."""


class StopStrings(Stop):
    """Ends a text with the first token that completes one of the strings, as
    `generate(stop_strings=…)` does. The text keeps that token, also its characters after the
    string.

    Only the answer is searched, with special tokens written out. A string may begin anywhere in a
    token, and span any number of tokens and drafts. A step decodes only its new tokens and the
    tokens of the last piece. Raises UserError if there is no string or an empty one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: str | Sequence[str]) -> None:
        self.strings = [strings] if isinstance(strings, str) else list(strings)
        if not self.strings or not all(self.strings):
            raise UserError(
                f"stop strings are {self.strings}; expected at least one, none of them empty"
            )
        self._tokenizer = tokenizer
        self._reach = max(map(len, self.strings)) - 1  # how many characters back a string may begin
        self._streams: dict[int, TextStream] = {}
        self._tails: dict[int, str] = {}

    def start(self) -> None:
        self._streams, self._tails = {}, {}

    def leave(self, row: int) -> None:
        self._streams.pop(row, None)
        self._tails.pop(row, None)

    def cut(self, row: int, tokens: list[int]) -> int | None:
        if row not in self._streams:
            self._streams[row] = TextStream(self._tokenizer, skip_special_tokens=False)
            self._tails[row] = ""
        stream, tail = self._streams[row], self._tails[row]
        text = tail + stream.peek(tokens)
        # An incomplete character may hide a string that was complete some tokens before.
        if "�" in text or self._complete(text):
            for count in range(1, len(tokens) + 1):
                if self._complete(tail + stream.peek(tokens[:count])):
                    return count
        text = tail + stream.add(tokens)
        self._tails[row] = text[max(len(text) - self._reach, 0) :]
        return None

    def _complete(self, text: str) -> bool:
        return any(string in text for string in self.strings)
