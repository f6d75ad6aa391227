"""`diagnose`: why does a drafter accept so little in an engine?"""

import json
from pathlib import Path
from typing import Annotated

import typer

from decode.base.errors import UserError
from draftsmith.cli.command import (
    Loading,
    given_or_shipped,
    require_packages,
    require_writable,
    tokenized_prompts,
)
from train.base.console import quieten


def diagnose(
    *,
    url: Annotated[str, typer.Argument(help="the server, http://HOST:PORT, with or without /v1")],
    loading: Loading,
    drafter: Annotated[Path, typer.Option(help="the drafter's directory, as it was trained")],
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
    timeout_seconds: Annotated[float, typer.Option(help="for one answer")] = 120.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="write the diagnosis here")
    ] = None,
) -> None:
    """Say why a drafter accepts so little in an engine: its counts beside our own loop's, with the
    drafter as it is and with each known mistake. Nobody else may ask the server meanwhile.

    Exit status 0: the engine does what the drafter can. 1: it does not, and the cause is said, or
    that no known one explains it.
    """
    require_packages("httpx2")
    require_writable(json_file)
    from decode.opening.directory import DRAFTER_FILE, describe_drafter
    from draftsmith.auditing.entry import server_config
    from draftsmith.diagnosis.engine import ready
    from draftsmith.diagnosis.entry import diagnose as run
    from draftsmith.diagnosis.entry import open_plain, require_enough
    from draftsmith.diagnosis.explain import EQUAL
    from train.base.console import Reporter

    quieten()
    reporter = Reporter()
    config = server_config(
        [url],
        protocol=protocol,
        model=model,
        key_env=key_env,
        concurrency=1,
        timeout_seconds=timeout_seconds,
    )
    # Before the target is loaded, which takes long.
    if not drafter.is_dir():
        raise UserError(f"{drafter} is no directory; expected the drafter's, as it was trained")
    if (drafter / DRAFTER_FILE).exists():
        describe_drafter(drafter)  # its files are whole
    examples = given_or_shipped(prompts)
    require_enough(min(limit, len(examples)))
    ready(config.urls[0], config, gamma)
    target = loading.load(str(drafter))
    opened = open_plain(drafter, target)
    asked = tokenized_prompts(examples, target, limit)
    found = run(config.urls[0], target, opened, asked, config, gamma=gamma, say=reporter.say)
    for place, (there, here) in enumerate(zip(found.there, found.here, strict=True), 1):
        reporter.say(f"place {place}: {there:.3f} accepted a prompt there, {here:.3f} here")
    reporter.say(found.headline)
    if found.explanation.unseen:
        reporter.say(f"not visible with these prompts: {', '.join(found.explanation.unseen)}")
    if json_file is not None:
        json_file.write_text(json.dumps(found.to_dict(), indent=2), encoding="utf-8")
    if found.explanation.verdict != EQUAL:
        raise typer.Exit(1)
