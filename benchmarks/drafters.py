"""Compares all drafters on the same prompts: what they accept, what they cost, what they gain.

    python -m benchmarks.drafters [--quick] [--minutes M] [--run DIR …] [--drafter NAME …]
        [--json FILE] [--plots DIR] [--target T] [--dtype D] [--gamma N] [--prompts FILE]
        [--runs DIR] [--grid]

Without options: the drafters and combinations that need no training, those that come along, and
what runs of this benchmark make of the target's answers to the shipped training prompts: a
datastore, a small model with another tokenizer, which drafts the tokens that both have (TLI) or
text (SLEM), and a drafter of each kind that is trained, all for --minutes (default 3, quick 0.5; 0:
none). --run names runs that have trained drafters (`runs/quickstart`, or a run of
`benchmarks.heads`); they take the place of those of each kind. --drafter adds any other, by the
names of `draftsmith evaluate`. Trained drafters also compete in combinations, with the seconds of
their training. For another target than the default, only --run has trained drafters.

Each drafter decodes greedily in its own shape, and is timed in turns with plain decoding. The rows
are sorted by the speed-up. A second table says what was not measured, and why; a drafter that fails
is there too, and the others go on. `memory` is that of all tensors that a drafter has after the
last timed prompt, weights and slots of its own, without those of the target; tables of texts that
are no tensors are not in it. `training` is the time of the drafter's own stage, without the answers
and states that it learned from.

--grid measures instead whether drafts of one drafter (--drafter, default ngram) ever cost: with the
policy `worth`, beside plain decoding and fixed drafts, in turns, for batches of 1 to 16, behind up
to 7,000 tokens, for chat, code and random tokens, greedy and at temperature 1
(`benchmarks.shared.never_slower`). No time has the target's pass over the prompts. For each batch
size, and for each with one temperature, it ends with the mean ratios, their intervals over the
paired rounds, and the worst cell.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common import (
    MIB,
    PROMPTS,
    TARGET,
    UNJUDGED,
    JsonOption,
    PromptsOption,
    RunsOption,
    TargetOption,
    describe_machine,
    execute_run,
    format_figure,
    format_interval,
    rows_table,
    run_command,
    run_config,
    save_figure,
    start_benchmark,
    with_interval,
    write_json,
)
from benchmarks.heads import HEADS, PARD, SMALL_LM, Settings, heads_config
from benchmarks.shared.drafter_contestants import (
    Contestant,
    named,
    omitted,
    seconds_of,
    shortly_named,
    size_of,
    trained_drafters,
    untrained,
)
from benchmarks.shared.held_memory import held_bytes
from benchmarks.shared.never_slower import hold_grid
from benchmarks.shared.small_vocabulary import write_student
from decode.base.errors import UserError
from decode.model.loading import Target, load_target
from decode.opening.directory import open_drafter
from decode.settings import EvaluationProtocol
from draftsmith.cli.command import tokenized_prompts
from train.base.console import Reporter
from train.data.read import read_examples, spread
from train.measure.evaluation import evaluate

DATASTORE_NODES = 8


def main(
    quick: Annotated[bool, typer.Option("--quick", help="a few prompts")] = False,
    run: Annotated[list[Path] | None, typer.Option(help="a run whose drafters compete")] = None,
    drafter: Annotated[list[str] | None, typer.Option(help="another drafter, by name")] = None,
    json_file: JsonOption = None,
    plots: Annotated[Path | None, typer.Option(help="write drafters.png here")] = None,
    target: TargetOption = TARGET,
    dtype: Annotated[str, typer.Option(help="of the target and the drafters")] = "fastest",
    gamma: Annotated[int, typer.Option(min=1, help="tokens per draft; trees ignore it")] = 4,
    minutes: Annotated[
        float | None,
        typer.Option(min=0, help="of training for each kind; default 3, quick 0.5; 0: none"),
    ] = None,
    prompts: PromptsOption = PROMPTS / "test.jsonl",
    runs: RunsOption = Path("runs"),
    grid: Annotated[
        bool, typer.Option("--grid", help="measure whether drafts by their worth ever cost")
    ] = False,
) -> None:
    """Measure every drafter, print the table, sorted by speed-up."""
    reporter = start_benchmark()
    loaded = load_target(target, dtype=dtype)
    if grid:
        found = hold_grid(loaded, (drafter or ["ngram"])[0], gamma, quick, reporter)
        if json_file:
            write_json(json_file, found | {"machine": describe_machine()})
        return
    trained = [row for path in run or () for row in trained_drafters(path)]
    if not run and target == TARGET:
        trained = trained_here(runs, quick, minutes, reporter)
    contestants = [*untrained(), *from_answers(loaded, runs, quick, reporter), *trained]
    contestants = shortly_named([*contestants, *map(named, drafter or ())])
    protocol = EvaluationProtocol(
        gamma=gamma,
        max_new_tokens=48 if quick else 64,
        timed_tokens=48 if quick else 64,
        timed_prompts=6 if quick else 12,
        generate=False,
    )
    examples, _ = read_examples(str(prompts))
    texts = tokenized_prompts(spread(examples, 12 if quick else 42), loaded, None)
    figures, failed = compare(contestants, loaded, texts, protocol, reporter)
    ordered = dict(sorted(figures.items(), key=lambda row: -row[1]["speedup"]["value"]))
    left_out = omitted(contestants)
    what = describe_target(loaded)
    title = f"{what}; greedy, γ = {gamma}, batch 1"
    rows = [table_row(*row) for row in ordered.items()]
    reporter.table(rows_table(title, rows, left=2))
    reasons = {name: f"failed: {why}" for name, why in failed.items()} | left_out
    lines = [{"drafter": name, "why": why} for name, why in reasons.items()]
    reporter.table(rows_table("Not measured", lines, left=2))
    if plots:
        plot_drafters(ordered, plots / "drafters.png")
    if json_file:
        write_json(
            json_file,
            {
                "ratios": {
                    f"speedup_{name}": row["speedup"]["value"] for name, row in ordered.items()
                },
                "drafters": ordered,
                "failed": failed,
                "omitted": left_out,
                "target": what,
                "machine": describe_machine(),
            },
        )


def compare(
    contestants: list[Contestant],
    target: Target,
    texts: list[list[int]],
    protocol: EvaluationProtocol,
    reporter: Reporter,
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The figures of each drafter, by name, and why others have none."""
    figures, failed = {}, {}
    for contestant in contestants:
        reporter.say(f"measuring {contestant.name}")
        try:
            figures[contestant.name] = measure(contestant, target, texts, protocol)
        except UserError as error:
            failed[contestant.name] = str(error)
        except Exception as error:  # the rows of the others took minutes
            failed[contestant.name] = f"{type(error).__name__}: {error}"
        if contestant.name in failed:
            reporter.say(f"  failed: {failed[contestant.name]}")
    return figures, failed


def describe_target(target: Target) -> str:
    weights = sum(parameter.numel() for parameter in target.model.parameters())
    return f"{target.name}, {weights / 1e6:.0f}M"


def trained_here(
    runs: Path, quick: bool, minutes: float | None, reporter: Reporter
) -> list[Contestant]:
    """A drafter of each kind that is trained, and their combinations. Their run is kept. None of
    them for 0 minutes."""
    if minutes is None:
        minutes = 0.5 if quick else 3.0
    if not minutes:
        return []
    heads = (name for name, (options, _) in HEADS.items() if options["type"] == name)
    config = heads_config(Settings(quick, (PARD, SMALL_LM, *heads), minutes, None, 0, runs))
    name = f"drafters-trained-{minutes:g}min{'-quick' if quick else ''}"
    made, _ = execute_run(config | {"name": name, "evaluation": UNJUDGED}, reporter)
    return trained_drafters(made.directory)


def from_answers(target: Target, runs: Path, quick: bool, reporter: Reporter) -> list[Contestant]:
    """A datastore of the target's answers to the shipped training prompts, and a small model with
    another tokenizer that learned from them. Their run is kept."""
    name = "drafters-quick" if quick else "drafters"
    prompts, _ = read_examples(str(PROMPTS / "train.jsonl"))
    other = runs / f"{name}-other-tokenizer"
    write_student(other, target, (text for row in prompts for text in row.user_texts()))
    stages: list[dict[str, Any]] = [
        {"name": "answers", "kind": "generate", "prompts": 96 if quick else None}
        | {"max_new_tokens": 80, "batch_size": 32, "part_prompts": 96},
        {"name": "datastore", "kind": "datastore", "text": "answers"}
        | {"tree_nodes": DATASTORE_NODES},
        {"name": "other", "kind": "distill", "text": "answers"}
        | {"drafter": {"model": str(other.absolute()), "vocabulary": "shared"}}
        | {"losses": {"forward_kl": 1.0}, "optimizer": {"lr": 2e-3}}
        | {"loop": {"epochs": 100, "max_steps": 60 if quick else 240, "tokens_per_batch": 1024}},
    ]
    made, _ = execute_run(run_config(name, runs, stages, target=target.name), reporter)
    contestants = []
    for drafts, kind, stage, option in (
        ("rest", "rest", "datastore", ""),
        ("TLI", "shared_vocabulary", "other", ""),
        ("SLEM", "shared_vocabulary", "other", ":vocabulary=text"),
    ):
        directory = made.stage_directory(stage)
        drafter = directory / "drafter"
        spec = f"{drafter}{option}"
        row = Contestant(drafts, spec, kind, seconds_of(directory), size_of(drafter))
        contestants.append(row)
    return contestants


def measure(
    contestant: Contestant, target: Target, texts: list[list[int]], protocol: EvaluationProtocol
) -> dict[str, Any]:
    """The figures of one drafter."""
    drafter = open_drafter(contestant.spec, target)
    figures = evaluate(target, drafter, texts, protocol).to_dict()
    kept = (
        "tokens_per_step", "tokens_per_step_interval", "acceptance_rate", "draft_efficiency", "c",
        "v", "break_even_acceptance", "speedup", "drafts", "identical_to_plain",
        "identical_within_rounding",
    )  # fmt: skip
    return {name: figures[name] for name in kept} | {
        "training_seconds": contestant.seconds,
        "file_bytes": contestant.size,
        "memory_bytes": held_bytes(drafter, target.model),
    }


def table_row(name: str, row: dict[str, Any]) -> dict[str, str]:
    """The cells of a drafter."""
    return {
        "drafter": name,
        "drafts": row["drafts"],
        "tokens/step": with_interval(row, "tokens_per_step", 2),
        "α": format_figure(row["acceptance_rate"], ".2f"),
        "speed-up": format_interval(row["speedup"], 2),
        "c": format_figure(row["c"], ".3f"),
        "v": format_figure(row["v"], ".2f"),
        "pays above α": format_figure(row["break_even_acceptance"], ".2f"),
        "memory MiB": f"{row['memory_bytes'] / MIB:.1f}",
        "training s": format_figure(row["training_seconds"], ".0f"),
        "same text": format_figure(row["identical_within_rounding"], ".0%"),
    }


def plot_drafters(figures: dict[str, dict[str, Any]], file: Path) -> None:
    """Plot tokens per step and speed-up of every drafter."""
    from matplotlib.figure import Figure

    names = list(figures)[::-1]
    figure = Figure(figsize=(9, 0.32 * len(names) + 1.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    left.barh(names, [figures[name]["tokens_per_step"] - 1 for name in names], left=1.0)
    left.set_ylim(-0.6, len(names) - 0.4)
    left.set_xlabel("tokens per step (plain decoding: 1)", fontsize=9)
    for y, name in enumerate(names):
        sides = ((left, "tokens_per_step_interval", ""), (right, "speedup", "o"))
        for side, key, marker in sides:
            ratio = figures[name].get(key)
            if ratio is not None:
                value = ratio["value"]
                errors = [[value - ratio.get("low", value)], [ratio.get("high", value) - value]]
                colour = "#0067a5" if marker else "#1f2933"
                side.errorbar(value, y, xerr=errors, fmt=marker, color=colour, capsize=2)
    right.axvline(1.0, color="#5a6674", linestyle=":")
    right.set_xlabel("speed-up over plain, 95% interval", fontsize=9)
    for side in (left, right):
        side.tick_params(labelsize=9)
        side.grid(axis="x", alpha=0.3)
        side.set_axisbelow(True)
    save_figure(figure, file)


if __name__ == "__main__":
    run_command(main)
