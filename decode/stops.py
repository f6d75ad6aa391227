"""What ends a text beside an end-of-text id and the length limit: stop strings."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from decode.detokenize import TextStream
from decode.errors import UserError


class Stop(ABC):
    """Life within one decode: start → cut*, for each row as often as it has new tokens."""

    @abstractmethod
    def start(self, rows: int) -> None:
        """A new batch begins; its rows are 0 … rows−1 all along, whichever of them still go on."""

    @abstractmethod
    def cut(self, row: int, tokens: list[int]) -> int | None:
        """How many of a row's new tokens are kept if its text ends with them, else None."""


class StopStrings(Stop):
    """Ends a text with the first token that completes one of the strings, as
    `generate(stop_strings=…)` does: that token is kept whole, with what it says beyond the string.

    The strings are looked for in the answer alone, special tokens written out; one may begin
    anywhere in a token, and span any number of tokens and drafts. What is decoded in a step are
    its new tokens and those before them. Raises UserError without a string, or for an empty one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: str | Sequence[str]) -> None:
        self.strings = [strings] if isinstance(strings, str) else list(strings)
        if not self.strings or not all(self.strings):
            raise UserError(
                f"stop strings are {self.strings}; expected at least one, none of them empty"
            )
        self._tokenizer = tokenizer
        self._reach = max(map(len, self.strings)) - 1  # how far back one may have begun
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
        # A broken character may hide one that was whole some tokens before.
        if "�" in text or self._complete(text):
            for count in range(1, len(tokens) + 1):
                if self._complete(tail + stream.peek(tokens[:count])):
                    return count
        text = tail + stream.add(tokens)
        self._tails[row] = text[max(len(text) - self._reach, 0) :]
        return None

    def _complete(self, text: str) -> bool:
        return any(string in text for string in self.strings)
