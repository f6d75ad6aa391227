"""Our attention is attention, and in a chain a token has the same bits in any company."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decode.model.cache import cached_model
from decode.model.cache.cached_model import CachedLM
from decode.model.cache.slots import round_up_slots
from decode.model.forward import attention_mask, few_rows
from decode.model.forward.attention_mask import LONGEST_CHAIN, SLOT_STEP, AttentionMask
from decode.model.forward.kept_bits import products_keep_bits
from decode.model.forward.lean_forward import LeanForward
from decode.model.forward.prepare_model import can_pack, prepare
from decode.model.forward.transformers_forward import TransformersForward
from decode.model.loading import Target
from tests.tiny import VOCAB, tiny_model

bfloat16_kernels = pytest.mark.skipif(
    not can_pack(tiny_model("llama").to(torch.bfloat16)),
    reason="this CPU has no kernels for bfloat16",
)


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
        (3, 6, 2, "in parts"),
        (3, 4, 1, "alone"),
        (3, 6, 2, "head by head"),
    ],
)
def test_it_is_attention(
    rows: int, heads: int, shared: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = {"in parts": 2, "alone": 1}.get(how, 5)
    monkeypatch.setattr(attention_mask, "tokens_together", lambda *_: together)
    if how == "head by head":
        monkeypatch.setattr(attention_mask, "SHORT_FEED", 4)
    query, key, value, visible = case(rows, 5, heads, shared, past=21)
    mask = AttentionMask(visible, query.dtype, chain=True)
    assert mask.additive is not None
    expected = by_definition(query, key, value, mask.additive)
    out = mask.attend(query, key, value, query.shape[3] ** -0.5)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    # A cap far above all scores.
    capped = mask.attend(query, key, value, query.shape[3] ** -0.5, softcap=1e4)
    torch.testing.assert_close(capped, expected, rtol=0, atol=1e-5)


PROMPT, CHAIN = 230, 10


def require_equal_products(lm: CachedLM) -> None:
    """Skip the test on a CPU whose products give a row other bits among others than alone."""
    forward: Any = lm.forward_pass
    if not products_keep_bits(getattr(forward, "model", forward), LONGEST_CHAIN):
        pytest.skip("on this CPU long sums have an order that depends on the number of rows")


def chain_logits(model: Any, rows: int, widths: list[int], *, exact_bits: bool = True) -> Tensor:
    """Logits [B, CHAIN, V] of a chain, fed in pieces of these widths after ragged prompts."""
    lm = CachedLM(model, exact_bits=exact_bits)
    require_equal_products(lm)
    assert lm.keeps_bits is (exact_bits and lm.forward_pass.has_our_attention)
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (rows, PROMPT + CHAIN), generator=g)
    lengths = PROMPT - 2 * np.arange(rows)
    lm.reset(rows, PROMPT + CHAIN)
    lm.forward(ids[:, :PROMPT], np.zeros(rows, dtype=np.int64))
    logits, begin = [], 0
    for width in widths:
        piece = ids[:, PROMPT + begin : PROMPT + begin + width]
        logits.append(lm.forward(piece, lengths + begin))
        begin += width
    return torch.cat(logits, 1)


def model_of(family: str) -> Any:
    """Large enough that a sum in another order gives other bits."""
    return tiny_model(family, hidden=192, heads=3, kv_heads=1).to(torch.bfloat16)


# With three rows thirty tokens are fed: from 33 on, some CPUs multiply matrices in another way.
@bfloat16_kernels
@torch.inference_mode()
@pytest.mark.parametrize(
    ("family", "lean", "together"),
    [
        *((family, False, "by trial") for family in ("llama", "gpt2", "opt", "gemma3_text")),
        *((family, True, "by trial") for family in ("qwen2", "qwen3", "phi3", "olmo2", "smollm3")),
        ("llama", True, "in parts"),
        ("llama", False, "alone"),
    ],
)
def test_a_chain_has_the_bits_of_its_tokens_fed_one_by_one(
    family: str, lean: bool, together: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(family)
    if not lean:
        prepare(model, lean=False)
    if together != "by trial":
        if together == "in parts" and attention_mask.tokens_together(3, 64, model.dtype) == 1:
            pytest.skip("on this CPU each token is alone")
        count = 1 if together == "alone" else 4
        monkeypatch.setattr(attention_mask, "tokens_together", lambda *_: count)
    assert isinstance(prepare(model), LeanForward) is lean
    for rows in (1, 3):
        one_by_one = chain_logits(model, rows, [1] * CHAIN)
        assert torch.equal(one_by_one, chain_logits(model, rows, [CHAIN]))
        assert torch.equal(one_by_one, chain_logits(model, rows, [2, 5, 1, 2]))


@bfloat16_kernels
@torch.inference_mode()
def test_without_exact_bits_a_chain_is_one_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a CPU where exact bits take each token alone. The logits are equal up to rounding.
    Layers in C++ give a token its bits in any pass, so they are not used here."""
    monkeypatch.setattr(few_rows, "library", lambda _: None)
    monkeypatch.setattr(attention_mask, "tokens_together", lambda *_: 1)
    alone: list[int] = []
    each = AttentionMask._each_token_alone

    def counting(self: AttentionMask, query: Tensor, *rest: Any) -> Tensor:
        alone.append(query.shape[3])
        return each(self, query, *rest)

    monkeypatch.setattr(AttentionMask, "_each_token_alone", counting)
    for lean in (True, False):
        model = model_of("llama")
        prepare(model, lean=lean)
        CachedLM(model)  # tries the model, in chains
        alone.clear()
        free = chain_logits(model, 1, [CHAIN], exact_bits=False)
        assert not alone
        exact = chain_logits(model, 1, [CHAIN])
        assert alone == [CHAIN] * 2  # its layers
        alone.clear()
        torch.testing.assert_close(free, exact, rtol=0, atol=0.03 * float(exact.abs().max()))


@bfloat16_kernels
@torch.inference_mode()
def test_transformers_attention_would_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without our attention the same comparison finds other bits."""
    replace = "decode.model.forward.prepare_model.replace_attention"
    monkeypatch.setattr(replace, lambda model: False)
    model = model_of("llama")
    prepare(model, lean=False)
    assert not torch.equal(chain_logits(model, 1, [1] * CHAIN), chain_logits(model, 1, [CHAIN]))


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
    monkeypatch.setattr(cached_model, "MASK_SIZE", 2400)
    monkeypatch.setattr(cached_model, "SHORT_PASS_TOKENS", 8)
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


def chat(target: Target, line: dict[str, Any]) -> list[int]:
    messages = line.get("messages") or [{"role": "user", "content": line["prompt"]}]
    ids: list[int] = target.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return ids


def test_an_attention_that_takes_booleans_gets_no_other_mask() -> None:
    mask = AttentionMask(torch.ones(1, 1, 3, 5, dtype=torch.bool).tril(2), torch.float32)
    forward = TransformersForward(tiny_model("llama"))
    assert forward._form(mask, torch.zeros(1, 3)) is mask.visible
    assert "additive" not in vars(mask)
    assert mask.additive is mask.additive
