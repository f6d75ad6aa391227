"""Does a boost-tuned second drafter add more to a tree than one that is trained plainly?

    python -m benchmarks.boosting [--quick] [--json FILE] [--runs DIR]

Boost-tuning (SpecInfer, 2305.09781, section 3) on SmolLM2-135M and the shipped prompts. Every
drafter starts from two layers of the target and learns from the target's greedy answers:

    A          layers 0 and 1
    A longer   A, trained for as many steps again
    A++A′      A, and a drafter of layers 0 and 2 that was trained as A; merged into one tree
    A++B       A, and a drafter like A′ that was trained on the tokens that A misses

The last three rows took the same number of training tokens. Each drafter drafts chains of 4, so a
merged tree has at most 8 nodes and costs two drafts. The table has the tokens per step on test
prompts, greedy and at temperature 1, with 95% intervals over prompts, and the mean number
of drafted tokens of a step. Runs are kept and continue where they stopped.
"""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks.common import (
    TEMPERATURES,
    JsonOption,
    RunsOption,
    count_tokens,
    describe_machine,
    execute_run,
    format_interval,
    read_summary,
    rows_table,
    run_command,
    run_config,
    start_benchmark,
    tokens_per_step,
    write_json,
)
from train.data.read import spread
from train.run.run import Run

# The stages whose drafters an arm has.
ARMS = {"A": ["a"], "A longer": ["longer"], "A++A′": ["a", "plain"], "A++B": ["a", "boosted"]}
GAMMA = 4


def main(
    quick: Annotated[bool, typer.Option("--quick", help="few steps, fewer prompts")] = False,
    json_file: JsonOption = None,
    runs: RunsOption = Path("runs"),
) -> None:
    """Train the drafters, measure every arm, print the table."""
    reporter = start_benchmark()
    run, _ = execute_run(boosting_config(quick=quick, runs=runs), reporter)
    figures = {}
    for arm, stages in ARMS.items():
        figures[arm] = measure(run, stages, quick=quick)
        reporter.say(f"{arm}: {tokens_per_step(figures[arm]['greedy'])['value']:.3f} greedy")
    missed = read_summary(run, "boosted")["missed_share"]
    reporter.table(arms_table(figures, missed))
    value = {
        (arm, metric): tokens_per_step(row[metric])["value"]
        for arm, row in figures.items()
        for metric in TEMPERATURES
    }
    if json_file:
        write_json(
            json_file,
            {
                "ratios": {
                    f"{metric}_boosted_vs_{name}": value["A++B", metric] / value[other, metric]
                    for name, other in (("plain", "A++A′"), ("longer", "A longer"))
                    for metric in TEMPERATURES
                },
                "arms": figures,
                "missed_share": missed,
                "settings": run.config.model_dump(mode="json"),
                "machine": describe_machine(),
            },
        )


def boosting_config(*, quick: bool, runs: Path) -> dict[str, Any]:
    """Return the config of one run: the text, and a distill stage for each drafter."""
    steps = 40 if quick else 240
    answers = {"name": "answers", "kind": "generate", "max_new_tokens": 80, "batch_size": 32}
    answers |= {"part_prompts": 96}
    training = {
        "kind": "distill",
        "text": "answers",
        "draft_vocabulary": 8000,
        "train_embeddings": False,
        "remember_teacher": True,
        "loop": {"epochs": 1000, "max_steps": steps, "tokens_per_batch": 1024},
        "optimizer": {"lr": 2e-3},
    }
    second = training | {"drafter": {"layers": [0, 2]}}
    longer = training | {"name": "longer", "drafter": {"stage": "a"}}
    longer["draft_vocabulary"] = None  # that of A
    stages = [
        answers,
        training | {"name": "a", "drafter": {"layers": [0, 1]}},
        longer,
        second | {"name": "plain"},
        second | {"name": "boosted", "boost": {"missed_by": "a"}},
    ]
    return run_config("boosting-quick" if quick else "boosting", runs, stages)


def measure(run: Run, stages: list[str], *, quick: bool) -> dict[str, Any]:
    """Return steps, emitted and drafted tokens by prompt, greedy and at T = 1, of the merged drafts
    of these stages' drafters."""
    target = run.target
    prompts = run.prompts(spread(run.read_data()["test"], 12 if quick else 42))
    drafter = "++".join(str(run.stage_directory(stage) / "drafter") for stage in stages)
    figures: dict[str, Any] = count_tokens(target, drafter, prompts, 32 if quick else 64, GAMMA)
    trained = ["a", "longer"] if stages == ["longer"] else stages  # `longer` continues A
    figures["seconds"] = sum(read_summary(run, s)["training"]["training_seconds"] for s in trained)
    return figures


def arms_table(figures: dict[str, dict[str, Any]], missed: float) -> Table:
    """Return the table of all arms. missed: the share of the text's tokens that A misses."""
    rows = [
        {
            "drafter": arm,
            "greedy": format_interval(tokens_per_step(row["greedy"]), 3),
            "T = 1": format_interval(tokens_per_step(row["sampled"]), 3),
            "drafted": f"{sum(row['greedy']['drafted']) / sum(row['greedy']['steps']):.1f}",
        }
        for arm, row in figures.items()
    ]
    caption = f"A misses {missed:.0%} of the tokens that B learns from"
    return rows_table(f"tokens per step at γ = {GAMMA}", rows, left=1, caption=caption)


if __name__ == "__main__":
    run_command(main)
