"""Drafts with the noise of the text, and rows that sit passes out.

Shapes: B rows, V vocabulary.
"""

from typing import Any

import numpy as np
import pytest
import torch

from decode.drafters import Drafter
from decode.drafters.lookup.ngram import NgramDrafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.draw.mixed_sampling import combined
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder, Decoding
from decode.loop.rows import RowSettings
from tests.tiny import VOCAB, finish, near_drafter, tiny_model

PROMPTS = [[5, 9, 12, 40], [7, 7, 3], [100, 2]]
SAMPLING = Sampling(temperature=0.9, top_p=0.95)


def decoder(drafter: Drafter, rule: str = "coupled", sampling: Sampling = SAMPLING) -> Decoder:
    return Decoder(tiny_model("llama"), drafter, rule=rule, sampling=sampling, gamma=3)


def test_equal_draws_are_as_frequent_as_the_bound_says() -> None:
    rows, vocab = 40_000, 20
    generator = torch.Generator().manual_seed(1)
    p = torch.randn(vocab, generator=generator)
    q = p + 0.6 * torch.randn(vocab, generator=generator)
    sampling = Sampling(1.0)
    rng = CounterRNG(3, torch.arange(rows))
    keys = rng.text_keys(torch.zeros(1, dtype=torch.int64))[:, 0]
    draws = [sampling.race(logits.expand(rows, -1), keys) for logits in (p, q)]
    tv = float((p.softmax(0) - q.softmax(0)).abs().sum()) / 2
    equal = float((draws[0] == draws[1]).double().mean())
    assert (1 - tv) / (1 + tv) - 0.01 < equal < 1 - tv + 0.01
    for logits, tokens in zip((p, q), draws, strict=True):
        share = torch.bincount(tokens, minlength=vocab) / rows
        law = logits.softmax(0)
        assert ((share - law).abs() < 5 * (law / rows).sqrt() + 1e-4).all()


def test_a_reduced_vocabulary_draws_with_the_noise_of_its_tokens() -> None:
    vocabulary = torch.tensor([1, 4, 7, 8])
    logits = torch.randn(500, 4, generator=torch.Generator().manual_seed(0))
    keys = CounterRNG(0, torch.arange(500)).text_keys(torch.zeros(1, dtype=torch.int64))[:, 0]
    full = torch.full((500, 10), -torch.inf).index_copy(1, vocabulary, logits)
    part = Sampling(1.0).race(logits, keys, vocabulary)
    assert (vocabulary[part] == Sampling(1.0).race(full, keys)).all()


def test_filters_that_look_at_few_tokens_draw_the_same() -> None:
    logits = 3 * torch.randn(50, 4000, generator=torch.Generator().manual_seed(0))
    keys = CounterRNG(0, torch.arange(50)).text_keys(torch.zeros(1, dtype=torch.int64))[:, 0]
    sampling = Sampling(0.8, top_p=0.9)
    law = sampling.probs(logits)
    expected = Sampling(1.0).race(law.log(), keys)
    assert (sampling.race(logits, keys) == expected).all()
    mixed = combined([sampling, Sampling()], np.arange(50) % 2)
    both = torch.where(torch.arange(50) % 2 == 0, expected, logits.argmax(-1))
    assert (mixed.race(logits, keys) == both).all()


def test_a_seed_gives_one_text_whatever_drafts() -> None:
    drafters: list[Any] = [
        near_drafter(),
        NgramDrafter(),
        SmallLMDrafter(tiny_model("llama", seed=9)),
    ]
    runs = [decoder(drafter).decode(PROMPTS, 20, seed=4) for drafter in drafters]
    assert runs[0].outputs == runs[1].outputs == runs[2].outputs
    keys = CounterRNG(4, torch.arange(3)).text_keys(torch.tensor([[4], [3], [2]]))[:, 0]
    logits = [tiny_model("llama")(torch.tensor([prompt])).logits[0, -1] for prompt in PROMPTS]
    first = SAMPLING.race(torch.stack(logits), keys).tolist()
    assert [output[0] for output in runs[0].outputs] == first
    assert runs[0].outputs != decoder(near_drafter()).decode(PROMPTS, 20, seed=5).outputs


def test_coupled_drafts_are_accepted_more_often_than_exact_match() -> None:
    rates = [
        decoder(near_drafter(), rule).decode(PROMPTS * 8, 30, seed=1).counts.acceptance_rate
        for rule in ("coupled", "exact")
    ]
    assert rates[0] > rates[1] + 0.05, rates


@pytest.mark.parametrize(
    ("rule", "policy"), [("coupled", "heuristic"), ("speculative", "entropy:ema=0.5")]
)
def test_rows_that_sit_out_stay_as_they_are(rule: str, policy: str) -> None:
    def decoding() -> Decoding:
        parts = Decoder(
            tiny_model("llama"),
            near_drafter(),
            rule=rule,
            sampling=SAMPLING,
            policy=policy,
            gamma=3,
        )
        return Decoding(parts, PROMPTS, 16, seed=2)

    together = decoding()
    finish(together)
    apart, turn = decoding(), 0
    settings = RowSettings(SAMPLING, seed=2)
    while not apart.finished:
        turn += 1
        taking = (apart.rows.numbers + turn) % 3 > 0
        before = {int(row): list(apart.outputs[row]) for row in apart.rows.numbers[~taking]}
        if turn == 4:
            apart.admit([PROMPTS[0]], 3, row_ids=[7], settings=settings)
            taking = np.append(taking, True)
        apart.step(np.where(taking, 99, -1))
        assert all(apart.outputs[row] == tokens for row, tokens in before.items())
    assert {row: apart.outputs[row] for row in range(3)} == together.outputs
    expected, counted = together.result().tally, apart.result().tally
    for row in range(3):
        assert counted.row(row).to_dict() == expected.row(row).to_dict()
    assert max(max(text) for text in together.outputs.values()) < VOCAB
