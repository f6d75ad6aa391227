"""Runs side by side, from run directories that are written by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from decode.base.errors import UserError
from draftsmith.cli.main import app
from tests.test_report import EVIL, Page, figures, write_run
from train.report.compare_runs import read_runs, render_comparison
from train.report.report_files import make_report


def write_runs(tmp_path: Path, **changes: Any) -> list[Path]:
    """Two finished runs: the second has a faster drafter, and these settings of its config."""
    paths = []
    for name, speed in (("first", 1.2), ("second", 1.6)):
        path = tmp_path / name
        rows = [("before", "ngram", figures(1.1, 0.3)), ("two", "small_lm", figures(speed, 0.6))]
        write_run(path, rows)
        config = json.loads((path / "config.json").read_text("utf-8"))
        config |= {"name": name, "output_dir": str(tmp_path)} | (changes if paths else {})
        (path / "config.json").write_text(json.dumps(config), "utf-8")
        make_report(path)
        paths.append(path)
    return paths


def test_runs_that_were_measured_alike(tmp_path: Path) -> None:
    stages = [
        {"name": "one", "kind": "distill", "losses": "x"},
        {"name": "two", "kind": "distill", "drafter": {"stage": "one"}},
    ]
    paths = write_runs(tmp_path, stages=stages)
    runs = read_runs(paths)
    assert runs.settings == {
        "stages.text.name": ["text", None],
        "stages.text.kind": ["generate", None],
        "stages.one.losses": [None, "x"],
    }
    assert [(run, label) for run, label, _ in runs.rows] == [
        ("first", "ngram"),
        ("first", "two"),
        ("second", "ngram"),
        ("second", "two"),
    ]
    assert runs.cautions == []
    assert runs.verdict == "second: two is faster than first: two."


def test_intervals_that_overlap_name_no_fastest_run(tmp_path: Path) -> None:
    paths = write_runs(tmp_path)
    report = json.loads((paths[1] / "report.json").read_text("utf-8"))
    report["rows"][1]["evaluation"]["speedup"] = {"value": 1.3, "low": 1.2, "high": 1.4}
    (paths[1] / "report.json").write_text(json.dumps(report), "utf-8")
    assert "not clearly faster" in read_runs(paths).verdict


def test_runs_that_were_measured_differently_are_not_ranked(tmp_path: Path) -> None:
    runs = read_runs(write_runs(tmp_path, target={"model": "other", "dtype": "auto"}))
    assert "target.model" in runs.cautions[0]
    assert runs.verdict == ""


@pytest.mark.usefixtures("plots")
def test_the_command_and_its_files(tmp_path: Path) -> None:
    paths = write_runs(tmp_path, seed=EVIL)
    page, figures_file = tmp_path / "page.html", tmp_path / "figures.json"
    words = ["compare", *map(str, paths), "--html", str(page), "--json", str(figures_file)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    for text in ("run first", "run second", "1.60× [1.55, 1.66]", "seed", "is faster than"):
        assert text in result.output
    stored = json.loads(figures_file.read_text("utf-8"))
    assert [run["run"] for run in stored["runs"]] == ["first", "second"]
    assert stored["runs"][1]["rows"][1]["evaluation"]["speedup"]["value"] == 1.6
    assert stored["settings"] == {"seed": [None, EVIL]}
    text = page.read_text("utf-8")
    assert text == render_comparison(read_runs(paths))
    parsed = Page(text)
    assert parsed.stack == []
    assert all(place.startswith("#") for place in parsed.loads)
    assert text.count("<svg") == 6
    assert EVIL not in text
    assert "1.60× [1.55, 1.66]" in text
    assert "http" not in text.replace("http://www.w3.org", "")


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    paths = write_runs(tmp_path)
    with pytest.raises(UserError, match="at least two"):
        read_runs(paths[:1])
    with pytest.raises(UserError, match="named twice"):
        read_runs([paths[0], paths[0] / "report.json"])
    with pytest.raises(UserError, match=r"nothing.*is not the report of a run"):
        read_runs([paths[0], tmp_path / "nothing"])
    (paths[1] / "report.json").write_text('{"format": 99}', "utf-8")
    with pytest.raises(UserError, match=r"format 99; .* reads format 1"):
        read_runs(paths)
    result = CliRunner().invoke(app, ["compare", *map(str, paths)])
    assert result.exit_code == 2
