"""Block drafters: what a block sees, and that training, drafting and decoding agree on it.

Shapes: B rows, T tokens, A anchors, S tokens of a block, H hidden size, V vocabulary.
"""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer

from decode.base.errors import UserError
from decode.drafters import DRAFTERS
from decode.loop.decoding import Decoder
from decode.model.features import Features
from decode.model.hidden_states import FINAL
from decode.model.loading import Target
from decode.shapes import SHAPES
from distill.losses import WeightedLoss
from heads.dflash_heads import even_taps
from heads.head_training import HeadTraining
from heads.heads_directory import new_heads
from heads.heads_module import HeadBatch, Prediction, shift_left
from heads.layers import block_layer
from heads.layers.block_layer import BlockMask, draw_anchors, part_mask
from heads.layers.llama_layer import Rotary
from heads.options import HeadOptions
from tests.contract import moved_heads
from tests.stages import (
    make_stage,
    plan_stage,
    stage_context,
)
from tests.tiny import tiny_target
from tests.trained_heads import check_drafts_are_trained, features_of
from tests.training import assert_equal

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

VOCAB = 304  # the last 4 ids are no tokens
DEPTH = 3
TAPS = [0, 2]
KINDS: dict[str, dict[str, Any]] = {
    "dflash": {"type": "dflash", "layers": 2, "block": DEPTH + 1, "taps": TAPS},
    "dspark": {"type": "dspark", "layers": 2, "block": DEPTH, "taps": TAPS, "rank": 8},
    "dflash2": {"type": "dflash2", "layers": 2, "block": DEPTH + 1, "taps": TAPS, "rank": 8}
    | {"candidates": 5},
    "xpress": {"type": "xpress", "layers": 2, "block": DEPTH + 1, "taps": TAPS, "rank": 8}
    | {"passes": 2},
    "domino": {"type": "domino", "layers": 2, "block": DEPTH, "taps": TAPS, "gru": 6, "rank": 8},
}
kinds = pytest.mark.parametrize("kind", KINDS)
LOSSES = {"cross_entropy": 0.1, "total_variation": 1.8}


@functools.cache
def target() -> Target:
    return tiny_target(vocab=VOCAB, layers=3)


def make(kind: str, *, dtype: Any = torch.float32, **options: Any) -> Any:
    heads = moved_heads(KINDS[kind] | options, target())
    heads.to(dtype).borrow(target().model, dtype)
    return heads.eval()


def text(rows: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 299, (rows, length), generator=generator)


# --- the mask -------------------------------------------------------------------------------------


def test_a_block_sees_the_text_before_it_and_itself() -> None:
    anchors, size, seen = torch.tensor([[1, 4, 6], [2, 3, 7]]), 3, 7
    mask = part_mask(anchors, size, torch.arange(seen))
    for b, block, token in np.ndindex(2, 3, size):
        row = mask[b, block * size + token]
        for column in range(seen):
            assert row[column] == (column < anchors[b, block])
        for other, place in np.ndindex(3, size):
            assert row[seen + other * size + place] == (other == block)


def test_blocks_attend_in_parts_as_each_does_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_layer, "TOGETHER", 2)
    generator = torch.Generator().manual_seed(0)
    anchors, size, length = torch.tensor([[1, 2, 5, 8, 8], [3, 4, 6, 7, 9]]), 3, 9
    keys, values = torch.randn(2, 2, 2, length, 4, generator=generator)
    queries = torch.randn(2, 4, 15, 4, generator=generator)
    block_keys, block_values = torch.randn(2, 2, 2, 15, 4, generator=generator)
    mask = BlockMask(anchors, size, length, keys.device, keys.dtype)
    outputs = mask.attention(keys, values)(queries, block_keys, block_values)
    for b, block, head in np.ndindex(2, 5, 4):
        part = slice(block * size, (block + 1) * size)
        k, v = (
            torch.cat([context[b, head // 2, : anchors[b, block]], own[b, head // 2, part]])
            for context, own in ((keys, block_keys), (values, block_values))
        )
        expected = (queries[b, head, part] @ k.T / 2).softmax(-1) @ v
        torch.testing.assert_close(outputs[b, head, part], expected)


def test_anchors_are_drawn_again_at_each_visit() -> None:
    candidates = torch.zeros(3, 40, dtype=torch.bool)
    candidates[0, 3:30] = candidates[1, 5:8] = True
    torch.manual_seed(0)
    draws = [draw_anchors(candidates, 6, torch.rand(3, 40)) for _ in range(200)]
    for anchors, is_drawn in draws:
        assert anchors.shape == is_drawn.shape == (3, 6)
        assert is_drawn.sum(1).tolist() == [6, 3, 0]
        for b in range(3):
            row = anchors[b][is_drawn[b]]
            assert candidates[b, row].all()
            assert (row.diff() > 0).all()
    counts = torch.cat([anchors[0] for anchors, _ in draws]).bincount(minlength=40)[3:30]
    assert 20 < counts.min() <= counts.max() < 80  # 44 each, on average
    heads = make("dflash", anchors=2)
    mask = torch.ones(1, 40, dtype=torch.bool)
    assert_equal({"": heads.anchors(mask)[0]}, {"": heads.anchors(mask)[0]})
    heads.train()
    torch.manual_seed(0)
    visits = torch.cat([heads.anchors(mask)[0] for _ in range(20)])
    assert len(visits.unique(dim=0)) > 15
    torch.manual_seed(0)
    assert torch.equal(torch.cat([heads.anchors(mask)[0] for _ in range(20)]), visits)


# --- the definition, one block at a time ----------------------------------------------------------


def around(layer: Any, name: str, x: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
    """[S, H]: a part of a layer, in DFlash2 with its two convolutions, token by token."""
    if not hasattr(layer, name):
        return part(x)
    weights = getattr(layer, name)
    changes = (x @ weights.kernel_projection.weight.T).reshape(len(x), 2, 2, -1)

    def mixed(x: Tensor, side: int) -> Tensor:
        rows = []
        for t in range(len(x)):
            now, before = (
                weights.base_kernel[side, back] + changes[t, side, back].repeat_interleave(16)
                for back in (0, 1)
            )
            rows.append(now * x[t] + (before * x[t - 1] if t else 0.0))
        return torch.stack(rows)

    return mixed(part(mixed(x, 0)), 1)


def block(
    heads: Any, features: torch.Tensor, ids: torch.Tensor, a: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The states of the tokens of the block at anchor a, [S, H], and their logits, [S, V], without
    what the tokens before add; by the parts of transformers' own Qwen3 layers. A layer reads the
    context as more states, whose queries are not used.

    features: [T, 2·H]. ids: int64 [T].
    """
    config = Qwen3Config(**{**heads.config.to_dict(), "attention_bias": False})
    config._attn_implementation = "eager"
    size = heads.options.block
    context = heads.hidden_norm(features[:a] @ heads.fc.weight.T)
    tokens = torch.full((size,), heads.mask_token)
    tokens[0] = ids[a]
    states = target().model.get_input_embeddings().weight[tokens].to(features.dtype)
    turns = Rotary(heads.config)(torch.arange(a + size)[None], states)
    for layer in heads.layers:
        reference: Any = Qwen3DecoderLayer(config, 0).to(features.dtype)
        weights = {name: x for name, x in layer.state_dict().items() if "_conv." not in name}
        reference.load_state_dict(weights)
        attention: Qwen3Attention = reference.self_attn
        nothing = torch.zeros(1, 1, a + size, a + size, dtype=features.dtype)

        def attended(
            x: Tensor, attention: Any = attention, nothing: Tensor = nothing
        ) -> torch.Tensor:
            both = torch.cat([context, x])[None]
            update: torch.Tensor = attention(
                both, position_embeddings=turns, attention_mask=nothing
            )[0]
            return update[0, a:]

        normed = reference.input_layernorm(states)
        states = states + around(layer, "attention_conv", normed, attended)
        normed = reference.post_attention_layernorm(states)
        states = states + around(layer, "mlp_conv", normed, reference.mlp)
    read = heads.norm(states)
    return read, F.linear(read, *heads.output.of(1))


def with_last(heads: Any, states: Tensor, logits: Tensor, before: Tensor) -> Tensor:
    """[n, V]: the logits with what the token before adds. before: int64 [n]."""
    if heads.options.type == "dspark":
        head = heads.markov_head
        added: Tensor = head.markov_w1.weight[before] @ head.markov_w2.weight.T
        return logits + added
    if heads.options.type in ("dflash", "xpress", "domino"):
        return logits
    return torch.stack(
        [
            torch.full_like(row, -torch.inf).index_put((ids,), edges(heads, *of_place, row, ids))
            for *of_place, row in zip(states, before, logits, strict=True)
            for ids in [row.argsort(descending=True)[: heads.options.candidates]]
        ]
    )


def refined(heads: Any, states: Tensor, before: Tensor) -> Tensor:
    """[S, V]: what XPress's refiner adds, token by token, for the states [S, H] of a block. before:
    int64 [S]."""
    refiner, rows, vectors = heads.refiner_head, [], []
    mean = states.mean(0) @ refiner.down_g.weight.T
    for slot, (state, token) in enumerate(zip(states, before, strict=True)):
        parts = [state @ refiner.down_h.weight.T, mean, refiner.token_embed.weight[token]]
        vectors.append(torch.cat(parts) @ refiner.in_proj.weight.T)
        mixed = vectors[slot] + sum(refiner.mix_l[:, slot, j] * vectors[j] for j in range(slot + 1))
        gate, up = mixed @ refiner.mlp_gate.weight.T, mixed @ refiner.mlp_up.weight.T
        rows.append(mixed + (F.silu(gate) * up) @ refiner.mlp_down.weight.T)
    return torch.stack(rows) @ refiner.readout.weight.T


def refiner_losses(heads: Any, states: Tensor, logits: Tensor, before: Tensor) -> Tensor:
    """[S, V]: the sum of the terms −w·log q of the block alone and of two passes, each after the
    likeliest tokens of the one before. before: int64 [S], the text's."""
    terms, guesses = -0.6 * logits.log_softmax(-1), logits.argmax(-1)
    for _ in range(2):
        rows = logits + refined(heads, states, torch.cat([before[:2], guesses[1:-1]]))
        terms, guesses = terms - 0.15 * rows.log_softmax(-1), rows.argmax(-1)
    return terms


def after_tokens(heads: Any, states: Tensor, tokens: Tensor) -> Tensor:
    """[S, V]: what Domino adds by torch's own GRU, for the states [S, H] of a block. tokens: int64
    [S], the anchor and the first tokens of the draft."""
    gru = torch.nn.GRU(states.shape[1], heads.options.gru, bias=False).to(states.dtype)
    gru.load_state_dict(heads.prefix_gru.state_dict())
    embedded = target().model.get_input_embeddings().weight[tokens].to(states.dtype)
    both = torch.cat([states, gru(embedded)[0]], -1)
    first, _, last = heads.embed_proj
    added = F.silu(both @ first.weight.T) @ last.weight.T
    return torch.cat([torch.zeros_like(added[:1]), added[1:]])


def edges(heads: Any, state: Tensor, before: Tensor, row: Tensor, ids: Tensor) -> Tensor:
    """[K]: the logits of DFlash2's candidates, int64 [K]. row: those of the place, [V]."""
    selector = heads.candidate_selector
    context = selector.predecessor_codebook[before] * (selector.hidden_projection.weight @ state)
    return torch.stack([row[c] + (context * selector.successor_codebook[c]).sum() for c in ids])


def selector_losses(
    heads: Any, states: Tensor, rows: Tensor, before: Tensor, labels: Tensor
) -> Tensor:
    """[n]: DFlash2's cross-entropy over the candidates, of which the last makes room for the
    label."""
    losses = []
    for state, row, token, label in zip(states, rows, before, labels, strict=True):
        ids = row.argsort(descending=True)[: heads.options.candidates]
        if label not in ids:
            ids = torch.cat([ids[:-1], label[None]])
        found = edges(heads, state, token, row, ids)
        losses.append(found.logsumexp(0) - found[ids == label][0])
    return torch.stack(losses)


@pytest.mark.parametrize("smoothing", [None, 0.3])
@kinds
def test_the_loss_is_that_of_each_block_by_hand(kind: str, smoothing: float | None) -> None:
    """In float64. The second text has two answers: a block ends where the first one ends."""
    heads = make(kind, dtype=torch.float64)
    model = copy.deepcopy(target().model).double()
    heads.borrow(model, torch.float64)
    module = HeadTraining(heads, WeightedLoss(LOSSES), model, chunk=5, smoothing=smoothing)
    module.training = True
    ids, mask = text(2, 9), torch.zeros(2, 9, dtype=torch.bool)
    mask[0, 3:] = mask[1, 2:4] = mask[1, 6:8] = True
    features = features_of(model, heads, ids)
    weights = heads.loss_weights(0.0)
    gamma = heads.options.decay
    assert weights[3] == pytest.approx(np.exp(-2 / gamma))
    loss, sums = module(ids, mask, features, weights)

    taps = torch.cat([features[layer] for layer in TAPS], -1)
    logits = model(ids).logits
    expected, blocks, accepted = torch.zeros((), dtype=torch.float64), 0, 0
    for b, a in np.ndindex(*ids.shape):
        learnt = 0
        while a >= 1 and learnt < DEPTH and a + learnt + 1 < 9 and mask[b, a + learnt + 1]:
            learnt += 1
        if not learnt:
            continue
        blocks += 1
        places = a + 1 + torch.arange(learnt)
        with torch.no_grad():
            whole = block(heads, taps[b], ids[b], a)
            if kind == "xpress":
                before = ids[b, (a - 1 + torch.arange(DEPTH + 1)).clamp(max=8)]
                more = refiner_losses(heads, *whole, before)[1 : learnt + 1]
                whole = whole[0], whole[1] + refined(heads, whole[0], before)
            if kind == "domino":
                tokens = ids[b, (a + torch.arange(DEPTH)).clamp(max=8)]
                more = -0.5 * whole[1].log_softmax(-1)[:learnt]
                whole = whole[0], whole[1] + after_tokens(heads, whole[0], tokens)
            states, rows = (x[heads.first_slot :][:learnt] for x in whole)
            known = (heads, states, rows, ids[b, places - 1])
            # What DFlash2's selector adds is in a term of its own.
            q = (rows if kind == "dflash2" else with_last(*known)).softmax(-1)
            p = logits[b, places - 1].softmax(-1)
        shares = q.gather(1, ids[b, places][:, None])[:, 0]
        rejected = (p - q).abs().sum(-1) / 2
        terms = -0.1 * shares.log() + 1.8 * rejected
        if kind == "dspark":
            taken, prior = (1 - rejected), heads.markov_head.markov_w1.weight[ids[b, places - 1]]
            with torch.no_grad():
                c = heads.confidence(states, prior).sigmoid()
            terms = terms - taken * c.log() - (1 - taken) * (1 - c).log()
        if kind in ("xpress", "domino"):
            terms = terms + more.gather(1, ids[b, places][:, None])[:, 0]
        if kind == "dflash2":
            with torch.no_grad():
                terms = terms + selector_losses(*known, ids[b, places])
        if smoothing is None:
            scale = torch.tensor([weights[k + 1] for k in range(learnt)])
        else:
            reach = ((1 - smoothing) * shares + smoothing).cumprod(0)
            scale = reach.flip(0).cumsum(0).flip(0)
        expected = expected + (terms * scale).sum()
        accepted += int((q.argmax(-1) == ids[b, places]).long().cumprod(0).sum())
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-5, atol=1e-5)
    figures = dict(zip(module.sums, sums.tolist(), strict=True))
    assert figures["positions"] == figures["head1/tokens"] == blocks
    assert figures["accepted"] == accepted


@kinds
def test_gradients_are_those_of_finite_differences(kind: str) -> None:
    """In float64, but for norms, which no model has in it. The confidence is left out: no gradient
    goes through its label."""
    options = {"confidence": False} if kind == "dspark" else {}
    heads = make(kind, dtype=torch.float64, **options)
    model = copy.deepcopy(target().model).double()
    heads.borrow(model, torch.float64)
    terms = WeightedLoss({"forward_kl": 0.5, "cross_entropy": 0.1})
    module = HeadTraining(heads, terms, model, chunk=5)
    ids = text(1, 7)
    mask = torch.ones_like(ids, dtype=torch.bool)
    features = features_of(model, heads, ids)

    def loss() -> torch.Tensor:
        value: torch.Tensor = module(ids, mask, features, heads.loss_weights(0.0))[0]
        return value

    loss().backward()
    generator = torch.Generator().manual_seed(0)
    step = 1e-3
    for parameter in heads.parameters():
        direction = torch.randn(parameter.shape, generator=generator).to(parameter)
        direction /= direction.norm()
        with torch.no_grad():
            parameter += step * direction
            up = loss()
            parameter -= 2 * step * direction
            down = loss()
            parameter += step * direction
        slope = (up - down) / (2 * step)
        torch.testing.assert_close(
            (parameter.grad * direction).sum(), slope.detach(), rtol=1e-2, atol=3e-3
        )
        assert parameter.grad.abs().max() > 0


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_candidates_are_drafted_as_they_were_trained(tree: bool) -> None:
    """What all other kinds draft is in their contract."""

    def logits(heads: Any, prediction: Prediction, ids: Tensor) -> Tensor:
        before = shift_left(ids, prediction.depth)[prediction.positions]
        rows = F.linear(prediction.states, *heads.output.of(1))
        return with_last(heads, prediction.states, rows, before)

    heads = make("dflash2")
    check_drafts_are_trained(heads, target().model, tree=tree, logits=logits)


# --- decoding -------------------------------------------------------------------------------------


def test_what_has_no_estimates_for_chains_is_refused() -> None:
    for kind, shape, message in (
        ("dflash", "chain", "DFlashDrafter has none"),
        ("dspark", "static:widths=[3,2,2]", "works only with chains"),
    ):
        refused: Any = DRAFTERS[kind](make(kind), VOCAB, SHAPES.make(shape))
        with pytest.raises(UserError, match=message):
            Decoder(target().model, refused, policy="reach", gamma=DEPTH)


@pytest.mark.parametrize("coverage", [1.0, 0.86, 0.67])
def test_the_confidence_learns_the_acceptance_of_the_full_target(coverage: float) -> None:
    """A table of the label by place, against Σ min(p, q) over all tokens of p in float64."""
    generator = torch.Generator().manual_seed(2)
    ids = None if coverage == 1 else torch.arange(int(coverage * VOCAB))
    heads = new_heads(HeadOptions.of(KINDS["dspark"]), target(), ids)
    heads.borrow(target().model, torch.float32)
    for weight in heads.parameters():
        torch.nn.init.normal_(weight, std=0.1, generator=generator)
    training = HeadTraining(
        heads, WeightedLoss({"total_variation": 1.0}), target().model, chunk=5
    ).eval()
    labels: list[Tensor] = []
    training._confidence_errors = lambda logits, accepted: labels.append(accepted) or accepted
    tokens = torch.randint(3, VOCAB, (2, 24), generator=generator)
    features = features_of(target().model, heads, tokens)
    batch = HeadBatch(tokens, torch.ones_like(tokens, dtype=torch.bool), features)
    places = range(1, heads.depth + 1)
    with torch.no_grad():
        training(tokens, batch.loss_mask, features, dict.fromkeys(places, 1.0))
        predictions = list(heads.predictions(batch, list(places)))
    for prediction, found in zip(predictions, labels, strict=True):
        expected = acceptance(heads, target().model, features, prediction)
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-4)


def acceptance(heads: Any, model: Any, features: Features, prediction: Any) -> Tensor:
    """float64 [n]: Σ min(p, q) over all tokens of the target's p."""
    states = shift_left(features[FINAL], prediction.depth)[prediction.positions]
    p = (states.double() @ model.get_output_embeddings().weight.double().T).softmax(-1)
    weight, _ = heads.output.of(prediction.depth)
    logits = prediction.states.double() @ weight.double().T
    logits += prediction.added[0].double() @ prediction.added[1].double().T
    ids = slice(None) if heads.vocabulary is None else heads.vocabulary
    return torch.minimum(p[:, ids], logits.softmax(-1)).sum(-1)


# --- the stage ------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    assert even_taps(5, 36) == [1, 9, 17, 25, 33]
    assert even_taps(1, 30) == [15]
    for options, message in (
        ({"taps": [2, 0]}, r"taps are \[2, 0\]; expected numbers from 0 to 2"),
        ({"taps": [1, 3]}, "taps are"),
        ({"taps": None}, "layers of a block drafter read 2 of the target's layers"),
        ({"mask_token": 42}, "mask_token is 42, which tiny-llama uses in texts"),
        ({"mask_token": 2}, "uses in texts, for '<|im_end|>'"),
        ({"mask_token": 304}, "has embeddings of 304 ids"),
        ({"block": 300}, "beyond the target's context"),
    ):
        with pytest.raises(UserError, match=message):
            new_heads(HeadOptions.of(KINDS["dflash"] | options), target(), None)
    with pytest.raises(UserError, match="uses all 300 ids"):
        new_heads(HeadOptions.of(KINDS["dflash"]), tiny_target(layers=3), None)
    context = stage_context(tmp_path, target())
    with pytest.raises(UserError, match="learn their confidence from the loss total_variation"):
        plan_stage(context, make_stage("heads", "heads", heads=KINDS["dspark"]))
