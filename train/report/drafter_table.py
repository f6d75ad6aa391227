"""The rows of a report: their labels, the baselines among them, and a table for the terminal."""

from collections.abc import Callable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from train.report.format_figures import (
    MISSING,
    Row,
    draft_length,
    drafter_name,
    format_break_even,
    format_number,
    format_perplexities,
    format_ratio,
    format_share,
    format_speedup,
    has_varying_lengths,
)

# The columns of the table: the heading, and a function from a row to its cell.
COLUMNS: dict[str, Callable[[Row], str]] = {
    "stage": lambda row: row["stage"],
    "drafter": drafter_name,
    "acceptance rate": lambda row: format_number(row["evaluation"].get("acceptance_rate")),
    "draft efficiency": lambda row: format_number(row["evaluation"].get("draft_efficiency")),
    "tokens/step": lambda row: format_number(row["evaluation"].get("tokens_per_step")),
    "c": lambda row: format_number(row["evaluation"].get("c")),
    "break-even acceptance": lambda row: format_break_even(row["evaluation"]),
    "speed-up": lambda row: format_speedup(row["evaluation"]),
}
# Headings that fit the terminal's width.
SHORT = {
    "acceptance rate": "acceptance rate α",
    "tokens/step": "tokens/ step",
    "break-even acceptance": "break- even α",
}
# Further figures, shown on request.
DETAILS: dict[str, Callable[[dict[str, Any]], str]] = {
    "γ": draft_length,
    "γ, mean": lambda e: format_number((e.get("draft_lengths") or {}).get("mean_gamma")),
    "v": lambda e: (
        format_ratio(e.get("v_interval")) if e.get("v_interval") else format_number(e.get("v"))
    ),
    "tokens per verification pass": lambda e: format_number(e.get("verify_width")),
    "nodes per step": lambda e: format_number(e.get("nodes_per_step")),
    "acceptance rate, tokens/step while thinking": lambda e: _part(e, "thinking"),
    "acceptance rate, tokens/step in the answer after it": lambda e: _part(e, "answer"),
    "la/k, mean over drafts": lambda e: format_number((e.get("draft_lengths") or {}).get("la_k")),
    "plain steps": lambda e: format_share((e.get("draft_lengths") or {}).get("plain_share")),
    "draft, verify, overhead, ms per step": lambda e: _milliseconds(e),
    "speed-up compares": lambda e: e.get("speedup_basis") or MISSING,
    "speed-up without prefill": lambda e: format_ratio(e.get("speedup_without_prefill")),
    "speed-up, texts that do not repeat": lambda e: format_ratio(e.get("speedup_not_repeating")),
    "tokens/step, texts that do not repeat": lambda e: format_number(
        e.get("tokens_per_step_not_repeating")
    ),
    "speed-up over generate()": lambda e: format_ratio(e.get("vs_generate")),
    "plain decoding over generate()": lambda e: format_ratio(e.get("plain_vs_generate")),
    "identical to plain": lambda e: format_share(e.get("identical_to_plain")),
    "identical within rounding": lambda e: format_share(e.get("identical_within_rounding")),
    "processor taken by others while timed": lambda e: format_share(e.get("others_share")),
    "repetition": lambda e: format_share(e.get("repetition")),
    "KL(original‖new target), nats per token": lambda e: format_number(
        (e.get("drift") or {}).get("kl"), 4
    ),
    "perplexity of held-out text, original → new target": lambda e: format_perplexities(e),
    "verification passes": lambda e: f"{e['steps']:,}" if e.get("steps") is not None else MISSING,
}


def _part(evaluation: dict[str, Any], name: str) -> str:
    part = (evaluation.get("parts") or {}).get(name)
    if not part:
        return MISSING
    return f"{format_number(part['acceptance_rate'])}, {format_number(part['tokens_per_step'])}"


def _milliseconds(evaluation: dict[str, Any]) -> str:
    parts = (evaluation.get("draft_lengths_timed") or {}).get("ms_per_step") or {}
    cells = [format_number(parts.get(part)) for part in ("draft", "verify", "overhead")]
    return MISSING if set(cells) == {MISSING} else ", ".join(cells)


def drafter_table(report: dict[str, Any]) -> Table:
    """Return the rows as a table for the terminal. Print `footnotes` below it."""
    # Narrow enough for 80 columns.
    table = Table(
        title=Text(f"run {report['name']}"),
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=0,
    )
    rows = [[cell(row) for cell in COLUMNS.values()] for row in report["rows"]]
    for index, heading in enumerate(COLUMNS):
        cells = [row[index] for row in rows]
        if heading in ("stage", "drafter"):
            is_short = max(map(len, cells), default=0) <= 13
            table.add_column(heading, overflow="fold", no_wrap=heading == "drafter" and is_short)
            continue
        # A fixed width: headings wrap between words, figures never wrap.
        heading = SHORT.get(heading, heading)
        width = max(map(len, [*heading.split(), *cells]))
        table.add_column(heading, justify="right", width=width)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def row_labels(report: dict[str, Any]) -> list[str]:
    """Return a short unique name for every row: the stage, or the drafter of a baseline and of a
    row without a stage."""
    names = []
    for row in report["rows"]:
        name = row["drafter"] if row["stage"] == MISSING else row["stage"]
        if is_baseline(report, row):
            gamma = row["evaluation"].get("gamma")
            differs = gamma != _main_gamma(report) and not has_varying_lengths(row["evaluation"])
            name = row["drafter"] + (f" γ={gamma}" if differs else "")
        names.append(f"{name} ({row['drafter']})" if name in names else name)
    return [f"{n} #{i + 1}" if names.count(n) > 1 else n for i, n in enumerate(names)]


def without_gamma(label: str) -> str:
    """Return a row's label without its γ."""
    return label.partition(" γ=")[0]


def is_baseline(report: dict[str, Any], row: Row) -> bool:
    """Whether the row's drafter is a baseline, not the output of a stage."""
    evaluation = report["config"].get("evaluation") or {}
    baselines = {"ngram", *(evaluation.get("baselines") or [])}
    stages = {stage["name"] for stage in report.get("stages", [])}
    return row["drafter"] in baselines and row["stage"] not in stages


def _main_gamma(report: dict[str, Any]) -> Any:
    """Return the γ of the trained drafters."""
    configured = (report["config"].get("evaluation") or {}).get("gamma")
    gammas = [row["evaluation"].get("gamma") for row in report["rows"]]
    return configured or (gammas[-1] if gammas else None)
