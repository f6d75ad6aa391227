"""The routes of the service."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp
from transformers import PreTrainedTokenizerBase

from decode.base.errors import UserError
from decode.grammars import Grammars
from draftsmith.net.access import LOCAL, Guard
from draftsmith.net.events import event
from draftsmith.net.page import page_routes
from draftsmith.serve.batching.request_batcher import RequestBatcher
from draftsmith.serve.batching.requests import Refusal
from draftsmith.serve.live_settings import Settings
from draftsmith.serve.middleware import RequestIds
from draftsmith.serve.openai.answers import ApiAnswer, ChatAnswer, CompletionAnswer
from draftsmith.serve.openai.api_errors import ApiError, refused
from draftsmith.serve.openai.contract import Contract, parse
from draftsmith.serve.openai.openai_requests import (
    ADAPTER_LOAD,
    ADAPTER_UNLOAD,
    CHAT,
    COMPLETION,
    RESPONSES,
    SETTINGS,
    SettingsChange,
)
from draftsmith.serve.openai.reading import SHORT, BodyReader, RequestLimits
from draftsmith.serve.openai.responses import ResponsesAnswer
from draftsmith.serve.running import Running, as_api_error

LONGEST_BODY = 2 << 20  # bytes; a prompt of 128k tokens has about 0.6 MB
_STATIC = Path(__file__).parent / "static"
_LIVE_SECONDS = 0.5
_ANY = ("GET", "POST", "DELETE")
# The client went away: nobody reads this status. nginx has the same for its log.
HUNG_UP = 499


@dataclass
class Service:
    """What the routes need. tokenizer: not used by other threads. names: the names of the model,
    the first in answers. max_tokens: the most tokens of one text; None: what the context holds.
    guard: who may call. seeds: for requests that name none."""

    batcher: RequestBatcher
    settings: Settings
    tokenizer: PreTrainedTokenizerBase
    names: Sequence[str]
    guard: Guard = LOCAL
    max_tokens: int | None = None
    seeds: random.Random = field(default_factory=random.Random)
    started: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        context, capacity = self.batcher.decoder.lm.max_positions, self.batcher.bounds.capacity
        learns = self.settings.learner is not None
        decoder = self.batcher.decoder
        size = decoder.vocab_size
        limits = RequestLimits(self.names, context, self.max_tokens, capacity, learns, size)
        self.reader = BodyReader(
            self.tokenizer,
            limits,
            lambda tokenizer: Grammars(tokenizer, decoder.eos.tolist(), size),
        )

    def close(self, seconds: float) -> None:
        """End the decode now, and save what was learnt. It takes about `seconds` seconds at most.
        Raises UserError if the decode had ended by an error."""
        self.batcher.drain(0)
        self.batcher.join(seconds)
        if self.settings.learner is not None:
            self.settings.learner.close(seconds)
        if self.batcher.error is not None:
            raise UserError(
                f"the decode has failed: {self.batcher.error}; see the log, and start the service "
                "again"
            ) from self.batcher.error

    def app(self) -> Starlette:
        """The ASGI application."""
        get, post = ["GET"], ["POST"]
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=post),
                Route("/v1/completions", self._complete, methods=post),
                Route("/v1/responses", self._respond, methods=post),
                Route("/v1/responses/{rest:path}", self._not_kept, methods=_ANY),
                Route("/v1/models", self._models, methods=get),
                Route("/v1/models/{name:path}", self._model, methods=get),
                Route("/health", self._health, methods=get),
                Route("/metrics", self._metrics, methods=get),
                Route("/v1/load_lora_adapter", self._load_adapter, methods=post),
                Route("/v1/unload_lora_adapter", self._unload_adapter, methods=post),
                Route("/admin/settings", self._settings, methods=get),
                Route("/admin/settings", self._change, methods=post),
                *page_routes(_STATIC, self._figures),
            ],
            exception_handlers={
                ApiError: _error_response,
                HTTPException: _http_error,
                ClientDisconnect: _hung_up,
                Exception: _bug,
            },
        )

    def guarded(self) -> ASGIApp:
        """The application behind its guard."""
        return RequestIds(self.guard.around(self.app()))

    async def _figures(self) -> AsyncIterator[bytes]:
        """The figures of the batcher twice a second, for the page."""
        while self.batcher.alive:
            yield event({"seconds": round(time.monotonic(), 3), **self.batcher.live()})
            await asyncio.sleep(_LIVE_SECONDS)

    # --- routes -----------------------------------------------------------------------------------

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, CHAT, ChatAnswer)

    async def _complete(self, request: Request) -> Response:
        return await self._answer(request, COMPLETION, CompletionAnswer)

    async def _respond(self, request: Request) -> Response:
        return await self._answer(request, RESPONSES, ResponsesAnswer)

    async def _not_kept(self, request: Request) -> Response:
        message = "answers are not kept, so none can be read or deleted; keep what you need"
        raise ApiError(404, message, code="not_kept")

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described_model()]})

    async def _model(self, request: Request) -> Response:
        self.reader.limits.require_model(request.path_params["name"])
        return JSONResponse(self._described_model())

    async def _health(self, request: Request) -> Response:
        batcher = self.batcher
        state = "ok" if batcher.alive and not batcher.draining else "draining"
        health = {"status": state, "lossy": self.settings.lossy}
        return JSONResponse(health, 200 if state == "ok" else 503)

    async def _metrics(self, request: Request) -> Response:
        return Response(self.batcher.metrics.text(), media_type="text/plain; version=0.0.4")

    async def _settings(self, request: Request) -> Response:
        return JSONResponse(self.settings.to_dict() | {"changeable": SettingsChange.fields()})

    async def _change(self, request: Request) -> Response:
        asked = parse(SETTINGS, await _body(request, SHORT))
        await _changed(self.settings.change(asked))
        return JSONResponse(self.settings.to_dict())

    async def _load_adapter(self, request: Request) -> Response:
        asked = await self._asked_adapter(request, ADAPTER_LOAD)
        await _changed(
            self.settings.change_adapters(
                lambda routes, decode: routes.with_adapter(asked.lora_name, asked.lora_path, decode)
            )
        )
        return self._adapters()

    async def _unload_adapter(self, request: Request) -> Response:
        asked = await self._asked_adapter(request, ADAPTER_UNLOAD)
        try:
            await _changed(
                self.settings.change_adapters(lambda routes, _: routes.without(asked.lora_name))
            )
        except KeyError:
            message = f"the adapter {asked.lora_name!r} is not loaded"
            raise ApiError(404, message, param="lora_name", code="not_found") from None
        return self._adapters()

    async def _asked_adapter(self, request: Request, contract: Contract) -> Any:
        if self.settings.adapters.directory is None:
            message = "this service was started without --adapters DIR, so it loads no adapters"
            raise ApiError(404, message, code="not_found")
        return parse(contract, await _body(request, SHORT))

    def _adapters(self) -> Response:
        return JSONResponse({"success": True, "adapters": list(self.settings.adapters.loaded)})

    # --- what they share --------------------------------------------------------------------------

    def _described_model(self) -> dict[str, Any]:
        return {
            "id": self.names[0],
            "object": "model",
            "created": self.started,
            "owned_by": "draftsmith",
        }

    async def _answer(
        self, request: Request, contract: Contract, kind: Callable[..., ApiAnswer]
    ) -> Response:
        """Read a request and answer it. A full service refuses it before it is read."""
        body = await _body(request)
        try:
            self.batcher.require_room(1 + self.reader.waiting)
            read = await self.reader.read(contract, body)
            asked = read.asked
            running = Running(
                self.batcher,
                self.tokenizer,
                asked,
                read.prompts,
                read.new_tokens,
                self.seeds.getrandbits,
                read.grammar,
            )
        except UserError as error:
            raise refused(error) from None
        except Refusal as refusal:
            raise as_api_error(refusal) from None
        answer = kind(
            self.names[0],
            self.settings.fingerprint,
            asked,
            list(map(len, read.prompts)),
            running.choices,
            self.settings.lossy_for(asked.sampling(self.batcher.decoder.sampling)),
            read.calls,
        )
        if asked.stream:
            return await running.stream(request, answer)
        return await running.whole(request, answer)


async def _changed(change: "Future[None]") -> None:
    """Wait for a change of settings. Raises ApiError."""
    try:
        await asyncio.wrap_future(change)
    except UserError as error:
        raise refused(error) from None
    except Refusal as refusal:
        raise as_api_error(refusal) from None


async def _body(request: Request, longest: int = LONGEST_BODY) -> bytes:
    """The body, if it has at most `longest` bytes. A body that says that it is longer is not
    read."""
    too_long = ApiError(413, f"the body is longer than {longest:,} bytes; shorten it")
    if int(request.headers.get("content-length", 0)) > longest:
        raise too_long
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > longest:
            raise too_long
        parts.append(part)
    return b"".join(parts)


def _response(error: ApiError) -> Response:
    return JSONResponse(error.body, error.status, error.headers)


async def _error_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return _response(ApiError(error.status_code, message, headers=error.headers))


async def _hung_up(request: Request, error: Exception) -> Response:
    return Response(status_code=HUNG_UP)


async def _bug(request: Request, error: Exception) -> Response:
    return _response(ApiError(500, "an error in the service; see its log", kind="server_error"))
