"""The tables and the plot of `benchmarks.decode`."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.table import Table

from benchmarks.common import save_figure
from benchmarks.decode_contest import OURS, Contest
from benchmarks.decode_contestants import NAMES


def contest_table(contest: Contest, gamma: int) -> Table:
    """Return a table of the contestants' figures. Times are medians over passes."""
    setting = contest.setting
    shown = Table(
        title=f"{contest.title}, γ = {gamma}: {setting.jobs * setting.batch} prompts, "
        f"{setting.tokens} tokens each"
    )
    shown.add_column("contestant")
    columns = ("tokens/s", "tokens/step", "accepted", "draft ms", "verify ms", "overhead ms")
    for column in (*columns, "same text", "up to rounding"):
        shown.add_column(column, justify="right")
    for name in contest.seconds:
        found = contest.figures(name)
        shown.add_row(
            NAMES[name],
            f"{found['tokens_per_second']:.1f}",
            _cell(found["tokens_per_step"], "{:.2f}"),
            _cell(found["acceptance_rate"], "{:.2f}"),
            *(_cell(found[f"{what}_ms"], "{:.2f}") for what in ("draft", "verify", "overhead")),
            _cell(found["equal_to_generate"], "{:.0%}"),
            _cell(found["equal_within_rounding"], "{:.0%}"),
        )
    return shown


def _cell(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def ratio_table(found: dict[str, dict[str, float]]) -> Table:
    shown = Table(title="ratios of time, theirs over ours")
    shown.add_column("what")
    shown.add_column("ratio", justify="right")
    shown.add_column("95% interval", justify="right")
    for name, ratio in found.items():
        interval = f"{ratio['low']:.2f}–{ratio['high']:.2f}" if "low" in ratio else "–"
        shown.add_row(name, f"{ratio['value']:.2f}", interval)
    return shown


def cold_table(cold: dict[str, dict[str, float]]) -> Table:
    shown = Table(title="cold start: seconds in a fresh process, models loaded")
    shown.add_column("contestant")
    for column in ("making it ready", "first call, one token", "second call"):
        shown.add_column(column, justify="right")
    for name, seconds in cold.items():
        shown.add_row(NAMES[name], *(f"{seconds[x]:.2f}" for x in ("ready", "first", "second")))
    return shown


def plot(contests: Sequence[Contest], file: Path) -> None:
    """Plot the tokens per second of every contestant, one panel per setting."""
    from matplotlib.figure import Figure

    names = [name for name in NAMES if any(name in contest.seconds for contest in contests)]
    figure = Figure(
        figsize=(3.2 * len(contests) + 2.4, 0.34 * len(names) + 1), layout="constrained"
    )
    panels = figure.subplots(1, len(contests), sharey=True, squeeze=False)[0]
    places = np.arange(len(names))[::-1]
    for panel, contest in zip(panels, contests, strict=True):
        for name, place in zip(names, places, strict=True):
            if name not in contest.seconds:
                panel.text(0, place, " –", va="center", fontsize=8, color="#5a6674")
                continue
            speed = contest.figures(name)["tokens_per_second"]
            panel.barh(place, speed, color="#0067a5" if name in OURS else "#b8c2cc")
            panel.text(speed, place, f" {speed:.0f}", va="center", fontsize=8)
        panel.set_title(contest.title, fontsize=9)
        panel.set_yticks(places, [NAMES[name] for name in names], fontsize=8)
        panel.set_xlabel("tokens/s", fontsize=8)
        panel.margins(x=0.15)
    save_figure(figure, file)
