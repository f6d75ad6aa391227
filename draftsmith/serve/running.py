"""A request while it is answered, seen from the event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from decode.base.threads import run_in_thread
from draftsmith.net.events import EVENT_HEADERS
from draftsmith.net.hang_up import unless_hung_up
from draftsmith.serve.batching.answer_tokens import Piece
from draftsmith.serve.batching.request_batcher import RequestBatcher
from draftsmith.serve.batching.requests import DecodeRequest, Event, Refusal
from draftsmith.serve.openai.answers import ApiAnswer
from draftsmith.serve.openai.reading import ReadRequest

UNREAD_EVENTS = 256  # of a text, which wait for a client that does not read
SHORT_ANSWER = 512  # tokens; such an answer is written in the event loop


class RunningRequest:
    """A request that the batcher answers, seen from the event loop. Raises Refusal and UserError as
    `RequestBatcher.submit`. random_bits: makes seeds."""

    def __init__(
        self,
        batcher: RequestBatcher,
        read: ReadRequest,
        random_bits: Callable[[int], int],
    ) -> None:
        loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._batcher, self._streams, self._unread = batcher, read.asked.stream, False

        def deliver(new: Event) -> None:
            # The loop is closed if the service was ended by force.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._take, new)

        self._request = DecodeRequest(read.job, deliver, random_bits)
        self.choices = self._request.choices
        self._batcher.submit(self._request)

    def _take(self, new: Event) -> None:
        if self._unread:
            return
        if isinstance(new, Refusal) or self._events.qsize() < UNREAD_EVENTS * len(self.choices):
            self._events.put_nowait(new)
        else:
            self._unread = True
            self.cancel()
            self._events = asyncio.Queue()
            message = f"the client has left {UNREAD_EVENTS} parts of each text unread"
            self._events.put_nowait(Refusal("unread", message))

    def cancel(self) -> None:
        """The answer is sent, or is given up. Its places are free."""
        self._batcher.cancel(self._request)

    async def pieces(self) -> AsyncIterator[Piece]:
        """The parts of the texts as they become final. Raises the Refusal that ends them."""
        left = len(self.choices)
        while left:
            new = await self._events.get()
            if isinstance(new, Refusal):
                raise new
            left -= new.reason is not None
            yield new

    async def _collected(self, answer: ApiAnswer) -> list[Piece]:
        """All texts. A Refusal after a text is complete ends the others with what they have, and is
        raised if none is."""
        texts = [Piece(choice.index, "", None) for choice in self.choices]
        try:
            async for piece in self.pieces():
                texts[piece.index] = texts[piece.index].joined(piece)
        except Refusal as error:
            if not any(text.reason for text in texts):
                raise
            answer.error = error.body["error"]
        return [replace(text, reason=text.reason or "length") for text in texts]

    async def answer(self, request: Request, answer: ApiAnswer) -> ASGIApp:
        """The answer, whole or as events."""
        working = self._stream(answer) if self._streams else self._whole(answer)
        try:
            response = await unless_hung_up(request.receive, working)
        except BaseException:
            self.cancel()
            raise
        return _Sent(self, response)

    async def _whole(self, answer: ApiAnswer) -> Response:
        """The complete answer. A long one is written in a thread."""
        texts = await self._collected(answer)

        def write() -> Response:
            content, headers = to_json(answer.whole(texts)), lossy_header(answer.lossy)
            return Response(content, headers=headers, media_type="application/json")

        if answer.generated_tokens <= SHORT_ANSWER:
            return write()
        return await asyncio.wrap_future(run_in_thread(write, "write"))

    async def _stream(self, answer: ApiAnswer) -> Response:
        """The answer as events. It begins with the first piece, so that a request which gets none
        has the status of its error."""
        pieces = self.pieces()
        events = _events_of(answer, await anext(pieces), pieces)
        headers = EVENT_HEADERS | lossy_header(answer.lossy)
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)


async def _events_of(
    answer: ApiAnswer, first: Piece, rest: AsyncIterator[Piece]
) -> AsyncIterator[bytes]:
    yield b"".join([*answer.opening(), *answer.part(first)])
    try:
        async for piece in rest:
            yield b"".join(answer.part(piece))
    except Refusal as error:
        yield b"".join(answer.failure(error))
        return
    yield b"".join(answer.closing())


@dataclass(frozen=True)
class _Sent:
    """An answer of a running request, which ends when it is sent, or when the client hangs up."""

    running: RunningRequest
    answer: Response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.answer(scope, receive, send)
        finally:
            self.running.cancel()


def lossy_header(rule: str | None) -> dict[str, str]:
    """The header of an answer whose texts a lossy rule may have changed."""
    return {} if rule is None else {"x-draftsmith-lossy": rule}
