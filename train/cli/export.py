"""`export`: write a drafter for inference engines."""

from pathlib import Path
from typing import Annotated

import typer

from train.cli.options import TokensOption
from train.cli.shared import app, quieten, shows_errors


@app.command()
@shows_errors
def export(
    drafter: Annotated[
        Path, typer.Argument(help="a drafter directory; without --format, an export")
    ],
    form: Annotated[
        str | None,
        typer.Option("--format", help="a layout (hf, gguf, medusa, …) or its engine"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="the directory to write; not yet there")] = None,
    target: Annotated[
        str | None, typer.Option(help="default: the one the drafter was trained for")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="check an export against its format's schema")
    ] = False,
    verify: Annotated[
        str | None,
        typer.Option(help="run it in this engine: transformers, llama-server, vllm, openvino"),
    ] = None,
    push_to_hub: Annotated[
        str | None, typer.Option(help="upload it to this repository (org/name)")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSONL file with held-out prompts, to measure and to verify on"),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="use only so many prompts")] = None,
    max_new_tokens: TokensOption = 64,
    backbone: Annotated[
        Path | None,
        typer.Option(
            help="the directory of a target that was trained with its drafter: written with "
            "--format, else read"
        ),
    ] = None,
    gamma: Annotated[
        int | None, typer.Option(help="tokens of a draft; default that of its evaluation, or 4")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="of the weights; default as they are stored")
    ] = None,
    data_licence: Annotated[
        str | None, typer.Option(help="licence of the training data, for the README")
    ] = None,
    min_drafted: Annotated[
        int, typer.Option(help="how many tokens an engine must have drafted to be judged")
    ] = 2000,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="write what --verify found here")
    ] = None,
) -> None:
    """Write a drafter in a layout that inference engines read, and prove that they use it.

    Exit status 1: --verify found that the engine does not use the drafter as our loop does.
    """
    from train.console import Reporter
    from train.export.command import Asked, run

    quieten()
    asked = Asked(
        source=drafter,
        form=form,
        out=out,
        target=target,
        check=check,
        engine=verify,
        repository=push_to_hub,
        prompts=prompts,
        limit=limit,
        max_new_tokens=max_new_tokens,
        gamma=gamma,
        dtype=dtype,
        data_licence=data_licence,
        min_drafted=min_drafted,
        json_file=json_file,
        backbone=backbone,
    )
    if not run(asked, Reporter()):
        raise typer.Exit(1)
