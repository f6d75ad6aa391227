"""Tokens to text while they arrive a few at a time, and strings that end a text.

A text also ends with an end-of-text id and at the length limit.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from decode.base.errors import UserError

# How many tokens of text are held back at most. Bytes that are no character then never are one: a
# character has at most four, and special tokens between them are rare.
HELD = 8


class TextStream:
    """The text of one growing sequence, in pieces that never split a character.

    A token may end inside a character: its bytes are not valid UTF-8 yet and decode to U+FFFD. Its
    text is held back until the character is complete, or after `HELD` tokens. The pieces are the
    same however many tokens a call brings. A call decodes only the last piece's tokens and the
    tokens since then.

    skip_special_tokens: these have no text, except those in `shown`. keep_blank: the text keeps a
    blank that its first token begins with, as a grammar has it. SentencePiece's decoders drop it.
    held: the text that is held back, as it would be if the sequence ended here.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        skip_special_tokens: bool,
        shown: frozenset[int] = frozenset(),
        keep_blank: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._hidden = special_ids(tokenizer) - shown if skip_special_tokens and shown else None
        # The last piece is needed because some tokenizers write the space of a token only if
        # another token precedes it.
        self._last = _letter(tokenizer) if keep_blank else []
        self._last_text = self._decode(self._last)
        self._waiting: list[int] = []  # the tokens that are held back
        self.held = ""

    def add(self, tokens: Sequence[int]) -> str:
        """The next piece, or '' if there is none yet."""
        everything = [*self._waiting, *tokens]
        text = self._text(everything)
        if text and "�" not in text:
            return self._give(everything, text, [])
        return "".join(self._add(token) for token in tokens)

    def end(self) -> str:
        """End the sequence and return the text that was held back."""
        return self._give([], self.held, [])

    def _add(self, token: int) -> str:
        self._waiting.append(token)
        self.held = self._text(self._waiting)
        if self.held and not self.held.endswith("�"):
            return self._give(self._waiting, self.held, [])
        if len(self._waiting) < HELD:
            return ""
        # No character that is still incomplete began before the last three tokens.
        old, new = self._waiting[:-3], self._waiting[-3:]
        return self._give(old, self._text(old), new)

    def _give(self, tokens: list[int], text: str, rest: list[int]) -> str:
        """The text of these tokens is a piece; the rest still waits."""
        self._last, self._last_text = tokens, self._decode(tokens)
        self._waiting = list(rest)
        self.held = self._text(self._waiting) if rest else ""
        return text

    def _text(self, tokens: list[int]) -> str:
        """The text of tokens that follow the last piece."""
        whole = self._decode([*self._last, *tokens])
        after = whole[len(self._last_text) :]
        if whole.startswith(self._last_text) and not after.endswith("�"):
            return after
        # Some tokenizers decode a run of bytes to characters only if all of them are characters.
        alone = self._decode(tokens)
        return after if whole.startswith(self._last_text) and alone.endswith("�") else alone

    def _decode(self, ids: list[int]) -> str:
        if self._hidden is not None:
            ids = [i for i in ids if i not in self._hidden]
        skip = self._skip and self._hidden is None
        return decode(self._tokenizer, ids, skip_special_tokens=skip) if ids else ""


def _letter(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """A token with a letter, as others may follow it."""
    ids = [tokenizer.convert_tokens_to_ids(token) for token in ("a", "<0x61>")]
    return [i for i in ids if i is not None and i != tokenizer.unk_token_id][:1]


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids that have no text where special tokens are skipped."""
    added = (i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset((*tokenizer.all_special_ids, *added))


def text_of(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, keep_blank: bool = False
) -> str:
    """The text of token ids without special tokens, as `TextStream` gives it."""
    stream = TextStream(tokenizer, skip_special_tokens=True, keep_blank=keep_blank)
    return stream.add(ids) + stream.end()


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


class AnswerText:
    """The text of one growing sequence, in pieces, without the stop string that ends it. What may
    be the beginning of a stop string is held back.

    Only the answer is searched, without its special tokens, as clients see it; for a string that
    contains a special token, they are written out. Such a string stays in the text, without its
    special tokens. A string may begin anywhere in a token, and span any number of tokens.

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
        self._stops, self._ready = stops, ""
        self.stopped: str | None = None
        self._written: AnswerText | None = None  # with special tokens, for the strings with some
        if stops and skip_special_tokens:
            special = [token for token in tokenizer.all_special_tokens if token]
            some = [string for string in stops if any(token in string for token in special)]
            if some:
                self._written = AnswerText(tokenizer, some, skip_special_tokens=False)

    def cut(self, tokens: Sequence[int]) -> int | None:
        """Add tokens, up to the one that completes a stop string. Returns how many these are, or
        None if no string is complete."""
        if not self._stops:
            self._ready += self._stream.add(tokens)
            return None
        for count, token in enumerate(tokens, 1):
            self._ready += self._stream.add([token])
            whole = self._ready + self._stream.held
            ends = [(at, stop) for stop in self._stops if (at := whole.find(stop)) >= 0]
            if ends:
                end, self.stopped = min(ends)
                self._ready = whole[:end]
                self._stream.end()
            elif self._written is not None:
                self._written.add([token])
                self.stopped = self._written.stopped
            if self.stopped is not None:
                return count
        return None

    def take(self, *, ended: bool = False) -> str:
        """The next piece, or ''. ended: it is the last one."""
        if ended:
            self._ready += self._stream.end()
        begins = () if ended else self._stops
        kept = max((begun(self._ready, stop) for stop in begins), default=0)
        given = len(self._ready) - kept
        piece, self._ready = self._ready[:given], self._ready[given:]
        return piece

    def add(self, tokens: Sequence[int], *, ended: bool = False) -> str:
        """`cut`, and then `take`. After a stop string there is nothing more."""
        if self.stopped is None:
            self.cut(tokens)
        return self.take(ended=ended or self.stopped is not None)


def begun(text: str, string: str) -> int:
    """The length of the longest end of a text that a string begins with.

    >>> begun("to be or", "or not")
    2
    """
    longest = min(len(string) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(string[:n])), 0)


class StopStrings(Stop):
    """Ends a text with the first token that completes one of the strings, as
    `generate(stop_strings=…)` does and `AnswerText` finds it. The text keeps that token, also its
    characters after the string. A step decodes only its new tokens and the tokens of the last
    piece. Raises UserError if there is no string or an empty one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: str | Sequence[str]) -> None:
        self.strings = [strings] if isinstance(strings, str) else list(strings)
        if not self.strings or not all(self.strings):
            raise UserError(
                f"stop strings are {self.strings}; expected at least one, none of them empty"
            )
        self._tokenizer = tokenizer
        self._texts: dict[int, AnswerText] = {}

    def start(self) -> None:
        self._texts = {}

    def leave(self, row: int) -> None:
        self._texts.pop(row, None)

    def cut(self, row: int, tokens: list[int]) -> int | None:
        if row not in self._texts:
            self._texts[row] = AnswerText(self._tokenizer, self.strings)
        kept = self._texts[row].cut(tokens)
        self._texts[row].take()  # else all of the text is searched each time
        return kept
