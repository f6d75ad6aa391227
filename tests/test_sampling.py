"""From logits to tokens: transformers' filters, honest draws, and random numbers by counter."""

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
import transformers
from torch import Tensor

from decode.base.errors import UserError
from decode.drafters import Drafter
from decode.drafters.lookup.ngram import NgramDrafter
from decode.drafters.several.combined import CompositeDrafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.draw import sampling
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling, draw, draw_of
from decode.draw.top import IN_ORDER, argmax, peaks, places_of_top, top, top_with_shares
from decode.loop.decoding import Decoder
from decode.model.forward import few_rows
from tests.enumeration import by_cdf
from tests.tiny import tiny_model

model = functools.cache(tiny_model)


def random_logits(rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab)
    return (3 * torch.randn(rows, vocab, generator=generator)).to(dtype)


# --- probabilities --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("temperature", "dtype"), [(0.3, torch.float32), (1.7, torch.float32), (1.0, torch.bfloat16)]
)
def test_probabilities_equal_transformers_warpers(temperature: float, dtype: torch.dtype) -> None:
    logits = random_logits(500, 50, dtype)
    for top_k, top_p, min_p in itertools.product(
        [0, 1, 5, 1000], [0.05, 0.9, 1.0], [0.0, 0.02, 0.3, 1.0]
    ):
        warpers: list[Any] = [transformers.TemperatureLogitsWarper(temperature)]
        if top_k:
            warpers.append(transformers.TopKLogitsWarper(top_k))
        if top_p < 1:
            warpers.append(transformers.TopPLogitsWarper(top_p))
        if min_p:
            warpers.append(transformers.MinPLogitsWarper(min_p))
        scores = transformers.LogitsProcessorList(warpers)(None, logits.float())
        found = Sampling(temperature, top_k, top_p, min_p).probs(logits)
        assert found.dtype == torch.float32
        wanted = scores.softmax(-1)
        if dtype != torch.float32:
            # Rounded logits are often equal, and which of two equal tokens top-p keeps is open.
            found, wanted = found.sort(-1).values, wanted.sort(-1).values
        # The same tokens stay; softmax twice (over all, then what stayed) is off by a rounding.
        assert torch.equal(found > 0, wanted > 0), (top_k, top_p, min_p)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)


def test_any_leading_shape() -> None:
    logits = random_logits(24, 50)
    sampling = Sampling(0.8, 10, 0.9)
    folded = sampling.probs(logits.view(2, 3, 4, 50))
    assert torch.equal(folded.view(24, 50), sampling.probs(logits))


def test_top_p_keeps_the_first_token_whatever_its_probability() -> None:
    probs = Sampling(1.0, top_p=1e-6).probs(random_logits(100, 50))
    assert torch.equal((probs > 0).sum(-1), torch.ones(100, dtype=torch.int64))


def test_greedy_is_the_argmax() -> None:
    logits = random_logits(100, 50)
    assert Sampling().greedy
    assert not Sampling(0.1).greedy
    assert torch.equal(Sampling().pick(logits, logits), logits.argmax(-1))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"temperature": -0.1}, r"temperature is -0.1; expected a number from 0 \(greedy\) to 1e"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": True}, "temperature is True"),
        ({"top_k": -2}, "top_k is -2; expected a whole number ≥ -1"),
        ({"top_k": 5.0}, "top_k is 5.0"),
        ({"top_p": 0.0}, r"top_p is 0.0; expected a number in \(0, 1\]"),
        ({"top_p": float("nan")}, r"top_p is nan"),
        ({"min_p": -0.1}, r"min_p is -0.1; expected a number in \[0, 1\]"),
        ({"min_p": None}, r"min_p is None"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty is 0.0; expected a number from 0.001"),
        ({"repetition_penalty": 1e-45}, r"repetition_penalty is 1e-45"),
        ({"repetition_penalty": float("inf")}, r"repetition_penalty is inf"),
    ],
)
def test_bad_parameters_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Sampling(**fields)


@pytest.mark.parametrize(
    ("temperature", "filters"),
    [(1e-30, {}), (1e-37, {"top_k": 5}), (1e-40, {"top_p": 0.9}), (5e-324, {"min_p": 0.1})],
)
def test_a_temperature_that_float32_does_not_hold_is_greedy(
    temperature: float, filters: dict[str, Any]
) -> None:
    """Also next to ties, to logits that differ by one bit, and to masked tokens."""
    logits = random_logits(50, 2000)
    logits[0, :3] = torch.tensor([20.0, torch.nextafter(torch.tensor(20.0), torch.tensor(0.0)), 0])
    logits[1::2, 5:] = -torch.inf
    probs = Sampling(temperature, **filters).probs(logits)
    assert torch.equal(probs, torch.nn.functional.one_hot(logits.argmax(-1), 2000).float())
    logits[:, 3:5] = 100.0
    halves = Sampling(temperature, **filters).probs(logits)
    assert torch.equal(halves[:, 3:5], torch.full((50, 2), 0.5))


# --- draws ----------------------------------------------------------------------------------------


def test_draws_have_the_right_frequencies() -> None:
    """Over few tokens; and over several blocks, one of them empty, and from the tokens alone."""
    few, many = torch.tensor([0.0, 3.0, 0.0, 1.0, 6.0, 0.0]), torch.zeros(1000)
    many[[0, 1, 255, 700, 999]] = torch.tensor([1.0, 2.0, 4.0, 1.0, 3.0])
    for weights, count in ((few, 200_000), (many, 20_000)):
        uniforms = CounterRNG(0, torch.arange(count)).uniforms(CounterRNG.DRAFT, 0, 1)[:, 0]
        some = weights.nonzero()[:, 0]
        drawn = draw(weights.expand(count, -1), uniforms)
        found = torch.bincount(drawn, minlength=len(weights))[some]
        assert found.sum() == count
        expected = count * (weights.double() / weights.double().sum())[some]
        assert scipy.stats.chisquare(found, expected.numpy()).pvalue > 1e-6
        ids, kept = some.expand(count, -1), weights[some].expand(count, -1)
        assert torch.equal(draw_of(ids, kept, uniforms, len(weights)), drawn)


def test_other_weights_change_few_draws() -> None:
    """In a running sum over the tokens, each weight that differs moves the borders of all rare
    tokens after it. In a race only two tokens that nearly tie change places. (The differences are
    larger than those of rounding, so that there is something to count.)"""
    rows, generator = 2000, torch.Generator().manual_seed(0)
    weights = torch.randn(rows, 8000, generator=generator).softmax(-1)
    other = weights * (1 + 1e-3 * torch.randn(weights.shape, generator=generator))
    uniforms = torch.rand(rows, dtype=torch.float64, generator=generator)
    by_sums = (by_cdf(weights, uniforms) != by_cdf(other, uniforms)).sum()
    by_races = (draw(weights, uniforms) != draw(other, uniforms)).sum()
    assert by_sums > 20
    assert by_races < by_sums / 10


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_tokens_of_probability_0_are_never_drawn(scale: float) -> None:
    """At the ends of [0, 1) too, with zeros at either end and weights of any size."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(20_000, 40, generator=generator) ** 8 * scale
    weights[torch.rand(weights.shape, generator=generator) < 0.7] = 0
    weights = weights[weights.sum(1) > 0]
    ends = torch.tensor([0.0, 2.0**-53, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    for uniform in ends:
        drawn = draw(weights, uniform.expand(len(weights)))
        assert (weights.gather(1, drawn[:, None]) > 0).all()


def test_many_rows_are_drawn_as_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "AT_ONCE", 1500)  # three rows at once
    logits = random_logits(14, 400).view(2, 7, 400)
    uniform = torch.rand(2, 7, dtype=torch.float64)
    for settings in (Sampling(1.0), Sampling(0.7, top_p=0.9), Sampling(1.3, top_k=4)):
        alone = [settings.pick(logits[row], uniform[row]) for row in np.ndindex(2, 7)]
        assert settings.pick(logits, uniform).flatten().tolist() == alone


def test_rare_tokens_of_a_large_vocabulary_are_drawn() -> None:
    """Each as often as its weight says, also beside a likely one."""
    weights = torch.full((20_001,), 2.0**-16)
    weights[0] = 1.0
    uniforms = CounterRNG(1, torch.arange(2000)).uniforms(CounterRNG.DRAFT, 0, 1)[:, 0]
    drawn = draw(weights.expand(2000, -1), uniforms)
    share = 20_000 * 2.0**-16 / (1 + 20_000 * 2.0**-16)
    rare = drawn[drawn > 0]
    assert abs(len(rare) / 2000 - share) < 5 * (share * (1 - share) / 2000) ** 0.5
    assert scipy.stats.kstest(rare.double() / 20_000, "uniform").pvalue > 1e-4


def check_groups(sampling: Sampling, logits: torch.Tensor) -> list[int | None]:
    """The ways by which rows are computed give the distributions and draws of the way over all
    tokens; returns how many candidates each row had, None: all."""
    wanted = sampling._filtered(logits)
    torch.testing.assert_close(sampling.probs(logits), wanted, rtol=1e-5, atol=0)
    rows = len(logits)
    for uniforms in torch.rand(
        5, rows, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ):
        picked = sampling.pick(logits, uniforms)
        assert torch.equal(picked, draw(wanted, uniforms))
        # What a row draws does not depend on the rows beside it.
        assert torch.equal(sampling.pick(logits[3:5], uniforms[3:5]), picked[3:5])
    counts: list[int | None] = [-1] * rows
    for which, ids, _ in sampling._groups(logits):
        for row in which.tolist():
            assert counts[row] == -1
            counts[row] = None if ids is None else ids.shape[1]
    assert -1 not in counts
    return counts


@pytest.mark.parametrize(("dtype", "top_p"), [(torch.float32, 1.0), (torch.bfloat16, 0.7)])
def test_few_candidates_of_a_large_vocabulary_after_top_k(dtype: torch.dtype, top_p: float) -> None:
    sampling = Sampling(0.8, top_k=5, top_p=top_p)
    logits = random_logits(40, 2000, dtype)
    best = logits.topk(5).values[:, -1:]
    logits[:, 7:40:4] = best  # ties with the fifth
    assert check_groups(sampling, logits) == [69] * 40
    logits[::2, :200] = best[::2]  # more than can be looked at
    assert check_groups(sampling, logits) == [None, 69] * 20


@pytest.mark.parametrize(
    ("dtype", "top_p", "min_p"), [(torch.float32, 0.9, 0.0), (torch.bfloat16, 0.9, 0.01)]
)
def test_top_p_and_min_p_look_at_few_tokens_first(
    dtype: torch.dtype, top_p: float, min_p: float
) -> None:
    """A sharp row, a flat one and one between, each computed in its own way, ties included."""
    sampling = Sampling(1.0, top_p=top_p, min_p=min_p)
    logits = random_logits(16, 20_000, dtype)
    logits[0::4] *= 4
    logits[1::4] *= 0.05
    logits[2::4] *= 0.8
    logits[3::4, :1000] = logits[3::4].amax(-1, keepdim=True) - 1  # ties across all boundaries
    counts = check_groups(sampling, logits)
    assert set(counts[0::4]) == {256}
    assert set(counts[1::4]) == {None}
    assert set(counts[2::4]) | set(counts[3::4]) >= {4096}


@pytest.mark.parametrize(("size", "count"), [(50, 60), (4000, 7), (4015, 1), (4015, 60)])
def test_the_largest_by_groups_are_the_largest(size: int, count: int) -> None:
    count = min(count, size)
    logits = random_logits(200, size)
    logits[::3] = logits[::3].round()  # ties
    logits[::4, -3:] += 10
    logits[1] = -torch.inf
    logits[2, 5:] = -torch.inf
    values, places = top(logits, count)
    assert torch.equal(values, logits.topk(count).values)
    assert torch.equal(logits.gather(-1, places), values)
    assert all(len(set(row)) == count for row in places.tolist())
    logits[:, 17] = torch.nan
    assert (top(logits, count)[1] == 17).any(-1).all()


def test_what_is_not_a_number_is_drawn_without_an_error() -> None:
    for size in (5, 1000):
        weights = torch.full((3, size), torch.nan)
        weights[1, : size - 1] = 1.0
        drawn = draw(weights, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64))
        assert ((drawn >= 0) & (drawn < size)).all()


# --- random numbers -------------------------------------------------------------------------------


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    count, places = 20_000, 8
    rng = CounterRNG(1, torch.arange(count))
    rounds = []
    for _ in range(3):
        rounds += [rng.uniforms(stream, 0, places) for stream in (0, 1)]
        rounds.append(rng.of_text(torch.arange(places).expand(count, -1)))
        rng.at_lengths(np.full(count, len(rounds) // 3 * places))
    streams = torch.stack(rounds, 1).numpy()  # [rows, rounds·streams, places]
    values = streams.reshape(count, -1)
    total = values.size
    assert values.min() >= 0
    assert values.max() < 1
    # Five standard errors each: a fixed seed makes this a computation, not a gamble.
    assert abs(values.mean() - 1 / 2) < 5 * (1 / 12 / total) ** 0.5
    assert abs(values.var() - 1 / 12) < 5 * (1 / 180 / total) ** 0.5
    bins = np.bincount((values * 256).astype(int).ravel(), minlength=256)
    assert scipy.stats.chisquare(bins).pvalue > 1e-5

    centred = (values - values.mean()) * 12**0.5
    rows = (centred[1:] * centred[:-1]).mean(0)  # neighbouring rows, for each stream and place
    assert np.abs(rows).max() < 5 / count**0.5
    # All pairs of streams, rounds and places of a row.
    correlation = centred.T @ centred / count - np.eye(centred.shape[1])
    off = correlation[~np.eye(len(correlation), dtype=bool)]
    assert np.abs(off).max() < 5.5 / count**0.5


def test_uniforms_depend_on_seed_row_length_stream_and_place() -> None:
    def values(seed: int = 0, row: int = 5, length: int = 0, stream: int = 0) -> list[float]:
        rng = CounterRNG(seed, torch.tensor([row]))
        rng.at_lengths(np.array([length]))
        found: list[float] = rng.uniforms(stream, 0, 4)[0].tolist()
        return found

    assert values() == values()
    others = [
        values(seed=1),
        values(seed=-1),
        values(row=6),
        values(length=1),
        values(stream=1),
        values(stream=2),
    ]
    everything = values() + [value for other in others for value in other]
    assert len(set(everything)) == len(everything)


def test_uniforms_do_not_depend_on_the_batch_or_the_width() -> None:
    wide = CounterRNG(3, torch.tensor([4, 9, 2, 7]))
    wide.at_lengths(np.array([5, 8, 6, 7]))
    alone = CounterRNG(3, torch.tensor([2]))
    alone.at_lengths(np.array([6]))
    whole = wide.uniforms(CounterRNG.DRAFT, 0, 6)
    assert torch.equal(whole[2:3], alone.uniforms(CounterRNG.DRAFT, 0, 6))
    assert torch.equal(whole[2:3, 3:5], alone.uniforms(CounterRNG.DRAFT, 3, 2))
    wide.keep_rows(np.array([2, 0]))
    assert torch.equal(wide.uniforms(CounterRNG.DRAFT, 0, 6), whole[[2, 0]])


# --- sampled text ---------------------------------------------------------------------------------

PROMPTS = ((5, 17, 250, 9, 42), (7,), (30,) * 9, (11, 12, 13) * 3)


def small_lm() -> SmallLMDrafter:
    return SmallLMDrafter(model("llama", seed=7, layers=1))


def test_texts_differ_by_seed_and_by_row() -> None:
    decoder = Decoder(model("llama"), small_lm(), sampling=Sampling(1.5))
    texts = {
        tuple(output)
        for seed in (0, 1)
        for output in decoder.decode([PROMPTS[0]] * 8, 16, seed=seed).outputs
    }
    assert len(texts) == 16


def test_a_small_context_of_the_drafter_does_not_tie_rows_together() -> None:
    """Which part of its text a row's draft is made from does not depend on the rows beside it, also
    where they are not asked in some rounds."""
    small: Drafter = SmallLMDrafter(tiny_model("llama", seed=7, layers=1, max_positions=14))
    both = CompositeDrafter([NgramDrafter(1, 1), small])
    decoder = Decoder(model("llama"), both, gamma=3, sampling=Sampling(0.7, top_k=20))
    together = decoder.decode(PROMPTS, 16)
    for row, prompt in enumerate(PROMPTS):
        assert decoder.decode([prompt], 16, row_ids=[row]).outputs == [together.outputs[row]]


@pytest.mark.parametrize(
    ("size", "dtype"), [(5, torch.float32), (257, torch.bfloat16), (1024, torch.float16)]
)
def test_argmax_is_the_first_of_the_largest(size: int, dtype: torch.dtype) -> None:
    # Few values, so that most rows have ties. In every third row all are negative.
    logits = torch.randint(-3, 3, (2, 500, size), generator=torch.Generator().manual_seed(size))
    logits = logits.to(dtype)
    logits[:, ::3] -= 9
    logits[:, ::7] = -torch.inf
    largest = logits == logits.amax(-1, keepdim=True)
    assert torch.equal(argmax(logits), largest.float().argmax(-1))
    logits[0, 0, size - 1] = torch.nan
    assert argmax(logits)[0, 0] == size - 1


each_size = pytest.mark.parametrize("size", [1, 7, 33, 1024, 3000])
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def rows_of(size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(2, 5, size, generator=torch.Generator().manual_seed(size)).to(dtype)


@each_dtype
@each_size
def test_the_largest_number_is_the_first_one_and_a_nan_is_seen(
    size: int, dtype: torch.dtype
) -> None:
    logits = rows_of(size, dtype)
    logits[0] -= 50
    logits[:, 3, size // 2 :] = logits[:, 3, size // 2 :].amax(-1, keepdim=True)
    places, most = peaks(logits)
    assert torch.equal(places, logits.float().argmax(-1))
    assert torch.equal(most.to(dtype), logits.amax(-1))
    for nan in (torch.nan, -torch.tensor(torch.nan)):
        logits[1, 2, size // 3] = nan
        assert torch.equal(peaks(logits)[1].isnan(), logits.isnan().any(-1))


@each_dtype
@each_size
def test_the_largest_few_come_in_order_and_the_first_of_equal_ones(
    size: int, dtype: torch.dtype
) -> None:
    logits = rows_of(size, dtype)
    logits[0, 0] = -torch.inf
    logits[1, :, size // 2 :] = 3
    order = logits.sort(dim=-1, descending=True, stable=True)
    for count in {1, min(4, size), min(IN_ORDER, size)}:
        expected = order.values[..., :count]
        places = places_of_top(logits, count)
        assert torch.equal(logits.gather(-1, places), expected)
        found = top_with_shares(logits, count)
        assert (found is None) == (few_rows.library(dtype) is None)
        if found is not None:
            assert torch.equal(places, order.indices[..., :count])
            assert torch.equal(found[0], places)
            shares = logits.float().softmax(-1).gather(-1, places)
            torch.testing.assert_close(found[1], shares, rtol=1e-5, atol=1e-7, equal_nan=True)
        # Those of every second row would be copied, so C++ does not look at them.
        assert torch.equal(top(logits[:, ::2], count)[0], expected[:, ::2])
    assert top(logits, 0)[1].shape == (2, 5, 0)
