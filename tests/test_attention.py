"""Our attention is attention, its masks stay small, and some models promise bits."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from decode.model import memory
from decode.model.cache import pass_size
from decode.model.cache.cached_model import CachedLM
from decode.model.cache.slots import round_up_slots
from decode.model.forward import attention_mask
from decode.model.forward.attention_mask import SLOT_STEP, AttentionMask
from decode.model.forward.prepare_model import prepare
from decode.model.forward.transformers_forward import TransformersForward, attention_forward
from tests.mtp_targets import FAMILIES
from tests.tiny import VOCAB, tiny_model


def by_definition(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """[B, N, n, D] by plain sums over all slots."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(2, 3) / query.shape[3] ** 0.5 + mask
    return scores.softmax(-1) @ value


def case(rows: int, fed: int, heads: int, shared: int, past: int) -> tuple[Tensor, ...]:
    """Query, key, value and mask. Keys lie in a larger cache; row b's past is b slots longer."""
    g = torch.Generator().manual_seed(0)
    slots = round_up_slots(past + rows + fed, SLOT_STEP)
    query = torch.randn(rows, fed, heads, 16, generator=g).transpose(1, 2)
    cache = torch.randn(2, rows, shared, slots + 32, 16, generator=g)
    last = past + torch.arange(rows)[:, None] + torch.arange(fed)
    return query, *cache[:, :, :, :slots], torch.arange(slots) <= last[:, None, :, None]


@pytest.mark.parametrize(
    ("rows", "heads", "shared", "how"),
    [
        (1, 4, 4, "together"),
        (3, 6, 2, "together"),
        (3, 6, 2, "head by head"),
    ],
)
def test_it_is_attention(
    rows: int, heads: int, shared: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "head by head":
        monkeypatch.setattr(attention_mask, "SHORT_FEED", 4)
    query, key, value, visible = case(rows, 5, heads, shared, past=21)
    mask = AttentionMask(visible, query.dtype)
    assert mask.additive is not None
    expected = by_definition(query, key, value, mask.additive)
    out = mask.attend(query, key, value, query.shape[3] ** -0.5)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    # A cap far above all scores.
    capped = mask.attend(query, key, value, query.shape[3] ** -0.5, softcap=1e4)
    torch.testing.assert_close(capped, expected, rtol=0, atol=1e-5)


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that an operation makes."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, tuple) else (made,):
            self.numbers = max(self.numbers, x.numel() if isinstance(x, Tensor) else 0)
        return made


@torch.inference_mode()
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("width", [8, 24])
def test_values_of_another_width_need_no_tensor_of_all_scores(width: int, masked: bool) -> None:
    """The heads of DeepSeek's keys are wider than those of its values."""
    query, key, value, visible = case(2, 96, 4, 4, past=64 if masked else 0)
    value = torch.cat([value, value], 3)[..., :width]
    if not masked:
        key, value = key[:, :, :96], value[:, :, :96]
        visible = torch.ones(96, 96, dtype=torch.bool).tril()[None, None]
    mask = AttentionMask(visible, query.dtype)
    assert mask.additive is not None
    expected = by_definition(query, key, value, mask.additive)
    causal: Any = SimpleNamespace(is_causal=True, num_key_value_groups=1)
    with Largest() as largest:
        if masked:
            out = mask.attend(query, key, value, 0.25)
        else:
            out = AttentionMask(None, query.dtype).attend(query, key, value, 0.25)
            theirs, _ = attention_forward(causal, query, key, value, None, scaling=0.25)
            torch.testing.assert_close(theirs.transpose(1, 2), out)
    assert out.shape == (2, 4, 96, width)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    assert largest.numbers <= key.shape[2] * 2 * 4 * 24 < 2 * 4 * 96 * key.shape[2]


@pytest.mark.parametrize(
    ("family", "fields", "heads"),
    [
        ("llama", {}, 0),
        ("deepseek_v3", FAMILIES["deepseek_v3"], 0),
        ("deepseek_v3", FAMILIES["deepseek_v3"] | {"attn_implementation": "eager"}, 4),
        ("gemma2", {"head_dim": 8}, 4),
        ("gpt_oss", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}, 4),
    ],
)
def test_scores_are_counted_where_no_kernel_makes_a_few_at_a_time(
    family: str, fields: dict[str, Any], heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the passes over a prompt are short, and the logits are those of one pass."""
    model = tiny_model(family, **fields)
    assert memory.scored_heads(model) == heads
    ids = torch.randint(3, VOCAB, (2, 100), generator=torch.Generator().manual_seed(0))
    start, counts = np.zeros(2, dtype=np.int64), np.array([100, 98])
    lm, whole = CachedLM(model), CachedLM(model)
    whole.reset(2, 128)
    expected = whole.forward(ids, start, columns=counts[:, None] - 1)
    lm.reset(2, 128)
    monkeypatch.setattr(pass_size, "SCORES", 4 * 100 * 40)
    with torch.inference_mode(), Largest() as largest:
        logits = lm.read(ids, start, counts)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    assert lm.fed in ((38, 40) if heads else (198, 200))  # with padding or without
    assert largest.numbers <= 4 * 40 * 128  # slots are padded
    # Per pair of a token and a slot: a mask, and copies of the scores.
    assert memory.pass_bytes(model, 200, 100) >= (40 if heads else 200) * 100 * (5 + 12 * heads)


def test_which_models_promise_bits() -> None:
    """Soft caps and experts are summed in another way; float32 promises texts, not bits."""
    assert not CachedLM(tiny_model("llama")).keeps_bits
    capped = tiny_model("gemma2", head_dim=8).to(torch.bfloat16)
    assert not CachedLM(capped).keeps_bits
    experts = tiny_model("mixtral", num_local_experts=4).to(torch.bfloat16)
    assert not CachedLM(experts).keeps_bits


@torch.inference_mode()
@pytest.mark.parametrize("lean", [True, False])
def test_masks_stay_small_in_long_texts(lean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes over a long prompt get shorter, so that no mask passes a limit; the logits are
    those of one pass."""
    monkeypatch.setattr(pass_size, "MASK_SIZE", 2400)
    monkeypatch.setattr(pass_size, "SHORT_PASS_TOKENS", 8)
    monkeypatch.setattr(attention_mask, "SHORT_FEED", 5)
    model = tiny_model("llama", heads=4, kv_heads=2)
    prepare(model, lean=lean)
    ids = torch.randint(3, VOCAB, (2, 120), generator=torch.Generator().manual_seed(0))
    start, counts = np.zeros(2, dtype=np.int64), np.array([120, 90])
    expected = CachedLM(model)
    expected.reset(2, 128)
    logits = expected.forward(ids, start, columns=counts[:, None] - 1)
    lm = CachedLM(model)
    sizes: list[int] = []
    attend = AttentionMask.attend

    def watching(self: AttentionMask, *rest: Any) -> Tensor:
        out = attend(self, *rest)
        masks = (self.additive, *self._forms.values())
        sizes.extend(mask.numel() for mask in masks if mask is not None)
        return out

    monkeypatch.setattr(AttentionMask, "attend", watching)
    lm.reset(2, 128)
    torch.testing.assert_close(lm.read(ids, start, counts), logits, rtol=0, atol=1e-4)
    # Keys are padded to a multiple of slots, and the queries' heads repeat no mask.
    assert 1200 < max(sizes) <= 2400 * 128 / 120


def test_an_attention_that_takes_booleans_gets_no_other_mask() -> None:
    mask = AttentionMask(torch.ones(1, 1, 3, 5, dtype=torch.bool).tril(2), torch.float32)
    forward = TransformersForward(tiny_model("llama"))
    assert forward._form(mask, torch.zeros(1, 3)) is mask.visible
    assert "additive" not in vars(mask)
    assert mask.additive is mask.additive
