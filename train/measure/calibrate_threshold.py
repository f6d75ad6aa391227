"""Chooses θ of the lossy rule `threshold` on dev prompts, as the edge–cloud recipe does."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from decode.base.errors import UserError
from decode.base.registry import Choice
from decode.drafters import Drafter
from decode.loop.decoded import Decoded
from decode.model.loading import Target
from decode.settings import DecodeSettings
from decode.stats import Counts, finite

GRID = (0.15, 0.20, 0.25, 0.30, 0.35)
WITHIN = (0.6, 0.8)


@dataclass(frozen=True)
class ThresholdTrial:
    """One θ and its figures, as defined in `train.measure.figures`. Times are at batch 1 and
    include prefill. A figure that does not exist is NaN."""

    threshold: float
    acceptance_rate: float
    draft_efficiency: float
    tokens_per_step: float
    ms_per_token: float


@dataclass(frozen=True)
class ThresholdCalibration:
    """All trials, ascending by θ, and the chosen one.

    within: the requested range of acceptance rates. in_range: whether any θ was in this range.
    """

    trials: list[ThresholdTrial]
    chosen: ThresholdTrial
    within: tuple[float, float]
    in_range: bool

    @property
    def rule(self) -> str:
        """The rule with the chosen θ, as `generate` and `verify-server` take it."""
        return str(Choice("threshold", {"threshold": self.chosen.threshold}))

    @property
    def verdict(self) -> str:
        low, high = self.within
        text = f"θ = {self.chosen.threshold:g}: use --rule {self.rule}"
        if self.in_range:
            return f"{text} (lowest latency with an acceptance rate of {low:g} to {high:g})"
        return (
            f"{text} (no θ has an acceptance rate of {low:g} to {high:g}; this one, with "
            f"{self.chosen.acceptance_rate:.2f}, is nearest)"
        )

    def to_dict(self) -> dict[str, Any]:
        """Converts to JSON values."""
        return {
            "rule": self.rule,
            "lossless": False,
            "threshold": self.chosen.threshold,
            "within": list(self.within),
            "kept": self.in_range,
            "trials": [
                {name: finite(value) for name, value in asdict(trial).items()}
                for trial in self.trials
            ],
        }


def choose(
    trials: Sequence[ThresholdTrial], within: tuple[float, float] = WITHIN
) -> ThresholdCalibration:
    """Chooses the trial with the lowest latency among those with an acceptance rate in the bounds.
    If there is none, it chooses the one nearest to the bounds; among equals, the faster one.

    Raises UserError if no trial drafted anything.
    """
    low, high = within
    drafting = [trial for trial in trials if np.isfinite(trial.acceptance_rate)]
    if not drafting:
        raise UserError(
            "nothing was drafted, so θ cannot be calibrated; use other prompts or another drafter"
        )
    distance = [max(low - t.acceptance_rate, t.acceptance_rate - high, 0.0) for t in drafting]
    nearest = [t for t, d in zip(drafting, distance, strict=True) if d == min(distance)]
    chosen = min(nearest, key=lambda trial: trial.ms_per_token)
    return ThresholdCalibration(list(trials), chosen, within, min(distance) == 0)


def calibrate_threshold(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    settings: DecodeSettings,
    *,
    thresholds: Sequence[float] = GRID,
    within: tuple[float, float] = WITHIN,
    max_new_tokens: int = 64,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> ThresholdCalibration:
    """Decodes each prompt (token ids, of the dev split) once with every θ, one prompt at a time,
    then calls `choose`. settings: everything except the rule.

    Raises UserError for no prompts, no thresholds or invalid bounds, and as `Decoder` does.
    """
    if not prompts or not thresholds:
        raise UserError("calibrating needs at least one prompt and one threshold")
    if not 0 <= within[0] <= within[1] <= 1:
        raise UserError(
            f"the range of acceptance rates is {within}; expected low ≤ high, from 0 to 1"
        )
    thetas = sorted(set(thresholds))
    shortest = min(prompts, key=len)
    decoders = []
    for theta in thetas:
        rule = {"name": "threshold", "threshold": float(theta)}
        decoder, _ = replace(settings, rule=rule).decoder(target, drafter, shortest)
        decoder.decode([prompts[0]], min(8, max_new_tokens))  # warm-up, not part of any figure
        decoder.numbers_repeat = False  # each θ meets each prompt as a new one
        decoders.append(decoder)
    runs: list[list[Decoded]] = [[] for _ in thetas]
    for done, prompt in enumerate(prompts):
        # Each θ goes first in turn, so that a drift of the machine does not affect the comparison.
        for turn in range(len(thetas)):
            index = (turn + done) % len(thetas)
            decoders[index].drafter.forget()
            run = decoders[index].decode([prompt], max_new_tokens, seed=seed, row_ids=[done])
            runs[index].append(run)
        if progress:
            progress(done + 1)
    return choose(
        [_trial(theta, decodes) for theta, decodes in zip(thetas, runs, strict=True)], within
    )


def _trial(theta: float, runs: Sequence[Decoded]) -> ThresholdTrial:
    counts = sum((run.counts for run in runs), Counts.zero())
    emitted = sum(len(run.outputs[0]) for run in runs)
    return ThresholdTrial(
        theta,
        counts.acceptance_rate,
        counts.draft_efficiency,
        counts.tokens_per_step,
        1000 * sum(run.timing.total for run in runs) / emitted,
    )
