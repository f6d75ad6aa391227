"""Trees in the loop: token-identical to `generate()`, and models that cannot be fed trees."""

import functools
from typing import Any

import pytest
import transformers

from decode.base.errors import UserError
from decode.drafters import DRAFTERS, Drafter
from decode.drafters.lookup.ngram import NgramDrafter
from decode.drafters.several.combined import SeveralDrafters
from decode.drafters.small_lm import SmallLMDrafter
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder
from decode.model.cache import cached_model
from decode.model.cache.cached_model import CachedLM
from tests.test_loop import NEW, PROMPTS, model
from tests.test_shapes import NAMES, drawn, shape
from tests.tiny import VOCAB, moved, tiny_model


@functools.cache
def nearly(family: str) -> Any:
    """`model(family)` with a little noise: its likeliest tokens are often the target's."""
    return moved(tiny_model(family), 0.03)


# --- greedy ---------------------------------------------------------------------------------------


def test_a_step_with_a_tree_looks_at_no_module_of_the_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To prepare a model is to look at all of its modules, which takes longer than drafting."""
    prepared: list[Any] = []
    real = cached_model.prepare
    decoder = Decoder(model("llama"), SmallLMDrafter(nearly("llama"), shape=shape(NAMES[0])))
    decoder.decode(PROMPTS, 1)  # the trial of trees comes with the first one
    monkeypatch.setattr(
        cached_model, "prepare", lambda *a, **b: (prepared.append(a), real(*a, **b))[1]
    )
    run = decoder.decode(PROMPTS, NEW)
    assert run.counts.nodes_per_step > 1
    assert len(run.steps) > 5
    assert len(prepared) <= 2  # the target and the drafter, once for a text


# --- sampled --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["static without replacement", "chains", "dynamic", "several"])
def test_exact_match_says_the_same_whatever_is_drafted(name: str) -> None:
    """Its draws belong to places in the text, so that a wrong mask, position or commit shows."""
    sampling = Sampling(0.7, top_k=20, repetition_penalty=1.2)
    if name == "several":
        drafter: Drafter = SeveralDrafters(
            [SmallLMDrafter(nearly("llama"), shape=drawn("chains")), NgramDrafter()]
        )
    else:
        drafter = SmallLMDrafter(
            nearly("llama"), shape=shape(name) if name == "dynamic" else drawn(name)
        )
    run, plain = (
        Decoder(model("llama"), which, gamma=3, rule="exact", sampling=sampling).decode(
            PROMPTS, NEW
        )
        for which in (drafter, DRAFTERS["none"]())
    )
    assert run.outputs == plain.outputs
    assert run.counts.accepted.sum() > 5


# --- models that cannot be fed trees --------------------------------------------------------------


@pytest.mark.parametrize("attention", ["flash_attention_2", "kernels-community/flash-attn3"])
def test_flash_attention_is_refused(attention: str) -> None:
    lm = tiny_model("llama")
    lm.config._attn_implementation_internal = attention
    with pytest.raises(UserError, match=rf"with {attention}, which takes no mask .*'sdpa' or 'ea"):
        CachedLM(lm).reset(1, 8)


@pytest.mark.parametrize("family", ["jamba", "recurrent_gemma", "mamba", "llama4_text"])
def test_states_that_cannot_be_rolled_back_are_refused(family: str) -> None:
    fields = {"mamba_d_state": 4} if family == "jamba" else {}
    if family == "mamba":
        config = transformers.MambaConfig(
            vocab_size=VOCAB, hidden_size=16, state_size=4, num_hidden_layers=1
        )
        lm: Any = transformers.MambaForCausalLM(config).eval()
    else:
        lm = tiny_model(family, **fields)
    tree = SmallLMDrafter(model("llama"), shape=shape("static"))
    with pytest.raises(UserError, match="keeps a running state"):
        Decoder(lm, tree, rule="exact").decode(PROMPTS, NEW)
