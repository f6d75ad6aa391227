"""What an engine is asked and what it replies, by protocol.

Every sampling field is in each request, because engines fill in defaults of their own: vLLM those
of the model's generation_config, llama-server top_k 40, top_p 0.95, min_p 0.05.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from decode.base.errors import UserError
from decode.base.registry import Registry
from decode.draw.sampling import Sampling
from decode.model.loading import Target


@dataclass(frozen=True, eq=False)
class WantedAnswer:
    """One answer that is wanted. number: unique in the stage. prompt: token ids."""

    number: int
    prompt: list[int]


def request_name(number: int) -> str:
    """What vLLM calls the request for a row, if it writes hidden states."""
    return f"row{number}"


@dataclass(frozen=True)
class AskSettings:
    """What all requests have in common. logprobs: how many log-probabilities are wanted for each
    token. model: the server's name for it. alone: requests come one at a time; a server
    with places for several uses one of them, and nothing that it keeps of other prompts. whole_in:
    the positions of a target whose vLLM is to read the last token of each text too; the text goes
    on for that."""

    sampling: Sampling
    max_new_tokens: int
    seed: int
    eos_token_ids: tuple[int, ...]
    logprobs: int = 0
    model: str | None = None
    alone: bool = False
    whole_in: int | None = None

    def row_seed(self, row: WantedAnswer) -> int:
        """A seed of 31 bits from the stage's seed and the row's number."""
        digest = hashlib.sha256(f"{self.seed} {row.number}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1


@dataclass(frozen=True)
class Reply:
    """An engine's answer. tokens, prompt: token ids; None if the engine returned none. stop_token:
    the id that ended the text, if the engine names it. token_count, prompt_count: by its own count,
    if it gives one. logprobs: for each token of the answer, log-probabilities by token id."""

    text: str
    finish_reason: str
    tokens: list[int] | None = None
    prompt: list[int] | None = None
    stop_token: int | None = None
    token_count: int | None = None
    prompt_count: int | None = None
    logprobs: list[dict[int, float]] | None = None


class Protocol(ABC):
    """path: where requests go."""

    path: ClassVar[str]

    @abstractmethod
    def body(self, row: WantedAnswer, settings: AskSettings) -> dict[str, Any]:
        """The request for one row."""

    @abstractmethod
    def read(self, reply: dict[str, Any]) -> Reply:
        """Raises KeyError, TypeError, IndexError, ValueError or AttributeError for what is no such
        reply."""


PROTOCOLS = Registry[Protocol]("server protocol")


class Completions(Protocol):
    """`/v1/completions` with token ids both ways: `return_token_ids` of vLLM and SGLang. An engine
    that does not know this field leaves the ids out."""

    path = "/v1/completions"

    def body(self, row: WantedAnswer, settings: AskSettings) -> dict[str, Any]:
        sampling = settings.sampling
        return {
            "model": settings.model,
            "prompt": row.prompt,
            "max_tokens": settings.max_new_tokens,
            "n": 1,
            "stream": False,
            "seed": settings.row_seed(row),
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or -1,  # SGLang refuses 0
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "stop_token_ids": list(settings.eos_token_ids),
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "add_special_tokens": False,
            "return_token_ids": True,
            # Names in the log-probabilities are then token_id:N; texts of tokens are not unique.
            **(
                {"logprobs": settings.logprobs, "return_tokens_as_token_ids": True}
                if settings.logprobs
                else {}
            ),
            **(self._whole(row, settings, settings.whole_in) if settings.whole_in else {}),
        }

    def _whole(self, row: WantedAnswer, settings: AskSettings, positions: int) -> dict[str, Any]:
        ends = list(settings.eos_token_ids)
        return {
            "request_id": request_name(row.number),
            "max_tokens": min(settings.max_new_tokens + 1, positions),
            "stop_token_ids": [],
            "ignore_eos": True,
            # The connector stops a text behind these ids.
            "kv_transfer_params": {"include_output_tokens": True, "end_token_ids": ends},
        }

    def read(self, reply: dict[str, Any]) -> Reply:
        choice, usage = reply["choices"][0], reply.get("usage") or {}
        stop = choice.get("stop_reason", choice.get("matched_stop"))
        top = (choice.get("logprobs") or {}).get("top_logprobs")
        return Reply(
            str(choice["text"]),
            str(choice["finish_reason"]),
            token_ids(choice.get("token_ids")),
            token_ids(choice.get("prompt_token_ids", reply.get("prompt_token_ids"))),
            stop if isinstance(stop, int) else None,
            _count(usage.get("completion_tokens")),
            _count(usage.get("prompt_tokens")),
            top and [{_named(name): value for name, value in (row or {}).items()} for row in top],
        )


class LlamaServer(Protocol):
    """llama-server's own `/completion`. reasons: to end, by its stop types."""

    path = "/completion"
    reasons: ClassVar[dict[str, str]] = {"eos": "stop", "word": "stop", "limit": "length"}

    def body(self, row: WantedAnswer, settings: AskSettings) -> dict[str, Any]:
        sampling = settings.sampling
        return {
            "prompt": row.prompt,
            "n_predict": settings.max_new_tokens,
            "stream": False,
            "seed": settings.row_seed(row),
            # The order of the decode loop here.
            "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repeat_penalty": sampling.repetition_penalty,
            # The complete text.
            "repeat_last_n": len(row.prompt) + settings.max_new_tokens,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "dynatemp_range": 0.0,
            "mirostat": 0,
            "ignore_eos": False,
            "return_tokens": True,
        }

    def read(self, reply: dict[str, Any]) -> Reply:
        # A prompt or an answer did not fit into the context.
        kind = "truncated" if reply.get("truncated") else reply["stop_type"]
        return Reply(
            str(reply["content"]),
            self.reasons.get(kind, str(kind)),
            token_ids(reply.get("tokens")) or None,
            token_count=_count(reply.get("tokens_predicted")),
            prompt_count=_count(reply.get("tokens_evaluated")),
        )


PROTOCOLS.register("completions")(Completions())
PROTOCOLS.register("llama-server")(LlamaServer())


def _named(name: str) -> int:
    """N of token_id:N."""
    return int(name.removeprefix("token_id:"))


def token_ids(value: Any) -> list[int] | None:
    """Token ids as a server gives them; None: none. Raises ValueError for anything else."""
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise ValueError(f"token ids are {str(value)[:100]}")
    return value


def _count(value: Any) -> int | None:
    if value is not None and type(value) is not int:
        raise ValueError(f"a number of tokens is {str(value)[:100]}")
    return value


@dataclass(frozen=True)
class Answer:
    """A row's answer. tokens: with the end-of-text token if it ended. left_out: why it cannot be
    used; empty if it can. retokenized: the ids come from the text."""

    tokens: list[int]
    finish_reason: str
    left_out: str = ""
    retokenized: bool = False


@dataclass(frozen=True)
class AnswerReader:
    """Makes answers of replies. vocab_size, token_count: the target's."""

    tokenizer: Any
    vocab_size: int
    token_count: int
    settings: AskSettings

    @classmethod
    def of_target(cls, target: Target, settings: AskSettings) -> "AnswerReader":
        return cls(target.tokenizer, target.vocab_size, target.token_count, settings)

    def answer(self, reply: Reply, prompt: Sequence[int], url: str) -> Answer:
        """The answer of a reply. Raises UserError if the engine read another prompt than was sent,
        or replied ids that the target does not have."""
        self._require_prompt(reply, prompt, url)
        reason = reply.finish_reason
        if reason not in ("stop", "length"):
            return Answer([], reason, f"ended with {reason}")
        tokens, retokenized = reply.tokens, reply.tokens is None
        if tokens is None:
            tokens = self._tokens_of_text(reply)
            if tokens is None:
                return Answer([], reason, "not the same after retokenising", True)
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            raise UserError(
                f"{url} replied the token id {max(tokens)}, but the target has ids from 0 to "
                f"{self.vocab_size - 1}; start the server with the run's target"
            )
        ends, longest = set(self.settings.eos_token_ids), self.settings.max_new_tokens
        if self.settings.whole_in:
            tokens = tokens[: next((i + 1 for i, x in enumerate(tokens) if x in ends), longest)]
            tokens = tokens[:longest]
            reason = "length" if ends.isdisjoint(tokens) else "stop"
        if reason == "stop" and (not tokens or tokens[-1] not in ends):
            end = self._end(reply)
            if end is None:
                return Answer([], reason, "ended without an end-of-text token", retokenized)
            tokens = [*tokens, end]
        if not tokens:
            return Answer([], reason, "empty", retokenized)
        if not ends.isdisjoint(tokens[:-1]):
            return Answer([], reason, "goes on after an end-of-text token", retokenized)
        if len(tokens) > longest + (reason == "stop"):
            return Answer([], reason, "longer than max_new_tokens", retokenized)
        return Answer(tokens[:longest], reason, "", retokenized)

    def _require_prompt(self, reply: Reply, prompt: Sequence[int], url: str) -> None:
        if reply.prompt is not None and reply.prompt != list(prompt):
            pairs = enumerate(zip(reply.prompt, prompt, strict=False))
            first = next((i for i, (theirs, ours) in pairs if theirs != ours), None)
            where = "in length" if first is None else f"first at position {first}"
            raise UserError(
                f"{url} read another prompt than was sent: {len(reply.prompt)} tokens, expected "
                f"{len(prompt)}; they differ {where}. Switch off what changes prompts there, such "
                "as truncation or added special tokens"
            )
        if reply.prompt_count not in (None, len(prompt)):
            raise UserError(
                f"{url} read a prompt of {reply.prompt_count} tokens, but {len(prompt)} were sent; "
                "switch off what changes prompts there, such as truncation"
            )

    def _tokens_of_text(self, reply: Reply) -> list[int] | None:
        """The ids of a reply without ids; None if they may differ from those of the engine. The
        text must come out again, with as many tokens as the engine counted."""
        if "\N{REPLACEMENT CHARACTER}" in reply.text:
            return None
        ids = list(self.tokenizer(reply.text, add_special_tokens=False)["input_ids"])
        if self.tokenizer.decode(ids, clean_up_tokenization_spaces=False) != reply.text:
            return None
        # Engines differ in whether the end-of-text token counts.
        ended = {0, 1} if reply.finish_reason == "stop" else {0}
        if reply.token_count is not None and reply.token_count - len(ids) not in ended:
            return None
        return ids

    def _end(self, reply: Reply) -> int | None:
        """The end-of-text token of a reply that has none. A checkpoint's tokenizer names the one
        that ends an answer, if there are several."""
        ends = self.settings.eos_token_ids
        for token in (reply.stop_token, self.tokenizer.eos_token_id, *ends):
            if token in ends:
                return int(token)
        return None
