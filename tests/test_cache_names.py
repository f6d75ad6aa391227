"""Models take their cache by the old and by the new name."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, LlamaForCausalLM

from decode.drafters import DRAFTERS
from decode.loop.decoding import Decoder
from decode.model.cache_names import cache_argument, cache_of, counts_from_cache, with_cache
from tests.tiny import own_text, tiny_llama

PROMPT = [5, 9, 3, 7, 5]


class _New(nn.Module):
    def forward(self, x: Any, cache: Any = None, cache_length: int = 0) -> Any: ...


class _Old(nn.Module):
    def forward(self, x: Any, past_key_values: Any = None, past_key_values_length: int = 0): ...


class _Mamba(nn.Module):
    def forward(self, x: Any, cache_params: Any = None) -> Any: ...


class _PassesOn(_Old):
    def forward(self, x: Any, **others: Any) -> Any: ...


class _Drops(_Old):
    def forward(self, x: Any) -> Any: ...


@pytest.mark.parametrize(
    ("kind", "name", "counts"),
    [
        (_New, "cache", True),
        (_Old, "past_key_values", True),
        (_Mamba, "cache_params", False),
        (_PassesOn, "past_key_values", False),
        (_Drops, "", False),
        (nn.Linear, "", False),
    ],
)
def test_a_forward_says_its_name(kind: Any, name: str, counts: bool) -> None:
    module = kind(1, 1) if kind is nn.Linear else kind()
    assert cache_argument(module) == name
    assert with_cache(module, 3) == {name or cache_argument(tiny_llama()): 3}
    assert counts_from_cache(module) is counts


class _OwnName(LlamaForCausalLM):
    """Code that comes with a model, and has the other name."""

    def forward(self, past_key_values: Any = None, **inputs: Any) -> Any:
        own = cache_argument(tiny_llama())
        return super().forward(**inputs, **{own: past_key_values})


def test_a_model_with_the_old_name_is_decoded() -> None:
    model = tiny_llama()
    expected = own_text(model, PROMPT, 6)
    old = _OwnName(model.config).eval()
    old.load_state_dict(model.state_dict())
    assert cache_argument(old) == "past_key_values"
    assert Decoder(old, DRAFTERS["ngram"]()).decode([PROMPT], 6).outputs == [expected]


@pytest.mark.parametrize("kept", [False, True])
def test_the_cache_of_an_output(kept: bool) -> None:
    output = tiny_llama()(input_ids=torch.tensor([PROMPT]), use_cache=kept)
    assert isinstance(cache_of(output), DynamicCache) is kept
