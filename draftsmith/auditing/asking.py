"""Asks the server that is audited: token ids both ways, and what it says of its answers."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx2

from decode.base.errors import UserError
from decode.draw.sampling import Sampling
from decode.model.loading import Target
from draftsmith.auditing.texts import EngineText
from train.engines.answers.protocols import (
    PROTOCOLS,
    Answer,
    AnswerReader,
    AskSettings,
    Completions,
    Protocol,
    Reply,
    Row,
)
from train.engines.ask_servers import REFUSED_ROW, ServerClient, excerpt, run_apart
from train.engines.server_config import ServerConfig

# Of AnswerReader: an answer with these is no answer of the target's, whatever its tokens.
NO_END = ("goes on after an end-of-text token", "longer than max_new_tokens")


class _Ids(Completions):
    """Without the fields that only some engines know; all of them end texts by themselves. With
    the log-probabilities of the tokens, if they are wanted."""

    def body(self, row: Row, settings: AskSettings) -> dict[str, Any]:
        body = super().body(row, settings)
        for name in ("stop_token_ids", "skip_special_tokens", "return_tokens_as_token_ids"):
            body.pop(name, None)
        return body


_PROTOCOLS: dict[str, Protocol] = {
    "completions": _Ids(),
    "llama-server": PROTOCOLS["llama-server"],
}


@dataclass
class Asked:
    """What a server answered. texts: of the answers that can be judged. faults: what is wrong with
    answers, whatever their tokens are. left_out: why answers cannot be judged."""

    texts: list[EngineText] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


class AuditedServer(ServerClient):
    """The server under audit."""

    kept = "Start it, and then the same command"

    def __init__(self, url: str, config: ServerConfig, target: Target) -> None:
        super().__init__(url, config)
        self._protocol, self._target = _PROTOCOLS[config.protocol], target

    def setting(self, name: str) -> str:
        return "--" + name.replace("_", "-")

    async def text(self, row: Row, number: int, settings: AskSettings, asked: Asked) -> None:
        """Ask for one answer, and put it where it belongs. Raises UserError for a server that
        refuses the request or gives no token ids."""
        body = self._protocol.body(row, settings)
        response = await self.send("POST", self._protocol.path, body)
        if response.status_code in REFUSED_ROW:
            raise UserError(
                f"{self.url}{self._protocol.path} refuses a request with token ids: "
                f"{excerpt(response)}. Expected a server that takes token ids as a prompt and "
                "every field of the request; for llama-server set --protocol llama-server"
            )
        reply, log_p = self._read(response)
        if reply.tokens is None:
            raise UserError(
                f"{self.url} gives no token ids, and text does not say which tokens were drawn. "
                "Expected return_token_ids (vLLM from 0.10.2, SGLang, draftsmith serve); for "
                "llama-server set --protocol llama-server"
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

    def _read(self, response: httpx2.Response) -> tuple[Reply, list[float] | None]:
        """The reply, and its tokens' log-probabilities if it has them."""
        try:
            body = self.accepted(response).json()
            log_p = None
            if self._protocol.path == Completions.path:
                # Names of tokens are not unique.
                logprobs = body["choices"][0].pop("logprobs", None) or {}
                log_p = logprobs.get("token_logprobs")
            return self._protocol.read(body), log_p
        except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
            raise UserError(
                f"{self.url}{self._protocol.path} replied what is no answer "
                f"({type(error).__name__}: {error}): {excerpt(response)}. Check --protocol"
            ) from error


def _faults(reply: Reply, answer: Answer, settings: AskSettings) -> list[str]:
    """What the answer's own fields get wrong."""
    faults, tokens = [], reply.tokens or []
    if answer.left_out in NO_END:
        faults.append(f"an answer is {answer.left_out}")
    # Engines differ in whether the end-of-text token counts.
    ended = {-1, 0, 1} if reply.finish_reason == "stop" else {0}
    if reply.token_count is not None and reply.token_count - len(tokens) not in ended:
        faults.append(f"usage counts {reply.token_count} tokens, but {len(tokens)} came")
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
    logprobs: bool,
    on_answer: Callable[[int], None] = lambda done: None,
) -> Asked:
    """Ask for `samples` answers to each prompt, each with a seed of its own. logprobs: also for
    the log-probabilities of their tokens. Raises UserError as `AuditedServer.text`, and ServerLost.
    """
    asked = Asked()
    rows = [
        (Row(number + sample * len(prompts), list(prompt)), number)
        for sample in range(samples)
        for number, prompt in enumerate(prompts)
    ]

    async def ask() -> None:
        async with AuditedServer(url, config, target) as server:
            model = await server.model() if config.protocol == "completions" else None
            settings = AskSettings(
                sampling, max_new_tokens, seed, target.eos_token_ids, int(logprobs), model
            )
            waiting, done = iter(rows), 0

            async def work() -> None:
                nonlocal done
                for row, number in waiting:
                    await server.text(row, number, settings, asked)
                    done += 1
                    on_answer(done)

            async with asyncio.TaskGroup() as group:
                for _ in range(config.concurrency):
                    group.create_task(work())

    try:
        run_apart(ask())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return asked
