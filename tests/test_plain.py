"""The page `decode/plain.py` is right, and the loop does what it says."""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from decode import plain
from decode.drafters.small_lm import SmallLMDrafter
from decode.loop.decoding import Decoder
from tests.tiny import generated, tiny_model

PROMPT = [3, 1, 2]
SMALL = {"vocab": 5, "layers": 1, "hidden": 8, "heads": 1, "kv_heads": 1}
RUNS, NEW = 600, 2


@pytest.mark.parametrize("gamma", [1, 4])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_loop_accepts_what_the_page_accepts(gamma: int, seed: int) -> None:
    """Greedy in float32: the same text in the same steps, with a drafter that is the target in its
    first layer."""
    target, drafter = tiny_model("llama", seed=seed), tiny_model("llama", seed=seed)
    drafter.model.layers = drafter.model.layers[:1]
    drafter.config.num_hidden_layers = 1
    prompt = [5, 17, 250, 9, 42]
    written = plain.decode(target, drafter, prompt, 24, gamma=gamma)
    decoded = Decoder(target, SmallLMDrafter(drafter), gamma=gamma).decode([prompt], 25)
    # The loop's first token comes from the pass that reads the prompt.
    first, *rest = decoded.outputs[0]
    after = plain.decode(target, drafter, [*prompt, first], 24, gamma=gamma)
    assert written.tokens == decoded.outputs[0][:24]
    assert after.tokens == rest
    passes = np.bincount(after.accepted, minlength=gamma + 1)
    assert np.array_equal(passes, decoded.counts.by_accepted)
    assert max(after.accepted) > 0


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_the_page_goes_back_past_a_sliding_window(family: str) -> None:
    target, drafter = (
        tiny_model(family, seed=seed, sliding_window=6, tie=False) for seed in (1, 2)
    )
    prompt = [5, 17, 250, 9, 42]
    written = plain.decode(target, drafter, prompt, 12, gamma=3)
    assert written.tokens == generated(target, prompt, 12)
    assert min(written.accepted) < 3


@pytest.mark.parametrize("lossless", [True, False])
def test_the_page_is_lossless(lossless: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The joint law of two tokens; a page that accepts every draft token is found."""
    if not lossless:
        monkeypatch.setattr(plain, "accepts", lambda *_: True)
    target, drafter = tiny_model("llama", seed=1, **SMALL), tiny_model("llama", seed=2, **SMALL)
    generator = torch.Generator().manual_seed(0)
    counts = np.zeros((5, 5))
    for _ in range(RUNS):
        text = plain.decode(
            target, drafter, PROMPT, NEW, gamma=1, temperature=1.0, generator=generator
        )
        counts[tuple(text.tokens)] += 1
    law = np.zeros((5, 5))
    for first, second in itertools.product(range(5), repeat=2):
        with torch.no_grad():
            logits = target(torch.tensor([[*PROMPT, first]])).logits[0, -2:]
        law[first, second] = logits.softmax(-1).double()[[0, 1], [first, second]].prod()
    chance = stats.chisquare(counts.ravel(), law.ravel() / law.sum() * RUNS).pvalue
    assert chance > 0.01 if lossless else chance < 1e-6
