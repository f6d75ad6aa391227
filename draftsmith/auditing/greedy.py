"""Are greedy texts the target's? Every token is judged by the target's logits on the text so far.

A token that differs changes all text after it. So two texts are not compared: each token is judged
after the text that the engine itself wrote, and one difference is counted once.

The first token of an answer comes from the pass over its prompt, before anything is drafted. So
first tokens show whether the server has the target's weights, and the others what drafts change.
"""

import math
from collections.abc import Sequence
from statistics import median_low

import numpy as np
from scipy.stats import chi2

from draftsmith.auditing.findings import Finding, Judgement
from draftsmith.auditing.tails import (
    martingale_tail,
    sign_tail,
    smallest_excess,
)
from draftsmith.auditing.texts import JudgedText
from train.engines.answers.check_model import MOST_STRANGE, STRANGE

GROUP = "greedy"
# A mean difference of log-probabilities that rounding to 8 bits does not explain, in nats.
MOST_OFF = 0.1
PLACE_TOKENS = 4  # the last tokens of a text, by which places are told apart
POWER = 0.99


def greedy_findings(
    texts: Sequence[JudgedText], level: float, baseline: Sequence[JudgedText] | None = None
) -> list[Finding]:
    """The findings about greedy texts. If the first one is not EQUAL, the server has other weights
    than the target, and the others are not judged.

    level: the probability that rounding alone is called wrong. baseline: the greedy texts of a
    server whose weights may be other ones. How far its own tokens are below the target's likeliest
    says what such weights explain.
    """
    if baseline is not None:
        least = _allowance(texts, baseline, level / 2)
        return [_tokens(texts, least), _beside(texts, baseline, level / 2)]
    weights = _weights(texts)
    if weights.verdict is not Judgement.EQUAL:
        return [weights]
    return [weights, *_log_probabilities(texts), _tokens(texts), _rounding(texts, level)]


def _weights(texts: Sequence[JudgedText]) -> Finding:
    told = [abs(text.log_p[0] - text.text.log_p[0]) for text in texts if text.text.log_p]
    far = sorted(bool(text.gap[0] > STRANGE) for text in texts)
    detail = f"{sum(far)} of {len(far)} first tokens are far from the target's likeliest"
    # What a single answer says is about that answer: it is no share, and moves no median.
    strange = float(np.mean(far[:-1] or far))
    off = median_low(told + [0.0] * (len(texts) - len(told)))
    if told:
        detail += f"; the median of their log-probabilities is {off:.4f} nats off"
    else:
        detail += "; the server gives no log-probabilities"
    if strange <= MOST_STRANGE and off <= MOST_OFF:
        return Finding(GROUP, "weights", Judgement.EQUAL, detail)
    detail += (
        ". First tokens come from the prompt alone, so the server has other weights than the "
        "target, or reads other prompts: start it with the target, or give --target its checkpoint"
    )
    return Finding(GROUP, "weights", Judgement.UNJUDGED, detail)


def _log_probabilities(texts: Sequence[JudgedText]) -> list[Finding]:
    """One finding; none if the server gives no log-probabilities."""
    pairs = [(t.log_p, np.array(t.text.log_p)[: len(t.log_p)]) for t in texts if t.text.log_p]
    if not pairs:
        return []
    off = np.concatenate([np.abs(ours - theirs) for ours, theirs in pairs])
    detail = f"{off.mean():.4f} nats from the target's in the mean, {off.max():.4f} at most"
    verdict = Judgement.EQUAL if off.mean() <= MOST_OFF else Judgement.WRONG
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
        sees = f"one token more than {rounding.max():.2g} below the likeliest"
        return Finding(GROUP, "tokens", Judgement.EQUAL, detail, sees=sees)
    detail += f"; the largest gap is {gap.max():.3g}; {_first(texts, least)}"
    return Finding(GROUP, "tokens", Judgement.WRONG, detail)


def _allowance(texts: Sequence[JudgedText], baseline: Sequence[JudgedText], level: float) -> float:
    """The gap that no token of `texts` exceeds with probability 1 − level, if its tokens have the
    law of the baseline's.

    After two texts part, their gaps are other draws: the larger one of two worst gaps is as often
    the one's as the other's. So the tail of the gaps is taken, as exponential, which tails of
    errors are not heavier than. Its mean is bounded from above by the baseline's gaps (2nx̄/m has
    the law χ² with 2n degrees of freedom). Half of the level is for the mean, half for the tail.
    What the baseline itself does is never wrong."""
    gaps = np.concatenate([text.gap for text in baseline])
    gaps = gaps[gaps > 0]
    count = sum(int((text.gap > 0).sum()) for text in texts)
    if not count or not len(gaps):
        return 0.0
    mean = 2 * float(gaps.sum() / chi2.isf(1 - level / 2, 2 * len(gaps)))
    return max(float(gaps.max()), mean * math.log(2 * count / level))


def _rounding(texts: Sequence[JudgedText], level: float) -> Finding:
    """Are as many tokens below the likeliest, and as far, as rounding explains?

    The sum of gap / rounding over the tokens, less its mean by the target's own margins. A place
    counts once for its last tokens, because a text that repeats itself repeats its errors."""
    excess, variance, below, count = 0.0, 0.0, 0, 0
    seen: set[tuple[int, ...]] = set()
    for text in texts:
        tokens = [*text.text.prompt, *text.text.tokens]
        for place, end in enumerate(range(len(text.text.prompt), len(tokens))):
            before = tuple(tokens[max(0, end - PLACE_TOKENS) : end])
            share = text.gap[place] / text.rounding[place]
            if before in seen or share > 1:  # more is another finding's
                continue
            seen.add(before)
            excess += share - text.below_due[place]
            variance += text.below_variance[place]
            below, count = below + (share > 0), count + 1
    p = martingale_tail(excess, variance) if excess > 0 else 1.0
    mean = excess / max(count, 1)
    detail = (
        f"{below} of {count} tokens after different words are below the likeliest; with their "
        f"distances, {abs(mean):.2%} of the allowance {'more' if mean > 0 else 'less'} than "
        "rounding explains in the mean"
    )
    needed = smallest_excess(variance, level, POWER)
    sees = f"{2 * needed:.0f} tokens more, each half of the allowance below"
    verdict = Judgement.WRONG if p < level else Judgement.EQUAL
    return Finding(GROUP, "rounding", verdict, detail, p, sees)


def _beside(texts: Sequence[JudgedText], baseline: Sequence[JudgedText], level: float) -> Finding:
    """Are the tokens further below the target's likeliest than the baseline's at the same places?

    Where the texts of a prompt part, both servers have read the same. If rounding alone parts
    them, either choice may have been either server's: the difference of their gaps has a random
    sign, whatever the weights are. So has that of their sums over all later places."""
    name = "tokens beside the baseline"
    of_prompt = {text.text.number: text for text in baseline}
    both = [(text, of_prompt.get(text.text.number)) for text in texts]
    compared = [(text, other) for text, other in both if other is not None]
    if not compared:
        detail = "no prompt has an answer of both servers that can be judged"
        return Finding(GROUP, name, Judgement.UNJUDGED, detail)
    parts, sums, same = [], [], 0
    for text, other in compared:
        pairs = list(zip(text.text.tokens, other.text.tokens, strict=False))
        at = next((i for i, (one, two) in enumerate(pairs) if one != two), None)
        same += len(pairs) if at is None else at
        if at is not None:
            parts.append(text.gap[at] - other.gap[at])
            sums.append(text.gap[at:].mean() - other.gap[at:].mean())
    p = min(1.0, 2 * min(sign_tail(parts), sign_tail(sums)))
    detail = (
        f"{same} tokens are those of the baseline; {len(parts)} of {len(compared)} texts part from "
        f"it, with tokens {np.mean(parts) if parts else 0.0:+.3g} further below the likeliest "
        f"there and {np.mean(sums) if sums else 0.0:+.3g} from there on"
    )
    needed = next(n for n in range(1, 200) if 2 * sign_tail([1.0] * n) < level)
    verdict = Judgement.WRONG if p < level else Judgement.EQUAL
    sees = f"{needed} texts that part, all to less likely tokens"
    return Finding(GROUP, name, verdict, detail, p, sees)


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
