"""The best drafter of a run, in words."""

from typing import Any

from train.report.rows import bare, is_baseline, labels
from train.report.words import Row, disturbed, moved, number, percent


def headline(report: dict[str, Any]) -> dict[str, Any] | None:
    """The best drafter a stage made, in words; None where nothing was evaluated.

    {label, row, verdict, against, before, baseline, warnings}. The best is the fastest, or without
    times the one with most tokens per step; `before` are its figures before all training, and
    `baseline` is the best of the drafters that need none.
    """
    named = list(zip(labels(report), report["rows"], strict=True))
    if not named:
        return None
    baselines = [pair for pair in named if is_baseline(report, pair[1])]
    trained = [pair for pair in named if not is_baseline(report, pair[1])]
    label, row = max(trained or baselines, key=lambda pair: _worth(pair[1]))
    evaluation = row["evaluation"]
    start = f"{_first_stage(report, row['stage'])} (start)"
    before = next((r["evaluation"] for _, r in named if r["stage"] == start), None)
    against: tuple[str, Row] | None = None
    if trained and baselines:
        against = max(baselines, key=lambda pair: _worth(pair[1]))
    warnings = []
    if not trained:
        warnings.append("No trained drafter was evaluated yet; this is an untrained baseline.")
    if evaluation.get("lossless") is False:
        warnings.append(
            f"The rule {evaluation.get('rule')} is LOSSY: the text is not distributed as the "
            "target's. Do not compare this speed-up with lossless ones."
        )
    if evaluation.get("drift"):
        found = moved(evaluation)
        warnings.append(f"{found[0].upper()}{found[1:]}. The original target's text is another.")
    within = evaluation.get("identical_within_rounding")
    if evaluation.get("lossless") and within is not None and within < 1:
        warnings.append(
            f"Only {percent(within)} of the greedy texts equal plain decoding's, rounding allowed "
            "for; a lossless rule should change nothing."
        )
    generate = evaluation.get("plain_vs_generate")
    if generate and generate["value"] < 0.95:
        warnings.append(
            f"Plain decoding runs at {generate['value']:.2f}× the speed of generate(), so the "
            "speed-up over it is too high; read the one over generate() instead."
        )
    for name, other in [(label, row), *([against] if against else [])]:
        if told := disturbed(other["evaluation"]):
            warnings.append(f"The speed of {name} is not reliable: {told}.")
    if row["stage"].endswith(" (start)"):
        warnings.append("The best row is a drafter before its training: training did not help.")
    return {
        "label": label,
        "row": row,
        "verdict": _verdict(evaluation),
        "against": _against(evaluation, against) if against else None,
        "before": before,
        "baseline": against,
        "warnings": warnings,
    }


def _first_stage(report: dict[str, Any], stage: str) -> str:
    """The stage that began the drafter with which this one went on (`drafter.stage`)."""
    settings = {entry["name"]: entry for entry in report["config"].get("stages", [])}
    while earlier := (settings.get(stage, {}).get("drafter") or {}).get("stage"):
        # Only an earlier stage can be named, so this ends.
        stage = earlier
    return stage


def _worth(row: Row) -> tuple[float, float]:
    speedup = row["evaluation"].get("speedup")
    return (
        speedup["value"] if speedup else 0.0,
        row["evaluation"].get("tokens_per_step") or 0.0,
    )


def _verdict(evaluation: dict[str, Any]) -> str:
    speedup = evaluation.get("speedup")
    if speedup is None:
        tokens = number(evaluation.get("tokens_per_step"))
        return f"yields {tokens} tokens per step; no prompt was timed, so its speed is not known"
    if speedup["low"] > 1:
        return f"decodes {speedup['value']:.2f} times as fast as the target alone"
    if speedup["high"] < 1:
        return (
            f"is slower than the target alone, at {speedup['value']:.2f} times its speed; "
            "it does not pay on this machine"
        )
    return (
        f"is neither clearly faster nor clearly slower than the target alone "
        f"({speedup['value']:.2f} times its speed; the interval includes 1)"
    )


def _against(evaluation: dict[str, Any], baseline: tuple[str, Row]) -> str:
    label, row = bare(baseline[0]), baseline[1]
    ours, theirs = evaluation.get("speedup"), row["evaluation"].get("speedup")
    if ours is None or theirs is None:
        mine, other = evaluation.get("tokens_per_step"), row["evaluation"].get("tokens_per_step")
        return f"yields {number(mine)} tokens per step, {label} yields {number(other)}"
    if ours["low"] > theirs["high"]:
        return f"is faster than {label}, which needs no training"
    if ours["high"] < theirs["low"]:
        return f"is slower than {label}, which needs no training: this drafter is not finished"
    return f"is not clearly different from {label}, which needs no training (intervals overlap)"
