"""`import`: read a published drafter, and measure it beside its publisher's figure."""

import json
from pathlib import Path
from typing import Annotated

import typer

from decode.base.errors import UserError
from draftsmith.cli.command import (
    LimitOption,
    Loading,
    TokensOption,
    shows_errors,
    table,
    takes_groups,
    tokenized_prompts,
)
from draftsmith.export import ImportOptions
from train.base.console import quieten


@shows_errors
@takes_groups
def import_drafter(
    *,
    source: Annotated[str, typer.Argument(help="a directory, or a hub id (org/name)")],
    loading: Loading,
    out: Annotated[Path, typer.Option(help="the new drafter directory")],
    options: ImportOptions,
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL file with prompts, to measure it on")
    ] = None,
    claimed: Annotated[
        float | None,
        typer.Option(help="tokens per step that its publisher states; default: of its card"),
    ] = None,
    gamma: Annotated[
        int | None, typer.Option(help="tokens per draft, to measure; default: 4, or its max depth")
    ] = None,
    limit: LimitOption = None,
    max_new_tokens: TokensOption = 64,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="write what was imported and measured here")
    ] = None,
) -> None:
    """Read a published drafter (heads or a small model) and write a drafter directory."""
    if prompts is None and (claimed is not None or gamma is not None):
        raise UserError(
            "--claimed and --gamma are for a measurement; give --prompts FILE too, with prompts "
            "like those of the published figure"
        )
    from decode.base.artifact import write_file
    from draftsmith.export.import_directory import import_drafter, measure_import
    from train.base.console import Reporter
    from train.data.read import read_examples

    quieten()
    reporter = Reporter()
    examples = read_examples(str(prompts))[0] if prompts else []
    target = loading.load()
    imported = import_drafter(source, target, out, options)
    depth = "" if imported.depth is None else f", drafts up to {imported.depth} tokens"
    reporter.say(
        f"imported to {out}: {imported.kind}, read from layout {imported.layout}, "
        f"{imported.dtype}{depth}"
    )
    for note in imported.notes:
        reporter.say(f"note: {note}")
    if imported.settings is not None:
        settings = {"type": imported.kind} | imported.settings
        reporter.say(f"to train it further: start: {out}, heads: {json.dumps(settings)}")
    record = {"out": str(out), **vars(imported), "measured": None}
    if prompts is not None:
        claim = imported.claimed if claimed is None else claimed
        ids = tokenized_prompts(examples, target, limit)
        figures = measure_import(
            out, target, ids, gamma=gamma, max_new_tokens=max_new_tokens, say=reporter.say
        )
        record |= {"measured": figures, "claimed": claim}
        stated = "–" if claim is None else f"{claim:.2f}"
        reporter.table(
            table(
                f"{len(ids)} prompts, γ = {figures['gamma']}, greedy, chains",
                ("", "tokens per step", "acceptance rate"),
                [
                    ["claimed", stated, "–"],
                    [
                        "measured",
                        f"{figures['tokens_per_step']:.2f}",
                        f"{figures['acceptance_rate']:.2f}",
                    ],
                ],
            )
        )
    if json_file:
        write_file(json_file, json.dumps(record, indent=2))
