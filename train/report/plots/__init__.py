"""The report's plots: small inline SVGs whose colours follow the page's light or dark theme.

Every function of `train.report.plots.bar_plots` and `train.report.plots.line_plots` takes plain
values and returns SVG text for an HTML page, or "" if there is nothing to show. This module has the
colours and the code that all figures share. A figure is drawn in the light theme's colours. In the
SVG each colour becomes a CSS variable of the page (`--plot-ink`, …) with the light colour as its
fallback.
"""

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from html import escape
from importlib.util import find_spec
from typing import TYPE_CHECKING, ParamSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

P = ParamSpec("P")

# The series use Okabe and Ito's colours, which readers with any kind of colour vision can tell
# apart. The dark theme has lighter ones in the same order.
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
WIDTH = 5.4  # inches; narrow, so that the text stays readable on a phone
_STYLE = {
    "font.size": 10,
    "font.family": "sans-serif",
    # Ships with matplotlib. It is wider than the fonts that pages use, so text always fits there.
    "font.sans-serif": ["DejaVu Sans"],
    "axes.edgecolor": LIGHT["muted"],
    "axes.labelcolor": LIGHT["muted"],
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": LIGHT["grid"],
    "text.color": LIGHT["ink"],
    "text.parse_math": False,  # names may contain a $
    "xtick.color": LIGHT["muted"],
    "ytick.color": LIGHT["muted"],
    "ytick.labelcolor": LIGHT["ink"],
    "svg.fonttype": "none",
}


def css_variables(colours: dict[str, str]) -> str:
    """Return the CSS declarations of a theme."""
    return " ".join(f"--plot-{name}: {colour};" for name, colour in colours.items())


def can_plot() -> bool:
    """Whether matplotlib is installed, the extra `plots`."""
    return find_spec("matplotlib") is not None


def plot(draw: Callable[P, str]) -> Callable[P, str]:
    """Make a function that draws return "" if there is no matplotlib: a report needs no plots."""

    @wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> str:
        return draw(*args, **kwargs) if can_plot() else ""

    return drawn


@contextmanager
def canvas(height: float) -> Iterator[tuple["Figure", "Axes"]]:
    """An empty figure, and the context in which to draw and write it. height: in inches."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        yield figure, figure.add_subplot()


def svg(figure: "Figure", name: str, alt: str) -> str:
    """Return SVG for inlining: no prologue, unique ids, the page's colours, sized by the page."""
    import matplotlib

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
