"""Formats figures for people. A missing figure is '–'."""

from typing import Any

NONE = "–"

Row = dict[str, Any]  # {stage, drafter, order, evaluation}
Ratio = dict[str, float]  # {value, low, high}


def number(value: float | None, digits: int = 2) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """Whole per cents. Only exactly 0 and 1 become 0% and 100%; values near them get a decimal."""
    if value is None:
        return NONE
    shown = f"{value:.0%}"
    if shown == "0%" and value > 0:
        return f"{value:.1%}" if value >= 0.0005 else "<0.1%"
    if shown == "100%" and value < 1:
        return f"{value:.1%}" if value < 0.9995 else ">99.9%"
    return shown


def speedup(evaluation: dict[str, Any]) -> str:
    """`ratio` of the speed-up, with a star if other processes used the machine."""
    shown = ratio(evaluation.get("speedup"))
    return f"{shown}*" if shown != NONE and disturbed(evaluation) else shown


def disturbed(evaluation: dict[str, Any]) -> str | None:
    """Say that other processes used the machine while a row was timed; None if they did not."""
    if evaluation.get("alone") is not False:
        return None
    return (
        f"other processes took {percent(evaluation.get('others_share'))} of the processor while "
        "this was timed; measure the times again on a machine that has nothing else to do"
    )


def ratio(value: Ratio | None) -> str:
    """'1.23× [1.18, 1.29]'."""
    if value is None:
        return NONE
    return f"{value['value']:.2f}× [{value['low']:.2f}, {value['high']:.2f}]"


def break_even(evaluation: dict[str, Any]) -> str:
    """The break-even acceptance; 'never' if not even full acceptance would pay."""
    c, v = evaluation.get("c"), evaluation.get("v")
    if c is None or v is None or v < 1 or varies(evaluation):
        return NONE
    value = evaluation.get("break_even_acceptance")
    return "never" if value is None else number(value)


def varies(evaluation: dict[str, Any]) -> bool:
    """Whether draft lengths vary, so there is no single γ."""
    return (evaluation.get("policy") or "fixed").partition(":")[0] != "fixed"


def draft_length(evaluation: dict[str, Any]) -> str:
    """'4', or '≤ 8 by heuristic:max_depth=8'."""
    most = evaluation.get("gamma")
    if not varies(evaluation):
        return NONE if most is None else str(most)
    return f"≤ {most} by {evaluation['policy']}"


def duration(seconds: float | None) -> str:
    """'0.8 s', '42 s', '3 min 5 s', '2 h 7 min'."""
    if seconds is None:
        return NONE
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


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


def drafted_in(evaluation: dict[str, Any]) -> str:
    """'chain', 'sequoia:nodes=8', or 'its own, a tree of 12 nodes, 4 deep' for a stored tree."""
    drafts = evaluation.get("drafts") or "chain"
    return evaluation.get("shape") or (drafts if drafts == "chain" else f"its own, a {drafts}")


def perplexities(evaluation: dict[str, Any]) -> str:
    drift = evaluation.get("drift")
    if not drift:
        return NONE
    return f"{number(drift['perplexity_original'])} → {number(drift['perplexity_new'])}"


def moved(evaluation: dict[str, Any]) -> str:
    """For a drafter whose target was trained too: which target the figures refer to, and the
    drift."""
    drift = evaluation["drift"]
    return (
        "the target was trained too; speed-up and losslessness are towards the new target. On "
        f"{drift['tokens']:,} held-out tokens KL(original‖new) is {drift['kl']:.4f} nats per token "
        f"and perplexity {perplexities(evaluation)}"
    )
