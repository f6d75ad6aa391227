"""What is counted and what the figures made of it mean, by cases worked out by hand."""

import functools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from decode import costs as others
from decode.base.errors import UserError
from decode.base.registry import Choice
from decode.draft import Contexts, Draft, Limits, Siblings
from decode.drafters import DRAFTERS, Drafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.draw.sampling import Sampling
from decode.lengths import POLICIES
from decode.loop.decoded import Decoded
from decode.loop.decoding import Decoder
from decode.settings import EvaluationProtocol
from decode.shapes import SHAPES, Chain
from decode.stats import Counts, Tally, Timing, summary
from decode.verification import Seconds, Verification
from tests.tiny import tiny_model, tiny_target, tiny_tokenizer, tokens_fed, verification
from train.base.provenance import describe_process
from train.measure.evaluation import evaluate
from train.measure.figures import Evaluation, break_even, repetition
from train.measure.intervals import ratio_of_totals
from train.measure.thinking import thinking_tokens
from train.measure.timed_prompts import fastest_gamma, generated_batches, in_turns
from train.report.report_summary import footnotes

model = functools.cache(tiny_model)

PROMPT = [5, 17, 250, 9, 42]
LONG = 40


@functools.cache
def answer() -> list[int]:
    """The greedy answer to PROMPT."""
    plain = Decoder(model("llama"), DRAFTERS["none"]())
    return plain.decode([PROMPT], LONG).outputs[0]


class Scripted(Drafter):
    """Drafts the right answer, but wrong tokens at the given places of it."""

    def __init__(self, *wrong: int) -> None:
        self.wrong = wrong

    def start(self, contexts: Contexts) -> None:
        return None

    def draft(self, contexts: Contexts, limits: Limits, *rest: Any) -> Draft:
        said = int(contexts.lengths[0]) - len(PROMPT)
        gamma = limits.max_depth
        places = range(said, said + gamma)
        tokens = [(answer()[place] + (place in self.wrong)) % 300 for place in places]
        return Draft(torch.tensor([tokens]), np.array([gamma]))


def counts(*wrong: int, new: int, eos: int | None = None) -> Counts:
    """Of a decode with γ = 4; the first token of the answer (place 0) is the prefill's."""
    decoder = Decoder(
        model("llama"), Scripted(*wrong), gamma=4, eos_token_ids=[] if eos is None else [eos]
    )
    return decoder.decode([PROMPT], new).counts


def figures(counts: Counts) -> tuple[int, int, list[int], list[int], list[int], list[int]]:
    return (
        counts.steps,
        counts.emitted,
        counts.drafted.tolist(),
        counts.reached.tolist(),
        counts.accepted.tolist(),
        counts.by_accepted.tolist(),
    )


def token_at(place: int) -> int:
    """A token of the answer that does not stand in it before `place`."""
    token = answer()[place]
    assert token not in answer()[:place]
    return token


# --- counts ---------------------------------------------------------------------------------------


def test_all_accepted_up_to_the_length_limit() -> None:
    # 9 tokens after the prefill's: 4 + 1, then 4 left, of which the last is not worth drafting.
    found = counts(new=10)
    assert figures(found) == (2, 9, [2, 2, 2, 1], [2, 2, 2, 1], [2, 2, 2, 1], [0, 0, 0, 1, 1])
    assert found.tokens_per_step == 4.5
    assert found.acceptance_rate == found.draft_efficiency == 1


def test_a_rejection_hides_what_comes_after_it() -> None:
    # Places 1 and 2 accepted, 3 rejected (reached), 4 never reached. Then 4 … 7 and a bonus.
    found = counts(3, new=9)
    assert figures(found) == (2, 8, [2, 2, 2, 2], [2, 2, 2, 1], [2, 2, 1, 1], [0, 0, 1, 0, 1])
    assert found.acceptance_rate == 6 / 7
    assert found.draft_efficiency == 6 / 8
    assert found.acceptance_by_position == [1, 1, 1 / 2, 1]
    assert found.tokens_per_step == 4
    assert found.nodes_per_step == 4


def test_tokens_past_an_accepted_eos_do_not_count() -> None:
    # The third of four drafted tokens ends the text.
    found = counts(new=LONG - 8, eos=token_at(3))
    assert figures(found) == (1, 3, [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0], [0, 0, 0, 1, 0])


def test_tokens_past_an_eos_that_replaces_one_do_not_count() -> None:
    # Place 1 accepted; at place 2 the target says EOS instead: places 3 and 4 are past the end.
    found = counts(2, 3, 4, new=LONG - 8, eos=token_at(2))
    assert figures(found) == (1, 2, [1, 1, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0, 0])


def test_an_eos_as_the_bonus_counts_the_whole_draft() -> None:
    found = counts(new=LONG - 8, eos=token_at(5))
    assert figures(found) == (1, 5, [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0, 1])


def test_an_eos_as_the_first_token_leaves_nothing_to_count() -> None:
    found = counts(new=LONG - 8, eos=token_at(0))
    assert figures(found) == (0, 0, [0] * 4, [0] * 4, [0] * 4, [0] * 5)
    assert math.isnan(found.tokens_per_step)
    assert found.to_dict()["tokens_per_step"] is None


def test_one_token_left_is_not_drafted_for() -> None:
    assert figures(counts(new=2)) == (1, 1, [0] * 4, [0] * 4, [0] * 4, [1, 0, 0, 0, 0])


def test_a_tally_by_hand() -> None:
    """Two rows, the second with a tree of 2 + 3 nodes, then with a deeper draft than promised."""
    tally = Tally(2, depth=1)
    tally.add(
        verification(
            [0, 2],
            nodes_by_depth=np.array([[1, 1], [2, 3]]),
            reached=np.array([1, 2]),
            emitted=np.array([1, 3]),
            ended=np.array([False, False]),
        )
    )
    tally.add(
        verification(
            [3],
            rows=np.array([1]),
            nodes_by_depth=np.array([[1, 1, 1]]),
            reached=np.array([3]),
            emitted=np.array([2]),  # EOS was the second accepted token
            ended=np.array([True]),
        )
    )
    assert figures(tally.row(0)) == (1, 1, [1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 0, 0, 0])
    assert figures(tally.row(1)) == (2, 5, [3, 4, 0], [2, 2, 0], [2, 2, 0], [0, 0, 2, 0])
    assert figures(tally.pooled()) == (3, 6, [4, 5, 0], [3, 2, 0], [2, 2, 0], [1, 0, 2, 0])


def test_counts_pool_over_texts_of_different_depth() -> None:
    a = Counts(2, 5, np.array([2, 2]), np.array([2, 1]), np.array([1, 1]), np.array([1, 0, 1]))
    b = Counts(1, 1, np.array([1]), np.array([1]), np.array([0]), np.array([1, 0]))
    pooled = Counts.zero() + a + b
    assert figures(pooled) == (3, 6, [3, 2], [3, 1], [1, 1], [2, 0, 1])
    # Ratios of sums, not means of ratios.
    assert pooled.tokens_per_step == 2
    assert pooled.acceptance_rate == 2 / 4
    assert pooled.draft_efficiency == 2 / 5
    assert pooled.acceptance_by_position == [1 / 3, 1]
    shown = pooled.to_dict()
    assert (shown["drafted"], shown["reached"], shown["accepted"]) == (5, 4, 2)
    json.dumps(shown, allow_nan=False)


# --- figures --------------------------------------------------------------------------------------


def test_break_even_in_closed_form() -> None:
    # γ = 1: 1 + α = c + v.
    assert break_even(1, 0.2, 1.1) == pytest.approx(0.3)
    # γ = 2: 1 + α + α² = 2c + v = 1.75.
    assert break_even(2, 0.25, 1.25) == pytest.approx(0.5)
    assert break_even(4, 0.0, 0.9) == pytest.approx(0, abs=1e-9)
    assert break_even(4, 0.9, 1.5) is None
    assert break_even(4, None, 1.0) is None
    assert break_even(4, 0.1, None) is None


def test_repetition() -> None:
    once = list(range(8))
    assert repetition([]) == 0
    assert repetition(once) == 0
    assert repetition([1, 2, 3, 4, 5, 6, 7] * 3) == 1  # an 8-gram may overlap its repetition
    assert repetition([*once, *once]) == 1
    assert repetition([*once, 99, *once, 98, 97]) == 16 / 19
    assert repetition([*once[:7], 99, *once[:7], 98]) == 0  # seven are too few
    assert repetition([3] * 20) == 1


def test_the_interval_holds_the_ratio() -> None:
    random = np.random.default_rng(0)
    plain, drafted = random.uniform(1, 3, 40), random.uniform(0.5, 1, 40)
    found = ratio_of_totals(plain, drafted)
    assert found is not None
    assert found["value"] == plain.sum() / drafted.sum()
    assert found["low"] < found["value"] < found["high"]
    # The delta method's standard error, which a bootstrap of 40 comes near to.
    error = np.std(plain - found["value"] * drafted, ddof=1) / 40**0.5 / drafted.mean()
    assert found["high"] - found["low"] == pytest.approx(2 * 1.96 * error, rel=0.15)
    assert found == ratio_of_totals(plain, drafted)

    # What varies alike from prompt to prompt does not widen it: prompts are drawn in pairs.
    paired = ratio_of_totals(plain, plain / 2)
    assert paired == pytest.approx({"value": 2, "low": 2, "high": 2})
    assert ratio_of_totals(np.array([]), np.array([])) is None
    # A few prompts do not tell how prompts differ, nor does a total of 0.
    assert set(ratio_of_totals(plain[:6], drafted[:6]) or ()) == {"value", "low", "high"}
    assert ratio_of_totals(plain[:5], drafted[:5]) == {"value": plain[:5].sum() / drafted[:5].sum()}
    assert ratio_of_totals(np.zeros(9), np.ones(9)) == {"value": 0}
    # Most draws lack the only prompt that differs. The interval is wide, but finite.
    odd = ratio_of_totals(np.append(np.ones(6), 3), np.ones(7))
    assert odd is not None
    assert 2 < odd["high"] / odd["low"] < 20


def simulated(kind: str, shape: tuple[int, int]) -> list[np.ndarray]:
    """Numerators, denominators, and the divisors of both, [studies, prompts] each.

    passes: tokens and passes, where few prompts are much easier to draft than most. times: prompts
    differ much more in their time than in its ratio, so the times of both arms are correlated at
    0.9 and more. per token: so do texts of different lengths, with a small correlation."""
    random = np.random.default_rng(3)
    easy, ones = random.gamma(1.2, 0.6, shape), np.ones(shape)
    if kind == "passes":
        tokens = random.integers(20, 129, shape)
        return [tokens * 1.0, np.ceil(tokens / (1 + easy)), ones, ones]
    if kind == "times":
        seconds = np.exp(random.normal(0, 0.8, shape))
        return [seconds, seconds / np.exp(random.normal(0.2, 0.3, shape)), ones, ones]
    lengths = random.integers(16, 129, (2, *shape)) * 1.0
    pace = np.exp(random.normal(0, 0.3, shape))
    return [lengths[0] * pace, lengths[1] * pace / (0.8 + easy), *lengths]


def percentile_bootstrap(n: Any, d: Any, over: Any, under: Any) -> dict[str, float]:
    index = np.random.default_rng(0).integers(0, len(n), (400, len(n)))
    top, bottom, over, under = (x[index].sum(1) for x in (n, d, over, under))
    low, high = np.quantile(top * under / (bottom * over), [0.025, 0.975])
    return {"low": low, "high": high}


KINDS = ("passes", "times", "per token")
STUDIES = 400


@functools.cache
def true_ratio(kind: str) -> float:
    n, d, over, under = (x.mean() for x in simulated(kind, (1, 400_000)))
    return float(n * under / (d * over))


def coverage(kind: str, prompts: int, interval: Any) -> float:
    """The share of the studies whose interval holds the ratio that any number of prompts gives."""
    each = zip(*simulated(kind, (STUDIES, prompts)), strict=True)
    found = [interval(*figures) for figures in each]
    return float(np.mean([one["low"] <= true_ratio(kind) <= one["high"] for one in found]))


@pytest.mark.parametrize(
    "prompts", [8, 42, *(pytest.param(x, marks=pytest.mark.thorough) for x in (16, 84))]
)
def test_intervals_cover_the_true_ratio(prompts: int) -> None:
    """Of 95% intervals, 93% or more hold the true ratio. The standard error of a kind's share is
    1.1% here. With 8 prompts a percentile bootstrap, the control, fails."""
    shares = [
        coverage(kind, prompts, lambda n, d, *per: ratio_of_totals(n, d, per=per)) for kind in KINDS
    ]
    assert min(shares) >= 0.92, shares
    assert np.mean(shares) >= 0.935, shares
    if prompts == 8:
        assert max(coverage(kind, 8, percentile_bootstrap) for kind in KINDS) < 0.91


def run_with(timing: Timing, output: list[int], tally: Tally | None = None) -> Decoded:
    """A run whose passes are equal."""
    steps = []
    for _ in range(timing.steps):
        step = verification([0])
        step.draft_steps = timing.draft_steps // timing.steps
        for part in ("draft", "verify", "overhead"):
            setattr(step.seconds, part, getattr(timing, part) / timing.steps)
        steps.append(step)
    return Decoded([output], tally or Tally(1), timing, steps)


def test_costs_from_timings_by_hand() -> None:
    # Plain: 10 passes in 1.0 s of verify, 0.1 of draft and 0.9 of overhead: a step is 0.2 s.
    # Drafted: 4 passes of 5 tokens; 16 draft steps in 0.32 s: c = 0.02/0.2. v = 0.24/0.2.
    plain = Timing(0.5, 0.1, 1.0, 0.9, steps=10, tokens_fed=10)
    drafted = Timing(0.5, 0.32, 0.80, 0.16, steps=4, draft_steps=16, tokens_fed=20)
    slow = Timing(0.5, 0.1, 3.0, 0.9, steps=20, tokens_fed=20)
    quick = Timing(0.5, 0.32, 0.80, 0.16, steps=4, draft_steps=16, tokens_fed=20)
    looping = [7] * 20
    tally = Tally(1, depth=4)
    tally.add(
        verification(
            [4], nodes_by_depth=np.array([[1] * 4]), emitted=np.array([5]), ended=np.array([False])
        )
    )

    def evaluation(plain_runs: list[Decoded], drafted_runs: list[Decoded]) -> dict[str, Any]:
        whole = Evaluation(
            protocol=EvaluationProtocol(gamma=4),
            lossless=True,
            dtype="float32",
            counts=tally.pooled(),
            outputs=[[1, 2], looping],
            repetition=[0.0, 1.0],
            plain=plain_runs,
            drafted=drafted_runs,
            generated={i: (5.0, len(run.outputs[0])) for i, run in enumerate(plain_runs)},
            identical=1.0,
            identical_within_rounding=1.0,
        )
        found: dict[str, Any] = json.loads(json.dumps(whole.to_dict(), allow_nan=False))
        return found

    one = evaluation([run_with(plain, [1, 2])], [run_with(drafted, [1, 2], tally)])
    assert one["c"] == pytest.approx(0.1)
    assert one["v"] == pytest.approx(1.2)
    assert one["verify_width"] == 5
    assert one["overhead_ms"] == pytest.approx(40)
    assert one["break_even_acceptance"] == break_even(4, one["c"], one["v"])
    assert one["speedup"]["value"] == pytest.approx(2.5 / 1.78)
    assert one["speedup_without_prefill"]["value"] == pytest.approx(2.0 / 1.28)
    assert one["vs_generate"]["value"] == pytest.approx(5 / 1.78)
    assert one["plain_vs_generate"]["value"] == pytest.approx(2)

    two = evaluation(
        [run_with(plain, [1, 2]), run_with(slow, looping)],
        [run_with(drafted, [1, 2], tally), run_with(quick, looping)],
    )
    assert two["speedup"]["value"] == pytest.approx((2.5 + 4.5) / (2 * 1.78))
    assert two["speedup_not_repeating"]["value"] == pytest.approx(2.5 / 1.78)
    assert two["tokens_per_step_not_repeating"] == 5
    assert (two["repetition"], two["share_repeating"]) == (0.5, 0.5)

    # The drafter's pass over the prompt counts, but not without prefill.
    read = replace(drafted, draft_prefill=0.5)
    found = evaluation([run_with(plain, [1, 2])], [run_with(read, [1, 2], tally)])
    assert found["speedup"]["value"] == pytest.approx(2.5 / 2.28)
    assert found["speedup_without_prefill"] == one["speedup_without_prefill"]
    assert (found["c"], found["v"]) == (one["c"], one["v"])

    # A lookup that finds something in 4 passes of 10: costs are those of a full draft.
    often = run_with(drafted, [1, 2], tally)
    seldom = run_with(replace(plain, draft=0.1, draft_steps=0), [1, 2], tally)
    seldom.steps += often.steps
    seldom.timing += often.timing
    found = evaluation([run_with(plain, [1, 2])], [seldom])
    assert (found["c"], found["v"]) == (pytest.approx(0.1), pytest.approx(1.2))
    assert found["break_even_acceptance"] == pytest.approx(one["break_even_acceptance"])
    assert found["verify_width"] == (10 + 20) / 14
    short = run_with(replace(drafted, draft_steps=12), [1, 2], tally)
    found = evaluation([run_with(plain, [1, 2])], [short])
    assert found["c"] is found["v"] is found["break_even_acceptance"] is None
    assert found["break_even_note"].startswith("no draft was γ = 4 deep")

    # A pass over five tokens cannot be cheaper than one over one token: that is noise.
    assert (one["break_even_note"], one["speedup_basis"]) == (None, "wall time")
    cheap = replace(drafted, verify=0.5)
    found = evaluation([run_with(plain, [1, 2])], [run_with(cheap, [1, 2], tally)])
    assert found["v"] == pytest.approx(0.825)
    assert found["break_even_acceptance"] is None
    assert "plain steps; less than 1 is noise" in found["break_even_note"]

    # Nothing was timed: figures that would need it do not exist.
    none = evaluation([], [])
    assert none["speedup"] is none["c"] is none["break_even_acceptance"] is None
    assert none["speedup_not_repeating"] is none["tokens_per_step_not_repeating"] is None


@pytest.mark.parametrize(
    ("lossless", "temperature"), [(True, 0.8), (False, 0.0), (False, 0.8), (True, 0.0)]
)
def test_texts_of_different_length_are_compared_by_time_per_token(
    lossless: bool, temperature: float
) -> None:
    plain, drafted = (Timing(prefill=1.0, verify=x, steps=9, tokens_fed=9) for x in (19.0, 9.0))
    found = Evaluation(
        protocol=EvaluationProtocol(sampling=Sampling(temperature)),
        lossless=lossless,
        dtype="float32",
        counts=Counts.zero(),
        outputs=[[1]],
        repetition=[0.0],
        plain=[run_with(plain, [5] * 10)],
        drafted=[run_with(drafted, [5] * 4)],
        generated={0: (30.0, 20)},
        identical=None,
        identical_within_rounding=None,
    ).to_dict()
    assert found["speedup_basis"] == "time per token"
    assert found["speedup"]["value"] == pytest.approx((20 / 10) / (10 / 4))
    assert found["speedup_without_prefill"]["value"] == pytest.approx((19 / 9) / (9 / 3))
    assert found["vs_generate"]["value"] == pytest.approx((30 / 20) / (10 / 4))
    assert found["plain_vs_generate"]["value"] == pytest.approx((30 / 20) / (20 / 10))


def test_generate_is_compared_on_the_batches_that_it_was_timed_on() -> None:
    plain, drafted = (
        [run_with(Timing(prefill=factor * s, steps=9, tokens_fed=9), [5] * 10) for s in (2, 100, 4)]
        for factor in (1.0, 0.5)
    )
    found = Evaluation(
        protocol=EvaluationProtocol(),
        lossless=True,
        dtype="float32",
        counts=Counts.zero(),
        outputs=[[1]] * 3,
        repetition=[0.0] * 3,
        plain=plain,
        drafted=drafted,
        generated={0: (20.0, 10), 2: (40.0, 10)},
        identical=None,
        identical_within_rounding=None,
    )
    shown = found.to_dict()
    assert shown["plain_vs_generate"]["value"] == pytest.approx(60 / 6)
    assert shown["vs_generate"]["value"] == pytest.approx(60 / 3)
    assert shown["speedup"]["value"] == pytest.approx(2)
    assert found.decoded_tokens == 3 + 30 + 30 + 20


def test_generate_is_timed_on_as_many_batches_as_an_interval_needs() -> None:
    protocol = EvaluationProtocol(gamma=2, max_new_tokens=2, timed_prompts=8, timed_tokens=3)
    found = evaluate(tiny_target(), DRAFTERS["ngram"](), [*PROMPTS, *PROMPTS], protocol)
    assert list(found.generated or {}) == [0, 1, 2, 4, 5, 7]
    assert {"low", "high"} <= found.to_dict()["plain_vs_generate"].keys()
    assert generated_batches(4) == [0, 1, 2, 3]


def test_the_interval_of_times_per_token() -> None:
    """Prompts differ in length; of each, a token takes half as long."""
    tokens = np.array([10.0, 20, 5, 8, 9, 7]), np.array([30.0, 4, 7, 9, 8, 1])
    found = ratio_of_totals(tokens[0] * 2, tokens[1], per=tokens)
    assert found == pytest.approx({"value": 2, "low": 2, "high": 2})
    # A resample of texts that have no token after the prefill's says nothing.
    some = np.array([2.0, 1, 0, 0, 0, 0])
    found = ratio_of_totals(some, np.ones(6), per=(some, np.ones(6)))
    assert found is not None
    assert len(found) == 3
    assert np.isfinite(list(found.values())).all()
    nothing = np.zeros(2)
    assert ratio_of_totals(nothing, nothing, per=(nothing, nothing)) is None


def test_decoders_take_turns_of_a_few_tokens() -> None:
    said: list[str] = []

    class Passes:
        def __init__(self, name: str, by: int, total: int) -> None:
            self.name, self.by, self.total, self.emitted = name, by, total, 0

        @property
        def finished(self) -> bool:
            return self.emitted >= self.total

        def step(self) -> None:
            said.append(self.name)
            self.emitted += self.by

        def result(self) -> str:
            return self.name

    decodings: Any = [Passes("a", 1, 6), Passes("b", 2, 12)]
    assert in_turns(decodings, 4) == ["a", "b"]
    assert "".join(said) == "aaaabbaabbbb"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_prompts_are_timed_in_batches(temperature: float) -> None:
    target = tiny_target()
    small = SmallLMDrafter(model("llama", seed=7, layers=1))
    protocol = EvaluationProtocol(
        gamma=2,
        sampling=Sampling(temperature),
        max_new_tokens=4,
        timed_prompts=4,
        timed_tokens=10,
        timed_batch_size=2,
    )
    found = evaluate(target, small, PROMPTS, protocol)
    shown = found.to_dict()
    no_nan(shown)
    assert (shown["timed_prompts"], shown["timed_batch_size"]) == (4, 2)
    for runs in (found.plain, found.drafted):
        assert [len(run.outputs) for run in runs] == [2, 2]
    timed = [{row for step in run.steps for row in step.rows.tolist()} for run in found.drafted]
    places = [sorted(rows) for rows in timed]
    assert sorted([*places[0], *places[1]]) == [0, 1, 2, 4]
    # Prompts of like length are together.
    assert max(len(PROMPTS[i]) for i in places[0]) <= min(len(PROMPTS[i]) for i in places[1])
    if temperature == 0:
        assert shown["identical_to_plain"] == 1
        # generate() says the same beside a padded prompt.
        lengths = [sum(map(len, run.outputs)) for run in found.plain]
        assert found.generated is not None
        assert [tokens for _, tokens in found.generated.values()] == lengths
    assert shown["vs_generate"]["value"] > 0
    with pytest.raises(UserError, match="too few for one timed batch of 2"):
        evaluate(target, small, PROMPTS[:1], protocol)


@pytest.mark.parametrize("size", [0, 3])
def test_timed_prompts_fill_whole_batches(size: int) -> None:
    with pytest.raises(UserError, match=f"timed_batch_size is {size} and timed_prompts 4"):
        EvaluationProtocol(timed_prompts=4, timed_batch_size=size)


def test_a_step_and_a_summary_by_hand() -> None:
    def step(depths: list[int], drafted: list[int], accepted: list[int], ms: float) -> Any:
        return verification(
            accepted,
            depths=np.array(depths),
            drafted=np.array(drafted),
            fed=len(drafted) * (1 + max(drafted)),
            draft_steps=max(drafted),
            seconds=Seconds(ms / 1000, 2 * ms / 1000),
        )

    first, second = step([4, 2], [4, 0], [3, 0], 1.0), step([0, 2], [0, 2], [0, 2], 3.0)
    first.signals["entropy"] = np.array([[0.1, 0.3], [0.5, np.nan]])
    shown = json.loads(json.dumps(first.to_dict(), allow_nan=False))
    assert shown["gamma"] == [4, 2]
    assert shown["la_k"] == [0.75, None]
    assert shown["entropy"] == [[0.1, 0.3], [0.5]]
    assert (shown["draft_ms"], shown["verify_ms"], shown["draft_steps"]) == (1.0, 2.0, 4)
    found = summary([first, second])
    assert found["gamma_histogram"] == {"0": 1, "2": 2, "4": 1}
    assert found["mean_gamma"] == 2
    assert found["plain_share"] == 0.25
    assert found["la_k"] == (0.75 + 1) / 2
    assert found["signals"] == {"entropy": pytest.approx(0.3)}
    assert found["ms_per_step"] == {"draft": 2.0, "verify": 4.0, "overhead": 0.0}
    none = summary([])
    no_nan(none)
    assert none["mean_gamma"] is none["la_k"] is None


def test_a_decode_as_json() -> None:
    small = SmallLMDrafter(model("llama"))
    run = Decoder(model("llama"), small, gamma=2).decode([PROMPT, [7]], 9)
    shown = json.loads(json.dumps(run.to_dict(), allow_nan=False))
    assert shown["outputs"] == run.outputs
    assert shown["acceptance_by_position"] == [1, 1]
    assert sum(sum(step["emitted"]) for step in shown["per_step"]) == shown["emitted"]
    parts = ("prefill", "draft_prefill", "draft", "verify", "overhead")
    assert sum(shown["timing"][f"{part}_ms"] for part in parts) == pytest.approx(
        1000 * run.timing.total
    )


def test_a_pass_of_the_drafter_for_a_token_that_was_held_back_counts() -> None:
    """c is the time of one pass of the drafter, so all its passes are counted."""
    small = SmallLMDrafter(model("llama", seed=7, layers=1))
    passes = tokens_fed(small.lm)
    policy = POLICIES.make("confidence:max_depth=5,threshold=0.4")
    run = Decoder(model("llama"), small, policy=policy).decode([PROMPT, [7]], 30)
    assert any(0 < step.drafted.max() < step.draft_steps for step in run.steps)
    # The first of them read the prompts.
    assert run.timing.draft_steps == len(passes) - 1


# --- the whole evaluation -------------------------------------------------------------------------

PROMPTS = [PROMPT, [7], [30] * 9, [11, 12, 13, 14] * 3, [100, 50, 60]]


def no_nan(value: Any) -> None:
    json.dumps(value, allow_nan=False)


@pytest.mark.parametrize(
    ("name", "temperature"), [("ngram", 0.0), ("same", 0.0), ("same", 0.8), ("none", 0.8)]
)
def test_evaluate_end_to_end(name: str, temperature: float) -> None:
    target = tiny_target()
    drafter = SmallLMDrafter(target.model) if name == "same" else DRAFTERS[name]()
    protocol = EvaluationProtocol(
        gamma=3,
        sampling=Sampling(temperature),
        max_new_tokens=20,
        batch_size=2,
        timed_prompts=3,
        timed_tokens=12,
    )
    seen: list[tuple[str, int, int]] = []
    found = evaluate(target, drafter, PROMPTS, protocol, lambda *step: seen.append(step))
    shown = found.to_dict()
    no_nan(shown)
    assert shown["prompts"] == len(PROMPTS) == len(found.outputs)
    assert shown["timed_prompts"] == 3
    assert seen[0] == ("acceptance", 0, 5)
    assert seen[-1] == ("timing", 3, 3)
    assert set(shown["speedup"]) == {"value"}  # three prompts are too few for an interval
    assert shown["plain_vs_generate"]["value"] > 0
    assert shown["lossless"] is True

    if temperature == 0:
        assert shown["identical_to_plain"] == shown["identical_within_rounding"] == 1.0
    else:
        assert shown["identical_to_plain"] is None
    if name == "same":
        # At a temperature, p and q differ by roundings of float32.
        assert shown["acceptance_rate"] == pytest.approx(1, abs=0.02)
    if name == "none":
        assert shown["tokens_per_step"] == 1
        assert shown["acceptance_rate"] is None
        assert shown["c"] is shown["v"] is None  # nothing is drafted
    # Prompts are decoded in batches of like length, and the answers put back in their order.
    decoder = Decoder(
        target.model,
        drafter,
        gamma=3,
        sampling=protocol.sampling,
        eos_token_ids=target.eos_token_ids,
    )
    for row, prompt in enumerate(PROMPTS):
        assert decoder.decode([prompt], 20, row_ids=[row]).outputs[0] == found.outputs[row]


def test_texts_that_differ_are_counted() -> None:
    """A drafter that breaks its own target's text must show up in the share of identical ones."""
    target = tiny_target()

    class Breaking(SmallLMDrafter):
        def observe(self, done: Verification) -> None:
            done.contexts.tokens[0, done.contexts.lengths[0] - 1] = 8  # vandalism
            super().observe(done)

    protocol = EvaluationProtocol(
        max_new_tokens=4, timed_prompts=2, timed_tokens=12, generate=False
    )
    shown = evaluate(target, Breaking(target.model), PROMPTS, protocol).to_dict()
    assert shown["identical_to_plain"] == shown["identical_within_rounding"] == 0
    assert "vs_generate" not in shown


@pytest.mark.parametrize(
    "policy", ["heuristic:max_depth=5", "confidence:max_depth=5", "cost_model:max_depth=5"]
)
def test_evaluate_with_draft_lengths_that_vary(policy: str) -> None:
    target = tiny_target()
    small = SmallLMDrafter(model("llama", seed=7, layers=1))
    protocol = EvaluationProtocol(
        policy=policy,
        max_new_tokens=12,
        batch_size=3,
        timed_prompts=2,
        timed_tokens=10,
        generate=False,
    )
    found = evaluate(target, small, PROMPTS, protocol)
    shown = found.to_dict()
    no_nan(shown)
    assert (shown["policy"], shown["gamma"], shown["rule"]) == (policy, 5, "speculative")
    # One γ does not exist, and so its break-even does not.
    assert shown["break_even_acceptance"] is None
    assert (shown["measured_costs"] is None) == (policy != "cost_model:max_depth=5")
    lengths = shown["draft_lengths"]
    assert sum(lengths["gamma_histogram"].values()) == shown["steps"]
    assert ("confidence" in lengths["signals"]) == policy.startswith("confidence")
    assert shown["draft_lengths_timed"]["ms_per_step"]["verify"] > 0
    steps = found.steps_to_dict()
    no_nan(steps)
    assert sum(sum(step["emitted"]) for step in steps["acceptance"]) == shown["emitted"]
    interval = shown["tokens_per_step_interval"]
    assert interval["value"] == pytest.approx(shown["tokens_per_step"])
    assert {row for step in steps["acceptance"] for row in step["rows"]} == {*range(len(PROMPTS))}
    assert [{row for step in run for row in step["rows"]} for run in steps["timed"]] == [{0}, {4}]


def test_a_lossy_rule_and_other_sampling_are_told() -> None:
    protocol = EvaluationProtocol(
        rule={"name": "lenience", "lenience": 0.5},
        sampling=Sampling(0.8, min_p=0.02, repetition_penalty=1.1),
        draft_temperature=0.5,
        max_new_tokens=8,
        timed_prompts=1,
        timed_tokens=8,
    )
    target = tiny_target()
    shown = evaluate(target, SmallLMDrafter(target.model), PROMPTS, protocol).to_dict()
    no_nan(shown)
    assert shown["rule"] == "lenience:lenience=0.5"
    assert shown["lossless"] is False
    assert shown["sampling"]["min_p"] == 0.02
    assert shown["draft_temperature"] == 0.5
    assert (shown["kernels"]["forward"], shown["kernels"]["exact_bits"]) == ("lean", False)
    assert shown["vs_generate"]["value"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "lenient"}, 'Did you mean "lenience"'),
        ({"rule": "lenience:lenienc=0.7"}, "no option 'lenienc'.*Did you mean \"lenience\""),
        ({"rule": "lenience:lenience=high"}, "option lenience is .high.; expected a valid"),
        ({"rule": "lenience:0.7"}, "expected name or name:option=value"),
        ({"policy": {"most": 3}}, "does not name a part"),
        ({"policy": "heuristic:max_depth=4,max_depth=5"}, "is given twice"),
        ({"shape": "chian"}, 'Did you mean "chain"'),
        ({"shape": "chain:width=3"}, "has no option 'width'; it has none"),
        ({"draft_temperature": -1.0}, "temperature is -1.0"),
        ({"gamma": 0}, "gamma is 0"),
    ],
)
def test_wrong_parts_are_refused_before_anything_is_loaded(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        EvaluationProtocol(**options)


def test_a_bracket_in_a_path_does_not_hide_the_options_after_it() -> None:
    choice = Choice("static", {"file": "runs/a]/tree.json", "draw": "top"})
    assert Choice.of(str(choice)) == choice


def test_a_drafter_without_a_shape_of_choice_says_so() -> None:
    with pytest.raises(UserError, match="NgramDrafter does not take a shape"):
        evaluate(tiny_target(), DRAFTERS["ngram"](), PROMPTS, EvaluationProtocol(shape="chain"))


class Bush(Chain):
    """A shape that may branch, as far as anyone is told."""

    branches = True

    def siblings(self, sampling: Sampling) -> Siblings:
        return "independent"


def test_parts_that_do_not_go_together_are_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(SHAPES._parts, "bush", Bush)
    with pytest.raises(UserError, match=r"shape bush drafts trees.*chains only"):
        EvaluationProtocol(shape="bush", rule="block", sampling=Sampling(1.0))
    with pytest.raises(UserError, match="works only with chains, but shape bush drafts trees"):
        EvaluationProtocol(shape="bush", rule="exact", policy="confidence")


def test_evaluate_without_timing_or_prompts() -> None:
    target = tiny_target()
    protocol = EvaluationProtocol(max_new_tokens=4, timed_prompts=0)
    shown = evaluate(target, DRAFTERS["ngram"](), PROMPTS, protocol).to_dict()
    no_nan(shown)
    assert shown["speedup"] is shown["identical_to_plain"] is None
    with pytest.raises(UserError, match="no prompts"):
        evaluate(target, DRAFTERS["ngram"](), [], protocol)


@pytest.mark.parametrize("gammas", [[1, 2, 4], [4, 1, 2]])
def test_fastest_gamma(monkeypatch: pytest.MonkeyPatch, gammas: list[int]) -> None:
    """Also where the first decode is cold, the machine slows down, and one decode is disturbed."""
    seconds = {1: 3.0, 2: 1.9, 4: 2.0}
    decode: Callable[..., Decoded] = Decoder.decode
    done = 0

    def timed(decoder: Decoder, *args: Any, **kwargs: Any) -> Decoded:
        nonlocal done
        done += 1
        run = decode(decoder, *args, **kwargs)
        disturbed = 100.0 * (done == 1) + 5.0 * (done == 12)
        run.timing = Timing(verify=seconds[decoder.policy.max_depth] * (1 + done / 100) + disturbed)
        return run

    monkeypatch.setattr(Decoder, "decode", timed)
    protocol = EvaluationProtocol(timed_tokens=8)
    found = fastest_gamma(tiny_target(), DRAFTERS["ngram"](), PROMPTS, gammas, protocol)
    assert found == 2


# --- other processes ------------------------------------------------------------------------------


class System:
    """Stands for psutil: seconds that each of four cores was busy, and this process's own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.own = 0.0
        self.cores = [0.0] * 4
        self.stolen = 0.0
        self.affinity = [0, 1]
        monkeypatch.setattr(others, "psutil", self)
        monkeypatch.setattr(others, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(others, "sys", SimpleNamespace(platform="linux"))

    def cpu_times(self, percpu: bool) -> list[Any]:
        assert percpu
        return [
            SimpleNamespace(user=seconds, system=0.0, idle=5.0, steal=self.stolen)
            for seconds in self.cores
        ]

    def Process(self) -> Any:
        return SimpleNamespace(
            cpu_affinity=lambda: self.affinity,
            cpu_times=lambda: SimpleNamespace(user=self.own, system=0.0),
        )


def test_what_other_processes_take(monkeypatch: pytest.MonkeyPatch) -> None:
    system = System(monkeypatch)
    watch = others.OtherProcesses()
    # Ten seconds, of which we work twelve on two cores; others work two there and ten elsewhere.
    system.now, system.own, system.cores = 10.0, 12.0, [7.0, 7.0, 10.0, 0.0]
    assert watch.share() == pytest.approx(2 / 20)
    assert others.busy(watch.share())
    system.cores = [6.2, 6.2, 10.0, 0.0]
    assert not others.busy(watch.share())
    system.stolen = 2.0
    assert watch.share() == pytest.approx((0.4 + 4) / 20)
    # Counters of fewer cores than there are numbers are those of a container.
    system.affinity = [8, 9]
    assert others.OtherProcesses().share() is None  # too short
    watch = others.OtherProcesses()
    system.now, system.cores = 20.0, [16.2, 6.2, 10.0, 0.0]
    assert watch.share() == pytest.approx(10 / 40)
    # Counters that stand still, and other systems, say nothing.
    watch = others.OtherProcesses()
    system.now, system.own = 30.0, 22.0
    assert watch.share() is None
    monkeypatch.setattr(others, "sys", SimpleNamespace(platform="darwin"))
    assert others.OtherProcesses().share() is None
    assert not others.busy(None)


def test_figures_say_whether_the_machine_was_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    protocol = EvaluationProtocol(max_new_tokens=2, timed_prompts=1, timed_tokens=2, generate=False)
    for share, alone in ((0.3, False), (0.01, True), (None, None)):
        monkeypatch.setattr(others.OtherProcesses, "share", lambda _, share=share: share)
        shown = evaluate(tiny_target(), DRAFTERS["none"](), PROMPTS, protocol).to_dict()
        assert (shown["others_share"], shown["alone"]) == (share, alone)


# --- reasoning models ---------------------------------------------------------------------------


def test_the_tokens_around_a_thought_are_those_of_the_tokenizer() -> None:
    tokenizer = tiny_tokenizer()
    assert thinking_tokens(tokenizer) is None
    tokenizer.add_tokens(["</think>", "<think>"], special_tokens=True)
    assert thinking_tokens(tokenizer) == (301, 300)


def test_a_step_counts_in_the_part_where_its_draft_begins() -> None:
    """The prompt begins the thought, as chat templates do, and the answer ends it."""
    text, begin = answer(), PROMPT[-1]
    at = next(i for i in range(6, LONG - 8) if text[i] not in {*text[:i], begin})
    vocabulary = {"<think>": begin, "</think>": text[at]}
    target = replace(tiny_target(), tokenizer=SimpleNamespace(get_vocab=lambda: vocabulary))
    protocol = EvaluationProtocol(
        gamma=3, max_new_tokens=LONG, timed_prompts=0, generate=False, batch_size=1
    )
    # Right while it thinks, but for one token; then often wrong.
    drafter = Scripted(2, *range(at + 1, LONG, 2))
    found = evaluate(target, drafter, [PROMPT], protocol)
    parts = found.to_dict()["parts"]

    expected = {"thinking": [0, 0, 0], "answer": [0, 0, 0]}
    length = 1  # the prefill's token
    for step in found.steps:
        before = [token for token in PROMPT + text[:length] if token in vocabulary.values()]
        counts = expected["thinking" if before[-1] == begin else "answer"]
        counts[0] += 1
        counts[1] += int(step.emitted[0])
        counts[2] += min(int(step.accepted[0]), int(step.emitted[0]))
        length += int(step.emitted[0])
    for name, counts in expected.items():
        assert [parts[name][key] for key in ("steps", "emitted", "accepted")] == counts
    pooled = found.to_dict()
    for key in ("steps", "emitted", "drafted", "reached", "accepted"):
        assert parts["thinking"][key] + parts["answer"][key] == pooled[key]
    thinking, after = (parts[name]["acceptance_rate"] for name in ("thinking", "answer"))
    assert thinking > after > 0

    row = {"stage": "–", "drafter": "scripted", "order": 1, "evaluation": pooled}
    report = {"name": "r", "rows": [row], "provenance": [describe_process()], "config": {}}
    assert f"acceptance rate {thinking:.2f} (while thinking" in " ".join(footnotes(report))
    # One part alone is not told apart.
    vocabulary["</think>"] = 299
    assert 299 not in text
    assert evaluate(target, drafter, [PROMPT], protocol).to_dict()["parts"] is None
