"""Asks servers for answers: many requests at a time, with retries."""

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2

from decode.errors import UserError
from train.answers.protocols import PROTOCOLS, Answer, AnswerReader, AskSettings, Row
from train.answers.server_config import ServerConfig

CONNECT_SECONDS = 10.0
RETRIED = (408, 409, 429)
# Of one row, such as a prompt that is too long for the engine.
REFUSED_ROW = (400, 413, 422)
REFUSED = "refused by the server"
FIRST_WAIT = 0.5
LONGEST_WAIT = 30.0


class AnswerServer:
    """One server. Enter it before the first request; it closes its connections at the end."""

    def __init__(
        self, url: str, config: ServerConfig, settings: AskSettings, reader: AnswerReader
    ) -> None:
        self.url, self._config, self._settings, self._reader = url, config, settings, reader
        self._protocol = PROTOCOLS[config.spoken]
        key = config.key()
        self._client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(config.timeout_seconds, connect=CONNECT_SECONDS),
            limits=httpx2.Limits(max_connections=None),
            trust_env=False,
        )

    async def __aenter__(self) -> "AnswerServer":
        if self._config.spoken == "completions":
            model = self._config.model or await self._first_model()
            self._settings = replace(self._settings, model=model)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def answer(self, row: Row) -> Answer:
        """The answer to a row's prompt. Raises UserError if the server does not answer, refuses
        every request, or replies something else."""
        body = self._protocol.body(row, self._settings)
        response = await self._send("POST", self._protocol.path, body)
        if response.status_code in REFUSED_ROW:
            return Answer([], _excerpt(response), REFUSED)
        try:
            reply = self._protocol.read(self._accepted(response).json())
            return self._reader.answer(reply, row.prompt, self.url)
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise UserError(
                f"{self.url}{self._protocol.path} replied what is no answer "
                f"({type(error).__name__}: {error}): {_excerpt(response)}. "
                f"Does it speak the protocol {self._config.spoken!r}?"
            ) from error

    async def _first_model(self) -> str:
        response = self._accepted(await self._send("GET", "/v1/models"))
        try:
            return str(response.json()["data"][0]["id"])
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise UserError(
                f"{self.url}/v1/models lists no model: {_excerpt(response)}. Set server.model"
            ) from error

    def _accepted(self, response: httpx2.Response) -> httpx2.Response:
        if response.status_code != 200:
            raise UserError(
                f"{response.request.url} refuses with status {response.status_code}: "
                f"{_excerpt(response)}. Check server.url, server.model and server.key_env"
            )
        return response

    async def _send(self, method: str, path: str, body: Any = None) -> httpx2.Response:
        """The first response that is no reason to try again. Raises UserError after the last
        attempt."""
        problem, wait = "", 0.0
        for attempt in range(self._config.retries + 1):
            await asyncio.sleep(wait)
            # Rows that fail together do not come back together.
            wait = min(FIRST_WAIT * 2**attempt, LONGEST_WAIT) * random.uniform(0.75, 1.25)
            try:
                response = await self._client.request(method, self.url + path, json=body)
            except httpx2.RequestError as error:
                problem = f"{type(error).__name__} {error}".strip()
                continue
            if response.status_code not in RETRIED and response.status_code < 500:
                return response
            problem = f"status {response.status_code}: {_excerpt(response)}"
            wait = max(wait, _retry_after(response))
        raise UserError(
            f"{self.url} did not answer in {self._config.retries + 1} attempts ({problem}). "
            "Finished answers are kept: when the server is up, the same command goes on with the "
            "others"
        )


def ask_servers(
    urls: Sequence[str],
    rows: Iterable[Row],
    config: ServerConfig,
    settings: AskSettings,
    reader: AnswerReader,
    on_answer: Callable[[Row, Answer], None],
    concurrency: int | None = None,
) -> None:
    """Ask for every row, and call `on_answer` with each answer as it comes. rows: taken one by one,
    as servers become free. concurrency: requests at a time for each server; None: the config's.
    Raises UserError as `AnswerServer.answer` does, and cancels all other requests."""
    asyncio.run(
        _ask(
            [AnswerServer(url, config, settings, reader) for url in urls],
            iter(rows),
            concurrency or config.concurrency,
            on_answer,
        )
    )


async def _ask(
    servers: Sequence[AnswerServer],
    rows: Iterator[Row],
    concurrency: int,
    on_answer: Callable[[Row, Answer], None],
) -> None:
    async def work(server: AnswerServer) -> None:
        for row in rows:  # shared by all: each row has one taker
            on_answer(row, await server.answer(row))

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


def _excerpt(response: httpx2.Response) -> str:
    return response.text[:300]


def _retry_after(response: httpx2.Response) -> float:
    """The seconds to wait that a response asks for, as a number or a date; 0 if it does not."""
    value = response.headers.get("retry-after", "")
    try:
        return max(float(value), 0.0)
    except ValueError:
        pass
    try:
        return max(parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except (TypeError, ValueError):
        return 0.0
