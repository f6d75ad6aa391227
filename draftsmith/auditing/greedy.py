"""Are greedy texts the target's? Every token is judged by the target's logits on the text so far.

A token that differs changes all text after it. So two texts are not compared: each token is judged
after the text that the engine itself wrote, and one difference is counted once.

The first token of an answer comes from the pass over its prompt, before anything is drafted. So
first tokens show whether the server has the target's weights, and the others what drafts change.
"""

from collections.abc import Sequence

import numpy as np

from draftsmith.auditing.findings import Finding, Verdict
from draftsmith.auditing.texts import JudgedText

GROUP = "greedy"
# A mean difference of log-probabilities that rounding to 8 bits does not explain, in nats.
MOST_OFF = 0.1
# A first token that is so much less likely than the likeliest is another model's. Models of one
# family differ in about a fifth of their greedy tokens.
STRANGE, MOST_STRANGE = 0.5, 0.1


def greedy_findings(
    texts: Sequence[JudgedText], baseline: Sequence[JudgedText] | None = None
) -> list[Finding]:
    """The findings about greedy texts. If the first one is not EQUAL, the server has other weights
    than the target, and the others are not judged.

    baseline: the greedy texts of a server whose weights may be other ones. What its own tokens are
    below the target's likeliest is then rounding.
    """
    if baseline is not None:
        return [_tokens(texts, max((float(text.gap.max()) for text in baseline), default=0.0))]
    weights = _weights(texts)
    if weights.verdict is not Verdict.EQUAL:
        return [weights]
    return [weights, *_log_probabilities(texts), _tokens(texts)]


def _weights(texts: Sequence[JudgedText]) -> Finding:
    first_off = [abs(text.log_p[0] - text.text.log_p[0]) for text in texts if text.text.log_p]
    strange = float(np.mean([text.gap[0] > STRANGE for text in texts]))
    detail = f"{strange:.0%} of {len(texts)} first tokens are far from the target's likeliest"
    off = float(np.mean(first_off)) if first_off else 0.0
    if first_off:
        detail += f"; their log-probabilities are {off:.4f} nats from the target's in the mean"
    else:
        detail += "; the server gives no log-probabilities"
    if strange <= MOST_STRANGE and off <= MOST_OFF:
        return Finding(GROUP, "weights", Verdict.EQUAL, detail)
    detail += (
        ". First tokens come from the prompt alone, so the server has other weights than the "
        "target, or reads other prompts: start it with the target, or give --target its checkpoint"
    )
    return Finding(GROUP, "weights", Verdict.UNJUDGED, detail)


def _log_probabilities(texts: Sequence[JudgedText]) -> list[Finding]:
    """One finding; none if the server gives no log-probabilities."""
    pairs = [(t.log_p, np.array(t.text.log_p)[: len(t.log_p)]) for t in texts if t.text.log_p]
    if not pairs:
        return []
    off = np.concatenate([np.abs(ours - theirs) for ours, theirs in pairs])
    detail = f"{off.mean():.4f} nats from the target's in the mean, {off.max():.4f} at most"
    verdict = Verdict.EQUAL if off.mean() <= MOST_OFF else Verdict.WRONG
    sees = f"a mean difference of {MOST_OFF} nats"
    return [Finding(GROUP, "log-probabilities", verdict, detail, sees=sees)]


def _tokens(texts: Sequence[JudgedText], least: float = 0.0) -> Finding:
    """least: the least rounding."""
    gap = np.concatenate([text.gap for text in texts])
    rounding = np.concatenate([text.rounding for text in texts]).clip(min=least)
    close = int(((gap > 0) & (gap <= rounding)).sum())
    wrong = gap > rounding
    detail = (
        f"{int((gap == 0).sum())} of {len(gap)} tokens are the likeliest, {close} within rounding "
        f"({rounding.max():.2g} at most), {int(wrong.sum())} wrong"
    )
    if not wrong.any():
        return Finding(GROUP, "tokens", Verdict.EQUAL, detail, sees="one token of another choice")
    detail += f"; the largest gap is {gap.max():.3g}; {_first(texts, least)}"
    return Finding(GROUP, "tokens", Verdict.WRONG, detail)


def _first(texts: Sequence[JudgedText], least: float) -> str:
    """Where the first wrong token is."""
    for text in texts:
        wrong = np.flatnonzero(text.gap > text.rounding.clip(min=least))
        if len(wrong):
            return (
                f"the first wrong token is at place {wrong[0]} of the answer to prompt "
                f"{text.text.number}"
            )
    return ""
