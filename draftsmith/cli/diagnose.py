"""`diagnose`: why does a drafter accept so little in an engine?"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from decode.base.errors import UserError
from draftsmith.cli.command import (
    Loading,
    given_or_shipped,
    require_packages,
    tokenized_prompts,
    write_json,
)
from train.base.console import quieten
from train.base.exit_status import ExitStatus

if TYPE_CHECKING:
    from draftsmith.diagnosis.entry import Diagnosis
    from draftsmith.diagnosis.trained_run import RunDiagnosis
    from train.settings.server_config import ServerConfig

ANSWER_SECONDS = 120.0  # for one answer, of few tokens


def diagnose(
    *,
    url: Annotated[
        str | None, typer.Argument(help="the server, http://HOST:PORT, with or without /v1")
    ] = None,
    loading: Loading,
    drafter: Annotated[
        Path | None, typer.Option(help="the drafter's directory, as it was trained")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            help="a run, or one of its stages/NUMBER-NAME: look for causes in the training, "
            "without a server"
        ),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL file with prompts; default: the shipped test prompts")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="prompts, spread over the file")] = 200,
    gamma: Annotated[int, typer.Option(min=1, help="tokens of the server's drafts")] = 4,
    protocol: Annotated[str, typer.Option(help="completions or llama-server")] = "completions",
    model: Annotated[
        str | None, typer.Option(help="the server's name for the model; default: its first")
    ] = None,
    key_env: Annotated[
        str | None, typer.Option(help="environment variable with the server's key")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="write the diagnosis here")
    ] = None,
) -> None:
    """Say why a drafter accepts so little in an engine: its counts beside our own loop's, with the
    drafter as it is and with each known mistake. Nobody else may ask the server meanwhile. With
    --run in the place of a server: whether the cause is in the training.

    Exit status 0: the engine does what the drafter can, and no cause is in the training. 1: it does
    not, and the cause is said, or that no known one explains it.
    """
    if (url is None) == (run is None) or (run is not None and drafter is not None):
        raise UserError(
            "give a server's URL with --drafter DIRECTORY, or --run DIRECTORY, which has a drafter"
        )
    from train.base.console import Reporter

    quieten()
    reporter = Reporter()
    found: Diagnosis | RunDiagnosis
    if run is not None:
        found = _of_run(run, loading, prompts, limit, gamma, reporter.say)
    else:
        assert url is not None
        if drafter is None or not drafter.is_dir():
            raise UserError(
                f"--drafter is {drafter}; expected the directory of the drafter, as it was trained"
            )
        require_packages("httpx2")
        from draftsmith.auditing.entry import server_config

        config = server_config(
            [url],
            protocol=protocol,
            model=model,
            key_env=key_env,
            concurrency=1,
            timeout_seconds=ANSWER_SECONDS,
        )
        found = _of_server(config, drafter, loading, prompts, limit, gamma, reporter.say)
    write_json(json_file, found.to_dict())
    if not found.sound:
        raise typer.Exit(ExitStatus.FAILED)


def _of_server(
    config: "ServerConfig",
    drafter: Path,
    loading: Loading,
    prompts: Path | None,
    limit: int,
    gamma: int,
    say: Callable[[str], None],
) -> "Diagnosis":
    """Why the server accepts what it does. What is known early is said before the target is loaded,
    which takes long."""
    from decode.opening.directory import DRAFTER_FILE, describe_drafter
    from draftsmith.diagnosis.engine import ready
    from draftsmith.diagnosis.entry import diagnose, open_plain, require_enough

    if (drafter / DRAFTER_FILE).exists():
        describe_drafter(drafter)  # its files are whole
    examples = given_or_shipped(prompts)
    require_enough(min(limit, len(examples)))
    ready(config.urls[0], config, gamma)
    target = loading.load(str(drafter))
    opened = open_plain(drafter, target)
    asked = tokenized_prompts(examples, target, limit)
    found = diagnose(config.urls[0], target, opened, asked, config, gamma=gamma, say=say)
    for place, (there, here) in enumerate(zip(found.there, found.here, strict=True), 1):
        say(f"place {place}: {there:.3f} accepted a prompt there, {here:.3f} here")
    for x in found.by_length:
        lengths = f"prompts of {x.shortest} to {x.longest} tokens"
        say(f"{lengths}: {x.there:.3f} accepted a prompt there, {x.here:.3f} here")
    several = [f"{x.rate or 0.0:.1%} with {n} at a time" for n, x in found.together.items()]
    say(", ".join([f"{found.alone.rate or 0.0:.1%} of draft tokens accepted", *several]))
    say(found.headline)
    if found.explanation.unseen:
        say(f"not visible with these prompts: {', '.join(found.explanation.unseen)}")
    return found


def _of_run(
    run: Path,
    loading: Loading,
    prompts: Path | None,
    limit: int,
    gamma: int,
    say: Callable[[str], None],
) -> "RunDiagnosis":
    """Whether the cause is in the training."""
    from decode.opening.directory import describe_drafter
    from draftsmith.diagnosis.entry import require_enough
    from draftsmith.diagnosis.trained_run import TrainedStage, diagnose_run

    if prompts is None:
        raise UserError("--run needs --prompts FILE, with prompts that are served")
    trained = TrainedStage.of_run(run)
    samples = trained.samples()
    describe_drafter(trained.directory / "drafter")  # its files are whole
    examples = given_or_shipped(prompts)
    require_enough(min(limit, len(examples)))
    target = loading.load()
    asked = tokenized_prompts(examples, target, limit)
    found = diagnose_run(trained, samples, target, asked, gamma=gamma, say=say)
    for line in found.lines:
        say(line)
    return found
