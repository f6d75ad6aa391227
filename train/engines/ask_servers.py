"""Asks servers for answers: many requests at a time, with retries."""

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from email.utils import parsedate_to_datetime
from typing import Any, ClassVar, Self

import httpx2

from decode.base.errors import UserError
from train.engines.answers.protocols import (
    PROTOCOLS,
    Answer,
    AnswerReader,
    AskSettings,
    Protocol,
    WantedAnswer,
)
from train.settings.server_config import EngineServer, ServerConfig

CONNECT_SECONDS = 10.0
RETRIED = (408, 409, 429)
# Of one row, such as a prompt that is too long for the engine.
REFUSED_ROW = (400, 413, 422)
REFUSED = "refused by the server"
UNANSWERED = "not answered by the server"
OTHER = -1  # the number of a row that only shows whether a server answers
FIRST_WAIT = 0.5
LONGEST_WAIT = 30.0


class ServerLost(UserError):
    """A server does not answer any more. Others can take its rows. reached: there was a server, so
    that it may be this request alone that it does not answer."""

    def __init__(self, message: str, *, reached: bool = False) -> None:
        super().__init__(message)
        self.reached = reached


class Unanswered(UserError):
    """A server does not answer a request, but others."""


class ServerClient:
    """One server. Enter it before the first request; it closes its connections at the end.

    when_lost: what is not lost with the server, and what to do then, for messages.
    """

    when_lost: ClassVar[str]

    def __init__(self, url: str, config: EngineServer) -> None:
        self.url, self._config = url, config
        key = config.key()
        self._client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            # The time of a complete answer is limited where it is sent for: httpx limits the time
            # between two bytes.
            timeout=httpx2.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx2.Limits(max_connections=None),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def model(self) -> str:
        """The name that the server has for the model. Raises UserError as `send`, and for a server
        that lists none."""
        if self._config.model is not None:
            return self._config.model
        response = self.accepted(await self.send("GET", "/v1/models"))
        try:
            return str(response.json()["data"][0]["id"])
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise UserError(
                f"{self.url}/v1/models lists no model: {excerpt(response)}. "
                f"Set {self.setting('model')}"
            ) from error

    def accepted(self, response: httpx2.Response) -> httpx2.Response:
        """The response. Raises UserError if its status is not 200."""
        if response.status_code != 200:
            raise UserError(
                f"{response.request.url} refuses with status {response.status_code}: "
                f"{excerpt(response)}. Check {self.setting('url')}, {self.setting('model')} and "
                f"{self.setting('key_env')}"
            )
        return response

    def setting(self, name: str) -> str:
        """What messages call a field of the config."""
        return f"server.{name}"

    async def headers(self) -> dict[str, str]:
        """Called before each attempt: its headers."""
        return {}

    def gave_up(self, headers: Mapping[str, str]) -> None:
        """Called after an attempt without a usable response. headers: the headers of the
        attempt."""

    async def send(self, method: str, path: str, body: Any = None) -> httpx2.Response:
        """The first response that is no reason to try again. Raises ServerLost after the last
        attempt, and for a server that wants to be left alone for longer than an answer may take."""
        limit, tries = self._config.timeout_seconds, 0
        problem, wait, reached = "", 0.0, False
        while tries <= self._config.retries and wait <= limit:
            await asyncio.sleep(wait)
            # Rows that fail together do not come back together.
            wait = min(FIRST_WAIT * 2**tries, LONGEST_WAIT, limit) * random.uniform(0.75, 1.0)
            tries += 1
            headers = await self.headers()
            try:
                async with asyncio.timeout(limit):
                    response = await self._client.request(
                        method, self.url + path, json=body, headers=headers
                    )
            except TimeoutError:
                problem = f"no complete answer in {limit:g} s ({self.setting('timeout_seconds')})"
                reached = True
            except httpx2.RequestError as error:
                problem = f"{type(error).__name__} {error}".strip()
                # A request that ends an engine does so at its first attempt.
                reached |= not isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout)
            except ValueError as error:  # it has what JSON or UTF-8 cannot hold
                raise UserError(f"a request to {self.url} cannot be written: {error}") from error
            else:
                if response.status_code not in RETRIED and response.status_code < 500:
                    return response
                problem, reached = f"status {response.status_code}: {excerpt(response)}", True
                wait = max(wait, _retry_after(response))
            self.gave_up(headers)
        if wait > limit:
            asked = self.setting("timeout_seconds")
            problem += f"; it asks to wait {wait:.0f} s, more than {asked}"
            reached = False  # by its own word it answers no request
        raise ServerLost(
            f"{self.url} did not answer in {tries} attempts ({problem}). {self.when_lost}",
            reached=reached,
        )

    async def ask(
        self, protocol: Protocol, body: Any, settings: AskSettings, path: str | None = None
    ) -> httpx2.Response:
        """As `send_or`, to the protocol's path or another. The other request is a token after a
        token."""
        token = settings.eos_token_ids[0] if settings.eos_token_ids else 0
        other = protocol.body(WantedAnswer(OTHER, [token]), replace(settings, max_new_tokens=1))
        return await self.send_or(
            path or protocol.path, body, lambda: self.send("POST", protocol.path, other)
        )

    async def send_or(
        self, path: str, body: Any, other: Callable[[], Awaitable[Any]]
    ) -> httpx2.Response:
        """As `send`. Raises Unanswered if the server answers `other`, a request that asks for
        little. Then this request is at fault, and else the server, for which it raises
        ServerLost."""
        try:
            return await self.send("POST", path, body)
        except ServerLost as error:
            if error.reached:
                with suppress(ServerLost):
                    await other()
                    raise Unanswered(f"{error}. It answers other requests") from error
            raise


class AnswerServer(ServerClient):
    """A server that answers prompts."""

    when_lost = (
        "Finished answers are kept: when the server is up, the same command goes on with the others"
    )

    def __init__(
        self, url: str, config: ServerConfig, settings: AskSettings, reader: AnswerReader
    ) -> None:
        super().__init__(url, config)
        self._settings, self._reader = settings, reader
        self._spoken, self._protocol = config.spoken, PROTOCOLS[config.spoken]

    async def __aenter__(self) -> Self:
        if self._spoken == "completions":
            self._settings = replace(self._settings, model=await self.model())
        return self

    async def answer(self, row: WantedAnswer) -> Answer:
        """The answer to a row's prompt; one without tokens if the server refuses it, or answers
        others only. Raises ServerLost if the server does not answer, and UserError if it refuses
        every request, or replies something else."""
        body = self._protocol.body(row, self._settings)
        try:
            response = await self.ask(self._protocol, body, self._settings)
        except Unanswered as error:
            return Answer([], str(error), UNANSWERED)
        if response.status_code in REFUSED_ROW:
            return Answer([], excerpt(response), REFUSED)
        try:
            reply = self._protocol.read(self.accepted(response).json())
            return self._reader.answer(reply, row.prompt, self.url)
        except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
            raise UserError(
                f"{self.url}{self._protocol.path} replied what is no answer "
                f"({type(error).__name__}: {error}): {excerpt(response)}. "
                f"Does it speak the protocol {self._spoken!r}?"
            ) from error


def ask_servers(
    urls: Sequence[str],
    rows: Iterable[WantedAnswer],
    config: ServerConfig,
    settings: AskSettings,
    reader: AnswerReader,
    on_answer: Callable[[WantedAnswer, Answer], None],
    concurrency: int | None = None,
    say: Callable[[str], None] = lambda problem: None,
) -> None:
    """Ask for every row, and call `on_answer` with each answer as it comes. rows: taken one by one,
    as servers become free. concurrency: requests at a time for each server; None: the config's.
    If one of several servers does not answer any more, the others take its rows. A row that a
    server alone does not answer is asked of the others; if none answers it, it is left out. `say`
    is called with both problems. Raises UserError as `AnswerServer.answer` does, ServerLost for the
    last server only, and cancels all other requests."""
    run_apart(
        _ask(
            [AnswerServer(url, config, settings, reader) for url in urls],
            iter(rows),
            concurrency or config.concurrency,
            on_answer,
            say,
        )
    )


def run_apart(work: Coroutine[Any, Any, None]) -> None:
    """`asyncio.run`, in a thread of its own where this one has a loop already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(work)
    else:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(asyncio.run, work).result()


async def _ask(
    servers: Sequence[AnswerServer],
    rows: Iterator[WantedAnswer],
    concurrency: int,
    on_answer: Callable[[WantedAnswer, Answer], None],
    say: Callable[[str], None],
) -> None:
    up = list(servers)
    free = {server: asyncio.Semaphore(concurrency) for server in servers}

    async def answered(row: WantedAnswer, first: AnswerServer) -> Answer:
        """By the first server that answers it. At least one is up, else the last has raised."""
        answer = Answer([], "", UNANSWERED)
        for server in (first, *(server for server in servers if server is not first)):
            if server not in up:
                continue
            try:
                async with free[server]:
                    answer = await server.answer(row)
            except ServerLost as error:
                if up == [server]:
                    raise
                if server in up:
                    up.remove(server)
                    say(f"{error}. The other servers take its rows")
                continue
            if answer.left_out != UNANSWERED:
                return answer
        say(f"{answer.finish_reason}, so this one is left out")
        return answer

    async def work(server: AnswerServer) -> None:
        # Shared by all: each row has one taker.
        while server in up and (row := next(rows, None)) is not None:
            on_answer(row, await answered(row, server))

    async with AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server)
        tasks = [
            asyncio.create_task(work(server)) for _ in range(concurrency) for server in servers
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def excerpt(response: httpx2.Response) -> str:
    """The beginning of a response, for messages."""
    return response.text[:300]


def _retry_after(response: httpx2.Response) -> float:
    """The seconds to wait that a response asks for, as a number or a date; 0 if it does not."""
    value = response.headers.get("retry-after", "")
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (TypeError, ValueError, OverflowError):
            return 0.0
    return 0.0 if math.isnan(seconds) else max(seconds, 0.0)
