"""`verify-server`: verifies the drafts of edges."""

from typing import Annotated

import typer

from draftsmith.cli.command import (
    CallerOptions,
    Loading,
    key_from,
    require_packages,
    shows_errors,
    takes_groups,
)
from train.base.console import quieten


@shows_errors
@takes_groups
def verify_server(
    *,
    loading: Loading,
    rule: Annotated[
        str,
        typer.Option(help="coupled (lossless), or threshold:threshold=θ (lossy; see `calibrate`)"),
    ] = "coupled",
    host: Annotated[
        str, typer.Option(help="address to listen on; 0.0.0.0: all of this machine")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any that is free")] = 8100,
    api_key_env: Annotated[
        str | None, typer.Option(help="environment variable with the key that edges must send")
    ] = None,
    callers: CallerOptions,
    max_rows: Annotated[int, typer.Option(help="texts whose keys and values are kept")] = 16,
    max_sessions: Annotated[int, typer.Option(help="edges")] = 256,
    max_texts: Annotated[int, typer.Option(help="texts of one edge")] = 16,
    max_gamma: Annotated[int, typer.Option(help="longest draft, in tokens")] = 16,
    kv_seconds: Annotated[
        float, typer.Option(help="how long keys and values of a text without drafts are kept")
    ] = 60.0,
    session_seconds: Annotated[
        float, typer.Option(help="how long an edge without a line is remembered")
    ] = 600.0,
    prefill_tokens: Annotated[
        int, typer.Option(help="tokens of new texts that are read between two passes")
    ] = 512,
    row_tokens: Annotated[
        int, typer.Option(help="tokens of a text that each row has memory for from the start")
    ] = 2048,
) -> None:
    """Hold the target and verify the drafts of edges: `generate --verifier ws://HOST:PORT`."""
    key = key_from("--api-key-env", api_key_env)
    require_packages("prometheus_client", "starlette", "uvicorn", "websockets", "msgpack")
    from decode.base.threads import run_in_thread
    from draftsmith.edge.server import VerifyServer
    from draftsmith.edge.sessions import SessionBounds
    from draftsmith.edge.verifier import Verifier, make_verified_rule
    from draftsmith.net.listen import address_of, bind

    quieten()
    guard = callers.guard(host, key, None)
    make_verified_rule(rule)
    bounds = SessionBounds(
        max_rows=max_rows,
        max_sessions=max_sessions,
        max_texts=max_texts,
        max_gamma=max_gamma,
        kv_seconds=kv_seconds,
        session_seconds=session_seconds,
        prefill_tokens=prefill_tokens,
        row_tokens=row_tokens,
    )
    # Before the target is loaded: a port that is taken must not cost that time.
    with bind(host, port) as bound:
        verifier = run_in_thread(
            lambda: Verifier(loading.load(only_decodes=True), rule, bounds)
        ).result()
        server = VerifyServer(verifier, bound, guard)
        address = f"ws://{address_of(host, bound)}"
        what = f"{loading.target} verifies by {verifier.rule_name} at {address}"
        server.run(lambda: typer.echo(what), signals=True)
