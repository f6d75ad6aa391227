"""Answers in the shape of OpenAI's API, whole and in pieces."""

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from decode.text_stream import TextStream
from train.serve.answer_tokens import AnswerToken
from train.serve.requests import Choice
from train.serve.schema import ChatRequest, CompletionRequest


class AnswerText:
    """The text of one choice, in pieces, without the stop string that ends it. What may be the
    beginning of a stop string is held back. stopped: a stop string has ended the text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str]) -> None:
        self._stream = TextStream(tokenizer, skip_special_tokens=True)
        self._stops = stops
        self._held = ""
        self.stopped = False

    def add(self, tokens: Sequence[int], *, ended: bool) -> str:
        """The next piece, or ''. ended: these are the last tokens."""
        if self.stopped:
            return ""
        text = self._held + self._stream.add(tokens)
        if ended:
            text += self._stream.end()
        ends = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)]
        kept = 0 if ended else max((_begun(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _begun(text: str, stop: str) -> int:
    """The length of the longest end of a text that a stop string begins with.

    >>> _begun("to be or", "or not")
    2
    """
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


@dataclass
class Piece:
    """A part of one choice's text, or all of it. reason: why the text ends with it, if it does.
    tokens: for requests that ask about single tokens."""

    index: int
    text: str
    reason: str | None
    tokens: list[AnswerToken] = field(default_factory=list)

    def joined(self, other: "Piece") -> "Piece":
        """This piece and the one after it."""
        tokens = [*self.tokens, *other.tokens]
        return Piece(self.index, self.text + other.text, other.reason, tokens)


class Answer(ABC):
    """What all JSON of one answer shares: id, model, time. kind, chunk: the values of `object`.
    prompts: the lengths of the prompts in tokens, each counted once. rule: the lossy rule in use
    when it begins, if it is lossy for this request."""

    kind: str
    chunk: str
    id_prefix: str

    def __init__(
        self,
        model: str,
        fingerprint: str,
        asked: ChatRequest | CompletionRequest,
        prompts: Sequence[int],
        choices: Sequence[Choice],
        rule: str | None = None,
    ) -> None:
        self._asked, self._prompts, self._choices, self._rule = asked, prompts, choices, rule
        self._shared = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    @abstractmethod
    def text(self, piece: Piece, *, whole: bool) -> dict[str, Any]:
        """The fields that hold the text. whole: of an answer without `stream`."""

    @abstractmethod
    def logprobs(self, tokens: Sequence[AnswerToken]) -> dict[str, Any]:
        """The field `logprobs`."""

    def choice(self, piece: Piece, *, whole: bool) -> dict[str, Any]:
        """One of `choices`."""
        asks = self._asked.likeliest is not None
        trace = {"draftsmith": {"tokens": list(map(_traced, piece.tokens))}}
        return {
            "index": piece.index,
            **self.text(piece, whole=whole),
            "logprobs": self.logprobs(piece.tokens) if asks else None,
            "finish_reason": piece.reason,
            **(trace if self._asked.draftsmith.trace else {}),
        }

    def begin(self, index: int) -> dict[str, Any] | None:
        """What comes before the first part of a text."""
        return None

    def whole(self, texts: Sequence[Piece]) -> dict[str, Any]:
        """The answer to a request without `stream`. texts: of each choice."""
        choices = [self.choice(text, whole=True) for text in texts]
        return {
            **self._shared,
            "object": self.kind,
            "choices": choices,
            "usage": self.usage(),
            "draftsmith": self.counts(),
        }

    def event(self, choices: list[dict[str, Any]], **fields: Any) -> bytes:
        """An event of a stream."""
        return event({**self._shared, "object": self.chunk, "choices": choices, **fields})

    def usage(self) -> dict[str, int]:
        read = sum(self._prompts)
        generated = sum(len(choice.tokens) for choice in self._choices)
        return {
            "prompt_tokens": read,
            "completion_tokens": generated,
            "total_tokens": read + generated,
        }

    @property
    def lossy(self) -> str | None:
        """The lossy rule that judges these texts, or has judged a part of them."""
        return next((choice.lossy for choice in self._choices if choice.lossy), self._rule)

    def counts(self) -> dict[str, Any]:
        """The verification passes of all texts of this answer and their draft tokens, the first and
        last version of the drafter, and the lossy rule if there was one."""
        counts = {
            name: sum(getattr(choice, name) for choice in self._choices)
            for name in ("steps", "drafted", "accepted")
        }
        versions = [version for choice in self._choices for version in choice.versions]
        return {
            **counts,
            "drafter_versions": [min(versions), max(versions)],
            "lossy": self.lossy,
        }


class ChatAnswer(Answer):
    """The answer of /v1/chat/completions."""

    kind, chunk, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def text(self, piece: Piece, *, whole: bool) -> dict[str, Any]:
        if whole:
            return {"message": {"role": "assistant", "content": piece.text, "refusal": None}}
        return {"delta": {"content": piece.text} if piece.text else {}}

    def logprobs(self, tokens: Sequence[AnswerToken]) -> dict[str, Any]:
        def entry(token: bytes, value: float) -> dict[str, Any]:
            return {"token": written(token), "logprob": value, "bytes": list(token)}

        content = [
            {**entry(x.raw, x.logprob), "top_logprobs": [entry(*one) for one in x.top]}
            for x in tokens
            if x.logprob is not None
        ]
        return {"content": content, "refusal": None}

    def begin(self, index: int) -> dict[str, Any] | None:
        beginning = {"delta": {"role": "assistant", "content": ""}}
        return {"index": index, **beginning, "logprobs": None, "finish_reason": None}


class CompletionAnswer(Answer):
    """The answer of /v1/completions."""

    kind = chunk = "text_completion"
    id_prefix = "cmpl"

    def text(self, piece: Piece, *, whole: bool) -> dict[str, Any]:
        return {"text": piece.text}

    def logprobs(self, tokens: Sequence[AnswerToken]) -> dict[str, Any]:
        # With the token itself, if it is not among the likeliest.
        best = [
            {written(one): value for one, value in [*x.top, (x.raw, x.logprob)]} for x in tokens
        ]
        return {
            "tokens": [written(x.raw) for x in tokens],
            "token_logprobs": [x.logprob for x in tokens],
            "top_logprobs": best,
            "text_offset": [x.start for x in tokens],
        }


def _traced(token: AnswerToken) -> dict[str, Any]:
    rejected = [one.decode(errors="replace") for one in token.rejected]
    origin = "draft" if token.accepted else "target"
    return {"text": token.text, "origin": origin, "rejected": rejected}


def written(token: bytes) -> str:
    """A token as text, or as OpenAI writes a token that is no complete text.

    >>> written("é".encode()), written("é".encode()[:1])
    ('é', 'bytes:\\\\xc3')
    """
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def event(value: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


END = b"data: [DONE]\n\n"
