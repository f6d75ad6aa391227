"""The routes of the service."""

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp
from transformers import PreTrainedTokenizerBase

from decode.errors import UserError
from decode.text import Prompt, prompt_ids
from train.net.guard import LOCAL, Guard
from train.serve.answers import Answer, ChatAnswer, CompletionAnswer
from train.serve.engine import Engine
from train.serve.page import page_routes
from train.serve.requests import Refusal
from train.serve.running import Running, as_api_error
from train.serve.schema import (
    ApiError,
    Asked,
    ChatRequest,
    CompletionRequest,
    SettingsChange,
    parse,
    refused,
)
from train.serve.settings import Settings

LONGEST_BODY = 2 << 20  # bytes; a prompt of 128k tokens has about 0.6 MB
# The client went away: nobody reads this status. nginx has the same for its log.
HUNG_UP = 499


@dataclass
class Service:
    """What the routes need. tokenizer: not used by other threads. max_tokens: of one text; None:
    what the context holds. guard: who may call. seeds: for requests that name none."""

    engine: Engine
    settings: Settings
    tokenizer: PreTrainedTokenizerBase
    model_name: str
    guard: Guard = LOCAL
    max_tokens: int | None = None
    seeds: random.Random = field(default_factory=random.Random)
    started: int = field(default_factory=lambda: int(time.time()))

    def close(self, seconds: float) -> None:
        """End the decode now, and save what was learnt. It takes about so many seconds at most."""
        self.engine.drain(0)
        self.engine.join(seconds)
        if self.settings.learner is not None:
            self.settings.learner.close(seconds)

    def app(self) -> Starlette:
        """The ASGI application."""
        get, post = ["GET"], ["POST"]
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=post),
                Route("/v1/completions", self._complete, methods=post),
                Route("/v1/models", self._models, methods=get),
                Route("/v1/models/{name:path}", self._model, methods=get),
                Route("/health", self._health, methods=get),
                Route("/metrics", self._metrics, methods=get),
                Route("/admin/settings", self._settings, methods=get),
                Route("/admin/settings", self._change, methods=post),
                *page_routes(self.engine),
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
        return self.guard.around(self.app())

    # --- routes -----------------------------------------------------------------------------------

    async def _chat(self, request: Request) -> Response:
        asked = await self._parse(ChatRequest, request)
        messages = [message.for_template() for message in asked.messages]
        if messages[-1]["role"] == "assistant":
            raise ApiError(400, "the last message is from assistant; expected user or system")
        return await self._answer(request, asked, [messages], ChatAnswer, "messages")

    async def _complete(self, request: Request) -> Response:
        asked = await self._parse(CompletionRequest, request)
        return await self._answer(request, asked, asked.prompts(), CompletionAnswer, "prompt")

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described_model()]})

    async def _model(self, request: Request) -> Response:
        self._require_model(request.path_params["name"])
        return JSONResponse(self._described_model())

    async def _health(self, request: Request) -> Response:
        engine = self.engine
        state = "ok" if engine.alive and not engine.draining else "draining"
        health = {"status": state, "lossy": self.settings.lossy}
        return JSONResponse(health, 200 if state == "ok" else 503)

    async def _metrics(self, request: Request) -> Response:
        return Response(self.engine.metrics.text(), media_type="text/plain; version=0.0.4")

    async def _settings(self, request: Request) -> Response:
        return JSONResponse(self.settings.to_dict() | {"changeable": SettingsChange.fields()})

    async def _change(self, request: Request) -> Response:
        asked = parse(SettingsChange, await _body(request))
        try:
            await asyncio.wrap_future(self.settings.change(asked))
        except UserError as error:
            raise refused(error) from None
        except Refusal as refusal:
            raise as_api_error(refusal) from None
        return JSONResponse(self.settings.to_dict())

    # --- what they share --------------------------------------------------------------------------

    def _described_model(self) -> dict[str, Any]:
        return {
            "id": self.model_name,
            "object": "model",
            "created": self.started,
            "owned_by": "draftsmith",
        }

    def _require_model(self, name: str) -> None:
        if name != self.model_name:
            message = f"the model {name!r} does not exist; this service has {self.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def _parse(self, kind: type[Asked], request: Request) -> Asked:
        """Read a request. A full service refuses it before its text is turned into tokens."""
        body = await _body(request)
        try:
            self.engine.require_room(1)
        except Refusal as refusal:
            raise as_api_error(refusal) from None
        return parse(kind, body)

    async def _answer(
        self,
        request: Request,
        asked: ChatRequest | CompletionRequest,
        prompts: list[Any],
        kind: type[Answer],
        param: str,
    ) -> Response:
        self._require_model(asked.model)
        if asked.store and self.settings.learner is None:
            message = "store is true, but this service does not learn (--learn); leave it out"
            raise ApiError(400, message, param="store", code="unsupported_parameter")
        texts = len(prompts) * asked.n
        capacity = self.engine.bounds.capacity
        if not 1 <= texts <= capacity:
            message = f"the request asks for {texts} texts; expected 1 to {capacity}"
            raise ApiError(400, message, param=param if asked.n == 1 else "n")
        try:
            ids = [self._ids(prompt, param) for prompt in prompts]
            limit = self._limit(asked, max(map(len, ids)), param)
            running = Running(
                self.engine, self.tokenizer, asked, ids, limit, self.seeds.getrandbits
            )
        except UserError as error:
            raise refused(error) from None
        except Refusal as refusal:
            raise as_api_error(refusal) from None
        written = kind(
            self.model_name,
            self.settings.fingerprint,
            asked,
            list(map(len, ids)),
            running.choices,
            self.settings.lossy_for(asked.sampling(self.engine.decoder.sampling)),
        )
        if asked.stream:
            return await running.stream(request, written, asked.include_usage)
        return await running.whole(request, written)

    def _ids(self, prompt: Prompt, param: str) -> list[int]:
        try:
            return prompt_ids(prompt, self.tokenizer)
        except UserError as error:
            raise refused(error, param) from None

    def _limit(self, asked: ChatRequest | CompletionRequest, longest: int, param: str) -> int:
        """How many tokens a text may have. longest: of the prompts."""
        context = self.engine.decoder.lm.max_positions
        room = context - longest
        if room < 1:
            message = f"the prompt has {longest} tokens, and the context holds {context}"
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        name, limit = asked.limit
        if limit is None:
            return room if self.max_tokens is None else min(room, self.max_tokens)
        if limit > room:
            message = (
                f"the prompt has {longest} tokens and {name} is {limit}, and the context holds "
                f"{context}; ask for at most {room}"
            )
            raise ApiError(400, message, param=name, code="context_length_exceeded")
        if self.max_tokens is not None and limit > self.max_tokens:
            message = f"{name} is {limit}; this service gives at most {self.max_tokens}"
            raise ApiError(400, message, param=name, code="invalid_value")
        return limit


async def _body(request: Request) -> bytes:
    """The body, if it is not too long."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > LONGEST_BODY:
            raise ApiError(413, f"the body is longer than {LONGEST_BODY:,} bytes; shorten it")
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
    return _response(ApiError(error.status_code, message))


async def _hung_up(request: Request, error: Exception) -> Response:
    return Response(status_code=HUNG_UP)


async def _bug(request: Request, error: Exception) -> Response:
    return _response(ApiError(500, "an error in the service; see its log", kind="server_error"))
