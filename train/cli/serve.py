"""`serve`: answers over HTTP, in the shape of OpenAI's API."""

from typing import Annotated

import typer

from decode.errors import UserError
from train.cli.command import (
    DecodeOptions,
    DrafterOption,
    Loading,
    key_from,
    quieten,
    require_packages,
    shows_errors,
    takes_groups,
)


@shows_errors
@takes_groups
def serve(
    *,
    loading: Loading,
    drafter: DrafterOption = "ngram",
    decoding: DecodeOptions,
    host: Annotated[
        str, typer.Option(help="address to listen on; 0.0.0.0: all of this machine")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any that is free")] = 8000,
    model_name: Annotated[
        str | None, typer.Option(help="what requests call the model; default: --target")
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(help="environment variable with the key that requests must send"),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="largest length of an answer, in tokens; default: the target's context"),
    ] = None,
    max_rows: Annotated[int, typer.Option(help="texts that decode together")] = 16,
    max_waiting: Annotated[
        int, typer.Option(help="texts that may wait besides; more get status 503")
    ] = 64,
    max_wait: Annotated[
        float, typer.Option(help="seconds that a text may wait; then it gets status 429")
    ] = 60.0,
    max_seconds: Annotated[
        float, typer.Option(help="seconds from a request to its end; then it gets status 504")
    ] = 600.0,
    drain_seconds: Annotated[
        float, typer.Option(help="seconds that running texts have to end after SIGTERM")
    ] = 30.0,
) -> None:
    """Serve a target with a drafter over HTTP, in the shape of OpenAI's API. The sampling options
    are for requests that say nothing else, --seed for requests without a seed."""
    key = key_from("--api-key-env", api_key_env)
    if max_tokens is not None and max_tokens < 1:
        raise UserError(f"--max-tokens is {max_tokens}; expected at least 1")
    if drain_seconds < 0:
        raise UserError(f"--drain-seconds is {drain_seconds}; expected seconds ≥ 0")
    require_packages("prometheus_client", "starlette", "uvicorn")
    import heads  # noqa: F401  (registers its drafters)
    from decode.drafters.directory import open_drafter
    from decode.settings import DecodeSettings
    from train.serve.requests import Bounds
    from train.serve.server import Server, bind, make_service

    quieten()
    settings = DecodeSettings(**decoding.settings)
    bounds = Bounds(max_rows, max_waiting, max_wait, max_seconds)
    # Before the target is loaded: a port that is taken must not cost that time.
    with bind(host, port) as bound:
        target = loading.load()
        service = make_service(
            target,
            open_drafter(drafter, target),
            settings,
            bounds,
            drafter_name=drafter,
            model_name=model_name,
            api_key=key,
            max_tokens=max_tokens,
            seed=decoding.seed,
        )
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{bound.getsockname()[1]}/v1"
        what = f"{service.model_name} with the drafter {drafter}"
        server = Server(service, drain_seconds, lambda: typer.echo(f"{what} is at {address}"))
        try:
            server.run(sockets=[bound])
        finally:
            service.engine.drain(0)
            service.engine.join(drain_seconds)
