"""The text of each token as bytes, for two tokenizers whose token ids mean different tokens.

Byte-level tokenizers write a space as Ġ and each byte as one character. SentencePiece writes a
space as ▁ and has tokens such as <0x0A> for single bytes. As bytes, tokens of both can be compared,
and a token that ends inside a character is no special case.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from transformers.convert_slow_tokenizer import bytes_to_unicode

from decode.base.errors import UserError

# The bytes of a special token: its name between two bytes that no UTF-8 text contains.
_BEGIN, _END = b"\xff", b"\xfe"
_SPECIAL = re.compile(rb"(\xff[^\xff\xfe]+\xfe)")
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Bytes of the text before the part to split into tokens, so that its first word is not taken for
# the first word of a text.
CONTEXT_BYTES = 24
# The byte of each character in the tokens of byte-level tokenizers (those of GPT-2).
BYTE_OF: dict[str, int] = {character: byte for byte, character in bytes_to_unicode().items()}

Spelling = Literal["byte_level", "sentencepiece", "plain"]


class TokenTexts:
    """The bytes of the tokens of one tokenizer.

    texts[id]: the bytes of a token; b"" for an id that is no token. For a special token they are
    its name between two marks, so no ordinary token equals it. ids: the token with some bytes; if
    several have the same ones, it is not the one for a single byte. rows: the number of rows of the
    output layer. Ids from there on are left out. unknown: the token for bytes that no token has.
    prefix: the tokens with which the model expects each text to begin.
    """

    def __init__(self, tokenizer: Any, rows: int) -> None:
        self.tokenizer = tokenizer
        self.spelling = _spelling(tokenizer)
        added = tokenizer.added_tokens_decoder
        special = {i for i, token in added.items() if token.special}
        special.update(tokenizer.all_special_ids)
        vocabulary = {i: token for token, i in tokenizer.get_vocab().items() if i < rows}
        self.texts = [b""] * (max(vocabulary, default=-1) + 1)
        # Tokens for single bytes come last.
        order = sorted(vocabulary, key=lambda i: bool(BYTE_TOKEN.fullmatch(vocabulary[i])))
        self.ids: dict[bytes, int] = {}
        for i in order:
            name = vocabulary[i]
            if i in special:
                text = _BEGIN + name.encode() + _END
            elif i in added:
                text = name.encode()
            else:
                text = _token_bytes(name, self.spelling)
            self.texts[i] = text
            if text:
                self.ids.setdefault(text, i)
        self._longest = max(map(len, self.ids), default=0)
        self.unknown = next(
            (i for i in (tokenizer.unk_token_id, tokenizer.eos_token_id) if i is not None), 0
        )
        # A model that was trained with a token at the start of each text needs it.
        start = tokenizer.bos_token_id
        begins = start is not None and tokenizer.encode("a")[:1] == [start]
        self.prefix: list[int] = [start] if begins else []

    def is_special(self, token: int) -> bool:
        return self.texts[token].startswith(_BEGIN) and self.texts[token].endswith(_END)

    def shown(self, token: int) -> bytes:
        """The bytes of a token, of a special one its name."""
        text = self.texts[token]
        return text[1:-1] if self.is_special(token) else text

    def mark_special(self, token: int) -> None:
        """Makes a token a special one."""
        if not self.is_special(token):
            self.rename(token, _BEGIN + self.texts[token] + _END)

    @property
    def spells_bytes(self) -> bool:
        """Whether tokens can spell every text: those of single bytes are among them."""
        if self.spelling == "sentencepiece":
            return any(map(BYTE_TOKEN.fullmatch, self.tokenizer.get_vocab()))
        return self.spelling == "byte_level"

    def rename(self, token: int, text: bytes) -> None:
        """Gives a token other bytes, such as those of the same role in another tokenizer."""
        self.ids.pop(self.texts[token], None)
        self.texts[token] = text
        self.ids[text] = token

    def pieces(self, text: bytes) -> list[int]:
        """Tokens that spell these bytes, always the longest that fits. The name of a special token
        that is not in this vocabulary is spelled. For bytes that no token has, one unknown token.
        """
        tokens: list[int] = []
        if _SPECIAL.fullmatch(text) and text not in self.ids:
            text = text[1:-1]
        begin, missed = 0, False
        while begin < len(text):
            sizes = range(min(self._longest, len(text) - begin), 0, -1)
            size = next((n for n in sizes if text[begin : begin + n] in self.ids), 0)
            if size:
                tokens.append(self.ids[text[begin : begin + size]])
            elif not missed:
                tokens.append(self.unknown)
            missed = not size
            begin += size or 1
        return tokens

    def encode(self, text: bytes, before: bytes = b"") -> list[int]:
        """The tokens into which the tokenizer splits these bytes, where they follow `before`.

        Special tokens and characters cut by either end are spelled, and also text that the
        tokenizer changes or joins with `before`.
        """
        tokens: list[int] = []
        for part in _SPECIAL.split(text):
            if _SPECIAL.fullmatch(part):
                tokens += self.pieces(part)
            elif part:
                tokens += self._encode_plain(part, before)
            before = (before + part)[-CONTEXT_BYTES:]
        return tokens

    def _encode_plain(self, text: bytes, before: bytes) -> list[int]:
        head = next((i for i, byte in enumerate(text) if byte & 0xC0 != 0x80), len(text))
        tail = len(text) - _cut_character(text[head:])
        before = (before + text[:head])[-CONTEXT_BYTES:]
        return [
            *self.pieces(text[:head]),
            *self._encode_characters(text[head:tail], before),
            *self.pieces(text[tail:]),
        ]

    def _encode_characters(self, text: bytes, before: bytes) -> list[int]:
        try:
            characters = text.decode()
        except UnicodeDecodeError:
            return self.pieces(text)
        context = _SPECIAL.split(before)[-1].decode(errors="ignore")
        tokens = self.tokenizer.encode(context + characters, add_special_tokens=False)
        # The tokens at the end that have exactly these bytes.
        first, size = len(tokens), 0
        while first and size < len(text):
            first -= 1
            size += len(self.texts[tokens[first]])
        tokens = tokens[first:]
        same = b"".join(self.texts[token] for token in tokens) == text
        return list(tokens) if same else self.pieces(text)


class SharedTokens(NamedTuple):
    """The tokens that are in both vocabularies, in the order of the target's ids: int [n] each."""

    target: list[int]
    drafter: list[int]


def compared_texts(
    target: tuple[Any, int], drafter: tuple[Any, int]
) -> tuple[TokenTexts, TokenTexts]:
    """The tokens of both as bytes, with the same names for the same roles. target, drafter: the
    tokenizer, and the rows of the model's output layer."""
    ours, theirs = TokenTexts(*target), TokenTexts(*drafter)
    share_roles(ours, theirs)
    return ours, theirs


def share_roles(target: TokenTexts, drafter: TokenTexts) -> None:
    """Gives the drafter's tokens for the end and the beginning of a text the names that these have
    in the target's vocabulary, where no token has the same name in both."""
    for role in ("eos_token_id", "bos_token_id"):
        theirs, ours = (getattr(x.tokenizer, role) for x in (target, drafter))
        if theirs is None or ours is None or theirs >= len(target.texts):
            continue
        if ours >= len(drafter.texts) or not drafter.is_special(ours):
            continue
        name = target.texts[theirs]
        if name not in drafter.ids and drafter.texts[ours] not in target.ids:
            drafter.rename(ours, name)


def shared_tokens(target: TokenTexts, drafter: TokenTexts) -> SharedTokens:
    """The tokens with the same bytes. Call `share_roles` before. Raises UserError if there are
    none, or if one tokenizer writes its tokens with spaces and the other one without."""
    if (target.spelling == "plain") != (drafter.spelling == "plain"):
        raise UserError(
            f"the target's tokenizer writes tokens as {target.spelling}, and the drafter's as "
            f"{drafter.spelling}. In plain tokens spaces are left out, so their texts cannot be "
            "compared; use a drafter with a tokenizer of the target's kind"
        )
    pairs = sorted((i, drafter.ids[text]) for text, i in target.ids.items() if text in drafter.ids)
    if not pairs:
        raise UserError(
            f"none of the {len(target.ids)} tokens of the target is among the {len(drafter.ids)} "
            "tokens of the drafter, so it can draft nothing; use another drafter"
        )
    return SharedTokens([i for i, _ in pairs], [i for _, i in pairs])


def spelled(target: TokenTexts, drafter: TokenTexts, token: int) -> list[int]:
    """The drafter's tokens, at least one, that are read for a token of the target: the same token,
    or the longest ones that spell it. For a row of the target's output layer that is no token, the
    unknown token."""
    text = target.texts[token] if token < len(target.texts) else b""
    return drafter.pieces(text) or [drafter.unknown]


@dataclass(frozen=True)
class SharedCoverage:
    """How many tokens two vocabularies share, as shares of the target's, of the drafter's, and of
    the tokens of a text. On a text that the target wrote, `of_text` estimates how much of the
    target's probability the drafter can match."""

    tokens: int
    of_target: float
    of_drafter: float
    of_text: float


def shared_coverage(
    texts: Sequence[Sequence[int]], target: tuple[Any, int], drafter: tuple[Any, int]
) -> SharedCoverage:
    """texts: in the target's token ids. target, drafter: the tokenizer, and the rows of the model's
    output layer. Raises UserError as `shared_tokens`."""
    ours, theirs = compared_texts(target, drafter)
    shared = shared_tokens(ours, theirs)
    known = set(shared.target)
    count = len(known)
    tokens = [token for text in texts for token in text]
    covered = sum(token in known for token in tokens) / max(len(tokens), 1)
    return SharedCoverage(count, count / len(ours.ids), count / len(theirs.ids), covered)


def _spelling(tokenizer: Any) -> Spelling:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and '"ByteLevel"' in backend.to_str():
        return "byte_level"
    names = tokenizer.get_vocab()
    if any(name.startswith("▁") for name in names):
        return "sentencepiece"
    return "byte_level" if any(name.startswith("Ġ") for name in names) else "plain"


def _token_bytes(name: str, spelling: Spelling) -> bytes:
    if spelling == "byte_level" and all(sign in BYTE_OF for sign in name):
        return bytes(BYTE_OF[sign] for sign in name)
    if spelling == "sentencepiece":
        byte = BYTE_TOKEN.fullmatch(name)
        return bytes([int(byte[1], 16)]) if byte else name.replace("▁", " ").encode()
    return name.encode()


def _cut_character(text: bytes) -> int:
    """The number of bytes at the end that begin a UTF-8 character and do not end it."""
    for size in range(1, min(3, len(text)) + 1):
        byte = text[-size]
        if byte & 0xC0 != 0x80:  # the first byte of a character
            needed = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
            return size if needed > size else 0
    return 0
