"""The footnotes of a report: the settings of the measurements, and cautions for the reader."""

from collections.abc import Callable, Iterator
from typing import Any

from train.report.rows import bare, is_baseline, labels
from train.report.words import (
    NONE,
    Row,
    disturbed,
    draft_length,
    drafted_in,
    moved,
    percent,
    rule_name,
)


def footnotes(report: dict[str, Any]) -> list[str]:
    """Return the settings behind the table's figures, and cautions for the reader, as lines."""
    rows = report["rows"]
    if not rows:
        return ["No drafter was evaluated yet."]
    target = report["config"].get("target") or {}
    lines = [
        f"γ {_each(report, 'gamma', draft_length)}; {_each(report, 'sampling', _sampling)}; "
        f"rule {_each(report, 'rule', rule_name)}" + _shapes(report),
        f"{_each(report, 'prompts')} prompts for acceptance, {_each(report, 'timed_prompts')} of "
        f"them timed{_batches(report)}; intervals are 95% bootstrap intervals over the timed "
        f"{'batches' if _batches(report) else 'prompts'}{_basis(report)}",
        f"target {target.get('model', NONE)} in {_dtype(report)}; {machine(report)}",
        *_own_depths(report),
    ]
    for label, row in zip(labels(report), rows, strict=True):
        if row["evaluation"].get("drift"):
            lines.append(f"{bare(label)}: {moved(row['evaluation'])}")
        if found := disturbed(row["evaluation"]):
            lines.append(f"* {bare(label)}: {found}")
        evaluation = row["evaluation"]
        if (evaluation.get("v") or 1) < 1 and evaluation.get("break_even_note"):
            lines.append(f"{bare(label)} has no break-even: {evaluation['break_even_note']}")
    plain = [r["value"] for r in _all(rows, "plain_vs_generate")]
    if plain:
        line = f"plain decoding runs at {_range(plain, '{:.2f}×')} the speed of generate()"
        if min(plain) < 0.95:
            line += ": it is slower, so the speed-ups are too high; see those over generate()"
        lines.append(line)
    identical, close = _all(rows, "identical_to_plain"), _all(rows, "identical_within_rounding")
    if identical:
        line = f"greedy texts identical to plain decoding: {_range(identical)}"
        if min(identical) == 1:
            line += ", token by token, with no allowance for rounding"
        elif close and close != identical:
            line += f"; up to choices within rounding: {_range(close)}"
        lines.append(line)
    repetition, repeating = _all(rows, "repetition"), _all(rows, "share_repeating")
    if repetition:
        lines.append(
            f"tokens inside a repeated 8-gram: {_range(repetition)}; outputs with one: "
            f"{_range(repeating)}. Loops flatter every drafter"
        )
    return lines


def _batches(report: dict[str, Any]) -> str:
    """Say how many prompts were timed together; "" if always one."""
    if all((row["evaluation"].get("timed_batch_size") or 1) == 1 for row in report["rows"]):
        return ""
    return f" in batches of {_each(report, 'timed_batch_size')}"


def _basis(report: dict[str, Any]) -> str:
    """Say that speed-ups compare the time per token, if some do (texts of different lengths)."""
    found = [row["evaluation"].get("speedup_basis") for row in report["rows"]]
    return "; speed-ups compare the time per token" if "time per token" in found else ""


def _own_depths(report: dict[str, Any]) -> Iterator[str]:
    """Yield a line for every drafter whose drafts have a fixed depth and ignore γ."""
    asked = (report["config"].get("evaluation") or {}).get("gamma")
    for label, row in zip(labels(report), report["rows"], strict=True):
        evaluation = row["evaluation"]
        most, policy = evaluation.get("gamma"), evaluation.get("policy") or "fixed"
        if asked and most and most != asked and policy == "fixed" and not is_baseline(report, row):
            yield (
                f"{bare(label)} drafts {most} deep ({evaluation.get('drafts')}): γ {asked} is for "
                "drafts that have no depth of their own"
            )


def machine(report: dict[str, Any]) -> str:
    """Describe the machine of the run's last start."""
    found = (report["provenance"] or [{}])[-1].get("machine") or {}
    processor = found.get("processor") or "unknown processor"
    cores, threads = found.get("cores"), found.get("threads")
    text = processor + (f", {cores} cores" if cores else "")
    text += f", {threads} thread{'s' if threads != 1 else ''}" if threads else ""
    return ", ".join([*(found.get("gpus") or []), text])


def _each(
    report: dict[str, Any],
    key: str,
    show: Callable[[dict[str, Any]], str] | None = None,
) -> str:
    """Return the setting of most rows, and the rows with another value: '4 (ngram: 8)'."""
    pairs = [
        (bare(label), show(row["evaluation"]) if show else str(row["evaluation"].get(key, NONE)))
        for label, row in zip(labels(report), report["rows"], strict=True)
    ]
    values = [value for _, value in pairs]
    usual = max(reversed(values), key=values.count)
    others = [f"{label}: {value}" for label, value in pairs if value != usual]
    return usual + (f" ({', '.join(others)})" if others else "")


def _shapes(report: dict[str, Any]) -> str:
    """Name the draft shapes; "" if none was asked for and all drafts are chains."""
    found = [row["evaluation"] for row in report["rows"]]
    if all(not e.get("shape") and drafted_in(e) == "chain" for e in found):
        return ""
    return f"; shape {_each(report, 'shape', drafted_in)}"


def _sampling(evaluation: dict[str, Any]) -> str:
    sampling = evaluation.get("sampling") or {}
    parts = []
    if not sampling.get("temperature"):
        parts.append("greedy decoding")
    else:
        parts.append(f"temperature {sampling['temperature']:g}")
        if sampling.get("top_k"):
            parts.append(f"top-k {sampling['top_k']}")
        if sampling.get("top_p", 1.0) < 1:
            parts.append(f"top-p {sampling['top_p']:g}")
        if sampling.get("min_p"):
            parts.append(f"min-p {sampling['min_p']:g}")
    if sampling.get("repetition_penalty", 1.0) != 1:
        parts.append(f"repetition penalty {sampling['repetition_penalty']:g}")
    if evaluation.get("draft_temperature") is not None:
        parts.append(f"drafter's temperature {evaluation['draft_temperature']:g}")
    return ", ".join(parts)


def _dtype(report: dict[str, Any]) -> str:
    dtypes = sorted({row["evaluation"].get("dtype") or NONE for row in report["rows"]})
    return ", ".join(dtypes) or NONE


def _all(rows: list[Row], key: str) -> list[Any]:
    return [row["evaluation"][key] for row in rows if row["evaluation"].get(key) is not None]


def _range(values: list[float], form: str = "") -> str:
    shown = [form.format(v) if form else percent(v) for v in (min(values), max(values))]
    return shown[0] if shown[0] == shown[1] else f"{shown[0]} to {shown[1]}"
