"""Two or more runs side by side: their rows, plots, and the settings that differ."""

import json
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from markupsafe import Markup

from decode.base.artifact import read_versioned
from decode.base.errors import UserError
from train.base.config_file import dotted
from train.report.drafter_table import COLUMNS, row_labels
from train.report.format_figures import MISSING
from train.report.plots import DARK, LIGHT, SERIES, css_variables
from train.report.report_files import FORMAT, evaluation_plots, template
from train.report.report_summary import headline, ranking

# The titles of the plots.
TITLES = {
    "speed": "Speed-up",
    "time": "Where the time goes",
    "acceptance": "Acceptance rate",
    "tokens": "Tokens per step",
    "positions": "Acceptance by position",
    "accepted": "Accepted per pass",
}
# Settings that say nothing about the figures.
NAMES = ("name", "output_dir")
# Speeds of runs that differ here say nothing about their drafters.
SPEED = ("machine.processor", "machine.gpus", "machine.threads", "target.", "data.", "evaluation.")


@dataclass(frozen=True)
class Runs:
    """The reports of some runs.

    reports: the contents of report.json, by the run's name here. settings: by dotted key, the value
    of each run, for the settings, package versions and machines that differ. A stage is matched by
    its name. None: the run lacks the setting.
    """

    reports: dict[str, dict[str, Any]]
    settings: dict[str, list[Any]]

    @property
    def rows(self) -> list[tuple[str, str, dict[str, Any]]]:
        """(run, label of the row in its run, row) of all runs."""
        return [
            (run, label, row)
            for run, report in self.reports.items()
            for label, row in zip(row_labels(report), report["rows"], strict=True)
        ]

    @property
    def cautions(self) -> list[str]:
        """Why figures of these runs cannot be compared as they are."""
        keys = [key for key in self.settings if key.startswith(SPEED)]
        if not keys:
            return []
        return [
            "these runs were not measured alike, so their figures do not say which drafter is "
            f"better: {', '.join(keys)} differ"
        ]

    @property
    def verdict(self) -> str:
        """Which run's best trained drafter is fastest, as far as intervals tell. "" if there is
        nothing to compare, or if the runs were not measured alike."""
        if self.cautions:
            return ""
        best = [(run, headline(report)) for run, report in self.reports.items()]
        return ranking(
            [
                {"label": f"{run}: {entry['label']}", "evaluation": entry["row"]["evaluation"]}
                for run, entry in best
                if entry is not None
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        """Converts to JSON values: runs, each with its rows; settings; cautions and verdict."""
        return {
            "runs": [
                {"run": run, "name": report["name"], "finished": report["finished"]}
                | {"rows": report["rows"]}
                for run, report in self.reports.items()
            ],
            "settings": self.settings,
            "cautions": self.cautions,
            "verdict": self.verdict,
        }


def read_runs(paths: list[Path]) -> Runs:
    """Read the reports of runs. A path is a run's directory or its report.json.

    Raises UserError for fewer than two runs, for one that is named twice, and for a report that is
    missing, damaged or of another format.
    """
    if len(paths) < 2:
        raise UserError(f"{len(paths)} run is named; expected at least two to compare")
    files = [path / "report.json" if path.is_dir() else path for path in paths]
    if len({file.resolve() for file in files}) < len(files):
        raise UserError("a run is named twice; expected different runs")
    short = [file.absolute().parent.name for file in files]
    names = [
        name if short.count(name) == 1 else str(file.parent)
        for name, file in zip(short, files, strict=True)
    ]
    remedy = "expected the directory of a finished run, or its report.json"
    reports = {
        name: read_versioned(file, FORMAT, (), "the report of a run", remedy)
        for name, file in zip(names, files, strict=True)
    }
    return Runs(reports, _differing([_settings(report) for report in reports.values()]))


def compare_table(runs: Runs) -> tuple[list[str], list[list[str]]]:
    """Return headings and cells of the table of all rows."""
    return ["run", *COLUMNS], [
        [run, *(cell(row) for cell in COLUMNS.values())] for run, _, row in runs.rows
    ]


def settings_table(runs: Runs) -> tuple[list[str], list[list[str]]]:
    """Return headings and cells of the table of the settings that differ."""
    return ["setting", *runs.reports], [
        [key, *(MISSING if value is None else _written(value) for value in values)]
        for key, values in runs.settings.items()
    ]


def render_comparison(runs: Runs) -> str:
    """Return the comparison as one self-contained page."""
    series = cycle(SERIES)
    colour = {run: next(series) for run in runs.reports}
    plots = evaluation_plots(
        [f"{run}: {label}" for run, label, _ in runs.rows],
        [row["evaluation"] for _, _, row in runs.rows],
        [colour[run] for run, _, _ in runs.rows],
    )
    return template("compare.html.j2").render(
        runs=runs,
        figures=compare_table(runs),
        settings=settings_table(runs),
        plots={TITLES[name]: (name, Markup(svg)) for name, svg in plots.items() if svg},
        light=css_variables(LIGHT),
        dark=css_variables(DARK),
    )


def _settings(report: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run, its versions and its machine as of its last start, by dotted key."""
    start = (report["provenance"] or [{}])[-1]
    config = {key: value for key, value in report["config"].items() if key not in NAMES}
    settings = dict(dotted(config))
    for key in ("git_commit", "versions", "machine"):
        settings |= dotted(start.get(key), key)
    return settings


def _differing(settings: list[dict[str, Any]]) -> dict[str, list[Any]]:
    keys = dict.fromkeys(key for run in settings for key in run)
    values = {key: [run.get(key) for run in settings] for key in keys}
    return {key: row for key, row in values.items() if any(one != row[0] for one in row)}


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
