"""Writes a run's report: report.json, and report.html, one self-contained page."""

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from decode.base.artifact import size, write_file
from train.base.run_files import (
    EVALUATION,
    read_record,
    row_directories,
    stage_directory,
    stored_forecast,
    stored_rows,
)
from train.base.stage import STAGES
from train.report.drafter_table import COLUMNS, DETAILS, is_baseline, row_labels, without_gamma
from train.report.format_figures import MISSING, format_duration, format_number, format_share
from train.report.plots import DARK, LIGHT, REFERENCE, SERIES, css_variables
from train.report.plots.bar_plots import bar_plot, interval_plot, stacked_bar_plot
from train.report.plots.line_plots import FEW, position_plot
from train.report.report_summary import footnotes, headline

FORMAT = 1
NOTES_FILE = "data_notes.json"
SAMPLES, SAMPLE_CHARACTERS = 3, 3000
# Endings of keys that determine how a value is written.
UNITS = ("_share", "seconds", "_bytes")
# Passes that accepted this many tokens or more share one part of their plot.
MANY_ACCEPTED = 8
# Parts of decoding time in the order of the loop, with their colours. Here "prefill" includes the
# drafter's prefill.
TIME_PARTS = {
    "prefill": REFERENCE,
    "draft": SERIES[1],
    "verify": SERIES[0],
    "overhead": SERIES[3],
}


def make_report(directory: Path) -> dict[str, Any]:
    """Write report.json and report.html into a run's directory; return the report.json contents.

    Call it on the main process only. Raises UserError if a file of the run is missing or damaged.
    """
    report, samples = collect(directory)
    write_file(directory / "report.json", json.dumps(report, indent=2, allow_nan=False) + "\n")
    # A text may contain half a surrogate pair, which UTF-8 cannot encode.
    write_file(directory / "report.html", render_page(report, samples).encode("utf-8", "replace"))
    return report


def collect(directory: Path) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Return the contents of report.json, and the sample texts by row label."""
    config = read_record(directory / "config.json")
    rows: list[dict[str, Any]] = []
    stages, samples, times = [], [], []
    for number, stage in enumerate(config.get("stages", [])):
        path = stage_directory(directory, stage["name"], number) / "done.json"
        if path.is_file():
            record = read_record(path)
            stored = {"name": stage["name"], "kind": stage["kind"], "summary": record["summary"]}
            # Those that made the figures. Runs of earlier versions do not store them.
            settings = record.get("settings", {})
            if changed := [key for key in settings if settings[key] != stage.get(key)]:
                stored["changed_since"] = changed
                config["stages"][number] = settings
            stages.append(stored)
            times.append(path.stat().st_mtime)
    for entry in row_directories(config, stored_rows(directory)):
        row = read_record(entry / EVALUATION) | {"order": len(rows)}
        samples.append(row.pop("samples", None) or [])
        # Runs of earlier versions have no seconds and tokens.
        keys = ("stage", "drafter", "order", "seconds", "tokens", "evaluation")
        rows.append({key: row[key] for key in keys if key in row})
        times.append((entry / EVALUATION).stat().st_mtime)
    # The time of the last figure, not of the report, so making the report again changes nothing.
    finished = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(max(times))) if times else None
    report = {
        "format": FORMAT,
        "name": config["name"],
        "finished": finished,
        "rows": rows,
        "stages": stages,
        # Runs of earlier versions have no such file.
        "data_notes": read_record(notes) if (notes := directory / NOTES_FILE).exists() else [],
        "provenance": read_record(directory / "provenance.json"),
        "config": config,
        "forecast": stored_forecast(directory),
    }
    return report, dict(zip(row_labels(report), samples, strict=True))


def template(name: str, *folders: Path) -> Template:
    """Return a template of one of these folders, or of this one. Its pages load nothing from
    elsewhere."""
    environment = Environment(
        loader=FileSystemLoader([*folders, Path(__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = format_number
    return environment.get_template(name)


def render_page(report: dict[str, Any], samples: dict[str, list[Any]]) -> str:
    """Return report.html, which loads nothing from elsewhere. samples: texts by row label."""
    best = headline(report)
    return template("page.html.j2").render(
        report=report,
        best=best,
        columns=list(COLUMNS),
        cells=[[cell(row) for cell in COLUMNS.values()] for row in report["rows"]],
        best_index=report["rows"].index(best["row"]) if best else None,
        details=[
            (heading, [cell(row["evaluation"]) for row in report["rows"]])
            for heading, cell in DETAILS.items()
        ],
        labels=row_labels(report),
        footnotes=footnotes(report),
        plots={name: Markup(svg) for name, svg in drafter_plots(report).items()},
        stages=[stage_section(number, stage) for number, stage in enumerate(report["stages"])],
        samples=_samples(samples, best),
        config=yaml.safe_dump(report["config"], sort_keys=False, allow_unicode=True),
        few=FEW,
        light=css_variables(LIGHT),
        dark=css_variables(DARK),
    )


def _samples(samples: dict[str, list[Any]], best: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return {label, texts} of the best row, or of the last row that has samples."""
    last = next((name for name in reversed(samples) if samples[name]), None)
    label = best["label"] if best and samples.get(best["label"]) else last
    if label is None:
        return None
    texts = []
    for sample in samples[label][:SAMPLES]:
        text = {key: _shortened(sample.get(key)) for key in ("prompt", "plain", "drafted")}
        same = sample.get("plain") == sample.get("drafted") if text["plain"] else None
        texts.append({**text, "same": same})
    return {"label": label, "texts": texts}


def _shortened(text: Any) -> str:
    full = "" if text is None else str(text)
    return full if len(full) <= SAMPLE_CHARACTERS else full[:SAMPLE_CHARACTERS] + " […]"


def stage_section(number: int, stage: dict[str, Any]) -> dict[str, Any]:
    """Return the page's section for a stage: name and kind, figures as text by name, and plots.

    Each kind of stage chooses its figures and plots (`train.base.stage.Stage.show`). number: the
    unique number of the stage in the run.
    """
    name, kind, summary = stage["name"], stage["kind"], stage["summary"]
    section = STAGES[kind].show(summary, number)
    figures = {}
    for key, value in section.figures.items():
        unit = next((end for end in UNITS if key.endswith(end)), "")
        label = re.sub(r"seconds$", "time", key) if unit == "seconds" else key
        label = label.removesuffix("_bytes").replace("_", " ")
        figures[label] = _format_figure(value, unit)
    plots = [replace(plot, svg=Markup(plot.svg)) for plot in section.plots if plot.svg]
    return {"name": name, "kind": kind, "figures": figures, "plots": plots}


def _format_figure(value: Any, unit: str) -> str:
    if value is None:
        return MISSING
    if isinstance(value, dict):
        pairs = [f"{str(k).replace('_', ' ')} {_format_figure(v, '')}" for k, v in value.items()]
        return ", ".join(pairs) or MISSING
    if isinstance(value, list | tuple):
        return ", ".join(_format_figure(v, "") for v in value) or MISSING
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if unit == "seconds":
        return format_duration(value)
    if unit == "_share":
        return format_share(value)
    if unit == "_bytes":
        return size(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def drafter_plots(report: dict[str, Any]) -> dict[str, str]:
    """Return the plots as SVG text, by name."""
    names, evaluations = row_labels(report), [row["evaluation"] for row in report["rows"]]
    series = cycle(SERIES)
    colours = [REFERENCE if is_baseline(report, row) else next(series) for row in report["rows"]]

    def reference(key: str) -> tuple[str, float] | None:
        lookups = [
            (without_gamma(name), row["evaluation"].get(key))
            for name, row in zip(names, report["rows"], strict=True)
            if row["drafter"] == "ngram" and row["evaluation"].get(key) is not None
        ]
        return max(lookups, key=lambda pair: pair[1]) if lookups else None

    return evaluation_plots(names, evaluations, colours, reference)


def evaluation_plots(
    names: list[str],
    evaluations: list[dict[str, Any]],
    colours: list[str],
    reference: Callable[[str], tuple[str, float] | None] = lambda _: None,
) -> dict[str, str]:
    """Return the plots of some evaluations as SVG text, by name. reference: the named value of a
    figure that is drawn through all rows."""

    def figures(key: str) -> list[Any]:
        return [evaluation.get(key) for evaluation in evaluations]

    return {
        "acceptance": bar_plot(
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
        "tokens": bar_plot(
            "tokens",
            names,
            figures("tokens_per_step"),
            colours,
            axis="tokens per step τ (plain decoding: 1)",
            reference=reference("tokens_per_step"),
        ),
        "speed": interval_plot(
            "speed", names, figures("speedup"), colours, axis="speed-up over plain decoding (×)"
        ),
        "positions": position_plot(
            "positions",
            names,
            [rates or [] for rates in figures("acceptance_by_position")],
            [counts or [] for counts in figures("reached_by_position")],
            colours,
        ),
        "accepted": _accepted_plot(names, evaluations),
        "time": _time_plot(names, evaluations),
    }


def _accepted_plot(names: list[str], evaluations: list[dict[str, Any]]) -> str:
    passes = [evaluation.get("steps_by_accepted") or [] for evaluation in evaluations]
    depth = max(map(len, passes), default=0)
    # Too many parts would look alike.
    parts = [
        (str(accepted), [sum(row[accepted : accepted + 1]) / (sum(row) or 1) for row in passes])
        for accepted in range(min(depth, MANY_ACCEPTED))
    ]
    if depth > MANY_ACCEPTED:
        beyond = [sum(row[MANY_ACCEPTED:]) / (sum(row) or 1) for row in passes]
        last = MANY_ACCEPTED if depth == MANY_ACCEPTED + 1 else f"{MANY_ACCEPTED}+"
        parts.append((str(last), beyond))
    return stacked_bar_plot(
        "accepted",
        names,
        parts,
        axis="share of verification passes",
        title="drafted tokens accepted in one pass",
    )


def _time_plot(names: list[str], evaluations: list[dict[str, Any]]) -> str:
    """Plot each drafter's time as a share of plain decoding's time on the same prompts."""

    def by_part(seconds: dict[str, float] | None) -> list[float]:
        times = dict(seconds or {})
        times["prefill"] = times.get("prefill", 0.0) + times.get("draft_prefill", 0.0)
        return [times.get(part, 0.0) for part in TIME_PARTS]

    def shares(times: list[float], total: float) -> list[float | None]:
        return [time / total if total else None for time in times]

    timed = [evaluation.get("seconds") or {} for evaluation in evaluations]
    plain = [by_part(seconds.get("plain")) for seconds in timed]
    totals = [sum(times) for times in plain]
    if not any(totals):
        return ""
    first = next(i for i, total in enumerate(totals) if total)
    rows = [shares(plain[first], totals[first])]
    for seconds, total in zip(timed, totals, strict=True):
        rows.append(shares(by_part(seconds.get("drafted")), total))
    return stacked_bar_plot(
        "time",
        ["plain decoding", *names],
        [(part, [row[i] for row in rows]) for i, part in enumerate(TIME_PARTS)],
        list(TIME_PARTS.values()),
        axis="wall time, share of plain decoding's",
        title="part of the decoding loop",
        line=("plain decoding", 1.0),
        totals=True,
    )
