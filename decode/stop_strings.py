"""Strings that end a text, in the tokens of a decode and in the pieces that a client gets.

A text also ends with an end-of-text id and at the length limit.
"""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from decode.base.errors import UserError
from decode.text_stream import Stop, TextStream


class AnswerText:
    """The text of one growing sequence, in pieces, without the stop string that ends it. What may
    be the beginning of a stop string is held back.

    stops: none of them is empty. The other arguments are those of `TextStream`. stopped: the stop
    string that has ended the text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stops: Sequence[str],
        *,
        skip_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
        keep_blank: bool = False,
    ) -> None:
        self._stream = TextStream(
            tokenizer, skip_special_tokens=skip_special_tokens, shown=shown, keep_blank=keep_blank
        )
        self._stops = stops
        self._held = ""
        self.stopped: str | None = None

    def add(self, tokens: Sequence[int], *, ended: bool) -> str:
        """The next piece, or ''. ended: these are the last tokens."""
        if self.stopped is not None:
            return ""
        text = self._held + self._stream.add(tokens)
        if ended:
            text += self._stream.end()
        whole = text + self._stream.held
        ends = [(at, stop) for stop in self._stops if (at := whole.find(stop)) >= 0]
        if ends:
            (end, self.stopped), self._held = min(ends), ""
            return whole[:end]
        kept = 0 if ended else max((begun(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def begun(text: str, string: str) -> int:
    """The length of the longest end of a text that a string begins with.

    >>> begun("to be or", "or not")
    2
    """
    longest = min(len(string) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(string[:n])), 0)


class StopStrings(Stop):
    """Ends a text with the first token that completes one of the strings, as
    `generate(stop_strings=…)` does. The text keeps that token, also its characters after the
    string.

    Only the answer is searched, without its special tokens, as clients see it; for a string that
    contains a special token, they are written out. A string may begin anywhere in a token, and span
    any number of tokens and drafts. A step decodes only its new tokens and the tokens of the last
    piece. Raises UserError if there is no string or an empty one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: str | Sequence[str]) -> None:
        self.strings = [strings] if isinstance(strings, str) else list(strings)
        if not self.strings or not all(self.strings):
            raise UserError(
                f"stop strings are {self.strings}; expected at least one, none of them empty"
            )
        self._tokenizer = tokenizer
        special = [token for token in tokenizer.all_special_tokens if token]
        written = [string for string in self.strings if any(token in string for token in special)]
        others = [string for string in self.strings if string not in written]
        # Whether special tokens are left out, and the strings to search for.
        self._searched = [(skip, some) for skip, some in ((True, others), (False, written)) if some]
        self._texts: dict[int, list[AnswerText]] = {}

    def start(self) -> None:
        self._texts = {}

    def leave(self, row: int) -> None:
        self._texts.pop(row, None)

    def ends(self, tokens: Sequence[int]) -> bool:
        """Whether a text of these tokens, which may have no row any more, has one of the
        strings."""
        return self._cut(self._new_texts(), tokens) is not None

    def cut(self, row: int, tokens: list[int]) -> int | None:
        if row not in self._texts:
            self._texts[row] = self._new_texts()
        return self._cut(self._texts[row], tokens)

    def _new_texts(self) -> list[AnswerText]:
        return [
            AnswerText(self._tokenizer, strings, skip_special_tokens=skip)
            for skip, strings in self._searched
        ]

    def _cut(self, texts: list[AnswerText], tokens: Sequence[int]) -> int | None:
        for count, token in enumerate(tokens, 1):
            for text in texts:
                text.add([token], ended=False)
            if any(text.stopped is not None for text in texts):
                return count
        return None
