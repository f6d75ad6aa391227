"""Asks the server that is audited: token ids both ways, and what it says of its answers."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import httpx2

from decode.base.errors import UserError
from decode.draw.sampling import Sampling
from decode.model.loading import Target
from draftsmith.auditing.texts import EngineText
from train.engines.answers.protocols import (
    Answer,
    AnswerReader,
    AskSettings,
    Completions,
    LlamaServer,
    Reply,
    WantedAnswer,
)
from train.engines.ask_servers import (
    REFUSED_ROW,
    ServerClient,
    Unanswered,
    excerpt,
    run_apart,
)
from train.engines.counters import DraftCounts, counts_beside
from train.settings.server_config import ServerConfig

# Of AnswerReader: an answer with these is no answer of the target's, whatever its tokens.
NO_END = ("goes on after an end-of-text token", "longer than max_new_tokens")

# Of a token each; None: the server gives none.
LogP = list[float] | None
T = TypeVar("T")
LARGEST = 1e9  # of a log-probability; NaN is none
# What reading an answer of another shape raises.
NO_ANSWER = (LookupError, TypeError, ValueError, AttributeError, RecursionError, ArithmeticError)


class _Ids(Completions):
    """Without the fields that only some engines know; all of them end texts by themselves. With
    the log-probabilities of the tokens, if they are wanted."""

    several = True  # answers to one request

    def body(self, row: WantedAnswer, settings: AskSettings) -> dict[str, Any]:
        body = super().body(row, settings)
        for name in ("stop_token_ids", "skip_special_tokens", "return_tokens_as_token_ids"):
            body.pop(name, None)
        return body

    def parts(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The body of each answer. Raises what an index or a key does."""
        return [body | {"choices": [choice]} for choice in body["choices"]]

    def reply(self, part: dict[str, Any]) -> tuple[Reply, LogP]:
        """An answer with the log-probabilities of its tokens. Raises as `Protocol.read`."""
        # Names of tokens are not unique.
        log_p = (part["choices"][0].pop("logprobs", None) or {}).get("token_logprobs")
        return self.read(part), _numbers(log_p)


class _LlamaIds(LlamaServer):
    """With the log-probabilities of the tokens, if they are wanted."""

    several = False

    def body(self, row: WantedAnswer, settings: AskSettings) -> dict[str, Any]:
        body = super().body(row, settings) | {"n_probs": settings.logprobs}
        return body | ({"id_slot": 0, "cache_prompt": False} if settings.alone else {})

    def parts(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """As `_Ids.parts`."""
        return [body]

    def reply(self, part: dict[str, Any]) -> tuple[Reply, LogP]:
        """As `_Ids.reply`."""
        log_p = [token["logprob"] for token in part.get("completion_probabilities", ())]
        return self.read(part), _numbers(log_p)


def _numbers(log_p: Any) -> LogP:
    """Log-probabilities that a server gives. None: it gives none that can be judged."""
    if not isinstance(log_p, list) or not log_p:
        return None
    fit = all(isinstance(x, int | float) and abs(x) < LARGEST for x in log_p)
    return log_p if fit else None


_PROTOCOLS: dict[str, _Ids | _LlamaIds] = {"completions": _Ids(), "llama-server": _LlamaIds()}


def gives_several(protocol: str) -> bool:
    """Whether a request of this protocol can ask for several answers."""
    return _PROTOCOLS[protocol].several


@dataclass
class AskedTexts:
    """What a server answered. texts: of the answers that can be judged. faults: what is wrong with
    answers, whatever their tokens are. left_out: why answers cannot be judged. problem: the first
    of them that the server's way to answer may explain. seconds: for all. counts: drafted and
    accepted tokens, if the answers themselves say so."""

    texts: list[EngineText] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    problem: UserError | None = None
    seconds: float = 0.0
    counts: DraftCounts = field(default_factory=DraftCounts)

    def leave_out(self, problem: UserError, count: int = 1) -> None:
        """So many answers cannot be judged."""
        self.problem = self.problem or problem
        self.left_out += [str(problem)] * count

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return sum(len(text.tokens) for text in self.texts) / max(self.seconds, 1e-9)


class AuditedServer(ServerClient):
    """The server under audit. protocol: how it is asked for texts."""

    when_lost = "Start it, and then the same command"

    def __init__(self, url: str, config: ServerConfig, target: Target) -> None:
        super().__init__(url, config)
        self.protocol, self._target = _PROTOCOLS[config.protocol], target

    def setting(self, name: str) -> str:
        return "--" + name.replace("_", "-")

    async def named(self) -> str | None:
        """The name of the model in requests; None for a protocol that has none."""
        return await self.model() if self.protocol.several else None

    def decoded(self, response: httpx2.Response, read: Callable[[Any], T]) -> T:
        """What `read` makes of the JSON of an answer. Raises UserError for an answer that is none,
        or has another shape."""
        return self.understood(response, lambda: read(response.json()))

    def understood(self, response: httpx2.Response, read: Callable[[], T]) -> T:
        """What `read` makes of an answer, as `decoded`."""
        self.accepted(response)
        try:
            return read()
        except NO_ANSWER as error:
            raise UserError(
                f"{response.request.url} replied what is no answer ({type(error).__name__}: "
                f"{error}): {excerpt(response)}. Check --protocol"
            ) from error

    async def texts(
        self, row: WantedAnswer, number: int, settings: AskSettings, each: int, asked: AskedTexts
    ) -> None:
        """Ask for answers to one prompt in one request, and put them where they belong. Answers of
        another shape, without token ids, refused, or that do not come are left out. Raises
        UserError for a server that cannot be asked at all, and ServerLost for one that is not
        there, or answers nothing any more."""
        body = self.protocol.body(row, settings)
        if each > 1:
            body["n"] = each
        try:
            response = await self.ask(self.protocol, body, settings)
        except Unanswered as error:
            asked.leave_out(error, each)
            return
        if response.status_code in REFUSED_ROW:
            problem = UserError(
                f"{self.url}{self.protocol.path} refuses a request with token ids: "
                f"{excerpt(response)}. Expected a server that takes token ids as a prompt and "
                "every field of the request; for llama-server set --protocol llama-server"
            )
            asked.leave_out(problem, each)
            return
        self.accepted(response)
        try:
            parts, counts = self.decoded(
                response, lambda body: (self.protocol.parts(body), counts_beside(body))
            )
        except UserError as error:
            asked.leave_out(error, each)
            return
        asked.counts += counts or DraftCounts()
        if len(parts) != each:
            asked.faults.append(f"{len(parts)} answers came in place of {each}")
        replies = []
        for part in parts:
            try:
                reply, log_p = self.understood(response, partial(self.protocol.reply, part))
                replies.append(reply)
                self._put(reply, log_p, row, number, settings, asked)
            except UserError as error:
                asked.leave_out(error)
        if len(replies) == len(parts):
            asked.faults += _miscounted(replies)

    def _put(
        self,
        reply: Reply,
        log_p: LogP,
        row: WantedAnswer,
        number: int,
        settings: AskSettings,
        asked: AskedTexts,
    ) -> None:
        """Put one answer where it belongs. Raises UserError if it cannot be the target's."""
        if reply.tokens is None:
            raise UserError(
                f"{self.url} gives no token ids, and text does not say which tokens were "
                "drawn. Expected return_token_ids (vLLM from 0.10.2, SGLang, draftsmith "
                "serve); for llama-server set --protocol llama-server"
            )
        reader = AnswerReader.of_target(self._target, replace(settings, logprobs=0))
        answer = reader.answer(reply, row.prompt, self.url)
        asked.faults += _faults(reply, answer, settings)
        if not answer.left_out:
            if log_p is not None and len(log_p) < len(answer.tokens):
                log_p = None
            asked.texts.append(EngineText(number, row.prompt, answer.tokens, log_p))
        elif answer.left_out not in NO_END:
            asked.left_out.append(answer.left_out)


def _miscounted(replies: Sequence[Reply]) -> list[str]:
    """What usage gets wrong of the answers to one request."""
    if any(reply.tokens is None for reply in replies):
        return []
    tokens = sum(len(reply.tokens or []) for reply in replies)
    # Engines differ in whether the end-of-text token counts.
    ended = sum(reply.finish_reason == "stop" for reply in replies)
    count = replies[0].token_count if replies else None
    if count is None or abs(count - tokens) <= ended:
        return []
    return [f"usage counts {count} tokens, but {tokens} came"]


def _faults(reply: Reply, answer: Answer, settings: AskSettings) -> list[str]:
    """What the answer's own fields get wrong."""
    faults, tokens = [], reply.tokens or []
    if answer.left_out in NO_END:
        faults.append(f"an answer is {answer.left_out}")
    if reply.finish_reason == "length" and len(tokens) != settings.max_new_tokens:
        faults.append(
            f"an answer ended with length after {len(tokens)} tokens; {settings.max_new_tokens} "
            "were asked for"
        )
    return faults


def ask_texts(
    url: str,
    target: Target,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    config: ServerConfig,
    *,
    samples: int,
    max_new_tokens: int,
    seed: int,
    logprobs: bool = False,
    each: int = 1,
    alone: bool = False,
) -> AskedTexts:
    """Send `samples` requests for each prompt, each with a seed of its own. logprobs: also ask for
    the log-probabilities of their tokens. each: answers to one request. alone: see `AskSettings`.
    Raises UserError as `AuditedServer.texts`, and if no answer at all can be judged, and
    ServerLost."""
    asked = AskedTexts()
    rows = [
        (WantedAnswer(number + sample * len(prompts), list(prompt)), number)
        for sample in range(samples)
        for number, prompt in enumerate(prompts)
    ]

    async def ask(server: AuditedServer) -> None:
        settings = AskSettings(
            sampling, max_new_tokens, seed, target.eos_token_ids, int(logprobs),
            await server.named(), alone,
        )  # fmt: skip
        waiting = iter(rows)

        async def work() -> None:
            for row, number in waiting:
                await server.texts(row, number, settings, each, asked)

        async with asyncio.TaskGroup() as group:
            for _ in range(config.concurrency):
                group.create_task(work())

    begin = time.monotonic()
    asking(url, config, target, ask)
    asked.seconds = time.monotonic() - begin
    if asked.problem is not None and not asked.texts and not asked.faults:
        raise asked.problem
    return asked


def asking(
    url: str,
    config: ServerConfig,
    target: Target,
    ask: Callable[[AuditedServer], Coroutine[Any, Any, None]],
) -> None:
    """Run `ask` with the server. Raises the first of several errors."""

    async def run() -> None:
        async with AuditedServer(url, config, target) as server:
            await ask(server)

    try:
        run_apart(run())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
