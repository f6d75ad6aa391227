"""Learning beside an engine: `record` and `forget` its answers, and `learn` from them."""

import json
import logging
import time
from pathlib import Path
from typing import Annotated

import typer

from decode.base.errors import UserError
from draftsmith.cli.command import CallerOptions, key_from, require_packages, write_json
from train.base.console import quieten
from train.base.exit_status import ExitStatus


def record(
    *,
    upstream: Annotated[str, typer.Option(help="address of the engine: http://HOST:PORT")],
    out: Annotated[Path, typer.Option(help="directory of the records, one directory per tenant")],
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any that is free")] = 8080,
    record_keys: Annotated[
        Path | None,
        typer.Option(
            help="JSON file with the tenants of keys; default: everybody is one tenant, and "
            "requests with store: true are recorded"
        ),
    ] = None,
    keep_days: Annotated[
        float | None, typer.Option(help="delete records that are older; default: none")
    ] = None,
    keep_bytes: Annotated[
        int | None,
        typer.Option(help="size of a tenant's records; the oldest are deleted; default: any"),
    ] = None,
    admin_key_env: Annotated[
        str | None,
        typer.Option(help="environment variable with the key that switches the engine"),
    ] = None,
    callers: CallerOptions,
    drain_seconds: Annotated[
        int, typer.Option(help="seconds that running answers have to end after SIGTERM")
    ] = 30,
) -> None:
    """Pass requests on to an inference engine, and record answers to learn from.

    Bytes pass untouched. Only answers to requests that allow it are recorded.
    """
    key = key_from("--admin-key-env", admin_key_env)
    require_packages("httpx2", "starlette", "uvicorn")
    from draftsmith.learn.record.consent import Keys
    from draftsmith.learn.record.proxy import LIMITS, RecordingProxy
    from draftsmith.learn.record.records import Retention
    from draftsmith.learn.record.upstream import Upstreams
    from draftsmith.net.http_server import HttpServer
    from draftsmith.net.listen import address_of, bind

    keys = Keys() if record_keys is None else Keys.of_file(record_keys)
    retention = Retention(keep_days, keep_bytes)
    upstreams = Upstreams(upstream, out / "upstream.json")
    guard = callers.guard(host, None, key)
    limits, _ = callers.bounds(LIMITS, files_each=2)
    recorder = RecordingProxy(upstreams, out, keys, retention, time.time, guard, limits=limits)
    logging.basicConfig(format="%(levelname)s: %(message)s")
    with bind(host, port) as bound:
        address = f"http://{address_of(host, bound)}/v1"
        told = f"{upstreams.current.url} is behind {address}; records are in {out}"
        server = HttpServer(
            recorder.guarded(),
            drain_seconds,
            lambda: typer.echo(told),  # before that, a client would be refused
            limits=limits,
            lifespan="auto",
            date_header=False,
        )
        server.run(sockets=[bound])


def forget(
    *,
    directory: Annotated[Path, typer.Option("--dir", help="directory of the records")],
    user: Annotated[str | None, typer.Option(help="as requests named the user")] = None,
    request: Annotated[str | None, typer.Option(help="id of the answer")] = None,
    learner: Annotated[
        Path | None,
        typer.Option(
            help="directory of draftsmith learn, to list the versions that learnt from it"
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="write what was deleted, in numbers, here")
    ] = None,
) -> None:
    """Delete the records of a user or of one request, of all tenants."""
    if (user is None) == (request is None):
        raise UserError("give --user NAME or --request ID, and not both")
    if not directory.is_dir():
        raise UserError(f"{directory} is no directory; expected the --out of draftsmith record")
    from draftsmith.learn.record.records import LEARNT_FILE, Records, tenants

    forgotten: set[str] = set()
    deleted: dict[str, int] = {}
    learnt: dict[str, int] = {}
    for tenant in tenants(directory):
        ids = Records(tenant).forget(user=user, request=request)
        forgotten.update(ids)
        deleted[tenant.name] = len(ids)
        typer.echo(f"{tenant.name}: {len(ids)} records deleted")
    for file in sorted(learner.glob(f"versions/*/{LEARNT_FILE}")) if learner else ():
        if count := len(forgotten.intersection(json.loads(file.read_text(encoding="utf-8")))):
            learnt[str(file.parent)] = count
            typer.echo(f"{file.parent} learnt from {count} of them")
    write_json(json_file, {"deleted": deleted, "learnt_from": learnt})


def learn(
    config: Annotated[Path, typer.Argument(help="a config of learning (YAML)")],
    once: Annotated[
        bool, typer.Option("--once", help="do one cycle if it is due, and end")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print what would be done, and stop")
    ] = False,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            help="for --once and --dry-run: write the state of learning and the figures of all "
            "cycles here",
        ),
    ] = None,
) -> None:
    """Train a better drafter from recorded answers, and swap it into a running engine.

    A command that was killed goes on where it stopped. Exit status 3: --once found that no cycle is
    due.
    """
    if json_file and not (once or dry_run):
        raise UserError(
            "--json is written at the end, and without --once or --dry-run the command has none; "
            "give one of them too"
        )
    from decode.base.artifact import write_file
    from draftsmith.learn.learn_config import read_learn_config

    settings = read_learn_config(config)
    key = key_from("recorder.key_env", settings.recorder.key_env) or ""
    engine_key = key_from("engine.key_env", settings.engine.key_env) or ""
    from draftsmith.learn.cycle import TenantLearner, require_ready
    from draftsmith.learn.swap import EngineProcesses, RecorderSwitch
    from train.base.console import Reporter
    from train.base.directory_lock import DirectoryLock
    from train.loop.checkpoint import Stopped
    from train.run.entry import start_accelerator

    quieten()
    require_ready(settings)
    reporter = Reporter()
    recorder = RecorderSwitch(settings.recorder.url, key)
    engines = EngineProcesses(settings.engine, settings.gamma, engine_key)
    learner = TenantLearner(
        settings, engines, recorder, reporter, start_accelerator, engine_key=engine_key
    )

    def write_figures() -> None:
        if json_file:
            write_file(json_file, json.dumps(learner.figures(), indent=2))

    if dry_run:
        for line in learner.describe():
            reporter.say(line)
        write_figures()
        return
    directory = Path(settings.directory)
    directory.mkdir(parents=True, exist_ok=True)
    with DirectoryLock(directory, "stop that learner first") as lock:
        lock.take()
        try:
            if not once:
                learner.follow()
            else:
                outcome = learner.once()
                write_figures()
                if outcome is None:
                    reporter.say("no cycle is due")
                    raise typer.Exit(ExitStatus.NOT_DUE)
        except Stopped as stopped:
            reporter.say(f"{stopped}; run the same command again to continue")
            raise typer.Exit(ExitStatus.STOPPED) from None
