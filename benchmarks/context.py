"""Measures what drafters accept and gain as the context grows.

    python -m benchmarks.context [--quick] [--drafter NAME …] [--lengths N,…] [--json FILE]
        [--plot FILE] [--target T] [--dtype D] [--gamma N] [--timed N] [--prompts FILE]
        [--notes FILE]
    python -m benchmarks.context --random [--drafter KIND …] [--lengths N,…] [--json FILE] …

Each prompt stands behind notes of a certain length: other prompts, one after the other, which the
answer does not need. So the text to write stays much the same, and only its context grows. A
drafter that was trained on short texts meets positions there that it has never seen. Decoding is
greedy, at batch 1. Speed-ups are without the pass over the prompt, which takes the same time with
and without drafts. A drafter directory with `:window=512` sees only a window of the context.

--random measures costs alone, also beyond the target's context: of untrained heads of some kinds
(`eagle1`, `eagle1:window=512`), on a target of the same sizes with random weights.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import heads  # noqa: F401  (registers its drafters)
from benchmarks.common import (
    PROMPTS,
    TARGET,
    JsonOption,
    PromptsOption,
    TargetOption,
    describe_machine,
    format_figure,
    format_interval,
    rows_table,
    run_command,
    save_figure,
    start_benchmark,
    write_json,
)
from benchmarks.shared.context_costs import cost_rows, with_random_weights
from benchmarks.shared.notes import NotesOption, behind_notes, notes_of
from decode.base.errors import UserError
from decode.measure.evaluation import evaluate
from decode.model.loading import load_target
from decode.opening.directory import open_drafter
from decode.settings import EvaluationProtocol
from train.data.read import read_examples, spread

LENGTHS = "0,1000,2000,4000,7500"
QUICK = "0,1000,2000"
RANDOM = "1000,2000,4000,8000,16000"
KEPT = (
    "tokens_per_step", "acceptance_rate", "c", "v", "speedup_without_prefill", "drafts",
    "identical_within_rounding",
)  # fmt: skip


def main(
    quick: Annotated[bool, typer.Option("--quick", help="fewer prompts, shorter notes")] = False,
    random: Annotated[
        bool, typer.Option("--random", help="costs of untrained heads, with random weights")
    ] = False,
    drafter: Annotated[list[str] | None, typer.Option(help="name or directory")] = None,
    lengths: Annotated[str | None, typer.Option(help="tokens of notes before a prompt")] = None,
    json_file: JsonOption = None,
    plot: Annotated[Path | None, typer.Option(help="draw the table here, as PNG")] = None,
    target: TargetOption = TARGET,
    dtype: Annotated[str, typer.Option(help="dtype of all models")] = "fastest",
    gamma: Annotated[int, typer.Option(min=1, help="tokens per draft; trees ignore it")] = 4,
    timed: Annotated[
        int | None, typer.Option(min=1, help="prompts whose decoding is timed; default: all")
    ] = None,
    prompts: PromptsOption = PROMPTS / "test.jsonl",
    notes: NotesOption = PROMPTS / "train.jsonl",
) -> None:
    """Measure every drafter at every length of the context."""
    reporter = start_benchmark()
    loaded = load_target(target, dtype=dtype)
    if random:
        counts = parse_lengths(lengths or RANDOM)
        loaded = with_random_weights(loaded, max(counts) + gamma)
        names = drafter or ["eagle1", "eagle1:window=512"]
        rows = cost_rows(loaded, names, counts, gamma, reporter)
        title = f"sizes of {loaded.name}, random weights; drafts of {gamma} tokens"
        reporter.table(rows_table(title, list(map(cost_cells, rows)), left=1))
        finish(rows, {"c": "c"}, "c", plot, json_file)
        return
    counts = parse_lengths(lengths or (QUICK if quick else LENGTHS))
    asked = spread(read_examples(str(prompts))[0], 4 if quick else 6)
    read = notes_of(loaded, notes)
    protocol = EvaluationProtocol(
        gamma=gamma,
        max_new_tokens=32 if quick else 48,
        timed_tokens=32 if quick else 48,
        timed_prompts=min(timed or len(asked), len(asked)),
        generate=False,
    )
    rows = []
    for count in counts:
        answer = protocol.max_new_tokens
        texts = [behind_notes(loaded, example, read, count, answer) for example in asked]
        for name in drafter or ["ngram"]:
            reporter.say(f"measuring {name} behind {count} tokens of notes")
            figures = evaluate(loaded, open_drafter(name, loaded), texts, protocol).to_dict()
            context = sum(map(len, texts)) / len(texts)
            rows.append(
                {"drafter": name, "notes": count, "context": context}
                | {key: figures[key] for key in KEPT}
            )
    reporter.table(rows_table(f"{loaded.name}; greedy, batch 1", list(map(cells, rows)), left=2))
    finish(rows, {"tokens_per_step": "tokens per step", "c": "c"}, "speedup", plot, json_file)


def finish(
    rows: Sequence[dict[str, Any]],
    panels: dict[str, str],
    ratio: str,
    plot: Path | None,
    json_file: Path | None,
) -> None:
    """Draw the plot and write the figures, where they are wanted. panels: as for `plot_rows`.
    ratio: what the JSON file has as `ratios`: `c` or `speedup`."""
    if plot is not None:
        plot_rows(rows, panels, plot)
    if json_file is not None:
        key = "notes" if ratio == "speedup" else "context"
        ratios = {f"{ratio}_{row['drafter']}_at_{row[key]}": _ratio(row, ratio) for row in rows}
        write_json(json_file, {"ratios": ratios, "rows": rows, "machine": describe_machine()})


def _ratio(row: dict[str, Any], ratio: str) -> float:
    value: float = row["speedup_without_prefill"]["value"] if ratio == "speedup" else row[ratio]
    return value


def parse_lengths(text: str) -> list[int]:
    """The numbers of `--lengths`. Raises UserError for anything else."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = [-1]
    if min(counts) < 0:
        raise UserError(f"--lengths is {text!r}; expected numbers of tokens such as {LENGTHS}")
    return counts


def cells(row: dict[str, Any]) -> dict[str, str]:
    """The cells of a row of the table."""
    return {
        "drafter": row["drafter"],
        "drafts": row["drafts"],
        "context": f"{row['context']:.0f}",
        "tokens/step": f"{row['tokens_per_step']:.2f}",
        "α": f"{row['acceptance_rate']:.2f}",
        "c": format_figure(row["c"], ".3f"),
        "v": format_figure(row["v"], ".2f"),
        "speed-up without prefill": format_interval(row["speedup_without_prefill"], 2),
        "same text": f"{row['identical_within_rounding']:.0%}",
    }


def cost_cells(row: dict[str, Any]) -> dict[str, str]:
    """The cells of a row of the table of costs."""
    return {
        "drafter": row["drafter"],
        "context": f"{row['context']}",
        "plain pass": f"{row['plain_ms']:.1f} ms",
        "draft": f"{row['draft_ms']:.2f} ms",
        "c": f"{row['c']:.3f}",
        "read of the prompt": f"{row['prefill_s']:.2f} s",
    }


def plot_rows(rows: Sequence[dict[str, Any]], panels: dict[str, str], file: Path) -> None:
    """Draw figures against the context, a line for each drafter. panels: the labels of the figures
    by their names."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * len(panels), 3.5), layout="constrained")
    for axes, (key, label) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        for name in dict.fromkeys(row["drafter"] for row in rows):
            of_one = [row for row in rows if row["drafter"] == name]
            contexts, values = ([row[x] for row in of_one] for x in ("context", key))
            # Of the path of a stage's drafter only the stage.
            short = re.sub(r"[^+]*/([^/+]+)/[^/+]+", r"\1", name)
            axes.plot(contexts, values, marker="o", label=short)
        axes.set_xlabel("tokens of the prompt")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=1 if key == "tokens_per_step" else 0)
        axes.grid(alpha=0.3)
        axes.legend()
    save_figure(figure, file)


if __name__ == "__main__":
    run_command(main)
