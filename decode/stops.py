"""Stop strings: they end a text, in addition to the end-of-text ids and the length limit."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from decode.detokenize import TextStream
from decode.errors import UserError


class Stop(ABC):
    """Call order within one decode: start → cut*, one `cut` each time a row has new tokens."""

    @abstractmethod
    def start(self, rows: int) -> None:
        """A new batch begins. Its rows keep their numbers 0 … rows−1 when other rows end."""

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
        self._streams: list[TextStream] = []
        self._tails: list[str] = []

    def start(self, rows: int) -> None:
        self._streams = [
            TextStream(self._tokenizer, skip_special_tokens=False) for _ in range(rows)
        ]
        self._tails = [""] * rows

    def cut(self, row: int, tokens: list[int]) -> int | None:
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
