"""A small server that runs a tiny target, for tests of answers by a server. It has faults."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from decode.drafters import DRAFTERS
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder
from decode.model.loading import Target
from tests.stages import make_stage, plan_stage, run_stage
from tests.tiny import tiny_target
from train.base.stage import StageInputs, StageResult
from train.data.answer_files import read_answers

NEW = 12
SETTINGS = {"max_new_tokens": NEW, "part_prompts": 4, "seed": 5}
SERVER = {"concurrency": 3, "retries": 2, "probe_prompts": 2}


@dataclass
class AnswerEngine:
    """Answers `/v1/completions` and llama-server's `/completion`.

    faults: responses to the next requests, in place of answers. never: prompts that get this status
    each time; None: a broken connection. change: of a reply, with the number of the request.
    bodies: what was asked, without what a fault took. seconds: when.
    """

    target: Target = field(default_factory=tiny_target)
    faults: list[Response | float] = field(default_factory=list)
    never: list[list[int]] = field(default_factory=list)
    status: int | None = 500
    change: Callable[[dict[str, Any], int], None] = lambda reply, number: None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    seconds: list[float] = field(default_factory=list)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", lambda _: JSONResponse({"data": [{"id": "tiny"}]})),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/completion", self._llama, methods=["POST"]),
            ]
        )

    def asked(self) -> Counter[int]:
        """How often each row was asked, by its seed."""
        return Counter(body["seed"] for body in self.bodies)

    async def _fault(self, request: Request) -> Response | None:
        self.seconds.append(time.monotonic())
        self.keys.add(request.headers.get("authorization"))
        if not self.faults:
            body = await request.json()
            if body["prompt"] in self.never:
                return Response("it failed", self.status) if self.status else broken_answer()
            self.bodies.append(body)
            return None
        fault = self.faults.pop(0)
        if isinstance(fault, Response):
            return fault
        await asyncio.sleep(fault)
        return Response(status_code=500)

    async def _completions(self, request: Request) -> Response:
        if fault := await self._fault(request):
            return fault
        body = self.bodies[-1]
        sampling = Sampling(
            body["temperature"], top_k=max(body["top_k"], 0), top_p=body["top_p"],
            min_p=body["min_p"], repetition_penalty=body["repetition_penalty"],
        )  # fmt: skip
        tokens = self._decode(body["prompt"], body["max_tokens"], sampling, body["seed"])
        ended = tokens[-1] in body.get("stop_token_ids", self.target.eos_token_ids)
        reply = {
            "model": body["model"],
            "choices": [
                {
                    "text": self.target.tokenizer.decode(tokens[: -1 if ended else None]),
                    "finish_reason": "stop" if ended else "length",
                    "stop_reason": tokens[-1] if ended else None,
                    "token_ids": tokens,
                    "prompt_token_ids": body["prompt"],
                }
            ],
            "usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(tokens)},
        }
        self.change(reply, len(self.bodies))
        return JSONResponse(reply)

    async def _llama(self, request: Request) -> Response:
        if fault := await self._fault(request):
            return fault
        body = self.bodies[-1]
        sampling = Sampling(body["temperature"])
        tokens = self._decode(body["prompt"], body["n_predict"], sampling, body["seed"])
        ended = tokens[-1] in self.target.eos_token_ids
        reply = {
            "content": "",
            "tokens": tokens[: -1 if ended else None],
            "stop_type": "eos" if ended else "limit",
            "tokens_evaluated": len(body["prompt"]),
        }
        if k := body.get("n_probs"):
            top = token_logprobs(self.target, body["prompt"], tokens, k)
            reply["completion_probabilities"] = [{"logprob": max(row.values())} for row in top]
        self.change(reply, len(self.bodies))
        return JSONResponse(reply)

    def _decode(self, prompt: list[int], tokens: int, sampling: Sampling, seed: int) -> list[int]:
        decoder = Decoder(
            self.target.model,
            DRAFTERS["none"](),
            eos_token_ids=self.target.eos_token_ids,
            sampling=sampling,
        )
        return decoder.decode([prompt], tokens, seed=seed).outputs[0]


def broken_answer() -> Response:
    """An answer whose connection breaks in its middle."""

    async def pieces() -> AsyncIterator[bytes]:
        yield json.dumps({"choices": []}).encode()
        raise ConnectionResetError

    return StreamingResponse(pieces(), headers={"content-length": "5000"})


def dripping_answer() -> Response:
    """An answer that comes a byte at a time, and takes a second."""

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" "
            await asyncio.sleep(0.05)

    return StreamingResponse(pieces())


def token_logprobs(target: Target, prompt: list[int], tokens: list[int], k: int) -> list[Any]:
    """`top_logprobs` as vLLM writes them: the drawn token first, then the likeliest k."""
    ids = torch.tensor([prompt + tokens[:-1]])
    with torch.inference_mode():
        logits = target.model(ids).logits[0, len(prompt) - 1 :]
    rows = []
    for token, log_p in zip(tokens, logits.log_softmax(-1), strict=True):
        best = [token, *log_p.topk(k).indices.tolist()]
        rows.append({f"token_id:{i}": float(log_p[i]) for i in best})
    return rows


def answer_with(
    context: StageInputs, url: Any, name: str = "answers", settings: Any = None, **server: Any
) -> StageResult:
    server = SERVER | {"url": url} | server
    stage = make_stage("generate", name, **(SETTINGS | (settings or {})), server=server)
    plan_stage(context, stage)
    return run_stage(context, stage)


def answers_of(context: StageInputs, name: str = "answers") -> list[dict[str, Any]]:
    return list(read_answers(context.directory / name))


def without_reason(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in answer.items() if k != "finish_reason"} for answer in answers]
