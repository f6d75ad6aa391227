"""The plots that compare the drafters of a report."""

from typing import Any

from train.plots import REFERENCE, SERIES
from train.plots.bars import bars, intervals, stacks
from train.plots.lines import by_position
from train.report.rows import bare, is_baseline, labels

MOST_KEPT = 8
# Parts of decoding time in the order of the loop, with their colours. Here "prefill" includes the
# drafter's prefill.
TIME = {
    "prefill": REFERENCE,
    "draft": SERIES[1],
    "verify": SERIES[0],
    "overhead": SERIES[3],
}


def drafter_plots(report: dict[str, Any]) -> dict[str, str]:
    """Return the plots as SVG text, by name."""
    names, evaluations = labels(report), [row["evaluation"] for row in report["rows"]]
    colours, used = [], 0
    for row in report["rows"]:
        colours.append(SERIES[used % len(SERIES)])
        if is_baseline(report, row):
            colours[-1] = REFERENCE
        else:
            used += 1

    def reference(key: str) -> tuple[str, float] | None:
        found = [
            (bare(name), row["evaluation"].get(key))
            for name, row in zip(names, report["rows"], strict=True)
            if row["drafter"] == "ngram" and row["evaluation"].get(key) is not None
        ]
        return max(found, key=lambda pair: pair[1]) if found else None

    def figures(key: str) -> list[Any]:
        return [evaluation.get(key) for evaluation in evaluations]

    return {
        "acceptance": bars(
            "acceptance",
            names,
            figures("acceptance_rate"),
            colours,
            axis="acceptance rate α",
            end=1.0,
            reference=reference("acceptance_rate"),
            marks=figures("break_even_acceptance"),
            mark_label="break-even",
        ),
        "tokens": bars(
            "tokens",
            names,
            figures("tokens_per_step"),
            colours,
            axis="tokens per step τ (plain decoding: 1)",
            reference=reference("tokens_per_step"),
        ),
        "speed": intervals(
            "speed", names, figures("speedup"), colours, axis="speed-up over plain decoding (×)"
        ),
        "positions": by_position(
            "positions",
            names,
            [found or [] for found in figures("acceptance_by_position")],
            [found or [] for found in figures("reached_by_position")],
            colours,
        ),
        "accepted": _accepted_plot(names, evaluations),
        "time": _time_plot(names, evaluations),
    }


def _accepted_plot(names: list[str], evaluations: list[dict[str, Any]]) -> str:
    passes = [evaluation.get("steps_by_accepted") or [] for evaluation in evaluations]
    depth = max(map(len, passes), default=0)
    # Long drafts: counts from MOST_KEPT on share one part; too many parts would look alike.
    parts = [
        (str(kept), [sum(row[kept : kept + 1]) / (sum(row) or 1) for row in passes])
        for kept in range(min(depth, MOST_KEPT))
    ]
    if depth > MOST_KEPT:
        beyond = [sum(row[MOST_KEPT:]) / (sum(row) or 1) for row in passes]
        last = MOST_KEPT if depth == MOST_KEPT + 1 else f"{MOST_KEPT}+"
        parts.append((str(last), beyond))
    return stacks(
        "accepted",
        names,
        parts,
        axis="share of verification passes",
        title="drafted tokens accepted in one pass",
    )


def _time_plot(names: list[str], evaluations: list[dict[str, Any]]) -> str:
    """Plot each drafter's time as a share of plain decoding's time on the same prompts."""

    def shares(seconds: dict[str, float] | None, whole: float) -> list[float | None]:
        return [spent(seconds, part) / whole if whole else None for part in TIME]

    def spent(seconds: dict[str, float] | None, part: str) -> float:
        found = seconds or {}
        drafter = found.get("draft_prefill", 0.0) if part == "prefill" else 0.0
        return found.get(part, 0.0) + drafter

    timed = [evaluation.get("seconds") or {} for evaluation in evaluations]
    wholes = [sum(spent(s.get("plain"), part) for part in TIME) for s in timed]
    rows = [shares(s.get("drafted"), whole) for s, whole in zip(timed, wholes, strict=True)]
    if not any(wholes):
        return ""
    first = next(i for i, whole in enumerate(wholes) if whole)
    rows = [shares(timed[first]["plain"], wholes[first]), *rows]
    return stacks(
        "time",
        ["plain decoding", *names],
        [(part, [row[i] for row in rows]) for i, part in enumerate(TIME)],
        list(TIME.values()),
        axis="wall time, share of plain decoding's",
        title="part of the decoding loop",
        line=("plain decoding", 1.0),
        totals=True,
    )
