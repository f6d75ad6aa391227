"""What drafts are worth in an engine: acceptance by its own counters, and speed."""

from decode.base.errors import UserError
from decode.draw.sampling import Sampling
from draftsmith.auditing.findings import Finding, Judgement
from draftsmith.export.compare_acceptance import (
    FEWEST_TOKENS,
    Acceptance,
    Counting,
    OwnLoop,
    count_drafts,
)
from draftsmith.export.engine_kinds import ENGINES
from train.engines.counters import DraftCounts, EngineCounters, settled_counters

GROUP = "drafts"
# How engines count, by the prefixes of their counters.
COUNTING = {
    "vllm": ENGINES["vllm"].counting,
    "sglang": ENGINES["vllm"].counting,
    "llamacpp": ENGINES["llama-server"].counting,
    "draftsmith": Counting(),
    **{name: ENGINES[name].counting for name in ("transformers", "openvino")},
}


def counters_if_shown(url: str, key: str | None) -> EngineCounters | None:
    """The engine's counters once they stand still, or those that it shows after a while; None if
    it shows none."""
    try:
        return settled_counters(url, key or "")[0]
    except UserError:
        return None


def acceptance_finding(
    name: str,
    counts: DraftCounts,
    engine: str,
    own: OwnLoop | None,
    sampling: Sampling,
    *,
    level: float,
    parting: float,
) -> Finding:
    """The engine's acceptance, beside that of our own loop on the same prompts if `own` is given.
    name: of the answers. counts: what it drafted and accepted for them. level, parting: see
    `Acceptance`."""
    name = f"acceptance of {name} answers"
    detail = f"{counts.accepted:.0f} of {counts.drafted:.0f} draft tokens"
    if counts.rate is not None:
        detail += f", {counts.rate:.1%}"
    if counts.accepted > counts.drafted:
        detail += ": more than were drafted, so these counters say nothing"
        return Finding(GROUP, name, Judgement.UNJUDGED, detail)
    if own is None:
        return Finding(GROUP, name, Judgement.EQUAL, detail)
    drafted, accepted = count_drafts(own, COUNTING[engine], sampling)
    figures = {
        "drafted": int(counts.drafted),
        "accepted": int(counts.accepted),
        "our_drafted": drafted,
        "our_accepted": accepted,
    }
    if counts.rate is None and drafted >= FEWEST_TOKENS:  # texts of one token have no drafts
        detail += ": the engine drafts nothing"
        return Finding(GROUP, name, Judgement.WRONG, detail, figures=figures)
    found = Acceptance(counts, DraftCounts(drafted, accepted), own.gamma, level, parting)
    detail += f"; {accepted} of {drafted} in our own loop"
    if drafted:
        detail += f", {accepted / drafted:.1%}"
    if found.fewest < FEWEST_TOKENS:
        detail += f"; expected at least {FEWEST_TOKENS} draft tokens: "
        if drafted < FEWEST_TOKENS:
            detail += "ask for more or longer texts"
        else:
            detail += (
                "the engine hardly drafts. See whether it reads the drafter and drafts "
                f"{own.gamma} tokens at this load; more texts do not help"
            )
        return Finding(GROUP, name, Judgement.UNJUDGED, detail, figures=figures)
    sees = f"{found.allowed:.1%} of the draft tokens; chance exceeds it in {level:.2g} of audits"
    verdict = Judgement.WRONG if found.fault else Judgement.EQUAL
    return Finding(GROUP, name, verdict, detail, sees=sees, figures=figures)


def speed_finding(drafted: float, plain: float) -> Finding:
    """Of tokens a second, with and without drafts."""
    detail = (
        f"{drafted:.0f} tokens a second with drafts, {plain:.0f} without: {drafted / plain:.2f} "
        "times as fast"
    )
    return Finding(GROUP, "speed", Judgement.EQUAL, detail)
