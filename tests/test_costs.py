"""Costs of drafting and verifying, measured on a clock that models move themselves."""

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from decode.base import clock as loop_clock
from decode.base.errors import UserError
from decode.costs import Costs
from decode.draft import Contexts, Draft, Limits
from decode.drafters import DRAFTERS, Drafter
from decode.drafters.lookup.suffix import SuffixTrie
from decode.drafters.several import combined
from decode.drafters.several.combined import CompositeDrafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.draw.sampling import Sampling
from decode.lengths import Fixed
from decode.lengths.by_batch import ByBatch
from decode.lengths.cost_model import CostModel
from decode.loop.decoding import Decoder, Decoding
from decode.model.cache.cached_model import CachedLM
from decode.settings import DecodeSettings, EvaluationProtocol
from decode.time_costs import measure_costs
from tests.tiny import finish, plain_texts, tiny_model, tiny_target
from train.measure.evaluation import evaluate

model = functools.cache(tiny_model)
PROMPT = [5, 17, 250, 9, 42]


class Clock:
    """Stands for the time module in the loop: a pass of a model takes what is said here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        for module in (loop_clock, combined):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def charge(self, lm: Any, first: float, further: float) -> None:
        """Each pass takes `first` seconds for one token per row and `further` for each more."""
        feed = lm._feed

        def timed(ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            self.now += first + further * (ids.numel() - 1)
            found: torch.Tensor = feed(ids, *args, **kwargs)
            return found

        lm._feed = timed


def timed_decoder(clock: Clock, c: float, slope: float, **options: Any) -> Decoder:
    """With a drafter that is nearly always wrong, c times as slow as the target; what it missed
    costs it as little as verifying costs the target."""
    drafter = SmallLMDrafter(model("llama", seed=7, layers=1))
    decoder = Decoder(model("llama"), drafter, **options)
    clock.charge(decoder.lm, 1.0, slope)
    clock.charge(drafter.lm, c, c * slope)
    return decoder


def test_costs_between_and_beyond_what_was_measured() -> None:
    costs = Costs(0.02, 1, 0.1, (1, 3, 5), (1.0, 1.2, 1.8))
    assert costs.verify([1, 2, 3, 4, 5, 6, 10]) == pytest.approx([1, 1.1, 1.2, 1.5, 1.8, 2.0, 2.8])
    # A wider pass is never cheaper: what was measured so is noise.
    assert Costs(1, 1, 0, (1, 2, 3), (1.0, 1.3, 1.1)).verify(3) == pytest.approx(1.3)
    assert costs.to_dict()["v"] == {"1": 1.0, "3": 1.2, "5": 1.8}


@pytest.mark.parametrize(
    ("rows", "temperature", "trees"), [(1, 0.0, True), (3, 0.0, False), (3, 1.0, True)]
)
def test_measured_costs_are_the_real_ones(
    monkeypatch: pytest.MonkeyPatch, rows: int, temperature: float, trees: bool
) -> None:
    clock = Clock(monkeypatch)
    sampling = Sampling(temperature)
    decoder = timed_decoder(clock, 0.2, 0.1, sampling=sampling, eos_token_ids=range(100))
    costs = measure_costs(decoder, [PROMPT] * rows, max_depth=4, max_width=6, trees=trees)
    assert costs.rows == rows
    assert costs.widths == (1, 2, 3, 5, 6)
    assert costs.noise < 0.01
    step = 1 + 0.1 * (rows - 1)
    assert costs.step_s == pytest.approx(step)
    wanted = [(1 + 0.1 * (rows * n - 1)) / step for n in costs.widths]
    assert costs.v == pytest.approx(wanted)
    # After a whole success the drafter feeds one token more, which is part of what it costs.
    assert costs.c(4) == pytest.approx(0.2 * (1 + 0.1 * (rows - 1)) / step, rel=0.1)
    assert costs.fixed < 0.03
    # The decoder itself is as it was.
    assert isinstance(decoder.drafter, SmallLMDrafter)
    assert decoder.policy.max_depth == 4
    assert len(decoder.eos) == 100


def test_v_of_a_mixture_of_experts_grows_with_the_experts_that_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each expert that a layer reads takes a second, for any number of tokens."""
    clock = Clock(monkeypatch)
    experts = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    target = tiny_model("qwen3_moe", **experts, head_dim=8)

    def count(module: Any, inputs: Any, output: Any) -> None:
        logits = output[0] if isinstance(output, tuple) else output
        clock.now += len(logits.reshape(-1, 16).topk(2).indices.unique())

    for layer in target.model.layers:
        layer.mlp.gate.register_forward_hook(count)
    decoder = Decoder(target, SmallLMDrafter(model("llama", seed=7, layers=1)))
    costs = measure_costs(decoder, [PROMPT], max_depth=4, max_width=9)
    assert costs.widths == (1, 2, 3, 5, 9)
    assert costs.step_s == 4  # two layers, two experts
    assert costs.v[1] > 1.2
    assert costs.v[4] > 2
    # A draft is shorter than it would be for a dense target.
    depths = []
    for v in (costs.v, (1.0,) * 5):
        policy = CostModel(8)
        policy.use_costs(Costs(1.0, 1, 0.05, costs.widths, v))
        policy._sources[0].accepted[0], policy._sources[0].tried[0] = 6.0, 10.0
        policy.start(1)
        depths.append(int(policy.depths()[0]))
    assert depths[0] < depths[1]


class OnePass(Drafter):
    """Drafts any depth in a pass of 0.4 seconds, and 0.02 more per token."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def start(self, contexts: Contexts) -> None:
        return None

    def draft(self, contexts: Contexts, limits: Limits, *rest: Any) -> Draft:
        self.clock.now += 0.4 + 0.02 * limits.max_depth
        tokens = torch.zeros(len(limits.depths), limits.max_depth, dtype=torch.int64)
        return Draft(tokens, limits.depths.copy())


def test_a_draft_in_one_pass_has_a_fixed_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    decoder = Decoder(model("llama"), OnePass(clock), gamma=8)
    clock.charge(decoder.lm, 0.5, 0.0)
    costs = measure_costs(decoder, [PROMPT], max_depth=8, max_width=9)
    assert costs.fixed == pytest.approx(0.8)
    assert costs.per_depth == pytest.approx(0.04)
    assert costs.draft([0, 1, 8]) == pytest.approx([0, 0.84, 1.12])
    assert costs.c(8) == pytest.approx(0.14)
    assert costs.to_dict()["draft_fixed"] == costs.fixed


def test_a_drafter_with_nothing_to_say_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    decoder = Decoder(model("llama"), DRAFTERS["ngram"](2, 3))
    clock.charge(decoder.lm, 1.0, 0.0)
    costs = measure_costs(decoder, [PROMPT], max_depth=2, max_width=4)
    assert costs.draft([1, 2]).tolist() == [0, 0]
    # And where drafting takes no time at all, it is judged by what verifying costs.
    policy = CostModel(4)
    policy.use_costs(costs)
    decoder.use(replace(decoder.parts, policy=policy))
    run = decoder.decode([[11, 12, 13, 14] * 4], 40)
    assert run.counts.drafted.sum() > 0


def test_what_does_not_fit_into_the_context_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    small = Decoder(tiny_model("llama", max_positions=32), DRAFTERS["ngram"]())
    clock.charge(small.lm, 1.0, 0.5)
    costs = measure_costs(small, [PROMPT], max_depth=16, max_width=64)
    # With a token of the target's own each they take 25 of 26 places; 18 more are too many.
    assert costs.widths == (1, 2, 3, 5, 9)
    assert costs.v == pytest.approx([1, 1.5, 2, 3, 5])
    with pytest.raises(UserError, match="give a shorter prompt"):
        measure_costs(small, [[5] * 29], max_depth=4, max_width=4)


def test_what_varies_is_noise_and_the_quickest_passes_decide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    decoder = Decoder(model("llama"), DRAFTERS["ngram"](2, 3))
    clock.charge(decoder.lm, 1.0, 0.1)
    random = np.random.default_rng(0)
    feed = decoder.lm._feed

    def disturbed(*args: Any, **kwargs: Any) -> torch.Tensor:
        clock.now += random.exponential(0.1)
        found: torch.Tensor = feed(*args, **kwargs)
        return found

    decoder.lm._feed = disturbed  # type: ignore[method-assign]
    costs = measure_costs(decoder, [PROMPT], max_depth=2, max_width=9, repeats=12)
    assert 0.001 < costs.noise < 0.05
    assert costs.v == pytest.approx([1, 1.1, 1.2, 1.4, 1.8], rel=0.05)
    assert costs.to_dict()["noise"] == costs.noise


PROMPTS = [[5 + i, *range(40, 90), 17] for i in range(2)]


def test_the_drafters_pass_over_the_prompt_is_no_draft_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """c is of draft steps alone; what the prompt costs both models is left out of the speed-up
    without prefill."""
    clock = Clock(monkeypatch)
    target = tiny_target()
    drafter = SmallLMDrafter(model("llama", seed=7, layers=1))
    feed = CachedLM._feed

    def timed(lm: CachedLM, ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        clock.now += (0.1 if lm.model is drafter.lm.model else 1.0) * (1 + 0.1 * (ids.numel() - 1))
        return feed(lm, ids, *args, **kwargs)

    monkeypatch.setattr(CachedLM, "_feed", timed)
    protocol = EvaluationProtocol(
        gamma=2, max_new_tokens=6, timed_prompts=2, timed_tokens=6, generate=False
    )
    found = evaluate(target, drafter, PROMPTS, protocol)
    shown = found.to_dict()
    # After a success the drafter feeds one token more.
    assert 0.1 * 0.999 <= shown["c"] <= 0.1 * 1.101
    prompt = len(PROMPTS[0])
    assert shown["seconds"]["drafted"]["prefill"] == pytest.approx(2 * (1 + 0.1 * (prompt - 1)))
    read = 2 * 0.1 * (1 + 0.1 * (prompt - 1))
    assert shown["seconds"]["drafted"]["draft_prefill"] == pytest.approx(read)
    steps = [sum(run.timing.stepping for run in runs) for runs in (found.plain, found.drafted)]
    assert shown["speedup_without_prefill"]["value"] == pytest.approx(steps[0] / steps[1])
    totals = [sum(run.timing.total for run in runs) for runs in (found.plain, found.drafted)]
    assert totals[1] - steps[1] == pytest.approx(totals[0] - steps[0] + read)
    # A text without a draft costs the drafter nothing.
    idle = Decoder(target.model, drafter, policy=ByBatch({1: 0, 2: 2}))
    assert idle.decode([PROMPTS[0]], 6).timing.draft_prefill == 0
    # Nor is a row that joins, while the drafter rests beside it.
    resting = Decoding(Decoder(target.model, drafter, policy=ByBatch({1: 2, 2: 0})), [PROMPT], 9)
    resting.step()
    read = resting.clock.timing.draft_prefill
    resting.admit([PROMPTS[0]], 2)
    resting.step()
    assert resting.clock.timing.draft_prefill == read > 0


def test_indexing_the_prompt_is_no_draft_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup that needs a second for each token reads the prompt and the first new token before
    its first draft, also for a row that joins later. A draft then reads only what is new."""
    clock = Clock(monkeypatch)
    extend = SuffixTrie.extend

    def timed(self: Any, tokens: list[int]) -> None:
        clock.now += len(tokens)
        extend(self, tokens)

    monkeypatch.setattr(SuffixTrie, "extend", timed)
    drafter = DRAFTERS["suffix"](max_cached_requests=0)
    decoding = Decoding(Decoder(model("llama"), drafter), [PROMPT], 8)
    decoding.step()
    assert decoding.clock.timing.draft_prefill == len(PROMPT) + 1
    decoding.admit([PROMPT * 4], 8)
    finish(decoding)
    timing = decoding.result().timing
    assert timing.draft_prefill == len(PROMPT) + 1 + 4 * len(PROMPT) + 1
    assert 0 < timing.draft <= 2 * 6


class InTurn(Fixed):
    """Of several drafters, it says how deep each may draft."""

    by_source = (1, 0)


def test_one_of_several_drafters_reads_when_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it reads is no drafting, as with one alone, and none reads for a draft of another."""
    clock = Clock(monkeypatch)
    read_by = [0, 0]
    read = CachedLM.read
    small = [SmallLMDrafter(model("llama", seed=seed, layers=1)) for seed in (7, 8)]

    def timed(lm: CachedLM, ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        for place, one in enumerate(small):
            if lm is one.lm:
                read_by[place] += ids.numel()
                clock.now += ids.numel()
        return read(lm, ids, *args, **kwargs)

    monkeypatch.setattr(CachedLM, "read", timed)
    policy = InTurn(1)
    decoding = Decoding(
        Decoder(model("llama"), CompositeDrafter(small), policy=policy), [PROMPT], 9
    )
    decoding.step()
    decoding.admit([PROMPT * 4], 9)
    decoding.step()
    assert read_by[0] > 5 * len(PROMPT)
    assert read_by[1] == 0
    policy.by_source = (0, 1)
    decoding.step()
    assert read_by[1] > 5 * len(PROMPT)
    timing = decoding.clock.timing
    assert timing.draft_prefill > 10 * len(PROMPT) > timing.draft
    finish(decoding)
    assert decoding.result().outputs == plain_texts(model("llama"), [PROMPT, PROMPT * 4], 9)


def test_a_machine_that_slows_down_slows_both_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """One prompt, and half way through its time something else begins: both decode half of their
    text before it and half after it."""
    clock = Clock(monkeypatch)
    feed = CachedLM._feed

    def timed(lm: CachedLM, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal passes
        passes += 1
        clock.now += 1.0 if passes < 80 else 3.0
        return feed(lm, *args, **kwargs)

    monkeypatch.setattr(CachedLM, "_feed", timed)
    protocol = EvaluationProtocol(
        max_new_tokens=4, timed_prompts=1, timed_tokens=64, generate=False
    )
    for before in (0, 20, 40):
        passes = before - 30
        found = evaluate(tiny_target(), DRAFTERS["none"](), PROMPTS[:1], protocol).to_dict()
        assert found["speedup"]["value"] == pytest.approx(1, abs=0.15)


def test_time_between_passes_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    decoder = Decoder(model("llama"), DRAFTERS["none"]())
    clock.charge(decoder.lm, 1.0, 0.0)
    decoding, said = Decoding(decoder, [PROMPT, [7]], 5), []
    while not decoding.finished:
        said.append(decoding.emitted)
        clock.now += 100
        decoding.step()
    done = decoding.result()
    assert said == [2, 4, 6, 8]
    assert done.timing.total == 5
    assert done.outputs == decoder.decode([PROMPT, [7]], 5).outputs


@pytest.mark.parametrize("c", [0.1, 0.5])
def test_the_cost_model_in_the_loop(monkeypatch: pytest.MonkeyPatch, c: float) -> None:
    """A useless drafter costs at most 5% of plain decoding, also where it must catch up."""
    clock = Clock(monkeypatch)
    policy = CostModel(4)
    decoder = timed_decoder(clock, c, 0.03, policy=policy)
    run = decoder.decode([PROMPT], 240)
    assert run.counts.acceptance_rate < 0.2
    steps, drafted = len(run.steps), [s for s in run.steps if s.draft_steps]
    assert 0 < len(drafted) < steps / 2
    # Once it reads the prompt, which no policy can spare it: that is counted apart.
    assert run.timing.draft_prefill >= c * (1 + 0.03 * (len(PROMPT) - 1))
    assert run.timing.stepping <= 1.05 * run.counts.emitted
    assert plain_texts(model("llama"), [PROMPT], 240) == run.outputs


def test_parts_that_need_costs_get_them() -> None:
    target = tiny_target()
    drafter = SmallLMDrafter(target.model)
    decoder, costs = DecodeSettings(policy="cost_model:max_depth=3").decoder(
        target, drafter, PROMPT
    )
    assert costs is not None
    assert costs.widths == (1, 2, 3, 4)
    assert costs.v[0] == 1
    assert costs.c(3) > 0
    assert np.all(np.diff(costs.v) >= 0)
    # It need not begin with plain steps to see what they cost.
    decoder.policy.start(1)
    for depth in (1, 2, 3):
        wanted = float(costs.draft(depth)) * costs.step_s
        assert decoder.policy._sources[0].drafts(depth) == pytest.approx(wanted)
    for settings, prompt in (
        (DecodeSettings(policy="cost_model"), None),
        (DecodeSettings(policy="heuristic"), PROMPT),
    ):
        assert settings.decoder(target, drafter, prompt)[1] is None
