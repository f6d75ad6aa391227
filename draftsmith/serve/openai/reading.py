"""Bodies of requests to token ids and grammars. What takes long is done beside the event loop."""

import asyncio
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase

from decode.base.errors import UserError
from decode.base.threads import run_in_thread
from decode.draw.sampling import Sampling
from decode.grammars import Grammar, Grammars
from decode.text import Prompt, prompt_ids
from draftsmith.net.api_error import ApiError
from draftsmith.serve.batching.requests import Job
from draftsmith.serve.openai.formats import AskedGrammar
from draftsmith.serve.openai.known_fields import KnownFields, parse, shown
from draftsmith.serve.openai.text_request import TextRequest, Tooled
from draftsmith.serve.openai.tools import Calls, require_tools

T = TypeVar("T")

SHORT = 16 << 10  # bytes; such a body is read at once


@dataclass(frozen=True)
class RequestLimits:
    """What a request may ask for. names: the names of the model. context: tokens of a prompt and
    its text.
    max_tokens: the most tokens of one text; None: what the context holds. texts: the texts of one
    request. learns: the service learns from requests with `store`. vocabulary: tokens of the
    target. sampling: how text is drawn, where a request does not say it."""

    names: Sequence[str]
    context: int
    max_tokens: int | None
    texts: int
    learns: bool
    vocabulary: int
    sampling: Sampling

    def require_model(self, name: str) -> None:
        if name not in self.names:
            message = f"the model {shown(name)} does not exist; this service has {self.names[0]!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def require(self, asked: TextRequest, prompts: int) -> None:
        """Raise ApiError for what needs no tokens to be refused."""
        self.require_model(asked.model)
        if asked.store and asked.keeps_store and not self.learns:
            message = "store is true, but this service does not learn (--learn); leave it out"
            raise ApiError(400, message, param="store", code="unsupported_parameter")
        texts = prompts * asked.texts
        if not 1 <= texts <= self.texts:
            message = f"the request asks for {texts} texts; expected 1 to {self.texts}"
            raise ApiError(400, message, param=asked.asks if asked.texts == 1 else "n")

    def sampling_of(self, asked: TextRequest) -> Sampling:
        """How the texts of a request are drawn. Raises ApiError for a value out of its range."""
        try:
            sampling = asked.sampling(self.sampling)
            sampling.require_vocabulary(self.vocabulary)
        except UserError as error:
            # The first word is the field.
            raise refused(error, str(error).partition(" ")[0], "invalid_value") from None
        return sampling

    def new_tokens(self, asked: TextRequest, longest: int) -> int:
        """How many tokens a text may have. longest: tokens of a prompt."""
        room = self.context - longest
        if room < 1:
            raise self.too_long(asked.asks, f"it has {longest} tokens")
        name, limit = asked.limit
        most = room if self.max_tokens is None else min(room, self.max_tokens)
        if (least := asked.min_tokens or 0) > (limit or most):
            message = f"min_tokens is {least}; expected at most {limit or most}, the longest text"
            raise ApiError(400, message, param="min_tokens", code="invalid_value")
        if limit is None:
            return most
        limit = limit if self.max_tokens is None else min(limit, self.max_tokens)
        if limit > room:
            raise ApiError(
                400,
                f"{self.maximum} However, you requested {longest + limit} tokens ({longest} in "
                f"{asked.asks}, {limit} for the answer). Shorten {asked.asks}, or set {name} to at "
                f"most {room}.",
                param=name,
                code="context_length_exceeded",
            )
        return limit

    @property
    def maximum(self) -> str:
        """Clients know these words."""
        return f"This model's maximum context length is {self.context} tokens."

    def too_long(self, param: str, why: str) -> ApiError:
        message = f"{self.maximum} However, your prompt is too long: {why}. Shorten {param}."
        return ApiError(400, message, param=param, code="context_length_exceeded")


@dataclass(frozen=True)
class ReadRequest:
    """A request that can be answered: what it asks for, its job for the decode, and what reads the
    calls of its answers, if it has tools."""

    asked: TextRequest
    job: Job
    calls: Calls | None = None


class BodyReader:
    """Reads bodies, in the event loop if they are short, and else one at a time in a thread.
    Grammars are compiled one at a time in a thread. tokenizer: not used by other threads.
    eos_token_ids: the target's. waiting: how many long bodies and grammars are being read."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        limits: RequestLimits,
        eos_token_ids: Sequence[int],
    ) -> None:
        self.limits, self.waiting = limits, 0
        self._eos_token_ids = eos_token_ids
        self._grammars: Grammars | None = None  # made when the first one is asked for
        self._tokenizer = tokenizer
        self._of_thread = copy.deepcopy(tokenizer)
        self._longest = longest_token(tokenizer)
        self._one = asyncio.Semaphore(1)

    async def read(self, known: KnownFields, body: bytes) -> ReadRequest:
        """Raises ApiError for a request that cannot be answered."""
        if len(body) <= SHORT:
            read = self._read(known, body, self._tokenizer)
        else:
            read = await self._beside(lambda: self._read(known, body, self._of_thread))
        asked = read.asked.grammar
        if read.calls is not None:
            asked = read.calls.forced or asked
        if asked is None:
            return read
        grammar = await self._beside(lambda: self._compiled(asked))
        sampling = replace(read.job.sampling, grammar=grammar)
        return replace(read, job=replace(read.job, sampling=sampling))

    async def _beside(self, call: Callable[[], T]) -> T:
        """The result of a call in a thread, one at a time."""
        self.waiting += 1
        try:
            async with self._one:
                return await asyncio.wrap_future(run_in_thread(call, "read"))
        finally:
            self.waiting -= 1

    def _compiled(self, asked: AskedGrammar) -> Grammar:
        field, kind, given = asked
        try:
            if self._grammars is None:
                size = self.limits.vocabulary
                self._grammars = Grammars(self._of_thread, self._eos_token_ids, size)
            make: Callable[[Any], Grammar] = getattr(self._grammars, kind)
            return make(given)
        except UserError as error:
            raise refused(error, field) from None

    def _read(
        self, known: KnownFields, body: bytes, tokenizer: PreTrainedTokenizerBase
    ) -> ReadRequest:
        asked: TextRequest = parse(known, body)
        prompts = asked.prompts()
        sampling = self.limits.sampling_of(asked)
        self.limits.require(asked, len(prompts))
        for prompt in prompts:
            self._require_short(prompt, asked)
        calls = self._calls(asked, tokenizer)
        try:
            ids = [prompt_ids(prompt, tokenizer, **asked.template) for prompt in prompts]
        except UserError as error:
            raise refused(error, asked.asks) from None
        job = Job(
            ids,
            self.limits.new_tokens(asked, max(map(len, ids))),
            sampling,
            asked.texts,
            asked.seed,
            asked.stops,
            asked.ignore_eos,
            asked.likeliest,
            asked.draftsmith.trace,
            asked.store,
            asked.draftsmith.label,
            frozenset() if calls is None else calls.shown,
        )
        return ReadRequest(asked, job, calls)

    def _calls(self, asked: TextRequest, tokenizer: PreTrainedTokenizerBase) -> Calls | None:
        """Reads the calls of an answer, if it may have some."""
        if not isinstance(asked, Tooled):
            return None
        if any(message["role"] == "tool" or "tool_calls" in message for message in asked.said):
            require_tools(tokenizer, asked.asks)
        if not asked.called:
            return None
        return Calls(tokenizer, asked.called, asked.tool_choice, asked.parallel_tool_calls)

    def _require_short(self, prompt: Prompt, asked: TextRequest) -> None:
        """Refuse a prompt that has too many tokens for certain, before it is turned into tokens."""
        least = 0
        if prompt and isinstance(prompt[0], int):
            least = len(prompt)
        elif self._longest is not None:
            least = -(-_characters(prompt) // self._longest)
        if least >= self.limits.context:
            raise self.limits.too_long(asked.asks, f"it has {least} tokens or more")


def refused(error: UserError, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that the decode refuses."""
    return ApiError(400, str(error), param=param, code=code)


def _characters(prompt: Prompt) -> int:
    """The characters of a prompt that are no white space: a tokenizer may drop that."""
    texts = [prompt] if isinstance(prompt, str) else [str(x["content"]) for x in prompt]  # type: ignore[index]
    return sum(map(len, (part for text in texts for part in text.split())))


def longest_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """No token stands for more characters of a text than this. None: it is not known, because a
    token for unknown text, or a normalizer, may stand for any number."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = getattr(backend, "model", None)
    if not isinstance(model, BPE) or not (model.byte_fallback or model.unk_token is None):
        return None
    # Composed forms (NFC) make one character of at most four.
    return 4 * max(map(len, tokenizer.get_vocab()))
