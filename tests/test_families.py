"""Families of models that differ from their neighbours: the loop's text is the model's own, or the
family is refused by name."""

from typing import Any, ClassVar

import pytest
import torch
import transformers
from transformers import LlamaForCausalLM

from decode.base.errors import UserError
from decode.drafters import DRAFTERS
from decode.loop.decoding import Decoder
from decode.model import small_copy
from decode.model.cache.cached_model import CachedLM
from decode.model.cache.prefix_cache import PrefixCache
from decode.model.cache.requirements import require_trees
from decode.model.cache_names import given_cache
from decode.model.forward import recognition
from decode.model.kinds.layer_kinds import attention_sizes, layer_windows
from decode.model.memory import slot_bytes
from heads.layers.layer_config import layer_config
from tests.tiny import own_text, sharpen, tiny_model

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
    # Its local layers take distances from the number of keys.
    "gpt-neo": (
        "gpt_neo",
        {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
        | {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    ),
    # Its positions come from the length of the cache.
    "bart": (
        "bart",
        {"vocab_size": 64, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4}
        | {"decoder_ffn_dim": 64, "is_decoder": True, "is_encoder_decoder": False},
    ),
    # It calls `view` on the result of attention.
    "afmoe": ("afmoe", _LLAMA | _AFMOE | {"num_experts_per_tok": 2, "sliding_window": WINDOW}),
}


def family_model(name: str) -> Any:
    model_type, fields = (FAMILIES | REFUSED)[name]
    config = transformers.AutoConfig.for_model(model_type, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        sharpen(model)
    return model.eval()


REFUSED = {
    "gpt-1": ("openai-gpt", {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "bloom": ("bloom", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_text_is_the_models_own(name: str) -> None:
    """Alone and in a ragged batch, with drafts, and with a known beginning."""
    model = family_model(name)
    texts = [own_text(model, prompt, TOKENS) for prompt in PROMPTS]
    prefixes = PrefixCache()
    decoder = Decoder(model, DRAFTERS["ngram"](), gamma=3, prefixes=prefixes)
    assert decoder.decode(PROMPTS[1:], TOKENS).outputs == texts[1:]
    assert decoder.decode(PROMPTS, TOKENS).outputs == texts
    assert prefixes.reused
    tree = DRAFTERS["lookahead"](window=3, ngram=2)
    assert Decoder(model, tree).decode(PROMPTS, TOKENS).outputs == texts


@pytest.mark.parametrize("name", REFUSED)
def test_families_that_cannot_be_decoded_are_refused(name: str) -> None:
    model = family_model(name)
    for drafter in ("none", "ngram"):
        with pytest.raises(UserError, match=f"{type(model).__name__} cannot be decoded here"):
            Decoder(model, DRAFTERS[drafter]())


class _Positions(LlamaForCausalLM):
    """It ignores the positions that it is given."""

    def forward(self, position_ids: Any = None, **inputs: Any) -> Any:
        return super().forward(**inputs)


class _NoCache(LlamaForCausalLM):
    def forward(self, input_ids: Any, position_ids: Any = None, **inputs: Any) -> Any:
        return super().forward(input_ids=input_ids, position_ids=position_ids)


class _CountsKeys(LlamaForCausalLM):
    """It makes its mask from the number of keys."""

    def forward(self, attention_mask: Any = None, **inputs: Any) -> Any:
        if attention_mask is not None:
            fed, keys = attention_mask.shape[-2:]
            attention_mask = torch.ones(1, 1, fed, keys, dtype=torch.bool).tril(keys - fed)
        return super().forward(attention_mask=attention_mask, **inputs)


class _ForgetsWindow(LlamaForCausalLM):
    """It has a window that no config names, and only without a cache."""

    def forward(self, **inputs: Any) -> Any:
        if given_cache(inputs) is None:
            apart = torch.arange(inputs["input_ids"].shape[1])
            apart = apart[:, None] - apart
            seen = (apart >= 0) & (apart < small_copy.WINDOW)
            # Eager attention adds the mask.
            inputs["attention_mask"] = torch.where(seen, 0.0, -torch.inf)[None, None]
        return super().forward(**inputs)


class _LooksAhead(LlamaForCausalLM):
    """Without a cache its first tokens see later ones."""

    def forward(self, **inputs: Any) -> Any:
        if given_cache(inputs) is None:
            length = inputs["input_ids"].shape[1]
            inputs["attention_mask"] = torch.zeros(1, 1, length, length)
        return super().forward(**inputs)


class _KeepsTokens(LlamaForCausalLM):
    """It adds up what it was fed, and takes nothing back."""

    fed: torch.Tensor | float = 0.0

    def forward(self, input_ids: Any, **inputs: Any) -> Any:
        output, cache = super().forward(input_ids, **inputs), given_cache(inputs)
        states = self.get_input_embeddings()(input_ids).cumsum(1)
        if cache is not None and cache.layers[0].fed.begin != 0:
            states = states + self.fed
        if cache is not None:
            self.fed = states[:, -1:]
        output.logits = output.logits + self.lm_head(states)
        return output


class _MaskOfPositions(LlamaForCausalLM):
    """One layer makes its mask from positions: right in a chain, where each slot is a position."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers[1].register_forward_pre_hook(self._masked, with_kwargs=True)

    @staticmethod
    def _masked(_: Any, args: Any, given: dict[str, Any]) -> Any:
        if (mask := given["attention_mask"]) is not None:
            positions = given["position_ids"][:, None, :, None]
            seen = torch.arange(mask.shape[-1]) <= positions
            given["attention_mask"] = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
        return args, given


class _PrefersNearSlots(LlamaForCausalLM):
    """ALiBi with the distance between slots."""

    def forward(self, attention_mask: Any = None, position_ids: Any = None, **inputs: Any) -> Any:
        n, cache = inputs["input_ids"].shape[1], given_cache(inputs)
        if attention_mask is None:
            keys = n if cache is None else cache.get_mask_sizes(n, 0)[0]
            later = ~torch.ones(n, keys, dtype=torch.bool).tril(keys - n)
            attention_mask = torch.zeros(1, 1, n, keys).masked_fill(later, -1e9)
        slots = torch.arange(attention_mask.shape[-1])
        attention_mask = attention_mask + 0.3 * slots
        inputs |= {"attention_mask": attention_mask, "position_ids": position_ids}
        return super().forward(**inputs)


def _control(kind: Any, layers: int = 2) -> Any:
    config = transformers.LlamaConfig(**_LLAMA | {"num_hidden_layers": layers})
    torch.manual_seed(0)
    return kind._from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (_Positions, "tokens were taken back"),
        (_NoCache, "read in parts"),
        (_CountsKeys, "read in parts"),
        (_ForgetsWindow, "read in parts"),
        (_LooksAhead, "change when more tokens follow"),
        (_KeepsTokens, "tokens were taken back"),
    ],
)
def test_a_trial_finds(kind: Any, reason: str) -> None:
    model = _control(kind)
    for _ in range(2):
        with pytest.raises(UserError, match=f"{kind.__name__} cannot be decoded .*{reason}"):
            CachedLM(model)


@pytest.mark.parametrize("kind", [_MaskOfPositions, _PrefersNearSlots])
def test_a_trial_of_trees_finds(kind: Any) -> None:
    model = _control(kind)
    tree = DRAFTERS["lookahead"](window=3, ngram=2)
    with pytest.raises(UserError, match=f"{kind.__name__} does not honour 4-D .* of a token tree"):
        Decoder(model, tree).decode(PROMPTS, TOKENS)
    require_trees(_control(LlamaForCausalLM))


class _Counted(LlamaForCausalLM):
    passes: ClassVar[list[int]] = []

    def forward(self, *args: Any, **inputs: Any) -> Any:
        self.passes.append(len(self.model.layers))
        return super().forward(*args, **inputs)


def test_the_lean_forward_compares_one_layer_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    compare = recognition._computes_the_same

    def counted(layer: Any, *others: Any) -> bool:
        compared.append(layer.self_attn.layer_idx)
        return compare(layer, *others)

    monkeypatch.setattr(recognition, "_computes_the_same", counted)
    kinds = ["sliding_attention", "full_attention"] * 3
    model = tiny_model("gemma3_text", layers=6, head_dim=8, layer_types=kinds, sliding_window=8)
    recognition.lean_forward(model)
    assert compared == [0, 1]


def test_what_a_trial_costs_does_not_grow_with_the_model() -> None:
    """It runs once for a config, on a few layers."""
    costs = []
    for layers in (6, 8, 24):  # at the first one, what a slot of such a model holds is counted too
        _Counted.passes.clear()
        for _ in range(2):
            require_trees(_control(_Counted, layers))
        costs.append(list(_Counted.passes))
    assert costs[1] == costs[2]
    assert max(costs[0]) <= small_copy.LAYERS


def test_values_of_each_layer() -> None:
    model = family_model("gemma4")
    assert [size.head_size for size in attention_sizes(model)] == [8, 16, 8, 16]
    assert slot_bytes(model) == 2 * 4 * 2 * (8 + 16 + 8 + 16)
    assert layer_windows(model) == [WINDOW, None, WINDOW, None]
    assert layer_config(model).head_dim == 8
