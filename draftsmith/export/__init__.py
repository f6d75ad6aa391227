"""Drafters in the layouts that inference engines read: written, proven in the engines, and read.

The options of exports and imports are here, so the command line can read them without loading
torch.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """How to write an export. The annotations are those of the command line.

    gamma: the default γ for readers; None takes that of the drafter's evaluation in its run, else
    4, but at most the drafter's max depth. repository: the future location, for the README.
    """

    target: Annotated[
        str | None, typer.Option(help="default: the one the drafter was trained for")
    ] = None
    backbone: Annotated[
        Path | None,
        typer.Option(
            help="the directory of a target that was trained with its drafter: written with "
            "--format, else read"
        ),
    ] = None
    gamma: Annotated[
        int | None,
        typer.Option(help="tokens per draft; default: γ of its evaluation, or 4"),
    ] = None
    dtype: Annotated[str | None, typer.Option(help="dtype of the weights; default: as stored")] = (
        None
    )
    licence: Annotated[
        str | None,
        typer.Option(help="licence of the drafter, for the README: apache-2.0, mit, … or any name"),
    ] = None
    data_licence: Annotated[
        str | None, typer.Option(help="licence of the training data, for the README")
    ] = None
    repository: Annotated[
        str | None,
        typer.Option("--push-to-hub", help="upload it to this repository (org/name)"),
    ] = None


# What the numbers of captured layers in a published config may mean.
LAYER_ID_MEANINGS = ("inputs", "outputs")


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """How to read a published drafter. The annotations are those of the command line."""

    form: Annotated[
        str | None, typer.Option("--format", help="its layout; default: the one that it has")
    ] = None
    depth: Annotated[
        int | None,
        typer.Option(help="max depth of an EAGLE drafter's drafts; default: what it names, or 7"),
    ] = None
    layer_ids: Annotated[
        str | None,
        typer.Option(help="what its numbers of captured layers mean: inputs or outputs"),
    ] = None
    ignore_keys: Annotated[
        str | None,
        typer.Option(help="keys of its config that change nothing, though import does not know it"),
    ] = None
    pickled: Annotated[
        bool,
        typer.Option("--allow-pickle", help="read pickled weights, with tensors and nothing else"),
    ] = False
    revision: Annotated[
        str | None, typer.Option(help="a branch, tag or commit of a hub repository")
    ] = None
