"""Plots with a row for every drafter: bars, intervals and stacks.

Rows run downwards in the given order. A missing value is None.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from train.report.plots import LIGHT, REFERENCE, canvas, plot, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@plot
def bar_plot(
    name: str,
    labels: Sequence[str],
    values: Sequence[float | None],
    colours: Sequence[str],
    *,
    axis: str,
    end: float | None = None,
    reference: tuple[str, float] | None = None,
    marks: Sequence[float | None] = (),
    mark_label: str = "",
) -> str:
    """Plot one bar per row, with its value beside it.

    reference: a named value, drawn as a dashed line through all rows. marks: a tick per row.
    """
    if not any(value is not None for value in values):
        return ""
    with _rows(labels) as (figure, axes):
        drawn_marks = [mark for mark in marks if mark is not None]
        largest = max(value for value in [*values, *drawn_marks] if value is not None)
        span = (end if end is not None else largest) or 1.0
        for y, (value, colour) in enumerate(zip(values, colours, strict=True)):
            if value is None:
                _text_beside(axes, 0, y, "–", muted=True)
                continue
            axes.barh(y, value, height=0.62, color=colour)
            mark = marks[y] if marks else None
            near = mark is not None and 0 <= mark - value < 0.15 * span
            _text_beside(axes, mark if mark is not None and near else value, y, f"{value:.2f}")
        if reference is not None:
            axes.axvline(reference[1], color=REFERENCE, linestyle=(0, (4, 3)), linewidth=1.2)
            _text_above(axes, reference[1], reference[0])
        for y, mark in enumerate(marks):
            if mark is not None:
                axes.plot([mark, mark], [y - 0.42, y + 0.42], color=LIGHT["ink"], linewidth=2)
        if drawn_marks:
            axis += f"   ( ┃ {mark_label} )"
        axes.set_xlim(0, 1.14 * span)
        if end is not None:
            axes.set_xticks([tick / 5 * span for tick in range(6)])
        axes.set_xlabel(axis)
        axes.grid(axis="x")
        texts = ["–" if value is None else f"{value:.2f}" for value in values]
        rows = [f"{label} {text}" for label, text in zip(labels, texts, strict=True)]
        return svg(figure, name, f"Bars, {axis}: {', '.join(rows)}.")


@plot
def interval_plot(
    name: str,
    labels: Sequence[str],
    ratios: Sequence[dict[str, float] | None],
    colours: Sequence[str],
    *,
    axis: str,
) -> str:
    """Plot a dot per row with its interval, if it has one ({value, low, high}), and a line at 1."""
    drawn = [ratio for ratio in ratios if ratio is not None]
    if not drawn:
        return ""
    with _rows(labels) as (figure, axes):
        axes.axvline(1.0, color=LIGHT["ink"], linewidth=1.2)
        _text_above(axes, 1.0, "plain decoding")
        for y, (ratio, colour) in enumerate(zip(ratios, colours, strict=True)):
            if ratio is None:
                _text_beside(axes, 1.0, y, "not timed", muted=True)
                continue
            if "low" in ratio:
                axes.plot([ratio["low"], ratio["high"]], [y, y], color=colour, linewidth=2.2)
            axes.plot(ratio["value"], y, "o", color=colour, markersize=8)
            _text_beside(axes, max(ratio.values()), y, f"{ratio['value']:.2f}×")
        low = min(1.0, *(min(ratio.values()) for ratio in drawn))
        high = max(1.0, *(max(ratio.values()) for ratio in drawn))
        span = max(high - low, 0.1)
        axes.set_xlim(low - 0.12 * span, high + 0.24 * span)
        axes.set_xlabel(axis)
        axes.grid(axis="x")
        rows = [f"{label} {_written(r)}" for label, r in zip(labels, ratios, strict=True)]
        return svg(figure, name, f"Dots with 95% intervals, {axis}: {', '.join(rows)}.")


def _written(ratio: dict[str, float] | None) -> str:
    if ratio is None:
        return "not timed"
    interval = f" ({ratio['low']:.2f} to {ratio['high']:.2f})" if "low" in ratio else ""
    return f"{ratio['value']:.2f}{interval}"


@plot
def stacked_bar_plot(
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
    """Plot one bar per row made of parts (shares, 1 is 100%). Parts carry a label if it fits.

    colours: the colours of the parts; by default steps of one hue from light to dark. line: a named
    value, drawn through all rows. totals: whether to write each bar's length beside it.
    """
    if not any(value for _, values in parts for value in values):
        return ""
    with _rows(labels, extra=0.3) as (figure, axes):
        ramp = _blues(len(parts))
        left = [0.0] * len(labels)
        sums = [sum(values[y] or 0.0 for _, values in parts) for y in range(len(labels))]
        longest = max([*sums, line[1] if line else 0.0])
        for index, (part, values) in enumerate(parts):
            colour, text = (colours[index], LIGHT["on"]) if colours else ramp[index]
            widths = [value or 0.0 for value in values]
            axes.barh(range(len(labels)), widths, left=left, height=0.66, color=colour, label=part)
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
                _text_beside(axes, 0.0, y, "–", muted=True)
            elif totals:
                _text_beside(axes, total, y, f"{total:.0%}")
        if line is not None:
            axes.axvline(line[1], color=LIGHT["ink"], linewidth=1.2)
        axes.set_xlim(0, longest * (1.14 if totals else 1.0))
        axes.xaxis.set_major_formatter("{x:.0%}")
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
        return svg(figure, name, f"Stacked bars, {axis}, by {title}. {'; '.join(rows)}.")


@contextmanager
def _rows(labels: Sequence[str], extra: float = 0.0) -> Iterator[tuple["Figure", "Axes"]]:
    with canvas(0.95 + extra + 0.36 * len(labels)) as (figure, axes):
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(len(labels) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        yield figure, axes


def _text_beside(axes: "Axes", x: float, y: float, text: str, *, muted: bool = False) -> None:
    axes.annotate(
        text,
        (x, y),
        xytext=(6, 0),
        textcoords="offset points",
        va="center_baseline",
        color=LIGHT["muted" if muted else "ink"],
        # Lines through all rows must not cross the text.
        bbox={"facecolor": LIGHT["page"], "edgecolor": "none", "pad": 1.2},
    )


def _text_above(axes: "Axes", x: float, text: str) -> None:
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


def _blues(count: int) -> list[tuple[str, str]]:
    """Return (fill, text) colours in even steps of one blue, light to dark, for both themes."""
    light, dark = (0xC9, 0xDF, 0xF1), (0x15, 0x50, 0x88)
    steps = []
    for i in range(count):
        position = i / (count - 1) if count > 1 else 1.0
        colour = [round(a + (b - a) * position) for a, b in zip(light, dark, strict=True)]
        text = "#14202c" if position < 0.45 else "#ffffff"
        steps.append(("#{:02x}{:02x}{:02x}".format(*colour), text))
    return steps
