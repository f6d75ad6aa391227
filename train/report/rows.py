"""The rows of a report: what they are called, and which are baselines."""

from typing import Any

from train.report.words import Row, varies


def labels(report: dict[str, Any]) -> list[str]:
    """A short name for every row that no other row has: the stage, or the baseline's drafter."""
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
    """A row's label without its γ."""
    return label.partition(" γ=")[0]


def is_baseline(report: dict[str, Any], row: Row) -> bool:
    """Whether a row is of a drafter that no stage made."""
    evaluation = report["config"].get("evaluation") or {}
    known = {"ngram", *(evaluation.get("baselines") or [])}
    stages = {stage["name"] for stage in report.get("stages", [])}
    return row["drafter"] in known and row["stage"] not in stages


def is_in_turn(row: Row) -> bool:
    """Whether a row is of several drafters together, such as `ngram+heads`."""
    return "+" in row["drafter"]


def _main_gamma(report: dict[str, Any]) -> Any:
    """The γ of the trained drafters."""
    configured = (report["config"].get("evaluation") or {}).get("gamma")
    found = [row["evaluation"].get("gamma") for row in report["rows"]]
    return configured or (found[-1] if found else None)
