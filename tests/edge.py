"""A verification server over a tiny model, on a loopback port, for tests."""

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from decode.base.threads import run_in_thread
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder
from decode.loop.parts import Part
from decode.model.loading import Target
from draftsmith.edge.client import EdgeClient
from draftsmith.edge.link import Link
from draftsmith.edge.sessions import SessionBounds
from draftsmith.edge.verifier import Verifier
from draftsmith.edge.verify_server import VerifyServer
from draftsmith.net.access import Guard
from draftsmith.net.limits import ServerLimits
from draftsmith.net.listen import bind
from tests.tiny import near_drafter, tiny_target

PROMPTS = [[5, 9, 12, 40], [7, 7, 3], [100]]
NEW = 24


@functools.cache
def target() -> Target:
    return tiny_target()


@dataclass
class Serving:
    """A server that runs in threads of its own."""

    server: VerifyServer
    verifier: Verifier
    port: int

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"


@contextlib.contextmanager
def serving(
    rule: Part = "coupled",
    *,
    served: Target | None = None,
    key: str | None = None,
    port: int = 0,
    limits: ServerLimits | None = None,
    **bounds: Any,
) -> Iterator[Serving]:
    """Raises at its end what the server ended of."""
    with bind("127.0.0.1", port) as bound:
        verifier = Verifier(served or target(), rule, SessionBounds(**bounds))
        server = VerifyServer(verifier, bound, Guard(key=key), limits)
        started = threading.Event()
        done = run_in_thread(lambda: server.run(started.set), "server")
        done.add_done_callback(lambda _: started.set())
        started.wait()
        try:
            yield Serving(server, verifier, bound.getsockname()[1])
        finally:
            server.stop()
            done.result()


@contextlib.contextmanager
def edge(
    url: str,
    *,
    key: str | None = None,
    patience: float = 20,
    stall: float = 1.0,
    **options: Any,
) -> Iterator[EdgeClient]:
    link = Link(url, key, patience=patience, stall=stall)
    client = EdgeClient(link, options.pop("drafter", None) or near_drafter(), **options)
    try:
        yield client
    finally:
        client.close()


def plain_texts(
    sampling: Sampling, *, seed: int = 0, prompts: Sequence[Sequence[int]] = PROMPTS
) -> list[list[int]]:
    """The texts of decoding alone, with a drafter and the rule `coupled`."""
    decoder = Decoder(
        target().model,
        near_drafter(),
        eos_token_ids=target().eos_token_ids,
        rule="coupled",
        sampling=sampling,
        first_target=False,
    )
    return decoder.decode(prompts, NEW, seed=seed).outputs
