"""`learn`: a drafter beside an inference engine learns from what the engine answers."""

import json
from pathlib import Path
from typing import Annotated

import typer

from decode.base.errors import UserError
from draftsmith.cli.command import key_from, shows_errors
from train.base.console import quieten
from train.base.exit_status import ExitStatus


@shows_errors
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
