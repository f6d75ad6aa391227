"""One of some texts, drawn from the target's law under the condition that it is one of them."""

import numpy as np
import pytest
import torch

from decode.base.errors import UserError
from decode.choices import choose
from decode.draw.constraint import Guide
from decode.draw.sampling import Sampling
from decode.grammars import Grammars
from decode.model.loading import Target

TEXTS = ["a", "b", "c", "ab"]
PROMPT = [5, 6, 7]


def law(target: Target, sampling: Sampling, masked: bool) -> np.ndarray:
    """[C]: the product of the tokens' probabilities, from a forward of each text."""
    grammar = Grammars.of(target).choice(TEXTS)
    found = []
    for text in TEXTS:
        ids = target.tokenizer(text, add_special_tokens=False)["input_ids"]
        whole = torch.tensor([[*PROMPT, *ids, *target.eos_token_ids]])
        with torch.no_grad():
            logits = target.model(whole).logits[0, len(PROMPT) - 1 : -1]
        if masked:
            for place in range(len(logits)):
                bits = Guide(grammar, 0).allowed(np.array(ids[:place], dtype=np.int64))
                assert bits is not None
                allowed = np.unpackbits(bits, bitorder="little")[: logits.shape[1]]
                logits[place, ~torch.as_tensor(allowed, dtype=torch.bool)] = -torch.inf
        probs = sampling.probs(logits).double()
        found.append(float(probs[range(len(logits)), whole[0, len(PROMPT) :]].prod()))
    return np.array(found) / sum(found)


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(2.0)])
def test_the_law_is_the_targets_under_the_condition(target: Target, sampling: Sampling) -> None:
    (found,) = choose(target, [PROMPT], TEXTS, sampling=sampling)
    np.testing.assert_allclose(found.probs, law(target, sampling, masked=False), atol=1e-6)
    # Masked decoding has another law, or nothing was tested.
    assert np.abs(found.probs - law(target, sampling, masked=True)).sum() / 2 > 0.005


def test_choices_are_drawn_from_the_law(target: Target) -> None:
    found = choose(target, [PROMPT] * 60, TEXTS, seed=3)
    shares = np.bincount([one.index for one in found], minlength=len(TEXTS)) / len(found)
    probs = found[0].probs
    assert (np.abs(shares - probs) < 4.5 * np.sqrt(probs * (1 - probs) / len(found)) + 1e-3).all()
    (likeliest,) = choose(target, [PROMPT], TEXTS, sampling=Sampling())
    assert likeliest.index == int(probs.argmax())
    assert likeliest.text == TEXTS[likeliest.index]


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ([], "list of texts"),
        ("red", "list of texts"),
        (["a", "a"], "twice"),
        (["a " * 2000], "most"),
    ],
)
def test_what_cannot_be_scored_is_refused(target: Target, texts: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        choose(target, [PROMPT], texts)
