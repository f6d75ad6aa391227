"""`calibrate` and `calibrate-tree`: choose settings by measurement on dev prompts."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from decode.errors import UserError
from train.cli.options import (
    DrafterOption,
    Drafting,
    Drawing,
    Loading,
    TokensOption,
    takes_groups,
)
from train.cli.shared import app, quieten, shows_errors


@app.command()
@shows_errors
@takes_groups
def calibrate(
    *,
    loading: Loading,
    drafter: DrafterOption,
    prompts: Annotated[Path, typer.Option(help="JSONL file with prompts of the dev split")],
    thresholds: Annotated[str, typer.Option(help="θ to try")] = "0.15,0.20,0.25,0.30,0.35",
    acceptance: Annotated[str, typer.Option(help="acceptance to be within")] = "0.6,0.8",
    drafting: Drafting,
    max_new_tokens: TokensOption = 64,
    limit: Annotated[int | None, typer.Option(help="use only so many prompts")] = 32,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures here")] = None,
) -> None:
    """Choose θ of the rule `threshold`, which is LOSSY, on dev prompts: the θ with the lowest
    latency among those whose acceptance is within bounds."""
    import heads  # noqa: F401  (makes its drafters known)
    from decode.artifact import write_file
    from decode.drafters.directory import open_drafter
    from decode.measure.calibrate_threshold import calibrate_threshold
    from decode.settings import DecodeSettings
    from decode.stats import finite
    from decode.trees import Chain
    from train.console import Reporter
    from train.data.chat import prompt_tokens
    from train.data.read import read_examples, spread
    from train.report.words import number

    quieten()
    tried, bounds = numbers("thresholds", thresholds), numbers("acceptance", acceptance)
    if len(bounds) != 2:
        raise UserError(f"acceptance is {acceptance!r}; expected two numbers, such as 0.6,0.8")
    settings = DecodeSettings(
        **drafting.settings, rule={"name": "threshold", "threshold": tried[0]}
    )
    examples, _ = read_examples(str(prompts))
    reporter = Reporter()
    loaded = loading.load()
    which = open_drafter(drafter, loaded)
    if which.branches:
        which = which.with_shape(Chain())  # the rule judges only chains
    chosen = [prompt_tokens(e, loaded.tokenizer) for e in spread(examples, limit)]
    with reporter.bar("calibrating", len(chosen)) as bar:
        found = calibrate_threshold(
            loaded,
            which,
            chosen,
            settings,
            thresholds=tried,
            within=(bounds[0], bounds[1]),
            max_new_tokens=max_new_tokens,
            seed=drafting.seed,
            progress=lambda done: bar.update(done, what="calibrating"),
        )
    table = Table(title=f"rule threshold, LOSSY, on {len(chosen)} dev prompts")
    for column in ("θ", "acceptance rate", "draft efficiency", "tokens/step", "ms/token"):
        table.add_column(column, justify="right")
    for trial in found.trials:
        figures = (
            trial.acceptance_rate,
            trial.draft_efficiency,
            trial.tokens_per_step,
            trial.ms_per_token,
        )
        mark = " ←" if trial is found.chosen else ""
        table.add_row(f"{trial.threshold:g}{mark}", *(number(finite(value)) for value in figures))
    reporter.table(table)
    reporter.say(found.verdict)
    if json_file:
        write_file(json_file, json.dumps(found.to_dict(), indent=2))


@app.command()
@shows_errors
@takes_groups
def calibrate_tree(
    *,
    loading: Loading,
    drafter: Annotated[str, typer.Option(help="a drafter directory; with --out any model")],
    prompts: Annotated[Path, typer.Option(help="JSONL file with prompts of the dev split")],
    method: Annotated[
        str,
        typer.Option(
            help="calibrated: by acceptance at each depth (Medusa); sequoia: by dynamic programming"
        ),
    ] = "calibrated",
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="so many nodes (sequoia: at most); default as many as pay at the measured costs",
        ),
    ] = None,
    depth: Annotated[int, typer.Option(min=1, help="how deep at most")] = 6,
    width: Annotated[int, typer.Option(min=1, help="of the likeliest tokens of each node")] = 8,
    drawing: Drawing,
    max_new_tokens: TokensOption = 64,
    limit: Annotated[int | None, typer.Option(help="use only so many prompts")] = 32,
    out: Annotated[
        Path | None, typer.Option(help="write the tree to this file, not to the drafter")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures here")] = None,
) -> None:
    """Choose a drafter's tree by what the target accepts on dev prompts, and store it with the
    drafter as its default shape."""
    import heads  # noqa: F401  (makes its drafters known)
    from train.cli.stored_tree import Asked, run
    from train.console import Reporter

    quieten()
    asked = Asked(
        target=loading.target,
        drafter=drafter,
        prompts=prompts,
        method=method,
        nodes=nodes,
        depth=depth,
        width=width,
        sampling=drawing.sampling,
        max_new_tokens=max_new_tokens,
        limit=limit,
        dtype=loading.dtype,
        device=loading.device,
        seed=drawing.seed,
        out=out,
        json_file=json_file,
    )
    run(asked, Reporter())


def numbers(what: str, text: str) -> list[float]:
    """Parse numbers separated by commas. Raises UserError for anything else."""
    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        raise UserError(f"{what} are {text!r}; expected numbers with commas") from None
