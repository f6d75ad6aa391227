"""What drafts are worth in an engine: acceptance by its own counters, and speed."""

import re
import time
from dataclasses import dataclass

from decode.base.errors import UserError
from decode.draw.sampling import Sampling
from draftsmith.auditing.findings import Finding, Judgement
from draftsmith.export.acceptance import (
    FEWEST_TOKENS,
    Acceptance,
    Counting,
    OwnLoop,
    count_drafts,
)
from draftsmith.export.engines import ENGINES
from train.engines.child_process import ask
from train.engines.counters import DraftCounts, parse_counters

GROUP = "drafts"
# Counters follow the answers a moment later: they are read until two readings are equal. Ours are
# counted before an answer leaves.
SETTLE_SECONDS = {"draftsmith": 0.02}
SLOW_SECONDS, LONGEST_SETTLE = 0.3, 5.0
# How engines count, by the prefixes of their counters.
COUNTING = {
    "vllm": ENGINES["vllm"].counting,
    "sglang": ENGINES["vllm"].counting,
    "llamacpp": ENGINES["llama-server"].counting,
    "draftsmith": Counting(),
    **{name: ENGINES[name].counting for name in ("transformers", "openvino")},
}


@dataclass(frozen=True)
class Counters:
    """A reading. engine: a name of COUNTING."""

    counts: DraftCounts
    engine: str


def read(url: str, key: str | None) -> Counters | None:
    """The engine's counters once they stand still; None if it shows none."""
    end = time.monotonic() + LONGEST_SETTLE
    last = _read(url, key)
    while last is not None and time.monotonic() < end:
        time.sleep(SETTLE_SECONDS.get(last.engine, SLOW_SECONDS))
        if (now := _read(url, key)) == last:
            break
        last = now
    return last


def _read(url: str, key: str | None) -> Counters | None:
    try:
        page = ask(f"{url}/metrics", key=key or "", seconds=30).decode(errors="replace")
        counts = parse_counters(page)
    except (UserError, ValueError):  # no page, or one whose numbers are none
        return None
    engine = re.search(rf"^({'|'.join(COUNTING)}):", page, re.MULTILINE)
    return None if counts is None or engine is None else Counters(counts, engine[1])


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
