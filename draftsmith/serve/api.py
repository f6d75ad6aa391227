"""The routes of the service."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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
from draftsmith.net.access import LOCAL, Guard, Paths
from draftsmith.net.api_error import ApiError
from draftsmith.net.body import BodyMemory, Held
from draftsmith.net.connections import HEALTH
from draftsmith.net.events import event
from draftsmith.net.limits import ServerLimits
from draftsmith.net.page import OPEN, page_routes
from draftsmith.serve.anthropic.messages_answer import MessagesAnswer, as_anthropic
from draftsmith.serve.anthropic.messages_request import COUNT, MESSAGES
from draftsmith.serve.batching.request_batcher import RequestBatcher
from draftsmith.serve.live_settings import LiveSettings
from draftsmith.serve.middleware import KeyHeader, RequestIds
from draftsmith.serve.openai.answers import ApiAnswer, ChatAnswer, CompletionAnswer
from draftsmith.serve.openai.known_fields import KnownFields, parse
from draftsmith.serve.openai.openai_requests import (
    ADAPTER_LOAD,
    ADAPTER_UNLOAD,
    CHAT,
    COMPLETION,
    RESPONSES,
    SETTINGS,
    SettingsChange,
)
from draftsmith.serve.openai.reading import SHORT, BodyReader, RequestLimits, refused
from draftsmith.serve.openai.responses import ResponsesAnswer
from draftsmith.serve.running import RunningRequest

PATHS = Paths(
    {HEALTH: "it says whether the service runs and is lossy, and nothing else", **OPEN},
    frozenset({"/admin/", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"}),
)
MESSAGES_PATH, COUNT_PATH = MESSAGES_PATHS = "/v1/messages", "/v1/messages/count_tokens"
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
    guard: who may call. limits: of its clients. seeds: for requests that name none."""

    batcher: RequestBatcher
    settings: LiveSettings
    tokenizer: PreTrainedTokenizerBase
    names: Sequence[str]
    guard: Guard = LOCAL
    limits: ServerLimits = field(default_factory=ServerLimits)
    max_tokens: int | None = None
    seeds: random.Random = field(default_factory=random.Random)
    started: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        decoder = self.batcher.decoder
        limits = RequestLimits(
            self.names,
            decoder.lm.max_positions,
            self.max_tokens,
            self.batcher.bounds.capacity,
            self.settings.learner is not None,
            decoder.vocab_size,
            decoder.sampling,
        )
        self.memory = BodyMemory(self.limits)
        self.reader = BodyReader(self.tokenizer, limits, decoder.eos.tolist())

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
        chat = partial(self._answer, known=CHAT, kind=ChatAnswer)
        complete = partial(self._answer, known=COMPLETION, kind=CompletionAnswer)
        respond = partial(self._answer, known=RESPONSES, kind=ResponsesAnswer)
        message = partial(self._answer, known=MESSAGES, kind=MessagesAnswer)
        shown = (ApiError, UserError, HTTPException, Exception)
        return Starlette(
            routes=[
                Route("/v1/chat/completions", chat, methods=post),
                Route("/v1/completions", complete, methods=post),
                Route("/v1/responses", respond, methods=post),
                Route("/v1/responses/{rest:path}", self._not_kept, methods=_ANY),
                Route(MESSAGES_PATH, message, methods=post),
                Route(COUNT_PATH, self._count, methods=post),
                Route("/v1/models", self._models, methods=get),
                Route("/v1/models/{name:path}", self._model, methods=get),
                Route(HEALTH, self._health, methods=get),
                Route("/metrics", self._metrics, methods=get),
                Route("/v1/load_lora_adapter", self._load_adapter, methods=post),
                Route("/v1/unload_lora_adapter", self._unload_adapter, methods=post),
                Route("/admin/settings", self._settings, methods=get),
                Route("/admin/settings", self._change, methods=post),
                *page_routes(_STATIC, self._figures, _LIVE_SECONDS, self.limits),
            ],
            exception_handlers={
                ClientDisconnect: _hung_up,
                **dict.fromkeys(shown, _error_response),
            },
        )

    def guarded(self) -> ASGIApp:
        """The application behind its guard."""
        guarded = replace(self.guard, paths=PATHS).around(self.app())
        return RequestIds(KeyHeader(guarded, MESSAGES_PATHS))

    async def _figures(self) -> bytes | None:
        """The figures of the batcher, for the page."""
        if not self.batcher.alive:
            return None
        learner = self.settings.learner
        learnt = {} if learner is None else learner.live()
        return event({"seconds": round(time.monotonic(), 3), **self.batcher.live(), **learnt})

    # --- routes -----------------------------------------------------------------------------------

    async def _not_kept(self, request: Request) -> Response:
        message = "answers are not kept, so none can be read or deleted; keep what you need"
        raise ApiError(404, message, code="not_kept")

    async def _count(self, request: Request) -> Response:
        read = await self.reader.read(COUNT, await self._body(request, LONGEST_BODY))
        return JSONResponse({"input_tokens": sum(map(len, read.job.prompts))})

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
        asked = parse(SETTINGS, await self._body(request, SHORT))
        await asyncio.wrap_future(self.settings.change(asked))
        return JSONResponse(self.settings.to_dict())

    async def _load_adapter(self, request: Request) -> Response:
        asked = await self._asked_adapter(request, ADAPTER_LOAD)
        await asyncio.wrap_future(
            self.settings.change_adapters(
                lambda routes, decode: routes.with_adapter(asked.lora_name, asked.lora_path, decode)
            )
        )
        return self._adapters()

    async def _unload_adapter(self, request: Request) -> Response:
        asked = await self._asked_adapter(request, ADAPTER_UNLOAD)
        try:
            await asyncio.wrap_future(
                self.settings.change_adapters(lambda routes, _: routes.without(asked.lora_name))
            )
        except KeyError:
            message = f"the adapter {asked.lora_name!r} is not loaded"
            raise ApiError(404, message, param="lora_name", code="not_found") from None
        return self._adapters()

    async def _asked_adapter(self, request: Request, known: KnownFields) -> Any:
        if self.settings.adapters.directory is None:
            message = "this service was started without --adapters DIR, so it loads no adapters"
            raise ApiError(404, message, code="not_found")
        return parse(known, await self._body(request, SHORT))

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
        self, request: Request, known: KnownFields, kind: Callable[..., ApiAnswer]
    ) -> ASGIApp:
        """Read a request and answer it. A full service refuses it before it is read."""
        self.batcher.require_room(1 + self.reader.waiting)
        body = await self._body(request, LONGEST_BODY)
        self.batcher.require_room(1 + self.reader.waiting)
        read = await self.reader.read(known, body)
        running = RunningRequest(self.batcher, read, self.seeds.getrandbits)
        answer = kind(
            self.names[0],
            self.settings.fingerprint,
            read,
            running.choices,
            self.settings.lossy_for(read.job.sampling),
        )
        return await running.answer(request, answer)

    async def _body(self, request: Request, longest: int) -> bytes:
        held = Held(self.memory, request.scope)
        try:
            return await held.read(request.scope, request.receive, longest)
        finally:
            held.leave()


async def _error_response(request: Request, error: Exception) -> Response:
    """An error in the shape of the route's API. Any other error is a bug."""
    match error:
        case ApiError():
            said = error
        case UserError():
            said = refused(error)
        case HTTPException():
            message = f"{request.method} {request.url.path}: {error.detail}"
            said = ApiError(error.status_code, message, headers=error.headers)
        case _:
            said = ApiError(500, "an error in the service; see its log")
    if request.url.path in MESSAGES_PATHS:
        return JSONResponse(as_anthropic(said), said.status, said.headers)
    return said.response()


async def _hung_up(request: Request, error: Exception) -> Response:
    return Response(status_code=HUNG_UP)
