"""P-EAGLE: EAGLE-3 that drafts all tokens in one pass."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from decode.base.errors import UserError
from decode.model.loading import Target
from distill.losses import WeightedLoss
from heads.head_training import HeadTraining
from heads.heads_directory import load_heads, new_heads, save_heads
from heads.options import HeadOptions
from heads.p_eagle_heads import PEagleDrafter
from tests.contract import check_stored, moved_heads
from tests.test_distill import batch_of
from tests.tiny import VOCAB, tiny_target
from tests.trained_heads import (
    check_drafts_are_trained,
    check_training_is_plain,
    features_of,
)

DEPTH = 4
OPTIONS = {"type": "p_eagle", "tokens": DEPTH, "layers": 2}
PROMPTS = [[5, 17, 250, 9, 42], [7, 8], [30] * 9]
# Other embeddings, layers and norms, as published drafters have them.
PUBLISHED: dict[str, Any] = {
    "embeddings": "trained",
    "mask_token": 299,
    "norm_before_residual": True,
    "captured_layers": [0, 5],
    "layer": {"num_attention_heads": 2, "num_key_value_heads": 1},
}
both = pytest.mark.parametrize("options", [{}, PUBLISHED], ids=["plain", "published"])


@functools.cache
def target() -> Target:
    return tiny_target(layers=7)


def make(moved: float = 0.2, **options: Any) -> Any:
    heads = moved_heads(OPTIONS | options, target(), by=moved)
    heads.borrow(target().model, torch.float32)
    return heads


def plain_logits(heads: Any, text: torch.Tensor, depth: int) -> torch.Tensor:
    """[depth, V]: of the tokens after `text`, int64 [L], by one causal pass without a cache."""
    seen = features_of(target().model, heads, text[None])
    taps = torch.cat([seen[layer] for layer in heads.captured_layers], -1)
    states = heads.fuse(taps[:, :-1])
    entries = states.shape[1]
    states = torch.cat([states, states.new_zeros(1, depth - 1, states.shape[2])], 1)
    tokens = torch.cat([text[1:], text.new_zeros(depth - 1)])[None]
    positions = torch.arange(entries + depth - 1)[None]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    with torch.no_grad():
        outputs = heads.run(states, tokens, positions >= entries, positions, [attend, attend])
        logits: torch.Tensor = heads.output.at(1, outputs[0, entries - 1 :])
    return logits


@both
def test_training_predicts_what_a_plain_pass_does(options: dict[str, Any]) -> None:
    heads = make(**options).eval()
    batch = batch_of([(4, 6), (3, 9)])
    plain = functools.partial(plain_logits, heads)
    count = check_training_is_plain(heads, target().model, batch, plain)
    # All drafts whose tokens are trained on: the first token of an answer is never drafted.
    assert count == sum(n - depth + 1 for n in (6, 9) for depth in range(1, DEPTH + 1))


@both
def test_training_drops_later_places_and_reaches_the_stand_ins(options: dict[str, Any]) -> None:
    """And the embeddings, if they are trained."""
    heads = make(keep=0.5, keep_min=0.1, **options)
    batch = batch_of([(4, 40), (3, 30)])
    ids, loss_mask = batch["input_ids"], batch["loss_mask"]
    module = HeadTraining(heads, WeightedLoss({"forward_kl": 1.0}), target().model)
    seen = features_of(target().model, heads, ids)
    loss, sums = module(ids, loss_mask, seen, heads.loss_weights(0.0))
    loss.backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in heads.parameters())
    named = dict(zip(module.sums, sums.tolist(), strict=True))
    counts = [named[f"head{depth}/tokens"] for depth in range(1, DEPTH + 1)]
    assert counts == [70, 20 + 15, 10 + 7, 5 + 3]
    # Some are missing, so nothing can be said of tokens in a row; in eval mode none are.
    assert "tokens_per_step" not in module.figures(named)
    module.eval()
    _, sums = module(ids, loss_mask, seen, heads.loss_weights(0.0))
    assert "tokens_per_step" in module.figures(dict(zip(module.sums, sums.tolist(), strict=True)))


def test_published_options_are_drafted_with_and_survive_their_directory(tmp_path: Path) -> None:
    heads = make(**PUBLISHED)
    check_drafts_are_trained(heads, target().model)
    save_heads(tmp_path / "drafter", heads, target=target(), provenance={})
    loaded, _ = load_heads(tmp_path / "drafter", target(), torch.float32)
    drafters = (PEagleDrafter(each, VOCAB) for each in (heads, loaded))
    check_stored(*drafters, target().model, PROMPTS)


def test_trained_embeddings_need_a_row_for_the_stand_in() -> None:
    heads: Any = new_heads(
        HeadOptions.of(OPTIONS | {"embeddings": "trained"}),
        tiny_target(layers=7, vocab=VOCAB + 2),
        None,
    )
    assert heads.reserved_tokens == (VOCAB,)
    for options, message in (
        ({"embeddings": "trained"}, "no unused special token"),
        ({"mask_token": VOCAB}, "mask_token is 300, but .* has embeddings of 300 ids"),
    ):
        with pytest.raises(UserError, match=message):
            new_heads(HeadOptions.of(OPTIONS | options), target(), None)
