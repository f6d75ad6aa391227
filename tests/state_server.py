"""A small server that hands out a tiny target's hidden states, for tests. It has faults."""

import asyncio
import fcntl
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from decode.model.loading import Target
from tests.tiny import tiny_target

Tensors = dict[str, torch.Tensor]


@dataclass
class StatesEngine:
    """Answers `/v1/completions` as vLLM does with `extract_hidden_states`.

    ids: of the layers. faults: of the next requests, a response or a change of what is written;
    one that returns None writes nothing. always: such a change of all others. never: texts that get
    status 500 each time. asked: how often each text was asked for. most: the most files that were
    there at a time. delays: seconds until the next requests get their reply.
    """

    directory: Path
    ids: Sequence[int]
    target: Target = field(default_factory=tiny_target)
    faults: list[Response | Callable[[Tensors], Tensors | None]] = field(default_factory=list)
    always: Callable[[Tensors], Tensors | None] = lambda tensors: tensors
    never: list[list[int]] = field(default_factory=list)
    asked: Counter[tuple[int, ...]] = field(default_factory=Counter)
    most: int = 0
    delays: list[float] = field(default_factory=list)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", lambda _: JSONResponse({"data": [{"id": "tiny"}]})),
                Route("/v1/completions", self._completions, methods=["POST"]),
            ]
        )

    def left(self) -> list[str]:
        """The files that nobody has deleted."""
        return [path.name for path in self.directory.iterdir()]

    async def _completions(self, request: Request) -> Response:
        fault = self.faults.pop(0) if self.faults else self.always
        if isinstance(fault, Response):
            return fault
        body = await request.json()
        assert (body["model"], body["max_tokens"]) == ("tiny", 1)
        tokens = body["prompt"]
        if tokens in self.never:
            self.asked[tuple(tokens)] += 1
            return Response("it failed", 500)
        name = f"cmpl-{request.headers['x-request-id']}-0-abc.safetensors"
        path = self.directory / name
        lock = open(f"{path}.lock", "w", encoding="utf-8")  # noqa: SIM115  # held until the file is written
        fcntl.flock(lock, fcntl.LOCK_EX)
        self.asked[tuple(tokens)] += 1
        await asyncio.sleep(self.delays.pop(0) if self.delays else 0)
        reply = {"choices": [{}], "kv_transfer_params": {"hidden_states_path": f"/there/{name}"}}
        return JSONResponse(
            reply, background=BackgroundTask(self._write, path, lock, tokens, fault)
        )

    async def _write(self, path: Path, lock: Any, tokens: list[int], fault: Any) -> None:
        await asyncio.sleep(0.002)
        with lock:
            tensors = fault(states_file(self.target, self.ids, tokens))
            if tensors is not None:
                save_file(tensors, path)
            self.most = max(self.most, len(list(self.directory.glob("*.safetensors"))))


@torch.inference_mode()
def states_file(target: Target, ids: Sequence[int], tokens: list[int]) -> Tensors:
    """What vLLM writes of a text. ids: of the layers."""
    layers = target.model(torch.tensor([tokens]), output_hidden_states=True)
    final: list[torch.Tensor] = []
    norm = target.model.base_model.norm
    # What the last norm reads, as vLLM gives it.
    hook = norm.register_forward_pre_hook(lambda _, inputs: final.append(inputs[0]))
    target.model(torch.tensor([tokens]))
    hook.remove()
    states = [*layers.hidden_states[:-1], final[0]]
    chosen = [states[i][0] for i in sorted(set(ids))]
    return {"hidden_states": torch.stack(chosen, 1), "token_ids": torch.tensor(tokens)}
