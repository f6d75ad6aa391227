"""The rows of a report: their labels, and which ones are baselines."""

from typing import Any

from train.report.words import Row, varies


def labels(report: dict[str, Any]) -> list[str]:
    """Return a short unique name for every row: the stage, or the baseline's drafter."""
    names = []
    for row in report["rows"]:
        name = row["stage"]
        if is_baseline(report, row):
            gamma = row["evaluation"].get("gamma")
            other = gamma != _main_gamma(report) and not varies(row["evaluation"])
            name = row["drafter"] + (f" γ={gamma}" if other else "")
        names.append(f"{name} ({row['drafter']})" if name in names else name)
    return [f"{n} #{i + 1}" if names.count(n) > 1 else n for i, n in enumerate(names)]


def bare(label: str) -> str:
    """Return a row's label without its γ."""
    return label.partition(" γ=")[0]


def is_baseline(report: dict[str, Any], row: Row) -> bool:
    """Whether the row's drafter is a baseline, not the output of a stage."""
    evaluation = report["config"].get("evaluation") or {}
    known = {"ngram", *(evaluation.get("baselines") or [])}
    stages = {stage["name"] for stage in report.get("stages", [])}
    return row["drafter"] in known and row["stage"] not in stages


def is_in_turn(row: Row) -> bool:
    """Whether the row combines several drafters, such as `ngram+heads`."""
    return "+" in row["drafter"]


def _main_gamma(report: dict[str, Any]) -> Any:
    """Return the γ of the trained drafters."""
    configured = (report["config"].get("evaluation") or {}).get("gamma")
    found = [row["evaluation"].get("gamma") for row in report["rows"]]
    return configured or (found[-1] if found else None)
