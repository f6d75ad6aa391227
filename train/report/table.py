"""The report's table for the terminal, and the functions that write each cell."""

from collections.abc import Callable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from train.report.words import (
    NONE,
    Row,
    break_even,
    draft_length,
    drafter_name,
    number,
    percent,
    perplexities,
    ratio,
    speedup,
)

# The columns of the table: the heading, and a function from a row to its cell.
COLUMNS: dict[str, Callable[[Row], str]] = {
    "stage": lambda row: row["stage"],
    "drafter": drafter_name,
    "acceptance rate": lambda row: number(row["evaluation"].get("acceptance_rate")),
    "draft efficiency": lambda row: number(row["evaluation"].get("draft_efficiency")),
    "tokens/step": lambda row: number(row["evaluation"].get("tokens_per_step")),
    "c": lambda row: number(row["evaluation"].get("c")),
    "break-even acceptance": lambda row: break_even(row["evaluation"]),
    "speed-up": lambda row: speedup(row["evaluation"]),
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
    "γ, mean": lambda e: number((e.get("draft_lengths") or {}).get("mean_gamma")),
    "v": lambda e: ratio(e.get("v_interval")) if e.get("v_interval") else number(e.get("v")),
    "tokens per verification pass": lambda e: number(e.get("verify_width")),
    "nodes per step": lambda e: number(e.get("nodes_per_step")),
    "la/k, mean over drafts": lambda e: number((e.get("draft_lengths") or {}).get("la_k")),
    "plain steps": lambda e: percent((e.get("draft_lengths") or {}).get("plain_share")),
    "draft, verify, overhead, ms per step": lambda e: _milliseconds(e),
    "speed-up compares": lambda e: e.get("speedup_basis") or NONE,
    "speed-up without prefill": lambda e: ratio(e.get("speedup_without_prefill")),
    "speed-up, texts that do not repeat": lambda e: ratio(e.get("speedup_not_repeating")),
    "tokens/step, texts that do not repeat": lambda e: number(
        e.get("tokens_per_step_not_repeating")
    ),
    "speed-up over generate()": lambda e: ratio(e.get("vs_generate")),
    "plain decoding over generate()": lambda e: ratio(e.get("plain_vs_generate")),
    "identical to plain": lambda e: percent(e.get("identical_to_plain")),
    "identical within rounding": lambda e: percent(e.get("identical_within_rounding")),
    "processor taken by others while timed": lambda e: percent(e.get("others_share")),
    "repetition": lambda e: percent(e.get("repetition")),
    "KL(original‖new target), nats per token": lambda e: number(
        (e.get("drift") or {}).get("kl"), 4
    ),
    "perplexity of held-out text, original → new target": lambda e: perplexities(e),
    "verification passes": lambda e: f"{e['steps']:,}" if e.get("steps") is not None else NONE,
}


def _milliseconds(evaluation: dict[str, Any]) -> str:
    parts = (evaluation.get("draft_lengths_timed") or {}).get("ms_per_step") or {}
    shown = [number(parts.get(part)) for part in ("draft", "verify", "overhead")]
    return NONE if set(shown) == {NONE} else ", ".join(shown)


def table(report: dict[str, Any]) -> Table:
    """Return the rows as a table for the terminal. Print `footnotes` below it."""
    # Narrow enough for 80 columns.
    made = Table(
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
            short = max(map(len, cells), default=0) <= 13
            made.add_column(heading, overflow="fold", no_wrap=heading == "drafter" and short)
            continue
        # A fixed width: headings wrap between words, figures never wrap.
        heading = SHORT.get(heading, heading)
        width = max(map(len, [*heading.split(), *cells]))
        made.add_column(heading, justify="right", width=width)
    for row in rows:
        made.add_row(*map(Text, row))
    return made
