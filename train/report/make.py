"""Writes both files of a run's report."""

import json
from pathlib import Path
from typing import Any

from decode.artifact import write_file
from train.report.collect import collect
from train.report.page import html


def make_report(directory: Path) -> dict[str, Any]:
    """Write report.json and report.html into a run's directory; return the report.json contents.

    Call it on the main process only. Raises UserError if a file of the run is missing or damaged.
    """
    report, samples = collect(directory)
    write_file(directory / "report.json", json.dumps(report, indent=2, allow_nan=False) + "\n")
    # A text may contain half a surrogate pair, which UTF-8 cannot encode.
    write_file(directory / "report.html", html(report, samples).encode("utf-8", "replace"))
    return report
