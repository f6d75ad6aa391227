"""Choosing θ of the lossy rule `threshold`."""

import json

import pytest

from decode.base.errors import UserError
from decode.drafters import DRAFTERS
from decode.drafters.small_lm import SmallLMDrafter
from decode.draw.sampling import Sampling
from decode.settings import DecodeSettings
from tests.tiny import tiny_model, tiny_target
from train.measure.calibrate_threshold import ThresholdTrial, calibrate_threshold, choose

PROMPTS = [[5, 17, 250, 9, 42], [7], [30] * 9]


def trial(threshold: float, acceptance: float, ms: float) -> ThresholdTrial:
    return ThresholdTrial(threshold, acceptance, acceptance, 1 + acceptance, ms)


def test_of_those_within_the_bounds_the_quickest() -> None:
    trials = [trial(0.1, 0.9, 5), trial(0.2, 0.8, 9), trial(0.3, 0.7, 8), trial(0.4, 0.5, 3)]
    found = choose(trials)
    assert found.chosen.threshold == 0.3
    assert found.in_range
    assert "lowest latency" in found.verdict
    assert found.to_dict()["threshold"] == 0.3


def test_of_none_within_the_bounds_the_nearest_and_it_says_so() -> None:
    found = choose([trial(0.1, 0.95, 1), trial(0.2, 0.45, 5), trial(0.3, 0.5, 9)])
    assert (found.chosen.threshold, found.in_range) == (0.3, False)
    assert "no θ has an acceptance rate of 0.6 to 0.8; this one, with 0.50" in found.verdict
    with pytest.raises(UserError, match="nothing was drafted"):
        choose([trial(0.1, float("nan"), 1)])


def test_calibrating_decodes_every_prompt_with_every_threshold() -> None:
    target = tiny_target()
    other = tiny_model("llama", seed=0, layers=2)
    with_noise = SmallLMDrafter(other)
    settings = DecodeSettings(gamma=3, sampling=Sampling(1.0), policy="heuristic:max_depth=4")
    found = calibrate_threshold(
        target, with_noise, PROMPTS, settings, thresholds=[0.6, 0.0, 0.2], max_new_tokens=20
    )
    json.dumps(found.to_dict(), allow_nan=False)
    assert [t.threshold for t in found.trials] == [0.0, 0.2, 0.6]
    rates = [t.acceptance_rate for t in found.trials]
    assert rates[0] == 1  # p ≥ 0 always holds
    assert rates[0] > rates[1] > rates[2]
    assert all(t.ms_per_token > 0 for t in found.trials)
    assert found.to_dict()["lossless"] is False


def test_a_drafter_that_learns_meets_each_prompt_anew() -> None:
    found = calibrate_threshold(
        tiny_target(),
        DRAFTERS["suffix"](),
        PROMPTS,
        DecodeSettings(gamma=3, sampling=Sampling(1.0)),
        thresholds=[0.2, 0.2 + 1e-9],
        max_new_tokens=24,
    )
    first, second = found.trials
    assert first.acceptance_rate == second.acceptance_rate


def test_what_cannot_be_calibrated_is_refused() -> None:
    target, ngram = tiny_target(), DRAFTERS["ngram"]()
    with pytest.raises(UserError, match="at least one prompt"):
        calibrate_threshold(target, ngram, [], DecodeSettings())
    with pytest.raises(UserError, match="expected low ≤ high"):
        calibrate_threshold(target, ngram, PROMPTS, DecodeSettings(), within=(0.8, 0.6))
    with pytest.raises(UserError, match="nothing was drafted"):
        calibrate_threshold(target, DRAFTERS["none"](), PROMPTS, DecodeSettings(), max_new_tokens=4)
