"""The report's plots: small inline SVGs whose colours follow the page's light or dark theme.

Every function takes plain values and returns SVG text for an HTML page, "" when there is nothing to
show. A figure is drawn in the light theme's colours; in the SVG each of them becomes a CSS variable
of the page (`--plot-ink`, …) with the light colour as its fallback.

Rows run downwards in the order given; a value that does not exist is None.
"""

import io
import re
from collections.abc import Collection, Sequence
from html import escape
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

# The series are Okabe and Ito's colours, told apart with any kind of colour vision; in the dark
# theme they are lighter, in the same order.
LIGHT = {
    "ink": "#1b2430",
    "muted": "#5a6674",
    "grid": "#dde2e8",
    "on": "#fdfdfd",  # text on a filled area
    "page": "#fefefe",
    "reference": "#868e98",
    "series-0": "#0072b2",
    "series-1": "#d55e00",
    "series-2": "#007f5f",
    "series-3": "#b8578f",
    "series-4": "#a87400",
    "series-5": "#2f8fc4",
}
DARK = {
    "ink": "#e6eaf0",
    "muted": "#a3aebb",
    "grid": "#333c48",
    "on": "#10151c",
    "page": "#10151c",
    "reference": "#98a1ac",
    "series-0": "#5ab0e8",
    "series-1": "#ff9357",
    "series-2": "#3fc9a0",
    "series-3": "#e69cc6",
    "series-4": "#e6b345",
    "series-5": "#9ad4f5",
}
REFERENCE = LIGHT["reference"]
SERIES = [colour for name, colour in LIGHT.items() if name.startswith("series")]
FEW = 30  # a share of fewer cases than this is drawn hollow: it is mostly noise
WIDTH = 5.4  # inches; narrow, so that the text stays readable on a phone
MAX_POINTS = 300
_STYLE = {
    "font.size": 10,
    "font.family": "sans-serif",
    # Ships with matplotlib, and is wider than what pages show instead: nothing gets too long.
    "font.sans-serif": ["DejaVu Sans"],
    "axes.edgecolor": LIGHT["muted"],
    "axes.labelcolor": LIGHT["muted"],
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": LIGHT["grid"],
    "text.color": LIGHT["ink"],
    "text.parse_math": False,  # names may hold a $
    "xtick.color": LIGHT["muted"],
    "ytick.color": LIGHT["muted"],
    "ytick.labelcolor": LIGHT["ink"],
    "svg.fonttype": "none",
}


def variables(colours: dict[str, str]) -> str:
    """The CSS declarations of a theme."""
    return " ".join(f"--plot-{name}: {colour};" for name, colour in colours.items())


def bars(
    name: str,
    labels: Sequence[str],
    values: Sequence[float | None],
    colours: Sequence[str],
    *,
    axis: str,
    start: float = 0.0,
    end: float | None = None,
    reference: tuple[str, float] | None = None,
    marks: Sequence[float | None] = (),
    mark_label: str = "",
) -> str:
    """One bar per row from `start`, its value beside it.

    reference: a named value, drawn as a dashed line through all rows. marks: a tick per row.
    """
    if not any(value is not None for value in values):
        return ""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _rows(labels)
        here = [mark for mark in marks if mark is not None]
        most = max(value for value in [*values, *here, start] if value is not None)
        span = (end if end is not None else most) - start or 1.0
        for y, (value, colour) in enumerate(zip(values, colours, strict=True)):
            if value is None:
                _beside(axes, start, y, "–", muted=True)
                continue
            axes.barh(y, value - start, left=start, height=0.62, color=colour)
            mark = marks[y] if marks else None
            hidden = mark is not None and 0 <= mark - value < 0.15 * span
            _beside(axes, mark if mark is not None and hidden else value, y, f"{value:.2f}")
        if reference is not None:
            axes.axvline(reference[1], color=REFERENCE, linestyle=(0, (4, 3)), linewidth=1.2)
            _above(axes, reference[1], reference[0])
        for y, mark in enumerate(marks):
            if mark is not None:
                axes.plot([mark, mark], [y - 0.42, y + 0.42], color=LIGHT["ink"], linewidth=2)
        if here:
            axis += f"   ( ┃ {mark_label} )"
        axes.set_xlim(start, start + 1.14 * span)
        if end is not None:
            axes.set_xticks([tick / 5 * span + start for tick in range(6)])
        axes.set_xlabel(axis)
        axes.grid(axis="x")
        shown = ["–" if value is None else f"{value:.2f}" for value in values]
        rows = [f"{label} {value}" for label, value in zip(labels, shown, strict=True)]
        return _svg(figure, name, f"Bars, {axis}: {', '.join(rows)}.")


def intervals(
    name: str,
    labels: Sequence[str],
    ratios: Sequence[dict[str, float] | None],
    colours: Sequence[str],
    *,
    axis: str,
) -> str:
    """A dot with its interval ({value, low, high}) per row, and a line at 1."""
    found = [ratio for ratio in ratios if ratio is not None]
    if not found:
        return ""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _rows(labels)
        axes.axvline(1.0, color=LIGHT["ink"], linewidth=1.2)
        _above(axes, 1.0, "plain decoding")
        for y, (ratio, colour) in enumerate(zip(ratios, colours, strict=True)):
            if ratio is None:
                _beside(axes, 1.0, y, "not timed", muted=True)
                continue
            axes.plot([ratio["low"], ratio["high"]], [y, y], color=colour, linewidth=2.2)
            axes.plot(ratio["value"], y, "o", color=colour, markersize=8)
            _beside(axes, max(ratio["high"], ratio["value"]), y, f"{ratio['value']:.2f}×")
        low = min(1.0, *(min(ratio.values()) for ratio in found))
        high = max(1.0, *(max(ratio.values()) for ratio in found))
        span = max(high - low, 0.1)
        axes.set_xlim(low - 0.12 * span, high + 0.24 * span)
        axes.set_xlabel(axis)
        axes.grid(axis="x")
        rows = [
            f"{label} "
            + (f"{r['value']:.2f} ({r['low']:.2f} to {r['high']:.2f})" if r else "not timed")
            for label, r in zip(labels, ratios, strict=True)
        ]
        return _svg(figure, name, f"Dots with 95% intervals, {axis}: {', '.join(rows)}.")


def stacks(
    name: str,
    labels: Sequence[str],
    parts: Sequence[tuple[str, Sequence[float | None]]],
    colours: Sequence[str] | None = None,
    *,
    axis: str,
    title: str,
    line: tuple[str, float] | None = None,
    totals: bool = False,
) -> str:
    """One bar per row made of parts (shares, 1 is 100%), each labelled inside where it fits.

    colours: of the parts; without them, steps of one hue from light to dark. line: a named value,
    drawn through all rows. totals: whether each bar's length is written beside it.
    """
    if not any(value for _, values in parts for value in values):
        return ""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _rows(labels, extra=0.3)
        ramp = _ramp(len(parts))
        left = [0.0] * len(labels)
        sums = [sum(values[y] or 0.0 for _, values in parts) for y in range(len(labels))]
        longest = max([*sums, line[1] if line else 0.0])
        for index, (part, values) in enumerate(parts):
            colour, text = (colours[index], LIGHT["on"]) if colours else ramp[index]
            widths = [value or 0.0 for value in values]
            axes.barh(
                range(len(labels)),
                widths,
                left=left,
                height=0.66,
                color=colour,
                label=part,
            )
            for y, width in enumerate(widths):
                if width > 0.085 * longest:
                    axes.text(
                        left[y] + width / 2,
                        y,
                        f"{width:.0%}",
                        ha="center",
                        va="center_baseline",
                        color=text,
                        fontsize=8.5,
                    )
                left[y] += width
        for y, total in enumerate(sums):
            if not total:
                _beside(axes, 0.0, y, "–", muted=True)
            elif totals:
                _beside(axes, total, y, f"{total:.0%}")
        if line is not None:
            axes.axvline(line[1], color=LIGHT["ink"], linewidth=1.2)
        axes.set_xlim(0, longest * (1.14 if totals else 1.0))
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_xlabel(axis)
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(0, 1.0),
            ncols=len(parts),
            frameon=False,
            title=title,
            alignment="left",
            handlelength=0.9,
            handleheight=0.9,
            handletextpad=0.4,
            columnspacing=1.1,
            borderpad=0.1,
            fontsize=9,
            title_fontsize=9,
        )
        rows = [
            f"{label}: "
            + (", ".join(f"{part} {values[y] or 0.0:.0%}" for part, values in parts) or "–")
            for y, label in enumerate(labels)
        ]
        return _svg(figure, name, f"Stacked bars, {axis}, by {title}. {'; '.join(rows)}.")


def by_position(
    name: str,
    labels: Sequence[str],
    rates: Sequence[Sequence[float | None]],
    reached: Sequence[Sequence[int]],
    colours: Sequence[str],
) -> str:
    """Acceptance rate by drafted position, a line per row labelled at its end."""
    lines = []
    for label, row, counts, colour in zip(labels, rates, reached, colours, strict=True):
        points = [(i + 1, rate) for i, rate in enumerate(row) if rate is not None]
        if points:
            few = [i for i, (at, _) in enumerate(points) if counts[at - 1] < FEW]
            lines.append((label, points, few, colour))
    if not lines:
        return ""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _plain(3.3)
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
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.set_xlabel("position in the draft (tokens)")
        axes.set_ylabel("acceptance rate")
        axes.grid()
        rows = [
            f"{label}: {', '.join(f'{rate:.2f}' for _, rate in points)}"
            for label, points, _, _ in lines
        ]
        return _svg(figure, name, f"Acceptance rate by position in the draft. {'; '.join(rows)}.")


def curves(name: str, history: Sequence[dict[str, Any]], losses: Collection[str]) -> str:
    """The loss by optimizer step, and its terms where it is a sum of several: those of `losses`,
    of the whole drafter or, as `head1/forward_kl`, of its parts."""
    points = [entry for entry in history if entry.get("loss") is not None]
    if not points:
        return ""
    keys = dict.fromkeys(key for entry in points for key in entry)
    terms = [key for key in keys if key.rpartition("/")[2] in losses]
    if len(terms) == 1:
        terms = []  # the loss itself under its own name
    first, final = points[0], points[-1]
    alt = f"Training loss: {first['loss']:.3f} at step {first['step']}, "
    return _lines(
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


def agreement(name: str, dev: Sequence[dict[str, Any]]) -> str:
    """Agreement with the target on a dev slice by optimizer step."""
    named = AGREEMENT | {
        key: f"{head}, top-1"
        for entry in dev
        for key in entry
        for head, _, figure in [key.partition("/")]
        if figure == "top1"
    }
    shown = {key: label for key, label in named.items() if dev and key in dev[-1]}
    if not shown:
        return ""
    final = ", ".join(f"{label} {dev[-1][key]:.2f}" for key, label in shown.items())
    return _lines(
        name,
        dev,
        shown,
        axis="acceptance on dev text",
        alt=f"Agreement with the target on dev text, at step {dev[-1]['step']}: {final}.",
    )


def stream(name: str, windows: Sequence[dict[str, Any]], rounds: Sequence[dict[str, Any]]) -> str:
    """Acceptance over a stream of requests by windows of it, and a tick where new weights came."""
    points = [w for w in windows if w.get("acceptance_rate") is not None]
    if not points:
        return ""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _plain(2.7)
        edges = [points[0]["first"], *(w["first"] + w["requests"] for w in points)]
        rates = [w["acceptance_rate"] for w in points]
        axes.stairs(rates, edges, color=SERIES[0], linewidth=2.2)
        kept = [entry["served"] for entry in rounds if entry["kept"]]
        axes.plot(kept, [0.0] * len(kept), "|", color=SERIES[1], markersize=9, clip_on=False)
        axes.set_ylim(0, 1)
        axes.margins(x=0.02)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("requests served" + ("   ( | new weights )" if kept else ""))
        axes.set_ylabel("acceptance rate α")
        axes.grid()
        alt = f"Acceptance over the stream: {rates[0]:.2f} first, {rates[-1]:.2f} last."
        return _svg(figure, name, alt)


def _lines(
    name: str, points: Sequence[dict[str, Any]], keys: dict[str, str], *, axis: str, alt: str
) -> str:
    """One line for each key of the points (with its label) by optimizer step; the first in bold."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _plain(2.7)
        ends = []
        for index, (key, label) in enumerate(keys.items()):
            colour = SERIES[index % len(SERIES)]
            xs, ys = _binned([(e["step"], e[key]) for e in points if e.get(key) is not None])
            smooth = _running_mean(ys)
            if len(xs) > 20:
                axes.plot(xs, ys, color=colour, linewidth=0.8, alpha=0.35)
            axes.plot(
                xs,
                smooth if len(xs) > 20 else ys,
                "-" if len(xs) > 1 else "o",
                color=colour,
                linewidth=1.4 if index else 2.2,
            )
            ends.append((xs[-1], (smooth if len(xs) > 20 else ys)[-1], label, colour))
        # A first value far above the others would press the rest flat, yet it is data: keep 0.
        bottom = min(0.0, *(end[1] for end in ends))
        axes.set_ylim(bottom=bottom)
        _end_labels(axes, ends, max(end[0] for end in ends), value=True)
        axes.margins(x=0.02)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("optimizer step")
        axes.set_ylabel(axis)
        axes.grid()
        return _svg(figure, name, alt)


def _plain(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def _rows(labels: Sequence[str], extra: float = 0.0) -> tuple[Figure, Axes]:
    figure, axes = _plain(0.95 + extra + 0.36 * len(labels))
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    return figure, axes


def _beside(axes: Axes, x: float, y: float, text: str, *, muted: bool = False) -> None:
    axes.annotate(
        text,
        (x, y),
        xytext=(6, 0),
        textcoords="offset points",
        va="center_baseline",
        color=LIGHT["muted" if muted else "ink"],
        # Lines through all rows must not cross the figure.
        bbox={"facecolor": LIGHT["page"], "edgecolor": "none", "pad": 1.2},
    )


def _above(axes: Axes, x: float, text: str) -> None:
    axes.annotate(
        text,
        (x, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        fontsize=8.5,
        color=LIGHT["muted"],
    )


def _end_labels(
    axes: Axes, ends: list[tuple[float, float, str, str]], x: float, *, value: bool = False
) -> None:
    """A label right of the plot for every (x, y, text, colour), moved apart where they collide."""
    bottom, top = axes.get_ylim()
    figure = axes.get_figure(root=True)
    assert figure is not None
    # A line of text, in units of the axis; 0.7 inches of the figure are the x axis with its label.
    gap = 0.17 / (figure.get_figheight() - 0.7) * (top - bottom)
    ordered = sorted(ends, key=lambda end: end[1])
    places: list[float] = []
    for end in ordered:
        places.append(max(end[1], places[-1] + gap) if places else end[1])
    over = places[-1] - top
    for i in reversed(range(len(places))):
        limit = places[i + 1] - gap if i + 1 < len(places) else top
        places[i] = min(places[i], limit) if over > 0 else places[i]
    for (at, y, text, colour), place in zip(ordered, places, strict=True):
        leader = {"arrowstyle": "-", "color": colour, "linewidth": 0.7, "alpha": 0.6}
        axes.annotate(
            f"{text} {y:.2f}" if value else text,
            (at, y),
            xytext=(1.03, place),
            textcoords=("axes fraction", "data"),
            va="center_baseline",
            color=colour,
            arrowprops=leader if at < x or abs(place - y) > gap / 2 else None,
        )


def _ramp(count: int) -> list[tuple[str, str]]:
    """(fill, text) from light to dark in even steps of one blue; visible in both themes."""
    light, dark = (0xC9, 0xDF, 0xF1), (0x15, 0x50, 0x88)
    steps = []
    for i in range(count):
        part = i / (count - 1) if count > 1 else 1.0
        colour = [round(a + (b - a) * part) for a, b in zip(light, dark, strict=True)]
        text = "#14202c" if part < 0.45 else "#ffffff"
        steps.append(("#{:02x}{:02x}{:02x}".format(*colour), text))
    return steps


def _binned(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """At most MAX_POINTS points: means of equally many neighbours."""
    size = -(-len(points) // MAX_POINTS)
    bins = [points[i : i + size] for i in range(0, len(points), size)]
    return (
        [sum(x for x, _ in some) / len(some) for some in bins],
        [sum(y for _, y in some) / len(some) for some in bins],
    )


def _running_mean(values: list[float]) -> list[float]:
    """The mean of each value and its neighbours, over a tenth of the curve."""
    reach = max(1, len(values) // 20)
    windows = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _svg(figure: Figure, name: str, alt: str) -> str:
    """SVG for inlining: no prologue, ids of its own, page colours, sized by the page."""
    stream = io.StringIO()
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(stream, format="svg", transparent=True, metadata=metadata)
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None
    body = text[text.index(">") + 1 :]
    body = re.sub(r"<style[^>]*>.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r'(\bid="|xlink:href="#|url\(#)', rf"\g<1>{name}-", body)
    body = body.replace("'DejaVu Sans'", "system-ui")
    for key, colour in LIGHT.items():
        body = body.replace(colour, f"var(--plot-{key}, {colour})")
    body = body.replace("xlink:href", "href")
    return f'<svg {box[0]} role="img" aria-label="{escape(alt)}">{body.strip()}'
