"""The page of a report: one self-contained HTML file."""

from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from train.plots import DARK, LIGHT, variables
from train.plots.lines import FEW
from train.report.drafters import drafter_plots
from train.report.headline import headline
from train.report.notes import footnotes
from train.report.rows import labels
from train.report.stages import stage_part
from train.report.table import COLUMNS, DETAILS
from train.report.words import duration, number, percent, ratio

SAMPLES, SAMPLE_CHARACTERS = 3, 3000


def html(report: dict[str, Any], samples: dict[str, list[Any]]) -> str:
    """Return the page as HTML that loads nothing from elsewhere."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number,
        "percent": percent,
        "ratio": ratio,
        "duration": duration,
    }
    best = headline(report)
    named = list(zip(labels(report), report["rows"], strict=True))
    return environment.get_template("page.html.j2").render(
        report=report,
        best=best,
        columns=list(COLUMNS),
        cells=[[cell(row) for cell in COLUMNS.values()] for row in report["rows"]],
        best_index=report["rows"].index(best["row"]) if best else None,
        details=[
            (heading, [show(row["evaluation"]) for _, row in named])
            for heading, show in DETAILS.items()
        ],
        labels=[label for label, _ in named],
        footnotes=footnotes(report),
        plots={name: Markup(svg) for name, svg in drafter_plots(report).items()},
        stages=[stage_part(number, stage) for number, stage in enumerate(report["stages"])],
        samples=_samples(samples, best),
        config=yaml.safe_dump(report["config"], sort_keys=False, allow_unicode=True),
        few=FEW,
        light=variables(LIGHT),
        dark=variables(DARK),
    )


def _samples(samples: dict[str, list[Any]], best: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return {label, texts} of the best row, or of the last row that has samples."""
    chosen = best["label"] if best and samples.get(best["label"]) else None
    label = chosen or next((name for name in reversed(samples) if samples[name]), None)
    if label is None:
        return None
    texts = []
    for sample in samples[label][:SAMPLES]:
        text = {key: _cut(sample.get(key)) for key in ("prompt", "plain", "drafted")}
        same = sample.get("plain") == sample.get("drafted") if text["plain"] else None
        texts.append({**text, "same": same})
    return {"label": label, "texts": texts}


def _cut(text: Any) -> str:
    whole = "" if text is None else str(text)
    return whole if len(whole) <= SAMPLE_CHARACTERS else whole[:SAMPLE_CHARACTERS] + " […]"
