"""Families of models that differ from their neighbours: the loop's text is the model's own, or the
family is refused by name."""

from typing import Any

import pytest
import torch
import transformers

from decode.drafters import DRAFTERS
from decode.loop import Decoder
from decode.target.cache.prefix_cache import PrefixCache
from decode.target.kinds.layer_kinds import attention_sizes, layer_windows
from decode.target.memory import slot_bytes
from heads.layers.llama_layer import layer_config
from tests.tiny import sharpen

WINDOW = 8
PROMPTS = [[5, 9, 3, 7, 5], [(n * 7 + 3) % 61 + 3 for n in range(19)]]
TOKENS = 8

_SIZES = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 32}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 256}
_LLAMA = _SIZES | _IDS | {"num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 4}
_GEMMA = _LLAMA | {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
}
_AFMOE = {"moe_intermediate_size": 16, "num_experts": 4, "num_dense_layers": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # The sizes of heads differ between layers.
    "gemma4": ("gemma4_text", _GEMMA | {"global_head_dim": 16, "num_kv_shared_layers": 0}),
    # The last layers read the keys of others.
    "gemma4 shared": ("gemma4_text", _GEMMA | {"global_head_dim": 16, "num_kv_shared_layers": 2}),
    "gemma3n": (
        "gemma3n_text",
        _GEMMA | {"num_kv_shared_layers": 2, "laurel_rank": 4, "altup_num_inputs": 2},
    ),
    # Only the config object has a window, not its class.
    "modernbert": (
        "modernbert-decoder",
        _SIZES | _IDS | {"num_hidden_layers": 4, "local_attention": 2 * WINDOW},
    ),
    # It calls `view` on the result of attention.
    "afmoe": ("afmoe", _LLAMA | _AFMOE | {"num_experts_per_tok": 2, "sliding_window": WINDOW}),
}


def family_model(name: str) -> Any:
    model_type, fields = FAMILIES[name]
    config = transformers.AutoConfig.for_model(model_type, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        sharpen(model)
    return model.eval()


@torch.no_grad()
def own_text(model: Any, prompt: list[int]) -> list[int]:
    """Greedy, by the model's own forward over the whole text."""
    ids = list(prompt)
    for _ in range(TOKENS):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("name", FAMILIES)
def test_text_is_the_models_own(name: str) -> None:
    """Alone and in a ragged batch, with drafts, and with a known beginning."""
    model = family_model(name)
    texts = [own_text(model, prompt) for prompt in PROMPTS]
    prefixes = PrefixCache()
    decoder = Decoder(model, DRAFTERS["ngram"](), gamma=3, prefixes=prefixes)
    assert decoder.decode(PROMPTS[1:], TOKENS).outputs == texts[1:]
    assert decoder.decode(PROMPTS, TOKENS).outputs == texts
    assert prefixes.reused


def test_values_of_each_layer() -> None:
    model = family_model("gemma4")
    assert [size.head_size for size in attention_sizes(model)] == [8, 16, 8, 16]
    assert slot_bytes(model) == 2 * 4 * 2 * (8 + 16 + 8 + 16)
    assert layer_windows(model) == [WINDOW, None, WINDOW, None]
    assert layer_config(model).head_dim == 8
