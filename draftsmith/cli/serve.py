"""`serve`: answers over HTTP, in the shape of OpenAI's API."""

import secrets
from contextlib import nullcontext
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import typer

from decode.base.errors import UserError
from draftsmith.cli.command import (
    CallerOptions,
    DrafterOption,
    Loading,
    PayingDrafts,
    key_from,
    require_packages,
)
from train.base.console import quieten

if TYPE_CHECKING:
    from draftsmith.serve.api import Service
    from draftsmith.serve.learner import LearnOptions

CLOSING_SECONDS = 10.0  # for what was learnt, at least


class LearnSource(StrEnum):
    """The requests that a service learns from."""

    STORE = "store"
    ALL = "all"


@dataclass(frozen=True, kw_only=True)
class ServeDecodeOptions(PayingDrafts):
    """`PayingDrafts`, with other numbers after each start."""

    seed: Annotated[
        int | None,
        typer.Option(help="for requests without a seed; default: random, printed at the start"),
    ] = None  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class LearnOptionGroup:
    """Whether and how the drafter learns."""

    PANEL: ClassVar[str] = "Learning"

    learn: Annotated[
        bool, typer.Option("--learn", help="the drafter learns from requests with store: true")
    ] = False
    learn_from: Annotated[
        LearnSource, typer.Option(help="store: requests with store: true; all: every request")
    ] = LearnSource.STORE
    learn_dir: Annotated[
        Path | None,
        typer.Option(help="directory for versions and records, to continue after a restart"),
    ] = None
    learn_options: Annotated[
        str,
        typer.Option(
            help="option=value,… as under learning of the online stage, and idle_seconds=2 without "
            "a text before a round (0: at any time), threads=1 of the CPU, device=cuda:1 (default: "
            "the target's)"
        ),
    ] = ""

    @property
    def options(self) -> "LearnOptions | None":
        """How the service learns. None: it does not. Raises UserError for options that do not
        exist or do not fit."""
        if not self.learn:
            if self != LearnOptionGroup():
                raise UserError("options of learning are given without --learn; add it")
            return None
        from draftsmith.serve.learner import LearnOptions

        source: Literal["store", "all"] = "all" if self.learn_from is LearnSource.ALL else "store"
        return LearnOptions.of(self.learn_options, source, self.learn_dir)


def serve(
    *,
    loading: Loading,
    drafter: DrafterOption = "ngram",
    decoding: ServeDecodeOptions,
    host: Annotated[
        str, typer.Option(help="address to listen on; 0.0.0.0: all of this machine")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any that is free")] = 8000,
    model_name: Annotated[
        str | None,
        typer.Option(
            help="what requests call the model; default: --target, or what is behind its colon"
        ),
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(help="environment variable with the key that requests must send"),
    ] = None,
    admin_key_env: Annotated[
        str | None,
        typer.Option(help="environment variable with the key for /admin; default: the same key"),
    ] = None,
    drafters: Annotated[
        Path | None,
        typer.Option(help="directory with drafters that /admin/settings may load; default: none"),
    ] = None,
    adapters: Annotated[
        Path | None,
        typer.Option(
            help="directory with adapters that /v1/load_lora_adapter may load; default: none"
        ),
    ] = None,
    dynamic_lenience: Annotated[
        float,
        typer.Option(help="LOSSY below 1: lowest lenience while many texts wait"),
    ] = 1.0,
    learning: LearnOptionGroup,
    callers: CallerOptions,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="largest length of an answer, in tokens; default: the target's context"),
    ] = None,
    prefix_cache: Annotated[
        float | None,
        typer.Option(
            help="GiB of keys and values of earlier texts, for prompts that begin like them; 0: "
            "none; default: 0.25 in float32, 0 in 16 bits, where reuse may change a text by "
            "rounding"
        ),
    ] = None,
    drain_seconds: Annotated[
        float, typer.Option(help="seconds that running texts have to end after SIGTERM")
    ] = 30.0,
) -> None:
    """Serve a target with a drafter over HTTP, in the shape of OpenAI's API. The sampling options
    are for requests that say nothing else, --seed for requests without a seed."""
    key = key_from("--api-key-env", api_key_env)
    admin_key = key_from("--admin-key-env", admin_key_env)
    for option, directory in (("--drafters", drafters), ("--adapters", adapters)):
        if directory is not None and not directory.is_dir():
            raise UserError(f"{option} is {directory}, which is not a directory; expected one")
    if max_tokens is not None and max_tokens < 1:
        raise UserError(f"--max-tokens is {max_tokens}; expected at least 1")
    if prefix_cache is not None and prefix_cache < 0:
        raise UserError(f"--prefix-cache is {prefix_cache}; expected GiB ≥ 0")
    if drain_seconds < 0:
        raise UserError(f"--drain-seconds is {drain_seconds}; expected seconds ≥ 0")
    require_packages("prometheus_client", "starlette", "uvicorn")
    from decode.base.threads import run_in_thread
    from decode.opening.directory import open_drafter
    from decode.settings import DecodeSettings
    from draftsmith.net.limits import ServerLimits
    from draftsmith.net.listen import address_of, bind
    from draftsmith.serve.batching.requests import RequestBounds
    from draftsmith.serve.dynamic_lenience import require_low
    from draftsmith.serve.server import ServiceServer, make_service

    quieten()
    seed = secrets.randbits(32) if decoding.seed is None else decoding.seed
    guard = callers.guard(host, key, admin_key or key)
    clients, given = callers.bounds(ServerLimits(), RequestBounds)
    bounds = RequestBounds(**given)
    settings = DecodeSettings(**decoding.settings)
    require_low(dynamic_lenience)
    learn = learning.options
    if learn is not None and adapters is not None:
        raise UserError(
            "--adapters and --learn are both given, but adapters belong to a drafter whose weights "
            "stay; leave one of them out"
        )

    def prepare() -> "Service":
        target = loading.load(drafter, only_decodes=learn is None)
        if learn is None:
            student, opened = None, open_drafter(drafter, target)
        else:
            from draftsmith.serve.learner import open_learning_drafter

            student, opened = open_learning_drafter(drafter, target, learn)
        return make_service(
            target,
            opened,
            settings,
            bounds,
            drafter_name=drafter,
            model_name=model_name,
            guard=guard,
            limits=clients,
            max_tokens=max_tokens,
            seed=seed,
            dynamic_lenience=dynamic_lenience,
            drafters=drafters,
            adapters=adapters,
            student=student,
            learning=learn,
            prefix_cache_bytes=None if prefix_cache is None else int(prefix_cache * 2**30),
        )

    # Before the target is loaded: a port that is taken must not cost that time.
    with bind(host, port) as bound, nullcontext() if learn is None else learn.locked():
        service = run_in_thread(prepare).result()
        address = f"http://{address_of(host, bound)}/v1"
        what = f"{service.names[0]} with the drafter {drafter}"
        started = f"{what} is at {address}\nthe seed for requests without one is {seed}"
        server = ServiceServer(service, drain_seconds, lambda: typer.echo(started))
        try:
            server.run(sockets=[bound])
        finally:
            service.close(max(drain_seconds, CLOSING_SECONDS))
