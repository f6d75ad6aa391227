"""The tokens of an answer, with the characters that each of them adds to the text."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from decode.drafters.tokenizers.token_texts import BYTE_OF, BYTE_TOKEN
from decode.draw.logprobs import TokenLogprob
from decode.text_stream import TextStream, decode


class TokenBytes:
    """The bytes of single tokens, also of those that hold only a part of a character."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # Some tokenizers write the space of a token only if another token precedes it.
        self._before: list[int] = tokenizer("a", add_special_tokens=False).input_ids
        self._skipped = len(decode(tokenizer, self._before))
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token: int) -> bytes:
        if token not in self._known:
            self._known[token] = self._read(token)
        return self._known[token]

    def _read(self, token: int) -> bytes:
        both = decode(self._tokenizer, [*self._before, token], skip_special_tokens=False)
        text = both[self._skipped :]
        if "�" not in text:
            return text.encode()
        # A part of a character: the vocabulary has its bytes, in one of two notations.
        name = str(self._tokenizer.convert_ids_to_tokens(token))
        if one := BYTE_TOKEN.fullmatch(name):
            return bytes([int(one[1], 16)])
        if all(character in BYTE_OF for character in name):
            return bytes(BYTE_OF[character] for character in name)
        return text.encode()


@dataclass(frozen=True)
class AnswerToken:
    """A token of an answer.

    raw: its bytes. start, text: where the characters begin that it completes, and these. The texts
    of all tokens add up to the answer. logprob, top: its log-probability, and the likeliest tokens
    with theirs; None and empty if the request does not ask. accepted: it is a draft token; else it
    is the target's. rejected: the draft tokens in whose place it stands, as bytes. special: it is
    not in the text.
    """

    raw: bytes
    start: int
    text: str
    logprob: float | None
    top: Sequence[tuple[bytes, float]]
    accepted: bool
    rejected: Sequence[bytes]
    special: bool = False

    @property
    def end(self) -> int:
        return self.start + len(self.text)


@dataclass
class Piece:
    """A part of one choice's text, or all of it. reason: why the text ends with it, if it does.
    tokens: for requests that ask about single tokens. generated: tokens of the text so far. stop:
    the stop string that ended it."""

    index: int
    text: str
    reason: str | None
    tokens: list[AnswerToken] = field(default_factory=list)
    generated: int = 0
    stop: str | None = None

    def joined(self, other: "Piece") -> "Piece":
        """This piece and the one after it."""
        return replace(other, text=self.text + other.text, tokens=[*self.tokens, *other.tokens])


@dataclass(frozen=True)
class NewTokens:
    """What a pass gave one text. reason: why the text has ended, if it has. logprobs: one entry per
    token, if the request asks for them. accepted: how many of the tokens are draft tokens, the
    first ones. rejected: the draft tokens below them, which were not kept. Only a request with
    `trace` has the last two."""

    tokens: Sequence[int]
    reason: str | None
    logprobs: Sequence[TokenLogprob] = ()
    accepted: int = 0
    rejected: Sequence[int] = ()


class AnswerTokens:
    """The tokens of one text as it grows. A token is held back until its characters are final.
    Special tokens have no text; they are here for their log-probabilities. shown: special tokens
    that have text all the same. keep_blank: see `TextStream`."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        token_bytes: TokenBytes,
        shown: frozenset[int] = frozenset(),
        keep_blank: bool = False,
    ) -> None:
        self._stream = TextStream(
            tokenizer, skip_special_tokens=True, shown=shown, keep_blank=keep_blank
        )
        self._special = {*tokenizer.all_special_ids} - shown
        self._bytes = token_bytes
        self._length = 0  # characters so far
        self._held: list[AnswerToken] = []

    def add(self, new: NewTokens) -> None:
        """The next tokens of the text."""
        for place, token in enumerate(new.tokens):
            text = self._stream.add([token])
            special = token in self._special
            if special and not new.logprobs:
                continue
            entry = new.logprobs[place] if new.logprobs else None
            of_target = place >= new.accepted
            self._held.append(
                AnswerToken(
                    self._bytes[token],
                    self._length,
                    text,
                    None if entry is None else entry.logprob,
                    [(self._bytes[one], value) for one, value in entry.top] if entry else [],
                    not of_target,
                    [self._bytes[one] for one in new.rejected] if of_target else [],
                    special,
                )
            )
            self._length += len(text)
        if new.reason is not None and (rest := self._stream.end()) and self._held:
            last = self._held[-1]
            self._held[-1] = replace(last, text=last.text + rest)

    def take(self, end: int, *, ended: bool) -> list[AnswerToken]:
        """The next tokens of the first `end` characters. ended: the text has no more characters:
        what begins behind them is dropped, and the last token is cut."""
        if ended:
            taken = [
                replace(x, text=x.text[: end - x.start])
                for x in self._held
                if x.start < end + x.special
            ]
            self._held = []
            return taken
        # A token without text is a part of the character that a later one completes.
        final = [place for place, x in enumerate(self._held) if x.text and x.end <= end]
        count = final[-1] + 1 if final else 0
        taken, self._held = self._held[:count], self._held[count:]
        return taken
