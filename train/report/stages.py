"""The section of the page for one stage: its figures as text, and its plots.

Each kind of stage chooses its figures and plots (`train.stage.Stage.show`).
"""

import re
from typing import Any

from markupsafe import Markup

from train.report.words import NONE, duration, percent
from train.stage import ReportSection
from train.stages import STAGES

# Endings of keys that determine how a value is written.
UNITS = ("_share", "seconds", "_bytes")


def stage_part(number: int, stage: dict[str, Any]) -> dict[str, Any]:
    """Return a stage for the page: its name and kind, its figures as text by name, and its plots.

    number: the unique number of the stage in the run."""
    name, kind, summary = stage["name"], stage["kind"], stage["summary"]
    if kind in STAGES:
        shown = STAGES[kind].show(summary, number)
    else:  # The config no longer has this stage, so its kind is unknown.
        shown = ReportSection({k: v for k, v in summary.items() if not isinstance(v, dict | list)})
    figures = {}
    for key, value in shown.figures.items():
        unit = next((end for end in UNITS if key.endswith(end)), "")
        written = re.sub(r"seconds$", "time", key) if unit == "seconds" else key
        written = written.removesuffix("_bytes").replace("_", " ")
        figures[written] = _written(value, unit)
    plots = [
        {"name": plot.name, "caption": plot.caption, "svg": Markup(plot.svg)}
        for plot in shown.plots
        if plot.svg
    ]
    return {"name": name, "kind": kind, "figures": figures, "plots": plots}


def _written(value: Any, unit: str) -> str:
    if value is None:
        return NONE
    if isinstance(value, dict):
        pairs = [f"{str(k).replace('_', ' ')} {_written(v, '')}" for k, v in value.items()]
        return ", ".join(pairs) or NONE
    if isinstance(value, list | tuple):
        return ", ".join(_written(v, "") for v in value) or NONE
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if unit == "seconds":
        return duration(value)
    if unit == "_share":
        return percent(value)
    if unit == "_bytes":
        return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
