"""`calibrate` and its kin: choose settings by measurement on dev prompts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from decode.base.errors import UserError
from decode.base.paths import from_home
from draftsmith.cli.command import (
    DrafterOption,
    Drafting,
    Drawing,
    FiguresOption,
    LimitOption,
    Loading,
    TokensOption,
    numbers,
    table,
    tokenized_prompts,
    write_json,
)
from train.base.console import quieten


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions:
    """The dev prompts to measure on, and the file for the figures."""

    prompts: Annotated[Path, typer.Option(help="JSONL file with prompts of the dev split")]
    max_new_tokens: TokensOption = 64
    limit: LimitOption = 32
    json_file: FiguresOption = None


def calibrate(
    *,
    loading: Loading,
    drafter: DrafterOption,
    trials: CalibrationOptions,
    thresholds: Annotated[str, typer.Option(help="θ to try")] = "0.15,0.20,0.25,0.30,0.35",
    acceptance: Annotated[str, typer.Option(help="bounds for the acceptance rate")] = "0.6,0.8",
    drafting: Drafting,
) -> None:
    """Choose θ of the rule `threshold`, which is LOSSY, on dev prompts: the θ with the lowest
    latency among those whose acceptance is within bounds."""
    from decode.opening.directory import open_drafter
    from decode.settings import DecodeSettings
    from decode.shapes import Chain
    from decode.stats import finite
    from train.base.console import Reporter
    from train.data.read import read_examples
    from train.measure.calibrate_threshold import calibrate_threshold
    from train.report.format_figures import format_number

    quieten()
    candidates = numbers(thresholds, "thresholds", float)
    bounds = numbers(acceptance, "acceptance", float)
    if len(bounds) != 2:
        raise UserError(f"acceptance is {acceptance!r}; expected two numbers, such as 0.6,0.8")
    settings = DecodeSettings(
        **drafting.settings, rule={"name": "threshold", "threshold": candidates[0]}
    )
    examples, _ = read_examples(str(trials.prompts))
    reporter = Reporter()
    target = loading.load(drafter)
    chain_drafter = open_drafter(drafter, target)
    if chain_drafter.branches:
        chain_drafter = chain_drafter.with_shape(Chain())  # the rule judges only chains
    prompts = tokenized_prompts(examples, target, trials.limit)
    with reporter.bar("calibrating", len(prompts)) as bar:
        calibration = calibrate_threshold(
            target,
            chain_drafter,
            prompts,
            settings,
            thresholds=candidates,
            within=(bounds[0], bounds[1]),
            max_new_tokens=trials.max_new_tokens,
            seed=drafting.seed,
            progress=lambda done: bar.update(done, what="calibrating"),
        )
    rows = []
    for trial in calibration.trials:
        figures = (
            trial.acceptance_rate,
            trial.draft_efficiency,
            trial.tokens_per_step,
            trial.ms_per_token,
        )
        mark = " ←" if trial is calibration.chosen else ""
        cells = [format_number(finite(value)) for value in figures]
        rows.append([f"{trial.threshold:g}{mark}", *cells])
    columns = ("θ", "acceptance rate", "draft efficiency", "tokens/step", "ms/token")
    title = f"rule threshold, LOSSY, on {len(prompts)} dev prompts"
    reporter.table(table(title, columns, rows, left=0))
    reporter.say(calibration.verdict)
    write_json(trials.json_file, calibration.to_dict())


def calibrate_tree(
    *,
    loading: Loading,
    drafter: Annotated[str, typer.Option(help="a drafter directory; with --out, any drafter")],
    trials: CalibrationOptions,
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
            help="number of nodes (sequoia: the maximum); default: fastest at measured costs",
        ),
    ] = None,
    depth: Annotated[int, typer.Option(min=1, help="maximum depth of the tree")] = 6,
    width: Annotated[int, typer.Option(min=1, help="number of likeliest tokens per node")] = 8,
    drawing: Drawing,
    out: Annotated[
        Path | None, typer.Option(help="write the tree to this file, not to the drafter")
    ] = None,
) -> None:
    """Choose a drafter's tree by the target's acceptance on dev prompts, and store it with the
    drafter as its default shape."""
    from decode.opening.directory import DRAFTER_FILE, describe_drafter, open_drafter
    from decode.shapes.static import TREE, store_tree
    from train.base.console import Reporter
    from train.data.read import read_examples
    from train.measure.calibrate_tree import calibrate_tree as calibrate

    quieten()
    directory = from_home(drafter)
    if out is None:
        if not (directory / DRAFTER_FILE).exists():
            raise UserError(
                f"{drafter} is not a drafter directory (it has no {DRAFTER_FILE}), so a tree "
                "cannot be stored with it; write the tree to a file with --out FILE and use it "
                "with --shape static:file=FILE"
            )
        describe_drafter(directory)  # fails early if the directory is damaged
    examples, _ = read_examples(str(trials.prompts))
    reporter = Reporter()
    target = loading.load(drafter)
    opened_drafter = open_drafter(drafter, target)
    checked_method: Any = method  # calibrate_tree checks it
    calibration = calibrate(
        target,
        opened_drafter,
        tokenized_prompts(examples, target, trials.limit),
        method=checked_method,
        nodes=nodes,
        depth=depth,
        width=width,
        sampling=drawing.sampling,
        max_new_tokens=trials.max_new_tokens,
        seed=drawing.seed,
        progress=lambda what: reporter.say(f"  measuring {what}"),
    )
    for level, shares in enumerate(calibration.acceptance.table(), 1):
        listed = " ".join(f"{share:.3f}" for share in shares)
        reporter.say(f"  depth {level}: share of the target's tokens by rank {listed}")
    reporter.say(calibration.verdict)
    structure = calibration.structure
    figures = calibration.to_dict() | {
        "target": target.name,
        "prompts_file": str(trials.prompts),
    }
    if out is not None:
        structure.save(out, figures)
        reporter.say(f"tree written to {out}; use it with --shape static:file={out}")
    else:
        store_tree(directory, structure, figures)
        reporter.say(f"tree stored as {directory / TREE}; this drafter now uses it by default")
    write_json(trials.json_file, figures | {"paths": structure.paths})


def calibrate_layers(
    *,
    loading: Loading,
    trials: CalibrationOptions,
    out: Annotated[Path, typer.Option(help="write the set of sublayers to this file")],
    depth: Annotated[int, typer.Option(min=1, help="longest chain that is compared")] = 8,
    max_trials: Annotated[int, typer.Option(min=1, help="number of sets that are tried")] = 300,
    drawing: Drawing,
) -> None:
    """Choose the sublayers that a target skips to draft for itself, by its acceptance on dev
    prompts and measured costs. `--drafter skip:file=FILE` then drafts without them."""
    from train.base.console import Reporter
    from train.data.read import read_examples
    from train.measure.calibrate_layers import calibrate_layers as calibrate
    from train.report.format_figures import format_number

    quieten()
    examples, _ = read_examples(str(trials.prompts))
    reporter = Reporter()
    target = loading.load()
    prompts = tokenized_prompts(examples, target, trials.limit)
    with reporter.bar("searching", max_trials) as bar:
        calibration = calibrate(
            target,
            prompts,
            depth=depth,
            max_trials=max_trials,
            sampling=drawing.sampling,
            max_new_tokens=trials.max_new_tokens,
            seed=drawing.seed,
            progress=lambda tried: bar.update(tried, what="searching"),
        )
    best = sorted(calibration.trials, key=lambda trial: -trial.speed)[:8]
    rows = [
        [str(trial.skipped), str(trial.gamma)]
        + [format_number(x) for x in (trial.c, float(trial.acceptance[0]), trial.speed)]
        for trial in best
    ]
    columns = ("skipped", "γ", "cost of a draft step", "first token accepted", "predicted speed")
    title = f"the best of {len(calibration.trials)} sets, on {len(prompts)} dev prompts"
    reporter.table(table(title, columns, rows, left=0))
    reporter.say(calibration.verdict)
    figures = calibration.to_dict() | {
        "target": target.name,
        "prompts_file": str(trials.prompts),
    }
    about = {key: figures[key] for key in ("target", "layers", "gamma", "speed", "c")}
    calibration.chosen.skipped.save(out, about)
    reporter.say(f"set written to {out}; use it with --drafter skip:file={out}")
    write_json(trials.json_file, figures)
