"""A request while it is answered, seen from the event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send
from transformers import PreTrainedTokenizerBase

from train.serve import requests as engine_requests
from train.serve.answer_tokens import AnswerTokens, TokenBytes
from train.serve.answers import Answer, AnswerText, Piece
from train.serve.engine import Engine
from train.serve.errors import ApiError
from train.serve.requests import Choice, Event, Refusal
from train.serve.schema import Asked

STATUS = {
    "full": 503,
    "draining": 503,
    "memory": 503,
    "waited": 429,
    "overran": 504,
    "failed": 500,
    "unread": 408,
}
UNREAD_EVENTS = 256  # of a text, which wait for a client that does not read
SEND_SECONDS = 60.0  # in which a client takes what is sent at once

T = TypeVar("T")


class Running:
    """A request that the engine answers, seen from the event loop. Raises Refusal and UserError as
    `Engine.submit`. limit: tokens of each text. random_bits: makes seeds."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        asked: Asked,
        prompts: list[list[int]],
        limit: int,
        random_bits: Callable[[int], int],
    ) -> None:
        loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._engine = engine
        self.choices: list[Choice] = []
        for prompt in prompts:
            # Equal prompts of one request get different texts, unless it names a seed.
            seed = random_bits(62) if asked.seed is None else asked.seed
            self.choices += [
                Choice(len(self.choices) + sample, prompt, seed, sample)
                for sample in range(asked.texts)
            ]

        def deliver(new: Event) -> None:
            # The loop is closed if the service was ended by force.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._take, new)

        self._texts = [AnswerText(tokenizer, asked.stops) for _ in self.choices]
        self._tokens: list[AnswerTokens] = []
        if asked.likeliest is not None or asked.draftsmith.trace:
            token_bytes = TokenBytes(tokenizer)
            self._tokens = [AnswerTokens(tokenizer, token_bytes) for _ in self.choices]
        self._request = engine_requests.Request(
            self.choices,
            limit,
            asked.sampling(engine.decoder.sampling),
            deliver,
            asked.stops,
            asked.ignore_eos,
            asked.likeliest,
            asked.draftsmith.trace,
            asked.store,
            asked.draftsmith.label,
        )
        self._engine.submit(self._request)

    def _take(self, new: Event) -> None:
        if self._events.qsize() < UNREAD_EVENTS * len(self.choices):
            self._events.put_nowait(new)
        elif not self._request.cancelled:
            self.cancel()
            self._events = asyncio.Queue()
            message = f"the client has left {UNREAD_EVENTS} parts of each text unread"
            self._events.put_nowait(Refusal("unread", message))

    def cancel(self) -> None:
        """The answer is sent, or is given up. Its places are free."""
        self._engine.cancel(self._request)

    async def pieces(self) -> AsyncIterator[Piece]:
        """The parts of the texts as they become final. Raises ApiError if the engine refuses the
        request."""
        left = len(self.choices)
        lengths, generated = [0] * left, [0] * left
        while left:
            new = await self._events.get()
            if isinstance(new, Refusal):
                raise as_api_error(new)
            index, reason = new.choice.index, new.reason
            text = self._texts[index]
            piece = Piece(index, text.add(new.tokens, ended=reason is not None), reason)
            generated[index] += len(new.tokens)
            piece.generated = generated[index]
            lengths[index] += len(piece.text)
            if self._tokens:
                self._tokens[index].add(new)
                ended = reason is not None
                piece.tokens = self._tokens[index].take(lengths[index], ended=ended)
            if reason is not None:
                left -= 1
                piece.reason = "stop" if text.stopped else reason
            if piece.text or reason is not None:
                yield piece

    async def whole(self, request: Request, answer: Answer) -> Response:
        """The complete answer."""

        async def collect() -> list[Piece]:
            texts = [Piece(choice.index, "", None) for choice in self.choices]
            async for piece in self.pieces():
                texts[piece.index] = texts[piece.index].joined(piece)
            return texts

        try:
            texts = await unless_hung_up(request, collect())
        except BaseException:
            self.cancel()
            raise
        return _Whole(self, answer.whole(texts), lossy_header(answer.lossy))

    async def stream(self, request: Request, answer: Answer) -> Response:
        """The answer as events. It begins with the first piece, so that a request which gets none
        has the status of its error."""
        pieces = self.pieces()
        try:
            first = await unless_hung_up(request, anext(pieces))
        except BaseException:
            self.cancel()
            raise
        return _Stream(self, _events_of(answer, first, pieces), lossy_header(answer.lossy))


async def _events_of(
    answer: Answer, first: Piece, pieces: AsyncIterator[Piece]
) -> AsyncIterator[bytes]:
    for event in answer.opening():
        yield event
    try:
        async for piece in _after(first, pieces):
            for event in answer.part(piece):
                yield event
    except ApiError as error:
        for event in answer.failure(error):
            yield event
        return
    for event in answer.closing():
        yield event


class _Sent(Response):
    """An answer of a running request, which ends when it is sent, or when the client hangs up or
    does not take it in time."""

    running: Running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(SEND_SECONDS):
                await send(message)

        try:
            # The server closes the connection of an answer without an end.
            with contextlib.suppress(TimeoutError):
                await super().__call__(scope, receive, send_in_time)
        finally:
            self.running.cancel()


class _Whole(_Sent, JSONResponse):
    def __init__(self, running: Running, content: Any, headers: dict[str, str]) -> None:
        super().__init__(content, headers=headers)
        self.running = running


class _Stream(_Sent, StreamingResponse):
    def __init__(
        self, running: Running, events: AsyncIterator[bytes], headers: dict[str, str]
    ) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no", **headers}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self.running = running


def lossy_header(rule: str | None) -> dict[str, str]:
    """The header of an answer whose texts a lossy rule may have changed."""
    return {} if rule is None else {"x-draftsmith-lossy": rule}


async def unless_hung_up(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`. Raises ClientDisconnect as soon as the client hangs up, and cancels
    the work. For requests whose body has been read."""

    async def hang_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    result, gone = asyncio.ensure_future(work), asyncio.ensure_future(hang_up())
    try:
        await asyncio.wait({result, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not result.done():
            raise ClientDisconnect
        return result.result()
    finally:
        for task in (result, gone):
            task.cancel()


async def _after(first: T, rest: AsyncIterator[T]) -> AsyncIterator[T]:
    yield first
    async for item in rest:
        yield item


def as_api_error(refusal: Refusal) -> ApiError:
    return ApiError(
        STATUS[refusal.reason],
        str(refusal),
        kind="server_error",
        code=refusal.reason,
        retry_after=refusal.retry_after,
    )
