"""Our attention is attention, and in a chain a token has the same bits in any company."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decode.drafters import DRAFTERS, Drafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.loop import Decoder
from decode.target.cached_model import CachedLM
from decode.target.cpu_kernels import SLOT_STEP, attention_forward, each_token_alone
from decode.target.loading import Target
from decode.target.prepare_model import can_pack, pack_layers
from heads.heads_directory import new_heads
from heads.heads_module import HeadOptions
from tests.tiny import FAMILIES, VOCAB, real_target, tiny_model

bfloat16_kernels = pytest.mark.skipif(
    not can_pack(tiny_model("llama").to(torch.bfloat16)),
    reason="this CPU has no kernels for bfloat16",
)


def by_definition(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """[B, n, H, D] by plain sums over all slots."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(2, 3) / query.shape[3] ** 0.5 + mask
    return (scores.softmax(-1) @ value).transpose(1, 2)


def case(rows: int, fed: int, heads: int, shared: int, past: int) -> tuple[Tensor, ...]:
    """Query, key, value and mask. Keys lie in a larger cache; row b's past is b slots longer."""
    g = torch.Generator().manual_seed(0)
    slots = -(-(past + rows + fed) // SLOT_STEP) * SLOT_STEP
    query = torch.randn(rows, fed, heads, 16, generator=g).transpose(1, 2)
    cache = torch.randn(2, rows, shared, slots + 32, 16, generator=g)
    last = past + torch.arange(rows)[:, None] + torch.arange(fed)
    mask = torch.zeros(rows, 1, fed, slots)
    mask.masked_fill_(torch.arange(slots) > last[:, None, :, None], torch.finfo(mask.dtype).min)
    return query, cache[0, :, :, :slots], cache[1, :, :, :slots], mask


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(("heads", "shared"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("rows", [1, 3])
def test_it_is_attention(rows: int, heads: int, shared: int, alone: bool) -> None:
    given = case(rows, 5, heads, shared, past=21)
    module = torch.nn.Module()
    if alone:
        with each_token_alone():
            out, _ = attention_forward(module, *given)
    else:
        out, _ = attention_forward(module, *given)
    torch.testing.assert_close(out, by_definition(*given), rtol=0, atol=1e-5)


PROMPT, CHAIN = 230, 10


def chain_logits(model: Any, rows: int, widths: list[int]) -> Tensor:
    """Logits [B, CHAIN, V] of a chain, fed in pieces of these widths after ragged prompts."""
    lm = CachedLM(model)
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
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", [*FAMILIES, "phi3", "opt", "gemma3_text"])
def test_a_chain_has_the_bits_of_its_tokens_fed_one_by_one(family: str, rows: int) -> None:
    model = model_of(family)
    one_by_one = chain_logits(model, rows, [1] * CHAIN)
    assert torch.equal(one_by_one, chain_logits(model, rows, [CHAIN]))
    assert torch.equal(one_by_one, chain_logits(model, rows, [2, 5, 1, 2]))


@bfloat16_kernels
@torch.inference_mode()
def test_transformers_attention_would_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without our attention the same comparison finds other bits."""
    monkeypatch.setattr("decode.target.prepare_model.replace_attention", lambda model: False)
    model = model_of("llama")
    assert not torch.equal(chain_logits(model, 1, [1] * CHAIN), chain_logits(model, 1, [CHAIN]))


@bfloat16_kernels
@pytest.mark.real
@torch.inference_mode()
def test_greedy_chains_in_bfloat16_are_plain_decoding_to_the_bit() -> None:
    """On test prompts of every kind, for each kind of chain drafter: rows of one token and of
    several, drafts that stay and drafts that do not."""
    real = real_target()
    model = copy.deepcopy(real.model).to(torch.bfloat16)
    target = dataclasses.replace(real, model=model)
    lines = Path("configs/prompts/test.jsonl").read_text().splitlines()
    prompts = [chat(target, json.loads(line)) for line in lines[::7]]
    plain = Decoder(model, DRAFTERS["none"](), eos_token_ids=target.eos_token_ids)
    texts = [plain.decode([prompt], 20).outputs for prompt in prompts]
    small = copy.deepcopy(model)
    small.model.layers = small.model.layers[:2]
    small.config.num_hidden_layers = 2
    torch.manual_seed(0)
    ids = torch.arange(0, target.vocab_size, 50)
    heads: Any = new_heads(HeadOptions.of({"type": "eagle1", "depth": 3}), target, ids)
    heads.to(torch.bfloat16).borrow(model, torch.bfloat16)
    pack_layers(heads)
    drafters: dict[str, tuple[Drafter, int]] = {
        "ngram": (DRAFTERS["ngram"](), 7),
        "small_lm": (SmallLMDrafter(small), 4),
        "eagle1": (DRAFTERS["eagle1"](heads, target.vocab_size), 3),
    }
    for name, (drafter, gamma) in drafters.items():
        decoder = Decoder(model, drafter, gamma=gamma, eos_token_ids=target.eos_token_ids)
        runs = [decoder.decode([prompt], 20) for prompt in prompts]
        assert [run.outputs for run in runs] == texts, name
        if name == "ngram":
            assert sum(run.counts.accepted.sum() for run in runs) > 10


def chat(target: Target, line: dict[str, Any]) -> list[int]:
    messages = line.get("messages") or [{"role": "user", "content": line["prompt"]}]
    ids: list[int] = target.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return ids
