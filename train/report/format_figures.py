"""Formats figures for people. A missing figure is '–'."""

from collections.abc import Mapping
from typing import Any

MISSING = "–"

Row = dict[str, Any]  # {stage, drafter, order, evaluation}
Ratio = dict[str, float]  # {value, low, high}


def format_number(value: float | None, digits: int = 2) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"


def format_share(value: float | None) -> str:
    """Whole per cents. Only exactly 0 and 1 become 0% and 100%; values near them get a decimal."""
    if value is None:
        return MISSING
    rounded = f"{value:.0%}"
    if rounded == "0%" and value > 0:
        return f"{value:.1%}" if value >= 0.0005 else "<0.1%"
    if rounded == "100%" and value < 1:
        return f"{value:.1%}" if value < 0.9995 else ">99.9%"
    return rounded


def format_speedup(evaluation: dict[str, Any]) -> str:
    """`format_ratio` of the speed-up, with a star if other processes used the machine."""
    ratio = format_ratio(evaluation.get("speedup"))
    return f"{ratio}*" if ratio != MISSING and disturbance(evaluation) else ratio


def disturbance(evaluation: dict[str, Any]) -> str | None:
    """Return a note that other processes used the machine while a row was timed, else None."""
    if evaluation.get("alone") is not False:
        return None
    share = format_share(evaluation.get("others_share"))
    return (
        f"other processes took {share} of the processor while "
        "this was timed; measure the times again on an idle machine"
    )


def format_ratio(value: Ratio | None) -> str:
    """'1.23× [1.18, 1.29]', or '1.23×' if it has no interval."""
    if value is None:
        return MISSING
    interval = f" [{value['low']:.2f}, {value['high']:.2f}]" if "low" in value else ""
    return f"{value['value']:.2f}×{interval}"


def format_break_even(evaluation: dict[str, Any]) -> str:
    """The break-even acceptance; 'never' if not even full acceptance would pay."""
    c, v = evaluation.get("c"), evaluation.get("v")
    if c is None or v is None or v < 1 or has_varying_lengths(evaluation):
        return MISSING
    value = evaluation.get("break_even_acceptance")
    return "never" if value is None else format_number(value)


def has_varying_lengths(evaluation: dict[str, Any]) -> bool:
    """Whether draft lengths vary, so there is no single γ."""
    return (evaluation.get("policy") or "fixed").partition(":")[0] != "fixed"


def draft_length(evaluation: dict[str, Any]) -> str:
    """'4', or '≤ 8 by heuristic:max_depth=8'."""
    gamma = evaluation.get("gamma")
    if not has_varying_lengths(evaluation):
        return MISSING if gamma is None else str(gamma)
    return f"≤ {gamma} by {evaluation['policy']}"


def format_duration(seconds: float | None) -> str:
    """'0.8 s', '42 s', '3 min 5 s', '2 h 7 min'."""
    if seconds is None:
        return MISSING
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60} min"


def format_machine(machine: Mapping[str, Any]) -> str:
    """A machine, as `train.base.provenance.describe_process` describes it."""
    processor = machine.get("processor") or "unknown processor"
    cores, threads = machine.get("cores"), machine.get("threads")
    text = processor + (f", {cores} cores" if cores else "")
    text += f", {threads} thread{'s' if threads != 1 else ''}" if threads else ""
    return ", ".join([*(machine.get("gpus") or []), text])


def drafter_name(row: Row) -> str:
    """The drafter's name. Adds the rule if it is lossy, and "new target" if the target was trained
    too."""
    evaluation = row["evaluation"]
    lossy = evaluation.get("lossless") is False
    notes = [f"{evaluation.get('rule')}, LOSSY"] if lossy else []
    notes += ["new target"] if evaluation.get("drift") else []
    return row["drafter"] + (f" ({', '.join(notes)})" if notes else "")


def rule_name(evaluation: dict[str, Any]) -> str:
    """'speculative (lossless)' or 'NAME (LOSSY: …)'."""
    if evaluation.get("lossless") is False:
        return f"{evaluation.get('rule')} (LOSSY: the text is not distributed as the target's)"
    return f"{evaluation.get('rule')} (lossless)"


def draft_shape(evaluation: dict[str, Any]) -> str:
    """'sequoia:nodes=8' if it was asked for, else the drafter's own: 'tree of 12 nodes, 4 deep'."""
    return evaluation.get("shape") or evaluation.get("drafts") or "chain"


def format_perplexities(evaluation: dict[str, Any]) -> str:
    drift = evaluation.get("drift")
    if not drift:
        return MISSING
    return (
        f"{format_number(drift['perplexity_original'])} → {format_number(drift['perplexity_new'])}"
    )


def target_drift(evaluation: dict[str, Any]) -> str:
    """Return a note for a drafter whose target was trained too: the target that the figures refer
    to, and the drift."""
    drift = evaluation["drift"]
    return (
        "the target was trained too; speed-up and losslessness refer to the new target. On "
        f"{drift['tokens']:,} held-out tokens KL(original‖new) is {drift['kl']:.4f} nats per token "
        f"and perplexity {format_perplexities(evaluation)}"
    )
