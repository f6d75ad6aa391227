"""`audit`: is an engine's text the target's?"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import typer

from decode.base.errors import UserError
from draftsmith.auditing import JudgingOptions
from draftsmith.cli.command import (
    Drawing,
    Loading,
    given_or_shipped,
    require_packages,
    tokenized_prompts,
)
from train.base.console import quieten
from train.base.exit_status import ExitStatus


@dataclass(frozen=True, kw_only=True)
class AuditDrawing(Drawing):
    """How the sampled answers are drawn."""

    NAMES: ClassVar[Mapping[str, type]] = {
        **Drawing.NAMES,
        "presence_penalty": float,
        "frequency_penalty": float,
    }

    temperature: Annotated[
        float, typer.Option(help="of the sampled answers; 0: only greedy ones are asked for")
    ] = 1.0


def audit(
    *,
    url: Annotated[str, typer.Argument(help="the server, http://HOST:PORT, with or without /v1")],
    loading: Loading,
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL file with prompts; default: the shipped test prompts")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="prompts, spread over the file")] = 32,
    judging: JudgingOptions,
    drawing: AuditDrawing,
    baseline: Annotated[
        str | None,
        typer.Option(help="the same engine without drafts, if its weights are not the target's"),
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(help="the server's drafter, to compare its acceptance with our own loop's"),
    ] = None,
    gamma: Annotated[int, typer.Option(min=1, help="tokens of a draft, with --drafter")] = 4,
    protocol: Annotated[str, typer.Option(help="completions or llama-server")] = "completions",
    model: Annotated[
        str | None, typer.Option(help="the server's name for the model; default: its first")
    ] = None,
    key_env: Annotated[
        str | None, typer.Option(help="environment variable with the server's key")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="requests at a time")] = 8,
    timeout_seconds: Annotated[float, typer.Option(help="for one answer")] = 120.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="write the findings here")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="write a page here")] = None,
    junit: Annotated[Path | None, typer.Option(help="write JUnit's XML here, for CI")] = None,
) -> None:
    """Judge from outside whether a server's text is the target's: greedy answers token by token,
    sampled ones by the target's law. Any server with an API like OpenAI's that gives token ids.

    Exit status 0: nothing was found. 1: the text is not the target's. 2: it could not be judged.
    """
    if protocol not in ("completions", "llama-server"):
        raise UserError(f"--protocol is {protocol!r}; expected completions or llama-server")
    said: Literal["completions", "llama-server"] = protocol  # type: ignore[assignment]
    require_packages("httpx2")
    from decode.opening.directory import open_drafter
    from draftsmith.auditing import report
    from draftsmith.auditing.audit_options import AuditOptions
    from draftsmith.auditing.entry import audit as run
    from draftsmith.auditing.exact import TINY_VOCABULARY, random_prompts
    from train.base.console import Reporter

    quieten()
    options = AuditOptions(sampling=drawing.sampling, seed=drawing.seed, **vars(judging))
    reporter = Reporter()
    target = loading.load(drafter)
    if prompts is None and target.token_count <= TINY_VOCABULARY:
        # Texts of people have no tokens there.
        asked = random_prompts(target, limit)
    else:
        asked = tokenized_prompts(given_or_shipped(prompts), target, limit)
    found = run(
        url,
        target,
        asked,
        options,
        baseline=baseline,
        drafter=None if drafter is None else open_drafter(drafter, target),
        gamma=gamma,
        protocol=said,
        model=model,
        key_env=key_env,
        concurrency=concurrency,
        timeout_seconds=timeout_seconds,
        say=reporter.say,
    )
    reporter.table(report.terminal_table(found))
    reporter.say(report.headline(found))
    for path, write in (
        (json_file, report.write_json),
        (html, report.write_page),
        (junit, report.write_junit),
    ):
        if path is not None:
            write(found, path)
    if found.exit_status is not ExitStatus.DONE:
        raise typer.Exit(found.exit_status)


def audit_models(
    out: Annotated[Path, typer.Argument(help="the new directory to write")],
) -> None:
    """Write tiny models, made without training, for an audit by enumeration: a target and its
    drafters, that every engine loads. Serve `target`, and then audit the server with it."""
    quieten()
    from draftsmith.auditing.tiny import write_tiny
    from train.base.console import Reporter

    reporter = Reporter()
    write_tiny(out, reporter.say)
    reporter.say(f"{out} has: {', '.join(sorted(path.name for path in out.iterdir()))}")
