"""The best drafter of a run and the figures to judge it by, in words."""

from typing import Any

from train.report.rows import bare, is_baseline, is_in_turn, labels
from train.report.words import Row, disturbed, moved, number, percent, ratio


def headline(report: dict[str, Any]) -> dict[str, Any] | None:
    """Describe the best trained drafter in words. Returns None if nothing was evaluated.

    Returns {label, row, verdict, before, compared, ranking, warnings}. The best drafter is the
    fastest one; without times, the one with the most tokens per step. `before` holds its figures
    before all training. `compared` holds the rows a reader should judge it by, each {what, label,
    evaluation}: the drafter itself, the best drafter that needs no training, and both in turn if
    that was measured. `ranking` says which of them is fastest; it is "" if there is nothing to
    compare.
    """
    named = list(zip(labels(report), report["rows"], strict=True))
    if not named:
        return None
    baselines = [pair for pair in named if is_baseline(report, pair[1])]
    in_turn = [pair for pair in named if is_in_turn(pair[1])]
    trained = [pair for pair in named if pair not in baselines and pair not in in_turn]
    label, row = max(trained or baselines, key=lambda pair: _worth(pair[1]))
    evaluation = row["evaluation"]
    start = f"{_first_stage(report, row['stage'])} (start)"
    before = next((r["evaluation"] for _, r in named if r["stage"] == start), None)
    compared = [_entry("trained" if trained else "untrained", label, row)]
    if trained and baselines:
        compared.append(_entry("untrained", *max(baselines, key=lambda pair: _worth(pair[1]))))
    if in_turn:
        compared.append(_entry("in turn", *in_turn[-1]))
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
    warnings += [
        f"The speed of {entry['label']} is not reliable: {told}."
        for entry in compared
        if (told := disturbed(entry["evaluation"]))
    ]
    if row["stage"].endswith(" (start)"):
        warnings.append("The best row is a drafter before its training: training did not help.")
    return {
        "label": label,
        "row": row,
        "verdict": _verdict(evaluation),
        "before": before,
        "compared": compared,
        "ranking": _ranking(compared),
        "warnings": warnings,
    }


def _first_stage(report: dict[str, Any], stage: str) -> str:
    """Return the stage that first made this stage's drafter, following `drafter.stage` back."""
    settings = {entry["name"]: entry for entry in report["config"].get("stages", [])}
    while earlier := (settings.get(stage, {}).get("drafter") or {}).get("stage"):
        # A config can name only an earlier stage, so this ends.
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


def comparison(best: dict[str, Any]) -> str:
    """Return the compared rows of a headline in one line."""
    shown = []
    for entry in best["compared"]:
        evaluation = entry["evaluation"]
        tokens = f"{number(evaluation.get('tokens_per_step'))} tokens per step"
        timed = evaluation.get("speedup")
        figures = f"{ratio(timed)}, {tokens}" if timed else tokens
        shown.append(f"{entry['label']} ({entry['what']}) {figures}")
    return "; ".join(shown)


def _entry(what: str, label: str, row: Row) -> dict[str, Any]:
    return {"what": what, "label": bare(label), "evaluation": row["evaluation"]}


def _ranking(compared: list[dict[str, Any]]) -> str:
    """Say in a sentence which row is fastest. Overlapping intervals count as no difference."""
    if len(compared) < 2:
        return ""
    timed = [(e["label"], s) for e in compared if (s := e["evaluation"].get("speedup"))]
    if len(timed) < len(compared):
        return "Not all of them were timed, so which is fastest is not known."
    first, top = max(timed, key=lambda pair: pair[1]["value"])
    others = [pair for pair in timed if pair[0] != first]
    level = [label for label, found in others if found["high"] >= top["low"]]
    slower = [label for label, found in others if found["high"] < top["low"]]
    if not level:
        return f"{first} is faster than {_and(slower)}."
    text = f"{first} is not clearly faster than {_and(level)} (intervals overlap)"
    return f"{text}, but it is faster than {_and(slower)}." if slower else f"{text}."


def _and(names: list[str]) -> str:
    return " and ".join(names)
