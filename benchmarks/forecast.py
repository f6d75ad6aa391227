"""Do the intervals of `draftsmith forecast` hold what trainings come to?

    python -m benchmarks.forecast [--quick] [--json FILE] [--runs DIR] [--target T] [--kind NAME …]
                                  [--minutes N] [--data FILE] [--rows N] [--trainings N]
                                  [--draft-vocabulary N] [--layer N …]

Each training has rows of its own: the first N of the prompts, then the next. Rows after those of
all trainings are the test prompts. A forecast is made from small parts of a training's rows; then
the whole is trained, and the report's own figures are set beside the interval. All kinds of a
training learn from the same answers. --quick has short answers and few prompts to judge on. What is
there already is kept.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common import (
    PROMPTS,
    TARGET,
    JsonOption,
    RunsOption,
    TargetOption,
    describe_machine,
    format_figure,
    format_interval,
    rows_table,
    run_command,
    run_config,
    start_benchmark,
    write_json,
)
from decode.base.artifact import write_file
from decode.base.errors import UserError
from decode.model.without_weights import load_model_config
from draftsmith.forecast.answer import Forecast, Range
from draftsmith.forecast.entry import forecast
from heads.layers.target_layers import auxiliary_layers
from train.run.config_checks import validate_config
from train.run.entry import train

# By kind: the settings of its stage, and the passes over the text.
SMALL_LM = {"kind": "distill", "drafter": {"layers": [0, 1]}, "teacher": "states"}
HEADS: dict[str, dict[str, Any]] = {
    "medusa": {"heads": 3},
    "eagle1": {"depth": 3},
    "eagle3": {"steps": 3},
    "dflash": {"layers": 2, "block": 4},
}
EPOCHS = {"small_lm": 8, "medusa": 6, "eagle1": 8, "eagle3": 8, "dflash": 12}
READ_LAYERS = {
    "eagle3": "captured_layers",
    "dflash": "taps",
}  # kind: the setting for those it reads
TESTED = 84  # test prompts
LENGTH = 128  # tokens of the texts that steps are timed on
FIGURES = ("tokens_per_step", "speedup")


def main(
    quick: Annotated[bool, typer.Option("--quick", help="short answers, few prompts")] = False,
    json_file: JsonOption = None,
    runs: RunsOption = Path("runs"),
    target: TargetOption = TARGET,
    kind: Annotated[list[str] | None, typer.Option(help=f"of {', '.join(EPOCHS)}")] = None,
    minutes: Annotated[float, typer.Option(help="of each forecast")] = 5.0,
    data: Annotated[Path, typer.Option(help="prompts, JSON lines")] = PROMPTS / "train.jsonl",
    rows: Annotated[int, typer.Option(min=1, help="of a training")] = 240,
    trainings: Annotated[int, typer.Option(min=1, help="each on rows of its own")] = 1,
    draft_vocabulary: Annotated[int, typer.Option(min=1, help="tokens that are drafted")] = 8000,
    layer: Annotated[
        list[int] | None,
        typer.Option(help="whose output eagle3 and dflash read; without it EAGLE-3's usual three"),
    ] = None,
) -> None:
    """Forecast, train, and say how often the interval held."""
    reporter, kinds = start_benchmark(), kind or ["medusa", "eagle1"]
    if unknown := set(kinds) - EPOCHS.keys():
        raise UserError(f"--kind is {', '.join(unknown)}; expected of {', '.join(EPOCHS)}")
    lines = _lines(data, rows * trainings + TESTED)
    test = (runs / f"forecast-test-{data.stem}.jsonl").absolute()
    write_file(test, "".join(lines[-TESTED:]))
    found: list[dict[str, Any]] = []
    for number in range(trainings):
        name = f"forecast-{data.stem}-{target.replace('/', '-').replace(':', '-')}-{rows}-{number}"
        file = (runs / f"{name}.jsonl").absolute()
        write_file(file, "".join(lines[number * rows : (number + 1) * rows]))
        stages = _stages(kinds, draft_vocabulary, _read_layers(kinds, layer, target), quick)
        values = _config(name, runs, target, stages, [file, test], quick)
        config = validate_config(values, base_dir=PROMPTS)
        said = forecast(
            config, minutes=minutes, loads=[1], lengths=[LENGTH], say=reporter.say, quiet=True
        )
        reporter.say(said.advice)
        report = train(config, quiet=True).report
        found += [{"training": number, **row} for row in compared(said, report)]
    reporter.table(rows_table("forecast and outcome", [_cells(row) for row in found], left=3))
    held = {figure: _share(row[figure]["inside"] for row in found) for figure in FIGURES}
    best = {figure: _share(_best(found, figure)) for figure in FIGURES}
    as_good = {figure: _share(_best(found, figure, noisy=True)) for figure in FIGURES}
    for figure, name in zip(FIGURES, ("tokens per step", "speed-up"), strict=True):
        reporter.say(
            f"{name}: {_said(held[figure])} inside; best kind right: {_said(best[figure])}, within "
            f"noise: {_said(as_good[figure])}"
        )
    if json_file is not None:
        figures = {"rows": found, "held": held, "best": best, "as_good": as_good}
        write_json(json_file, {"benchmark": "forecast", **figures, "process": describe_machine()})


def _lines(data: Path, count: int) -> list[str]:
    try:
        lines = data.read_text("utf-8").splitlines(keepends=True)[:count]
    except OSError as error:
        raise UserError(f"cannot read {data}: {error.strerror}") from error
    if len(lines) < count:
        raise UserError(
            f"{data} has {len(lines)} rows; expected {count} or more: give another file with "
            "--data, or fewer --rows or --trainings"
        )
    return lines


def _read_layers(kinds: Sequence[str], named: Sequence[int] | None, target: str) -> list[int]:
    """The layers of the target that EAGLE-3 and DFlash read; none if no such kind is trained."""
    if READ_LAYERS.keys().isdisjoint(kinds):
        return []
    if named:
        return list(named)
    config, _ = load_model_config(target)
    return list(auxiliary_layers(config.get_text_config().num_hidden_layers))


def _stages(
    kinds: Sequence[str], vocabulary: int, layers: list[int], quick: bool
) -> list[dict[str, Any]]:
    """The target answers; its states in the answers are kept, and each kind learns from these."""
    answers = {"name": "answers", "kind": "generate", "max_new_tokens": 32 if quick else 80}
    states = {"name": "states", "kind": "feature_cache", "text": "answers"}
    stages: list[dict[str, Any]] = [
        answers | {"batch_size": 32},
        states | {"captured_layers": [*layers, -1]},
    ]
    for kind in kinds:
        how: dict[str, Any] = SMALL_LM
        if kind in HEADS:
            heads = {"type": kind, **HEADS[kind]}
            if kind in READ_LAYERS:
                heads[READ_LAYERS[kind]] = layers
            how = {"kind": "heads", "features": "states", "heads": heads}
        epochs = EPOCHS[kind]
        stages.append(
            {
                "name": kind,
                "text": "answers",
                **how,
                "draft_vocabulary": vocabulary,
                "loop": {"epochs": epochs // 2 if quick else epochs, "tokens_per_batch": 1024},
                "optimizer": {"lr": 1e-3},
            }
        )
    return stages


def _config(
    name: str,
    runs: Path,
    target: str,
    stages: list[dict[str, Any]],
    files: Sequence[Path],
    quick: bool,
) -> dict[str, Any]:
    evaluation = {
        "prompts": 24 if quick else TESTED,
        "gamma": 3,
        "max_new_tokens": 32 if quick else 64,
        "timed_prompts": 4 if quick else 8,
        "timed_tokens": 32,
        "shape": "chain",
        "generate": False,
        "baselines": ["ngram"],
        "in_turn": [],
    }
    data = {"train": str(files[0]), "test": str(files[1]), "dev": "dev.jsonl"}
    return run_config(name, runs, stages, target=target, data=data, evaluation=evaluation)


def compared(said: Forecast, report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Each trained kind: forecast and outcome of both figures, and the seconds of both."""
    outcomes = {row["stage"]: row["evaluation"] for row in report["rows"]}
    training = sum(stage["summary"]["seconds"] for stage in report["stages"])
    for line in said.lines:
        if not line.trained or line.tokens_per_step is None:
            continue
        outcome = outcomes[line.name]
        figures = {
            "tokens_per_step": (
                line.tokens_per_step,
                outcome["tokens_per_step_interval"] or {"value": outcome["tokens_per_step"]},
            ),
            "speedup": (
                line.cells[0].speedup if line.cells else None,
                outcome["speedup_without_prefill"],
            ),
        }
        yield {
            "kind": line.name,
            "pilots": said.pilots,
            "rows": said.rows,
            "measured": {str(rows): rate for rows, rate in line.measured.items()},
            "spent_seconds": said.spent,
            "training_seconds": training,
            **{figure: _beside(*pair) for figure, pair in figures.items()},
        }


def _beside(given: Range | None, measured: Mapping[str, float] | None) -> dict[str, Any]:
    """noise: half the width of the 95% interval of what came out, 0 if it has none."""
    measured = measured or {}
    outcome, inside = measured.get("value"), None
    if given is not None and outcome is not None:
        inside = given.low <= outcome <= given.high
    noise = (measured["high"] - measured["low"]) / 2 if "low" in measured else 0.0
    beside = {"forecast": given and asdict(given), "outcome": outcome}
    return beside | {"inside": inside, "noise": noise}


def _best(
    found: Sequence[dict[str, Any]], figure: str, *, noisy: bool = False
) -> Iterator[bool | None]:
    """Whether the kind that was forecast best came out best, by training. noisy: or less than the
    noise of the difference below the best."""
    for number in sorted({row["training"] for row in found}):
        rows = [row[figure] for row in found if row["training"] == number]
        if any(row["inside"] is None for row in rows):
            yield None
        else:
            named = max(rows, key=lambda row: row["forecast"]["value"])
            best = max(rows, key=lambda row: row["outcome"])
            noise = math.hypot(best["noise"], named["noise"]) if noisy else 0.0
            yield best["outcome"] - named["outcome"] <= noise


def _share(values: Iterator[bool | None]) -> list[int]:
    """[true, judged]."""
    judged = [value for value in values if value is not None]
    return [sum(judged), len(judged)]


def _said(share: Sequence[int]) -> str:
    return f"{share[0]} of {share[1]}"


def _cells(row: dict[str, Any]) -> dict[str, str]:
    cells = {
        "training": str(row["training"]),
        "drafter": row["kind"],
        "small trainings": ", ".join(f"{n}: {rate:.2f}" for n, rate in row["measured"].items()),
        "rows": str(row["rows"]),
    }
    for figure, name in zip(FIGURES, ("tokens/step", "speed-up"), strict=True):
        part = row[figure]
        inside = {True: "inside", False: "outside", None: "–"}[part["inside"]]
        cells[name] = format_interval(part["forecast"], 2)
        cells[f"{name} came out"] = f"{format_figure(part['outcome'], '.2f')} {inside}"
    cells["forecast ÷ training"] = f"{row['spent_seconds'] / row['training_seconds']:.0%}"
    return cells


if __name__ == "__main__":
    run_command(main)
