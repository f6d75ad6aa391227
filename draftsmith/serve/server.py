"""A service from its parts, and the HTTP server around it."""

import copy
import random
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from decode.base.errors import UserError
from decode.drafters import Drafter
from decode.model.cache.prefix_cache import prefix_cache
from decode.model.loading import Target
from decode.settings import DecodeSettings
from decode.text import prompt_ids
from distill.replay.online_student import OnlineStudent
from draftsmith.net.access import LOCAL, Guard
from draftsmith.net.http_server import HttpServer
from draftsmith.net.limits import ServerLimits
from draftsmith.serve.adapter_routes import AdapterRoutes
from draftsmith.serve.api import Service
from draftsmith.serve.batching.metrics import Metrics
from draftsmith.serve.batching.request_batcher import RequestBatcher
from draftsmith.serve.batching.requests import RequestBounds
from draftsmith.serve.live_settings import LiveSettings

if TYPE_CHECKING:
    from draftsmith.serve.learner import LearnOptions

# To measure costs on, for a policy or a shape that uses them.
_SOME_TEXT = "A drafter proposes tokens, and the target verifies them in one forward pass."
_CLOSING_SECONDS = 5  # for connections that are open when all texts have ended


def make_service(
    target: Target,
    drafter: Drafter,
    settings: DecodeSettings,
    bounds: RequestBounds,
    *,
    drafter_name: str,
    model_name: str | None = None,
    guard: Guard = LOCAL,
    limits: ServerLimits | None = None,
    max_tokens: int | None = None,
    seed: int | None = None,
    dynamic_lenience: float = 1.0,
    drafters: Path | None = None,
    adapters: Path | None = None,
    student: OnlineStudent | None = None,
    learning: "LearnOptions | None" = None,
    prefix_cache_bytes: int | None = None,
) -> Service:
    """A service whose batcher runs. settings: sampling is the default of requests. model_name: what
    requests call it; default: what is behind the colon of the target's name, or all of it. seed:
    for requests that name none; None: any. limits: of clients. dynamic_lenience, drafters: as for
    `LiveSettings`. adapters: the directory with those that may be loaded; None: none may. student:
    the copy of the drafter that learns; None: nothing is learnt. prefix_cache_bytes: as for
    `prefix_cache`. Raises UserError as `Decoder`, `ServiceLearner` and `LiveSettings` do."""
    prompt = prompt_ids(_SOME_TEXT, target.tokenizer) if settings.needs_costs else None
    decoder, costs = settings.decoder(target, drafter, prompt)
    decoder.prefixes = prefix_cache(target.model, prefix_cache_bytes)
    if prefix_cache_bytes and decoder.prefixes is None:
        raise UserError(
            f"a prefix cache of {prefix_cache_bytes} bytes would not be used: {target.name} has an "
            "encoder or running states; leave --prefix-cache out"
        )
    learner = None
    if student is not None:
        # Training is not loaded for a service that does not learn.
        from draftsmith.serve.learner import LearnOptions, ServiceLearner

        options = learning or LearnOptions()
        learner = ServiceLearner(decoder.drafter, student, target, drafter_name, options)
        decoder.observers.append(learner.observe)
    # Some clients take what is before a colon for a provider, or what is behind it for an adapter.
    names = [model_name or target.name.rpartition(":")[2] or target.name]
    if model_name is None:
        names.append(target.name)
    metrics = Metrics(names[0], decoder.policy.max_depth)
    batcher = RequestBatcher(decoder, target.tokenizer, bounds, metrics, settings.draft_temperature)
    if learner is not None:
        learner.start(batcher)
    return Service(
        batcher,
        LiveSettings(
            batcher,
            target,
            settings,
            drafter_name,
            costs=costs,
            dynamic_lenience=dynamic_lenience,
            drafters=drafters,
            adapters=AdapterRoutes(adapters, target, drafter),
            learner=learner,
        ),
        # Another thread uses the batcher's.
        copy.deepcopy(target.tokenizer),
        names,
        guard,
        limits or ServerLimits(),
        max_tokens,
        random.Random(seed),
    )


class ServiceServer(HttpServer):
    """Ends after the batcher has: the first SIGTERM or Ctrl-C lets running texts end, for at most
    `drain_seconds`, and new requests get status 503. A second signal ends it at once.

    started_up: called when it listens.
    """

    def __init__(
        self, service: Service, drain_seconds: float, started_up: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(service.guarded(), _CLOSING_SECONDS, started_up, service.limits)
        self._batcher, self._drain_seconds = service.batcher, drain_seconds

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._batcher.draining:
            super().handle_exit(sig, frame)
        else:
            self._batcher.drain(self._drain_seconds)

    async def on_tick(self, counter: int) -> bool:
        if not self._batcher.alive:
            self.should_exit = True
        return await super().on_tick(counter)
