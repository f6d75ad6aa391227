"""Plots with a line for every drafter or figure: by position, by step, over a stream."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from train.report.plots import LIGHT, REFERENCE, SERIES, canvas, plot, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FEW = 30  # a share of fewer cases than this is mostly noise, so its marker is hollow
MAX_POINTS = 300


@plot
def position_plot(
    name: str,
    labels: Sequence[str],
    rates: Sequence[Sequence[float | None]],
    reached: Sequence[Sequence[int]],
    colours: Sequence[str],
) -> str:
    """Plot the acceptance rate by draft position: a line per row, labelled at its end."""
    lines = []
    for label, row, counts, colour in zip(labels, rates, reached, colours, strict=True):
        points = [(i + 1, rate) for i, rate in enumerate(row) if rate is not None]
        if points:
            few = [i for i, (position, _) in enumerate(points) if counts[position - 1] < FEW]
            lines.append((label, points, few, colour))
    if not lines:
        return ""
    with canvas(3.3) as (figure, axes):
        last = max(points[-1][0] for _, points, _, _ in lines)
        for _, points, few, colour in lines:
            axes.plot(
                *zip(*points, strict=True),
                marker="o",
                color=colour,
                linewidth=1.8,
                markersize=5,
                linestyle=(0, (4, 3)) if colour == REFERENCE else "-",
            )
            for i in few:
                axes.plot(
                    *points[i], "o", color=colour, markersize=5, markerfacecolor=LIGHT["page"]
                )
        axes.set_ylim(-0.02, 1.04)
        _end_labels(axes, [(*p[-1], label, colour) for label, p, _, colour in lines], last)
        axes.set_xlim(1 - 0.04 * last, last + 0.02 * last)
        from matplotlib.ticker import MaxNLocator

        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.set_xlabel("position in the draft (tokens)")
        axes.set_ylabel("acceptance rate")
        axes.grid()
        rows = [
            f"{label}: {', '.join(f'{rate:.2f}' for _, rate in points)}"
            for label, points, _, _ in lines
        ]
        return svg(figure, name, f"Acceptance rate by position in the draft. {'; '.join(rows)}.")


@plot
def loss_plot(name: str, history: Sequence[dict[str, Any]], losses: Collection[str]) -> str:
    """Plot the loss by optimizer step, and its terms if it is a sum of several.

    losses: the names of the terms, each for the drafter as a whole or, as `head1/forward_kl`, for
    one of its parts."""
    points = [entry for entry in history if entry.get("loss") is not None]
    if not points:
        return ""
    keys = dict.fromkeys(key for entry in points for key in entry)
    terms = [key for key in keys if key.rpartition("/")[2] in losses]
    if len(terms) == 1:
        terms = []  # the only term is the loss itself
    first, final = points[0], points[-1]
    alt = f"Training loss: {first['loss']:.3f} at step {first['step']}, "
    return _step_plot(
        name,
        points,
        {key: key for key in ["loss", *terms]},
        axis="loss (nats per token)" if not terms else "loss (per token)",
        alt=f"{alt}{final['loss']:.3f} at step {final['step']}.",
    )


AGREEMENT = {
    "expected_acceptance": "expected, T = 1",
    "top1": "same top-1",
    "acceptance_rate": "decoded, greedy",
}


@plot
def agreement_plot(name: str, dev: Sequence[dict[str, Any]]) -> str:
    """Plot the agreement with the target on a dev slice, by optimizer step."""
    labels = AGREEMENT | {
        key: f"{head}, top-1"
        for entry in dev
        for key in entry
        for head, _, figure in [key.partition("/")]
        if figure == "top1"
    }
    drawn = {key: label for key, label in labels.items() if dev and key in dev[-1]}
    if not drawn:
        return ""
    final = ", ".join(f"{label} {dev[-1][key]:.2f}" for key, label in drawn.items())
    return _step_plot(
        name,
        dev,
        drawn,
        axis="acceptance on dev text",
        alt=f"Agreement with the target on dev text, at step {dev[-1]['step']}: {final}.",
    )


@plot
def stream_plot(
    name: str, windows: Sequence[dict[str, Any]], rounds: Sequence[dict[str, Any]]
) -> str:
    """Plot acceptance over a stream of requests, by windows, with a tick at new weights."""
    points = [w for w in windows if w.get("acceptance_rate") is not None]
    if not points:
        return ""
    with canvas(2.7) as (figure, axes):
        edges = [points[0]["first"], *(w["first"] + w["requests"] for w in points)]
        rates = [w["acceptance_rate"] for w in points]
        axes.stairs(rates, edges, color=SERIES[0], linewidth=2.2)
        updates = [entry["served"] for entry in rounds if entry["kept"]]
        axes.plot(updates, [0.0] * len(updates), "|", color=SERIES[1], markersize=9, clip_on=False)
        axes.set_ylim(0, 1)
        axes.margins(x=0.02)
        from matplotlib.ticker import MaxNLocator

        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("requests served" + ("   ( | new weights )" if updates else ""))
        axes.set_ylabel("acceptance rate α")
        axes.grid()
        alt = f"Acceptance over the stream: {rates[0]:.2f} first, {rates[-1]:.2f} last."
        return svg(figure, name, alt)


def _step_plot(
    name: str, points: Sequence[dict[str, Any]], keys: dict[str, str], *, axis: str, alt: str
) -> str:
    """Plot a line by optimizer step for each key of the points. The first is bold.

    keys: label by key."""
    with canvas(2.7) as (figure, axes):
        ends = []
        for index, (key, label) in enumerate(keys.items()):
            colour = SERIES[index % len(SERIES)]
            xs, ys = _binned([(e["step"], e[key]) for e in points if e.get(key) is not None])
            drawn_ys = _running_mean(ys) if len(xs) > 20 else ys
            if len(xs) > 20:
                axes.plot(xs, ys, color=colour, linewidth=0.8, alpha=0.35)
            axes.plot(
                xs,
                drawn_ys,
                "-" if len(xs) > 1 else "o",
                color=colour,
                linewidth=1.4 if index else 2.2,
            )
            ends.append((xs[-1], drawn_ys[-1], label, colour))
        # A first value far above the others flattens the rest, but it is data: start at 0.
        bottom = min(0.0, *(end[1] for end in ends))
        axes.set_ylim(bottom=bottom)
        _end_labels(axes, ends, max(end[0] for end in ends), value=True)
        axes.margins(x=0.02)
        from matplotlib.ticker import MaxNLocator

        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("optimizer step")
        axes.set_ylabel(axis)
        axes.grid()
        return svg(figure, name, alt)


def _end_labels(
    axes: "Axes", ends: list[tuple[float, float, str, str]], x: float, *, value: bool = False
) -> None:
    """Write a label right of the plot for each (x, y, text, colour). Move colliding ones apart."""
    bottom, top = axes.get_ylim()
    figure = axes.get_figure(root=True)
    assert figure is not None
    # The height of a line of text in units of the axis. The x axis and its label take 0.7 inches.
    gap = 0.17 / (figure.get_figheight() - 0.7) * (top - bottom)
    ordered = sorted(ends, key=lambda end: end[1])
    heights: list[float] = []
    for end in ordered:
        heights.append(max(end[1], heights[-1] + gap) if heights else end[1])
    if heights[-1] > top:
        for i in reversed(range(len(heights))):
            limit = heights[i + 1] - gap if i + 1 < len(heights) else top
            heights[i] = min(heights[i], limit)
    for (end_x, y, text, colour), height in zip(ordered, heights, strict=True):
        leader = {"arrowstyle": "-", "color": colour, "linewidth": 0.7, "alpha": 0.6}
        axes.annotate(
            f"{text} {y:.2f}" if value else text,
            (end_x, y),
            xytext=(1.03, height),
            textcoords=("axes fraction", "data"),
            va="center_baseline",
            color=colour,
            arrowprops=leader if end_x < x or abs(height - y) > gap / 2 else None,
        )


def _binned(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Reduce to at most MAX_POINTS points: each is the mean of equally many neighbours."""
    size = -(-len(points) // MAX_POINTS)
    bins = [points[i : i + size] for i in range(0, len(points), size)]
    return (
        [sum(x for x, _ in group) / len(group) for group in bins],
        [sum(y for _, y in group) / len(group) for group in bins],
    )


def _running_mean(values: list[float]) -> list[float]:
    """Return the mean of each value and its neighbours, over a tenth of the curve."""
    radius = max(1, len(values) // 20)
    windows = [values[max(0, i - radius) : i + radius + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]
