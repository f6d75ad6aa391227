"""Answers in the shape of OpenAI's API, whole and in pieces."""

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from decode.text_stream import TextStream
from train.serve.requests import Choice


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
        prompts: Sequence[int],
        choices: Sequence[Choice],
        rule: str | None = None,
    ) -> None:
        self._prompts, self._choices, self._rule = prompts, choices, rule
        self._shared = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    @abstractmethod
    def choice(self, index: int, text: str, reason: str) -> dict[str, Any]:
        """A complete text."""

    @abstractmethod
    def piece(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        """A part of a text. reason: of its end, with the last part."""

    def begin(self, index: int) -> dict[str, Any] | None:
        """What comes before the first part of a text."""
        return None

    def whole(self, texts: Sequence[tuple[str, str]]) -> dict[str, Any]:
        """The answer to a request without `stream`. texts: (text, reason) of each choice."""
        choices = [self.choice(index, *text) for index, text in enumerate(texts)]
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

    def choice(self, index: int, text: str, reason: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": reason}

    def piece(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        delta = {"content": text} if text else {}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}

    def begin(self, index: int) -> dict[str, Any] | None:
        return self.piece(index, "", None) | {"delta": {"role": "assistant", "content": ""}}


class CompletionAnswer(Answer):
    """The answer of /v1/completions."""

    kind = chunk = "text_completion"
    id_prefix = "cmpl"

    def choice(self, index: int, text: str, reason: str) -> dict[str, Any]:
        return self.piece(index, text, reason)

    def piece(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


def event(value: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


END = b"data: [DONE]\n\n"
