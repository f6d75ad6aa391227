"""The figures, the table and the plot of `benchmarks.online`, computed from the arms' counts."""

from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.common import save_figure
from benchmarks.online_runs import BATCH, DOMAINS, FAMILIES, GAMMA, MAIN, Arm
from decode.measure.evaluation import ratio_of_totals
from train.plots import LIGHT, SERIES

END = 40  # requests at the end of a domain
# An arm has recovered if a window's acceptance is at most this far below the domain's end.
WITHIN = 0.02


def row(counts: np.ndarray, summary: dict[str, Any], size: int) -> dict[str, Any]:
    """Return an arm's figures: acceptance in each domain and at its end, recovery time, costs.

    counts: int [requests, 4], see `train.online.stream_progress.COUNTS`. size: requests per domain.
    """
    figures = ("acceptance", "end", "end_tokens_per_step", "recovered_after")
    found: dict[str, Any] = {name: {} for name in figures}
    for number, domain in enumerate(DOMAINS):
        own = counts[number * size : (number + 1) * size]
        found["acceptance"][domain] = ratio(own)
        found["end"][domain] = ratio(own[-END:])
        steps, emitted = own[-END:, :2].sum(0)
        found["end_tokens_per_step"][domain] = float(emitted / steps)
        level = found["end"][domain]["value"] - WITHIN
        windows = [ratio(own[i : i + BATCH])["value"] for i in range(0, size, BATCH)]
        reached = next((i for i, rate in enumerate(windows) if rate >= level), len(windows))
        found["recovered_after"][domain] = reached * BATCH
    seconds = summary["decoding_seconds"] + summary["learning_seconds"]
    return found | {
        "tokens_per_step": float(counts[:, 1].sum() / counts[:, 0].sum()),
        "net_tokens_per_second": summary["tokens"] / seconds,
        "learning_share": summary["learning_seconds"] / seconds,
        "learning_seconds": summary["learning_seconds"],
        "versions_kept": summary["versions_kept"],
        "versions_rolled_back": summary["versions_rolled_back"],
    }


def ratio(counts: np.ndarray) -> dict[str, float]:
    """Return accepted / reached, with a 95% bootstrap interval over requests."""
    found = ratio_of_totals(counts[:, 3], counts[:, 2])
    assert found is not None
    return found


def ratios(rows: dict[Arm, dict[str, Any]]) -> dict[str, float]:
    """Return the figures to compare between versions of this project."""
    found = {}
    for family in FAMILIES:
        name = family.replace(" ", "_")
        frozen, main, offline = (
            rows[arm] for arm in (Arm(family), Arm(family, MAIN), Arm(family, offline=True))
        )
        for domain in DOMAINS:
            end = [x["end"][domain]["value"] for x in (frozen, main, offline)]
            found[f"{name}_acceptance_gain_{domain}"] = end[1] - end[0]
            found[f"{name}_acceptance_{domain}_vs_offline"] = end[1] / end[2]
        speed = "net_tokens_per_second"
        found[f"{name}_net_speed_vs_frozen"] = main[speed] / frozen[speed]
    return found


def table(
    rows: dict[Arm, dict[str, Any]],
    ngram: dict[str, float],
    training: dict[Arm, dict[str, float]],
) -> Table:
    """Return the table of all arms. training: the cost of each arm's offline distillation."""
    first = DOMAINS[0]
    own = ", ".join(
        f"{arm.name} {found['end_tokens_per_step'][first]:.2f}"
        for arm, found in rows.items()
        if arm.share is None and not arm.offline
    )
    shown = Table(
        title=f"acceptance rate at γ = {GAMMA}, last {END} requests of each domain",
        caption=f"tokens a step on {first}: ngram at its best γ of {ngram['gamma']:.0f} "
        f"{ngram['tokens_per_step']:.2f} (acceptance {ngram['acceptance_rate']:.3f}), {own}",
    )
    for column in ("arm", *DOMAINS):
        shown.add_column(column)
    for column in ("recovered after", "kept / undone", "learning", "offline", "net tokens/s"):
        shown.add_column(column, justify="right")
    for arm, figures in rows.items():
        ends = [figures["end"][domain] for domain in DOMAINS]
        recovered = [str(figures["recovered_after"][domain]) for domain in DOMAINS[1:]]
        learns = arm.share is not None
        offline = training[arm]
        shown.add_row(
            arm.name,
            *(f"{x['value']:.3f} [{x['low']:.3f}, {x['high']:.3f}]" for x in ends),
            " / ".join(recovered) if learns else "–",
            f"{figures['versions_kept']} / {figures['versions_rolled_back']}" if learns else "–",
            f"{figures['learning_seconds']:.0f} s ({figures['learning_share']:.0%})",
            f"{offline['seconds']:.0f} s + {offline['answer_seconds']:.0f} s",
            f"{figures['net_tokens_per_second']:.0f}",
        )
    return shown


def plot(counts: dict[Arm, np.ndarray], size: int, file: Path) -> None:
    """Plot acceptance over the stream by batches of requests, with marks at changes of domain."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 6.4), layout="constrained")
    panels = figure.subplots(len(FAMILIES), sharex=True, sharey=True)
    for family, axes in zip(FAMILIES, panels, strict=True):
        own = {arm: rows for arm, rows in counts.items() if arm.family == family}
        for (arm, rows), colour in zip(own.items(), SERIES, strict=False):
            places = range(0, len(rows), BATCH)
            rates = [ratio(rows[i : i + BATCH])["value"] for i in places]
            middles = [i + BATCH / 2 for i in places]
            label = arm.name.partition(", ")[2]
            axes.plot(middles, rates, "o-", color=colour, markersize=3, label=label)
        for number, domain in enumerate(DOMAINS):
            if number:
                axes.axvline(number * size, color=LIGHT["muted"], linestyle=":")
            axes.text((number + 0.5) * size, 0.01, domain, ha="center", color=LIGHT["muted"])
        axes.set_ylim(bottom=0)
        axes.set_title(family, loc="left")
        axes.set_ylabel("acceptance rate α")
        axes.grid(color=LIGHT["grid"])
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    panels[-1].set_xlabel("requests served")
    save_figure(figure, file)
