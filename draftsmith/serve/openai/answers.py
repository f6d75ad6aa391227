"""Answers in the shape of OpenAI's API, whole and in pieces: chat and completions."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from draftsmith.net.api_error import ApiError
from draftsmith.net.events import DONE, event
from draftsmith.serve.batching.answer_tokens import AnswerToken, Piece
from draftsmith.serve.batching.requests import AnswerChoice
from draftsmith.serve.openai.reading import ReadRequest
from draftsmith.serve.openai.text_request import Several, StreamOptions
from draftsmith.serve.openai.tools import CallText, call_ids


class ApiAnswer(ABC):
    """An answer as JSON, and as the events of a stream. read: the request. rule: the lossy rule in
    use when it begins, if it is lossy for this request. error: what ended some texts early, if
    others are complete."""

    def __init__(
        self,
        model: str,
        fingerprint: str,
        read: ReadRequest,
        choices: Sequence[AnswerChoice],
        rule: str | None,
    ) -> None:
        self._asked, self._job, self._choices, self._rule = read.asked, read.job, choices, rule
        self._model, self._fingerprint = model, fingerprint
        self.prompt_tokens = sum(map(len, read.job.prompts))
        self._created = int(time.time())
        self.error: dict[str, Any] | None = None
        # Of an answer with tools, by choice.
        self._texts: dict[int, CallText] = {}
        if read.calls is not None:
            self._texts = {one.index: CallText(read.calls, one.prompt) for one in choices}

    @abstractmethod
    def whole(self, texts: Sequence[Piece]) -> dict[str, Any]:
        """The answer to a request without `stream`. texts: those that are given."""

    @abstractmethod
    def opening(self) -> Iterator[bytes]:
        """The events before the first part of a text."""

    @abstractmethod
    def part(self, piece: Piece) -> Iterator[bytes]:
        """The events of a part of a text."""

    @abstractmethod
    def closing(self) -> Iterator[bytes]:
        """The events after all texts."""

    @abstractmethod
    def failure(self, error: ApiError) -> Iterator[bytes]:
        """The events of an answer that cannot go on."""

    def read(self, piece: Piece) -> tuple[str, list[dict[str, Any]]]:
        """The next text of a choice that is no call, and the calls, which come with its end."""
        if not self._texts:
            return piece.text, []
        text = self._texts[piece.index]
        if piece.reason is None:
            return text.add(piece.text), []
        said, calls = text.end(piece.text, self._choices[piece.index].tokens)
        return said, call_ids(calls)

    @property
    def generated_tokens(self) -> int:
        return sum(len(choice.tokens) for choice in self._choices)

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of prompts that were in the prefix cache. None: there is none."""
        known = [choice.cached for choice in self._choices if choice.cached is not None]
        # A prompt may be read again for more of its texts.
        return min(sum(known), self.prompt_tokens) if known else None

    @property
    def lossy(self) -> str | None:
        """The lossy rule that judges these texts, or has judged a part of them."""
        return next((choice.lossy for choice in self._choices if choice.lossy), self._rule)

    def counts(self) -> dict[str, Any]:
        """The verification passes of all texts of this answer and their draft tokens, the first and
        last version of the drafter, the lossy rule if there was one, and the error if one ended
        some texts."""
        counts = {
            name: sum(getattr(choice, name) for choice in self._choices)
            for name in ("steps", "drafted", "accepted")
        }
        versions = [version for choice in self._choices for version in choice.versions]
        return {
            **counts,
            "drafter_versions": [min(versions), max(versions)],
            "lossy": self.lossy,
            **({} if self.error is None else {"error": self.error}),
        }


class ChoicesAnswer(ApiAnswer):
    """What the JSON of chat and completions shares. kind, chunk: the values of `object`."""

    _asked: Several
    kind: str
    chunk: str
    id_prefix: str

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        options = self._asked.stream_options or StreamOptions()
        self._with_usage = options.include_usage
        self._with_each = options.include_usage and options.continuous_usage_stats
        self._generated = dict.fromkeys((choice.index for choice in self._choices), 0)
        self._left = len(self._choices)
        self._shared = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
        }

    @abstractmethod
    def text(self, piece: Piece, *, whole: bool) -> dict[str, Any]:
        """The fields that hold the text. whole: the whole of an answer without `stream`."""

    @abstractmethod
    def logprobs(self, tokens: Sequence[AnswerToken]) -> dict[str, Any]:
        """The field `logprobs`."""

    def choice(self, piece: Piece, *, whole: bool) -> dict[str, Any]:
        """One of `choices`."""
        asks = self._job.logprobs is not None
        # A special token is not in the text.
        shown = [token for token in piece.tokens if not token.special]
        trace = {"draftsmith": {"tokens": list(map(_traced, shown))}}
        return {
            "index": piece.index,
            **self.text(piece, whole=whole),
            "logprobs": self.logprobs(piece.tokens) if asks else None,
            "finish_reason": piece.reason,
            **(self.token_ids(piece, whole=whole) if self._asked.return_token_ids else {}),
            **(trace if self._job.trace else {}),
        }

    def token_ids(self, piece: Piece, *, whole: bool) -> dict[str, Any]:
        """The ids of a piece's tokens, as vLLM gives them. A whole text has its prompt's too."""
        choice = self._choices[piece.index]
        if whole:
            return {"token_ids": choice.tokens, "prompt_token_ids": list(choice.prompt)}
        return {"token_ids": choice.tokens[self._generated[piece.index] : piece.generated]}

    def whole(self, texts: Sequence[Piece]) -> dict[str, Any]:
        choices = [self.choice(text, whole=True) for text in texts]
        return {
            **self._shared,
            "object": self.kind,
            "choices": choices,
            "usage": self.usage(self.generated_tokens),
            "draftsmith": self.counts(),
        }

    def opening(self) -> Iterator[bytes]:
        return iter(())

    def part(self, piece: Piece) -> Iterator[bytes]:
        self._left -= piece.reason is not None
        last = {} if self._left else {"draftsmith": self.counts()}
        choice = self.choice(piece, whole=False)
        self._generated[piece.index] = piece.generated
        yield self.event([choice], **last)

    def closing(self) -> Iterator[bytes]:
        if self._with_usage:
            usage = self.usage(self.generated_tokens)
            yield self.event([], usage=usage, draftsmith=self.counts())
        yield END

    def failure(self, error: ApiError) -> Iterator[bytes]:
        yield event(error.body)

    def event(self, choices: list[dict[str, Any]], **fields: Any) -> bytes:
        """An event of a stream. Its usage is null, unless each chunk has the usage so far."""
        so_far = self.usage(sum(self._generated.values())) if self._with_each else None
        usage = {"usage": so_far} if self._with_usage else {}
        shared = {**self._shared, "object": self.chunk, "choices": choices}
        return event({**shared, **usage, **fields})

    def usage(self, generated: int) -> dict[str, Any]:
        read, cached = self.prompt_tokens, self.cached_tokens
        details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
        return {
            "prompt_tokens": read,
            "completion_tokens": generated,
            "total_tokens": read + generated,
            **details,
        }


class ChatAnswer(ChoicesAnswer):
    """The answer of /v1/chat/completions."""

    kind, chunk, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def choice(self, piece: Piece, *, whole: bool) -> dict[str, Any]:
        made = super().choice(piece, whole=whole)
        if "tool_calls" in made["message" if whole else "delta"]:
            made["finish_reason"] = "tool_calls"
        return made

    def text(self, piece: Piece, *, whole: bool) -> dict[str, Any]:
        content, calls = self.read(piece)
        if whole:
            message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
            if calls:
                message |= {"content": content or None, "tool_calls": calls}
            return {"message": message}
        numbered = [{"index": at, **call} for at, call in enumerate(calls)]
        delta = {"content": content} if content else {}
        return {"delta": {**delta, **({"tool_calls": numbered} if calls else {})}}

    def logprobs(self, tokens: Sequence[AnswerToken]) -> dict[str, Any]:
        return {"content": entries(tokens), "refusal": None}

    def opening(self) -> Iterator[bytes]:
        for choice in self._choices:
            beginning = {"delta": {"role": "assistant", "content": ""}}
            rest = {"logprobs": None, "finish_reason": None}
            yield self.event([{"index": choice.index, **beginning, **rest}])


class CompletionAnswer(ChoicesAnswer):
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


def entries(tokens: Sequence[AnswerToken]) -> list[dict[str, Any]]:
    """The log-probabilities of tokens, as chat and responses have them."""

    def entry(token: bytes, value: float) -> dict[str, Any]:
        return {"token": written(token), "logprob": value, "bytes": list(token)}

    return [
        {**entry(x.raw, x.logprob), "top_logprobs": [entry(*one) for one in x.top]}
        for x in tokens
        if x.logprob is not None
    ]


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


END = b"data: %b\n\n" % DONE
