"""Are sampled texts those of a baseline server: the same engine without drafts?

Its law may differ from the target's, as that of an engine with quantised weights does. If drafts
change nothing, the answers of both servers to a prompt are draws from one law. So which of them
came from which server is exchangeable, and that gives the mean and the covariance of every sum over
answers, whatever their law is (Strasser and Weber, 1999). u and the other sums are those of the
target's law: it is only the ruler.
"""

from collections.abc import Callable, Sequence

import numpy as np
from scipy.stats import chi2

from draftsmith.auditing.findings import Finding, Judgement
from draftsmith.auditing.sampled import BINS, GROUP, ORDER_NAMES, POWER, SET_NAMES, too_few
from draftsmith.auditing.tails import smallest_shift
from draftsmith.auditing.texts import JudgedText

# Of a text: float64 [figures].
Figures = Callable[[JudgedText], np.ndarray]


def beside_findings(
    texts: Sequence[JudgedText], baseline: Sequence[JudgedText], level: float
) -> list[Finding]:
    """The findings about sampled texts beside those of a baseline. level: the probability that an
    engine whose texts have the baseline's law is called wrong by any of them. Prompts that only one
    of them answered are left out."""
    answered = {text.text.number for text in texts} & {text.text.number for text in baseline}
    texts = [text for text in texts if text.text.number in answered]
    baseline = [text for text in baseline if text.text.number in answered]
    if few := too_few(texts) or too_few(baseline):
        return [few]
    figures: dict[str, Figures] = {name: _bins(at) for at, name in enumerate(ORDER_NAMES.values())}
    figures |= {name: _hits(at) for at, name in enumerate(SET_NAMES.values())}
    figures["temperature"] = lambda text: np.array([text.surprise.sum()])
    each = level / len(figures)
    return [_compared(name, texts, baseline, of, each) for name, of in figures.items()]


def _bins(order: int) -> Figures:
    def of(text: JudgedText) -> np.ndarray:
        bins = np.minimum((text.u[order] * BINS).astype(int), BINS - 1)
        return np.bincount(bins, minlength=BINS).astype(np.float64)

    return of


def _hits(which: int) -> Figures:
    return lambda text: np.array([text.hit[which].sum()])


def _compared(
    name: str,
    texts: Sequence[JudgedText],
    baseline: Sequence[JudgedText],
    of: Figures,
    level: float,
) -> Finding:
    """χ² of the sums of the engine's answers, with the mean and covariance of a random choice of as
    many answers to each prompt from those of both servers."""
    prompts = np.array([text.text.number for text in (*texts, *baseline)])
    values = np.stack([of(text) for text in (*texts, *baseline)])
    ours = np.arange(len(values)) < len(texts)
    excess = np.zeros(values.shape[1])
    covariance = np.zeros((values.shape[1],) * 2)
    for prompt in np.unique(prompts):
        of_prompt = prompts == prompt
        centred = values[of_prompt] - values[of_prompt].mean(0)
        count, chosen = len(centred), int(ours[of_prompt].sum())
        excess += centred[ours[of_prompt]].sum(0)
        share = chosen * (count - chosen) / (count * max(count - 1, 1))
        covariance += share * centred.T @ centred
    freedom = int(np.linalg.matrix_rank(covariance))
    statistic = float(excess @ np.linalg.pinv(covariance) @ excess)
    p = float(chi2.sf(statistic, freedom)) if freedom else 1.0
    tokens = sum(len(text.gap) for text in texts)
    largest = int(np.argmax(np.abs(excess)))
    detail = f"{2 * excess[largest] / tokens:+.4f} a token more than the baseline"
    if len(excess) > 1:
        detail += f" in bin {largest + 1} of {BINS}"
    detail += f", χ² {statistic:.1f} with {freedom} degrees of freedom"
    # The difference of two servers with as many answers is twice the excess over their mean.
    variance = 4 * float(covariance[largest, largest])
    sees = f"{smallest_shift(tokens, variance, level, POWER):.4f} a token" if variance > 0 else ""
    verdict = Judgement.WRONG if p < level else Judgement.EQUAL
    return Finding(GROUP, f"beside the baseline: {name}", verdict, detail, p, sees)
