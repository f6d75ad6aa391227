"""Asks servers for the hidden states of samples: one request and one file for each.

vLLM writes the file after its reply (`extract_hidden_states`), and holds a lock beside it until it
is complete. The file is read once and deleted.

Shapes: n tokens of a sample, L layers, H hidden size.
"""

import asyncio
import contextlib
import random
import re
import threading
import time
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from decode.base.artifact import free_space
from decode.base.errors import UserError
from train.base.file_lock import lock_file
from train.data.chat_tokens import Sample
from train.engines.ask_servers import (
    FIRST_WAIT,
    LONGEST_WAIT,
    REFUSED_ROW,
    ServerClient,
    ServerLost,
    Unanswered,
    excerpt,
)
from train.engines.states.served_states import EngineLayers, file_bytes
from train.settings.server_config import StatesServer

PATH = "/v1/completions"
LOCK = ".lock"
# The longest time until another machine sees a file on a shared disk.
SEEN_SECONDS = 60.0
# Requests that are under way at the end may still write their files.
CLOSE_SECONDS = 10.0
REQUEST_ID = "X-Request-Id"  # vLLM makes it a part of the name of a request's file
# The bits of an exponent; all of them are set in infinities and NaN.
_EXPONENT = {
    torch.float32: (torch.int32, 0x7F800000),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
}

T = TypeVar("T")


class Unusable(Exception):
    """A file that another attempt may make good."""


@dataclass(frozen=True)
class StatesReader:
    """Reads and checks files of these layers."""

    layers: EngineLayers

    def size(self, tokens: int) -> int:
        """The bytes of a file."""
        layers = self.layers
        return file_bytes(len(layers.ids) * layers.hidden_size * layers.dtype.itemsize, tokens)

    def read(self, path: Path, tokens: Sequence[int]) -> Tensor:
        """[n, L, H] in the target's dtype. Raises Unusable, or UserError for what would be the same
        again. All work is numpy's: a thread that computes with torch keeps OpenMP threads."""
        seen, states = self.load(path, len(tokens))
        if seen != list(tokens):
            reason = "are others than those sent"
            if seen == list(tokens[: len(seen)]):
                reason = f"are {len(seen)} of {len(tokens)}; switch its prefix caching off"
            raise UserError(f"the tokens of the server's hidden states {reason}")
        return states

    def load(self, path: Path, longest: int) -> tuple[list[int], Tensor]:
        """The token ids of a file, and their states as `read` returns them. longest: the most
        tokens that it may have."""
        try:
            # Not mapped: a mapped file keeps its space on the disk after it is deleted.
            tensors = load(path.read_bytes())
            states, ids = tensors["hidden_states"], tensors["token_ids"]
        except (OSError, SafetensorError, KeyError) as error:
            if free_space(path.parent) < self.size(longest):
                raise UserError(
                    f"the disk of {path.parent} is full, so the server cannot write hidden states; "
                    "free some space there, or choose another directory"
                ) from error
            raise Unusable(f"{path.name} is not complete ({error})") from error
        layers = self.layers
        expected = (len(ids), len(layers.ids), layers.hidden_size)
        if tuple(states.shape) != expected or states.dtype != layers.dtype:
            raise UserError(
                f"the server's hidden states are {list(states.shape)} in {states.dtype}, expected "
                f"{list(expected)} in {layers.dtype}; start it with the run's target and dtype, "
                f"and with eagle_aux_hidden_state_layer_ids {layers.ids}"
            )
        kind, mask = _EXPONENT[layers.dtype]
        if bool(np.any(states.view(kind).numpy() & mask == mask)):
            raise Unusable("they have infinities or NaN")
        return ids.tolist(), states


class StatesClient(ServerClient):
    """One server. requester: is a part of the names of its files. in_flight: its requests."""

    when_lost = (
        "The newest checkpoint is kept: when the server is up, the same command goes on from it"
    )

    def __init__(
        self, url: str, config: StatesServer, reader: StatesReader, directory: Path, requester: str
    ) -> None:
        super().__init__(url, config)
        self._retries, self._seconds = config.retries, config.timeout_seconds
        self._reader, self._directory, self._requester = reader, directory, requester
        self.in_flight = self._count = 0
        self._model = ""
        # Of attempts without a response. The server may still write their files.
        self._given_up: set[str] = set()

    async def find_model(self) -> None:
        """Ask for the name of the model. Raises UserError as `model`."""
        self._model = await self.model()

    async def headers(self) -> dict[str, str]:
        await self._no_file_left()
        self._count += 1
        return {REQUEST_ID: f"{self._requester}-{self._count}"}

    def gave_up(self, headers: Mapping[str, str]) -> None:
        self._given_up.add(headers[REQUEST_ID])

    async def _no_file_left(self) -> None:
        """Delete the files of the attempts that were given up, and wait for those that the server
        writes now. Raises ServerLost if one is not complete after `timeout_seconds`."""
        begin, pause = time.monotonic(), 0.001
        while rest := self._unfinished():
            if time.monotonic() - begin > self._seconds:
                raise self._not_written(rest[0])
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.05)

    def _not_written(self, path: Path) -> ServerLost:
        return ServerLost(
            f"{self.url} did not complete {path.name} in {self._seconds:g} s "
            f"(server.timeout_seconds). {self.when_lost}"
        )

    def _unfinished(self) -> list[Path]:
        """Delete the complete files of the attempts that were given up, and forget these attempts:
        each has one file. Returns the files that the server writes now."""
        rest: list[Path] = []
        name = re.compile(re.escape(self._requester) + r"-\d+")
        locks = self._directory.glob(f"*{self._requester}-*{LOCK}") if self._given_up else ()
        for lock in list(locks):
            request = name.search(lock.name)
            if request is None or request[0] not in self._given_up:
                continue
            path = lock.with_name(lock.name.removesuffix(LOCK))
            if is_written(path) is False:
                rest.append(path)
            else:
                delete(path)
                self._given_up.discard(request[0])
        return rest

    async def states(self, sample: Sample) -> Tensor:
        """[n, L, H]. Raises ServerLost if the server does not answer, Unanswered if it answers
        other samples only, and UserError if it refuses the sample, replies something else, or
        writes no usable file in all attempts."""
        problem = ""
        for attempt in range(self._retries + 1):
            if attempt:
                wait = min(FIRST_WAIT * 2**attempt, LONGEST_WAIT)
                await asyncio.sleep(wait * random.uniform(0.75, 1.0))
            path = await self._ask(sample)
            try:
                await self._written(path)
                return await asyncio.to_thread(self._reader.read, path, sample.tokens)
            except Unusable as error:
                problem = str(error)
            except UserError as error:
                raise UserError(f"{self.url}, sample {sample.id}: {error}") from error
            finally:
                delete(path)
        raise UserError(
            f"{self.url} gave no usable hidden states of sample {sample.id} in "
            f"{self._retries + 1} attempts: {problem}. The newest checkpoint is kept"
        )

    def _body(self, tokens: Sequence[int]) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": list(tokens),
            "max_tokens": 1,
            "temperature": 0.0,
            "add_special_tokens": False,
        }

    async def _ask(self, sample: Sample) -> Path:
        """The file with a sample's states."""

        async def first_token() -> None:
            path = self._file(await self.send("POST", PATH, self._body(sample.tokens[:1])))
            try:
                await self._written(path)
            finally:
                delete(path)

        response = await self.send_or(PATH, self._body(sample.tokens), first_token)
        if response.status_code in REFUSED_ROW:
            raise UserError(
                f"{self.url} refuses sample {sample.id} with {len(sample.tokens)} tokens: "
                f"{excerpt(response)}. Start it with a larger --max-model-len, or set max_length"
            )
        return self._file(response)

    def _file(self, response: httpx2.Response) -> Path:
        """The file that a response names."""
        try:
            reply = self.accepted(response).json()
            name = Path(reply["kv_transfer_params"]["hidden_states_path"]).name
            return self._directory / name
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{self.url}{PATH} replied without hidden states: {excerpt(response)}. Start vLLM "
                "as docs/scale.md says, with extract_hidden_states"
            ) from error

    async def _written(self, path: Path) -> None:
        """Wait until the server has written a file. Raises ServerLost after `timeout_seconds`, and
        UserError if there is no lock after SEEN_SECONDS."""
        begin, pause = time.monotonic(), 0.001
        while True:
            waited, written = time.monotonic() - begin, is_written(path)
            if written:
                return
            if written is None and waited > SEEN_SECONDS:
                raise UserError(
                    f"the server wrote {path.name}, but {path.parent} does not have it; set "
                    "server.directory to the server's shared_storage_path, on a disk that both "
                    "machines see"
                )
            if written is False and waited > self._seconds:
                raise self._not_written(path)
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.05)


class StatesServers:
    """Several servers, asked by a thread of its own. Use it as a context.

    concurrency: requests at a time for each server. max_bytes: the most bytes of all files at a
    time; a larger file is alone. lost: messages on servers that do not answer any more, whose
    samples the others take, and on samples that no server answers. Raises UserError at the start if
    a server does not answer.
    """

    def __init__(
        self,
        clients: Sequence[StatesClient],
        reader: StatesReader,
        concurrency: int,
        max_bytes: int,
    ) -> None:
        self._clients, self._reader = clients, reader
        self._concurrency, self._max_bytes = concurrency, max_bytes
        self._up = list(clients)
        self._bytes, self._closing = 0, False
        self._under_way: set[asyncio.Task[Any] | None] = set()
        self.lost: deque[str] = deque()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="states", daemon=True)
        # Requests start in the order in which they were asked for.
        self._order, self._changed = asyncio.Lock(), asyncio.Event()

    def ask(self, sample: Sample) -> "Future[Tensor | None]":
        """The states of a sample, [n, L, H]; None if no server answers it, but other samples.
        Raises as `StatesClient.states`."""
        return self._begin(self._states(sample))

    def ask_each(self, sample: Sample) -> Iterator[tuple[str, Tensor | Unanswered]]:
        """The address of each server, with its states of a sample, or why it has none."""
        for client in self._clients:
            try:
                yield client.url, self._begin(client.states(sample)).result()
            except Unanswered as error:
                yield client.url, error

    def __enter__(self) -> "StatesServers":
        self._thread.start()
        try:
            for client in self._clients:
                self._begin(client.find_model()).result()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(TimeoutError):
            self._begin(self._close()).result(2 * CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    def _begin(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _states(self, sample: Sample) -> Tensor | None:
        size, problem = self._reader.size(len(sample.tokens)), ""
        tried: set[StatesClient] = set()  # those that do not answer this sample
        while not tried.issuperset(self._up):
            async with self._order:
                while (client := self._free(size, tried)) is None:
                    self._changed.clear()
                    await self._changed.wait()
                client.in_flight += 1
                self._bytes += size
            task = asyncio.current_task()
            self._under_way.add(task)
            try:
                return await client.states(sample)
            except Unanswered as error:
                tried.add(client)
                problem = str(error)
            except ServerLost as error:
                if client in self._up:
                    if len(self._up) == 1:
                        raise
                    self._up.remove(client)
                    self.lost.append(f"{error}. The other servers take its samples")
            finally:
                client.in_flight -= 1
                self._bytes -= size
                self._under_way.discard(task)
                self._changed.set()
        self.lost.append(f"{problem}, so the target runs sample {sample.id} here")
        return None

    def _free(self, size: int, tried: Set[StatesClient]) -> StatesClient | None:
        """A server that may be asked for a file of this size now: one that was not `tried`, if
        there is one."""
        others = [client for client in self._up if client not in tried] or self._up
        client = min(others, key=lambda client: client.in_flight)
        full = self._bytes and self._bytes + size > self._max_bytes
        busy = client.in_flight >= self._concurrency
        return None if full or busy or self._closing else client

    async def _close(self) -> None:
        """Let requests end that are under way, so that their files are deleted. No other begins."""
        self._closing = True
        if self._under_way:
            await asyncio.wait({task for task in self._under_way if task}, timeout=CLOSE_SECONDS)
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        for client in self._clients:
            await client.__aexit__()
        await self._loop.shutdown_default_executor()


def _lock_of(path: Path) -> Path:
    return path.with_name(path.name + LOCK)


def is_written(path: Path) -> bool | None:
    """Whether the server has written a file: then its lock is free. None: there is no lock. Raises
    UserError for a lock that cannot be tried."""
    try:
        with open(_lock_of(path), encoding="utf-8") as lock:
            try:
                lock_file(lock.fileno(), shared=True)
            except (BlockingIOError, PermissionError):  # EAGAIN, or EACCES on some file systems
                return False
            return True
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"cannot lock {_lock_of(path)}: {error}") from error


def delete(path: Path) -> None:
    """Delete a file and its lock, if they are there."""
    for file in (path, _lock_of(path)):
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
