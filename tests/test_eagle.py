"""Heads that read what they drafted: training and the loop compute the same, token by token.

Shapes: B rows, T tokens, H hidden size, V vocabulary.
"""

import copy
import functools
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from decode.base.errors import UserError
from decode.draft import Contexts
from decode.drafters import DRAFTERS
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder
from decode.model.features import Features
from decode.model.forward.low_rank_output import expand
from decode.model.hidden_states import FINAL
from decode.model.loading import Target
from decode.shapes import SHAPES
from distill.choose_vocabulary import rows_of_tokens
from distill.losses import WeightedLoss
from distill.place_weights import place_weights
from distill.teacher.feature_sources import LiveFeatures
from heads.head_training import HeadTraining
from heads.heads_directory import new_heads
from heads.heads_module import HeadBatch, trained_positions
from heads.layers.layer_config import layer_config
from heads.layers.llama_layer import Rotary
from heads.layers.target_layers import auxiliary_layers
from heads.options import HeadOptions
from tests.contract import moved_heads
from tests.stages import LOOP, make_stage, plan_stage, run_stage, stage_context
from tests.tiny import VOCAB, plain_texts, tiny_target
from tests.trained_heads import features_of, trained_logits

DEPTH = 3
KINDS: dict[str, dict[str, Any]] = {
    "eagle1": {"type": "eagle1", "depth": DEPTH},
    "eagle3": {"type": "eagle3", "steps": DEPTH},
    "eagle3.1": {"type": "eagle3", "steps": DEPTH, "fc_norm": True, "norm_output": True},
    "hydra": {"type": "hydra", "heads": DEPTH},
    "hydra_plus": {"type": "hydra_plus", "heads": DEPTH, "layers": 2},
}
IDS = torch.arange(0, VOCAB, 2)


@functools.cache
def target(kind: str = "eagle1") -> Target:
    return tiny_target(layers=7 if kind.startswith("eagle3") else 2)


def make(kind: str, ids: torch.Tensor | None = None, *, dtype: Any = torch.float32) -> Any:
    heads = moved_heads(KINDS[kind], target(kind), ids)
    heads.to(dtype).borrow(target(kind).model, dtype)
    return heads


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "hydra"])
def test_the_prompt_is_read_before_the_first_draft_and_counted_apart(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer makes the prompt's entries in `prefill`, all but the last token's; the first draft
    then costs what any other does."""
    drafter = DRAFTERS[KINDS[kind]["type"]](make(kind), VOCAB)
    made: list[int] = []
    layer = drafter.layer

    def counted(contexts: Contexts, columns: np.ndarray, states: torch.Tensor) -> torch.Tensor:
        made.append(columns.shape[1])
        return layer(contexts, columns, states)

    monkeypatch.setattr(drafter, "layer", counted)
    decoder = Decoder(target(kind).model, drafter, gamma=DEPTH)
    prompts = [[5, 17, 250, 9, 42, 8, 13, 77, 21], [5, 17, 30]]
    for texts in (prompts, prompts[:1]):
        made.clear()
        run = decoder.decode(texts, 8)
        assert made[:2] == [len(texts[0]) - 1, 1]
        assert max(made[1:]) <= 1 + DEPTH
        assert run.timing.draft_prefill > 0
        assert run.outputs == plain_texts(target(kind).model, texts, 8)
    # A prompt of one token has nothing to read yet.
    made.clear()
    decoder.decode([[5]], 4)
    assert made[0] == 1


def text(rows: int = 1, length: int = 12) -> torch.Tensor:
    g = torch.Generator().manual_seed(1)
    return torch.randint(3, VOCAB, (rows, length), generator=g)


# --- the definitions, one token at a time ---------------------------------------------------------


def llama_layer(heads: Any, prefixes: tuple[str, ...], x: torch.Tensor, **parts: Any) -> Any:
    """[n, H] of x [n, H]: transformers' own llama layer on the parameters whose names begin with
    the first of the prefixes, less all of them; parts: what stands in it for parts of its own."""
    config = layer_config(target().model)
    config._attn_implementation = "eager"
    layer: Any = LlamaDecoderLayer(config, 0).to(x.dtype)
    for name, part in parts.items():
        setattr(layer, name, part)
    weights = {}
    for name, weight in heads.named_parameters():
        if name.startswith(prefixes[0]):
            weights[functools.reduce(str.removeprefix, prefixes, name)] = weight
    count = len(x)
    mask = torch.full((count, count), float("-inf"), dtype=x.dtype).triu(1)[None, None]
    turns = Rotary(config)(torch.arange(count)[None], x)
    made = torch.func.functional_call(
        layer, weights, (x[None],), {"attention_mask": mask, "position_embeddings": turns}
    )
    return (made if torch.is_tensor(made) else made[0])[0]


def eagle1_states(
    heads: Any, features: torch.Tensor, embedded: torch.Tensor, depth: int
) -> torch.Tensor:
    """[H]: what step `depth` makes after features [t + 1, H] and the embeddings [t + depth, H] of
    the tokens that follow each of them and what was drafted; by transformers' own llama layer."""
    states = features
    for _ in range(depth):
        mixed = torch.cat([embedded[: len(states)], states], -1) @ heads.fc.weight.T
        made = llama_layer(heads, ("layers.0.",), mixed, input_layernorm=torch.nn.Identity())
        # The next step sees all features as they are, and then what the drafter made of them.
        states = torch.cat([states, made[-1:]])
    return states[-1]


def normed(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def eagle3_states(
    heads: Any, features: torch.Tensor, embedded: torch.Tensor, depth: int
) -> torch.Tensor:
    """The same from features [t + 1, 3·H], by plain sums, one key after the other."""
    layer, config = heads.midlayer, heads.config
    size, groups = config.head_dim, config.num_attention_heads // config.num_key_value_heads

    def turned(x: torch.Tensor, position: int) -> torch.Tensor:
        """[N, D] rotated, from [N·D]."""
        x = x.unflatten(-1, (-1, size))
        half = size // 2
        angles = position / 10000.0 ** (torch.arange(half, dtype=x.dtype) / half)
        a, b = x[:, :half], x[:, half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def step(state: torch.Tensor, word: torch.Tensor, position: int, keys: Any) -> torch.Tensor:
        read = torch.cat(
            [normed(layer.input_layernorm.weight, word), normed(layer.hidden_norm.weight, state)]
        )
        attention = layer.self_attn
        query = turned(attention.q_proj.weight @ read, position)
        value = (attention.v_proj.weight @ read).unflatten(-1, (-1, size))
        keys.append((turned(attention.k_proj.weight @ read, position), value))
        heads_out = []
        for head, q in enumerate(query):
            scores = torch.stack([q @ k[head // groups] for k, _ in keys]) / size**0.5
            weights = scores.softmax(-1)
            values = torch.stack([v[head // groups] for _, v in keys])
            heads_out.append(weights @ values)
        state = state + attention.o_proj.weight @ torch.cat(heads_out)
        inner = normed(layer.post_attention_layernorm.weight, state)
        mlp = layer.mlp
        gated = F.silu(mlp.gate_proj.weight @ inner) * (mlp.up_proj.weight @ inner)
        state = state + mlp.down_proj.weight @ gated
        return normed(heads.norm.weight, state) if heads.options.norm_output else state

    keys: list[Any] = []
    if heads.options.fc_norm:
        taps = zip(heads.fc_norm, features.chunk(3, -1), strict=True)
        features = torch.cat([normed(norm.weight, tap) for norm, tap in taps], -1)
    fused = features @ heads.fc.weight.T
    for place, state in enumerate(fused):
        last = step(state, embedded[place], place, keys)
    for further in range(len(fused), len(fused) + depth - 1):
        last = step(last, embedded[further], further, keys)
    return last


def hydra_states(
    heads: Any, features: torch.Tensor, embedded: torch.Tensor, depth: int
) -> torch.Tensor:
    read = torch.cat([features[-1], *embedded[-depth:]])
    for block in heads.blocks[depth - 1]:
        skip = block.skip
        skipped = read if isinstance(skip, torch.nn.Identity) else skip.weight @ read + skip.bias
        read = skipped + F.silu(block.linear.weight @ read + block.linear.bias)
    return read


def hydra_plus_states(
    heads: Any, features: torch.Tensor, embedded: torch.Tensor, depth: int
) -> torch.Tensor:
    """Hydra's, of what transformers' own llama layer makes of the features [t + 1, H]."""
    made = llama_layer(heads, ("prefix.", "layer."), features)
    return hydra_states(heads, made, embedded, depth)


STATES = {
    "eagle1": eagle1_states,
    "eagle3": eagle3_states,
    "hydra": hydra_states,
    "hydra_plus": hydra_plus_states,
}


def readout(heads: Any, state: torch.Tensor) -> torch.Tensor:
    reads_norm = heads.options.type == "eagle3" and not heads.options.norm_output
    return normed(heads.norm.weight, state) if reads_norm else state


def hand_logits(
    kind: str, heads: Any, features: torch.Tensor, ids: torch.Tensor, t: int, depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The step's state [H] and its logits [V'], from features [T, F] and token ids [T]."""
    table = target(kind).model.get_input_embeddings().weight.to(features.dtype)
    state = STATES[KINDS[kind]["type"]](
        heads, features[: t + 1], table[ids[1 : t + depth + 1]], depth
    )
    return state, F.linear(readout(heads, state), *heads.output.of(depth))


@pytest.mark.parametrize(
    ("kind", "smoothing"), [*((kind, None) for kind in KINDS), ("eagle1", 0.3), ("hydra", 0.3)]
)
def test_the_loss_is_that_of_each_token_by_hand(kind: str, smoothing: float | None) -> None:
    """Gradients too, through all steps. float64, but for norms, which no model has in it. With
    smoothing, each token has the weight of D-PACE."""
    heads = make(kind, IDS, dtype=torch.float64)
    heads.eval()  # without noise
    model = copy.deepcopy(target(kind).model).double()
    heads.borrow(model, torch.float64)
    terms = WeightedLoss({"forward_kl": 0.1, "cross_entropy": 0.5})
    module = HeadTraining(heads, terms, model, chunk=5, smoothing=smoothing)
    module.training = True
    ids, mask = text(2, 9), torch.zeros(2, 9, dtype=torch.bool)
    mask[0, 1:] = True
    mask[1, 2:4] = mask[1, 6:8] = True
    found = LiveFeatures(model, module.captured_layers).features(ids, torch.ones_like(ids), [])
    weights = {1: 1.0, 2: 0.8, 3: 0.5}
    loss, sums = module(ids, mask, found, weights)
    ours = torch.autograd.grad(loss, list(heads.parameters()))

    features = torch.cat([found[layer] for layer in heads.captured_layers], -1)
    logits = model(ids).logits
    rows = rows_of_tokens(IDS, VOCAB)
    expected = torch.zeros((), dtype=torch.float64)
    counts = dict.fromkeys(weights, 0)
    for b, t in np.ndindex(*ids.shape):
        values: dict[int, torch.Tensor] = {}
        shares: dict[int, float] = {}
        for depth, weight in weights.items():
            place = t + depth + 1
            if place >= ids.shape[1] or not mask[b, place]:
                continue
            state, own = hand_logits(kind, heads, features[b], ids[b], t, depth)
            p = logits[b, place - 1, IDS].log_softmax(-1)
            q = own.log_softmax(-1)
            label = rows[ids[b, place]]
            value = 0.1 * (p.exp() * (p - q)).sum()
            if label >= 0:
                value = value - 0.5 * q[label]
            if kind == "eagle1":
                value = value + F.smooth_l1_loss(state, found[FINAL][b, t + depth])
            values[depth] = value if smoothing is not None else weight * value
            shares[depth] = q[label].exp().item() if label >= 0 else 0.0
            counts[depth] += 1
        for depth, value in values.items():
            if smoothing is not None:
                reached = [
                    np.prod([0.7 * share + 0.3 for i, share in shares.items() if i <= m])
                    for m in shares
                    if m >= depth
                ]
                value = value * float(sum(reached))
            expected = expected + value
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    theirs = torch.autograd.grad(expected, list(heads.parameters()))
    for own, other in zip(ours, theirs, strict=True):
        assert (own - other).abs().max() <= 1e-5 * other.abs().max()
    figures = dict(zip(module.sums, sums.tolist(), strict=True))
    for depth, count in counts.items():
        assert figures[f"head{depth}/tokens"] == count == int(trained_positions(mask, depth).sum())


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_the_teachers_logits_of_a_token_are_computed_once(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all steps that predict it, and a chunk at a time."""
    heads = make(kind, IDS)
    model = target(kind).model
    module = HeadTraining(heads, WeightedLoss({"forward_kl": 1.0}), model, chunk=5)
    ids, mask = text(2, 9), torch.ones(2, 9, dtype=torch.bool)
    found = LiveFeatures(model, module.captured_layers).features(ids, torch.ones_like(ids), [])
    counts: list[int] = []

    def counted(x: torch.Tensor, *layer: Any) -> torch.Tensor:
        counts.append(len(x))
        return F.linear(x, *layer)

    monkeypatch.setattr("heads.head_training.product", counted)
    module(ids, mask, found, {1: 1.0, 2: 0.8, 3: 0.5})
    # The first step of a text of nine tokens predicts seven, and the later ones the last of these.
    assert counts == [5, 5, 4]


# --- training and the loop ------------------------------------------------------------------------


def test_several_nodes_of_a_chain_at_once_are_one_after_the_other() -> None:
    heads = make("eagle1")
    ids = text(1, 12)
    found = features_of(target().model, heads, ids)
    expected = trained_logits(heads, ids, found)
    drafter: Any = DRAFTERS["eagle1"](copy.deepcopy(heads), VOCAB)
    contexts = Contexts(np.pad(ids.numpy(), ((0, 0), (0, 9))), np.array([6]))
    with torch.inference_mode():
        drafter.start(contexts)
        drafter.read(Features({layer: x[:, :5] for layer, x in found.items()}, np.array([5])))
        growth = drafter.growth(contexts, Sampling(), DEPTH)
        growth.first()
        both = growth.extend(ids[:, 6:8])[0]
    for depth in (2, 3):
        torch.testing.assert_close(both[depth - 2], expected[depth][4], rtol=1e-3, atol=1e-3)


# --- decoding -------------------------------------------------------------------------------------

PROMPTS = [[5, 17, 250, 9, 42], [7], [11, 12, 13], [40, 41, 42, 43, 44, 45, 46, 47]]


@pytest.mark.parametrize("kind", ["eagle1", "hydra", "hydra_plus"])
def test_heads_start_as_the_target_one_token_before(kind: str) -> None:
    """EAGLE's fc takes the feature as it is and the layer adds nothing: the identity that engines
    are tested with. Its tensors have the names and shapes that engines read."""
    options = KINDS[kind] | ({} if kind == "eagle1" else {"layers": 2})
    heads: Any = new_heads(HeadOptions.of(options), target(), None)
    heads.borrow(target().model)
    ids = text(1, 10)
    found = trained_logits(heads, ids, features_of(target().model, heads, ids))
    logits = target().model(ids).logits[0]
    for depth in range(1, DEPTH + 1):
        torch.testing.assert_close(found[depth][: 9 - depth], logits[: 9 - depth])
    if kind != "eagle1":
        return
    width = heads.config.intermediate_size
    assert {name: tuple(x.shape) for name, x in heads.state_dict().items()} == {
        "fc.weight": (32, 64),
        "layers.0.self_attn.q_proj.weight": (32, 32),
        "layers.0.self_attn.k_proj.weight": (16, 32),
        "layers.0.self_attn.v_proj.weight": (16, 32),
        "layers.0.self_attn.o_proj.weight": (32, 32),
        "layers.0.post_attention_layernorm.weight": (32,),
        "layers.0.mlp.gate_proj.weight": (width, 32),
        "layers.0.mlp.up_proj.weight": (width, 32),
        "layers.0.mlp.down_proj.weight": (32, width),
    }


@pytest.mark.usefixtures("fresh_accelerate")
def test_eagle1_trains_as_many_steps_as_are_asked_for(tmp_path: Path) -> None:
    """One, or those of HASS with the same weight. It can then draft as deep, and D-PACE has places
    to weigh."""
    one, three = (
        new_heads(HeadOptions.of(KINDS["eagle1"] | {"depth": 2, "steps": steps}), target(), None)
        for steps in (1, 3)
    )
    assert (one.depth, one.loss_weights(0.0)) == (2, {1: 1.0})
    assert (three.depth, three.loss_weights(0.0)) == (3, {1: 1.0, 2: 1.0, 3: 1.0})
    flops = [heads.body_flops() for heads in (one, three)]
    # After its attention, the last step computes only what is predicted.
    assert flops[1].per_prediction == flops[0].per_prediction > 0
    assert sum(astuple(flops[1])[::2]) == 3 * sum(astuple(flops[0])[::2])
    context = stage_context(tmp_path, target())
    settings: dict[str, Any] = {
        "losses": {"forward_kl": 0.1},
        "loop": LOOP,
        "optimizer": {"lr": 1e-2, "warmup_steps": 2},
        "place_smoothing": 0.5,
        "gradient_checkpointing": True,
    }
    make = functools.partial(make_stage, "heads", "heads", **settings)
    run_stage(context, make(heads=KINDS["eagle1"] | {"steps": 2}))
    with pytest.raises(UserError, match="train one only"):
        plan_stage(context, make(heads=KINDS["eagle1"]))


def test_features_are_noisy_only_while_they_are_trained_on() -> None:
    heads = make("eagle1")
    features = torch.zeros(4, 50, 32)
    ids = torch.zeros(4, 50, dtype=torch.int64)
    batch = HeadBatch(ids, ids > 0, {FINAL: features})
    assert torch.equal(heads.eval().inputs_of(batch), features)
    noise = heads.train().inputs_of(batch)
    assert 0.09 < noise.max() <= 0.1
    assert -0.1 <= noise.min() < -0.09
    # A draft that is replayed was made from states without noise.
    assert torch.equal(heads.inputs_of(replace(batch, inputs=features)), features)


def test_any_target_has_its_eagle() -> None:
    """Whatever its own layers are: the drafter's is llama's."""
    other = tiny_target("gpt2")
    heads: Any = new_heads(HeadOptions.of(KINDS["eagle1"]), other, None)
    heads.borrow(other.model)
    drafter: Any = DRAFTERS["eagle1"](heads, VOCAB, SHAPES["dynamic"](width=2, nodes=5))
    run = Decoder(other.model, drafter, gamma=DEPTH).decode(PROMPTS, 8)
    assert run.outputs == plain_texts(other.model, PROMPTS, 8)


def test_a_target_with_narrow_embeddings_is_refused() -> None:
    other = tiny_target()
    other.model.set_input_embeddings(torch.nn.Embedding(VOCAB, 16))
    with pytest.raises(UserError, match="has embeddings of size 16 and hidden states"):
        new_heads(HeadOptions.of(KINDS["eagle1"]), other, None)


def test_the_weights_of_places_by_hand() -> None:
    """The second text is not trained at its second place."""
    shares = {
        1: torch.tensor([[0.5, 0.5]]),
        2: torch.tensor([[0.2, float("nan")]]),
        3: torch.tensor([[1.0, 1.0]]),
    }
    expected = {1: [[0.7, 1.0]], 2: [[0.2, 0.5]], 3: [[0.1, 0.5]]}
    for depth, weights in place_weights(shares, 0.0).items():
        torch.testing.assert_close(weights, torch.tensor(expected[depth]))
    # With a = 1 a place has as much weight as there are places from it on.
    assert place_weights(shares, 1.0)[1].tolist() == [[3.0, 2.0]]


# --- EAGLE-3 --------------------------------------------------------------------------------------


def test_taps_are_the_layers_that_engines_take() -> None:
    """Those put out what layers 2, n // 2 and n − 3 are given."""
    assert auxiliary_layers(7) == (1, 2, 3)
    assert auxiliary_layers(30) == (1, 14, 26)
    assert auxiliary_layers(32) == (1, 15, 28)
    heads = make("eagle3")
    assert heads.captured_layers == (1, 2, 3)
    ids = text()
    given: list[torch.Tensor] = []
    model = target("eagle3").model
    hooks = [
        model.model.layers[i].register_forward_pre_hook(lambda _, args: given.append(args[0]))
        for i in (2, 3, 4)
    ]
    model(ids)
    for hook in hooks:
        hook.remove()
    found = features_of(target("eagle3").model, heads, ids)
    assert all(
        torch.equal(found[layer], x) for layer, x in zip(heads.captured_layers, given, strict=True)
    )


@pytest.mark.parametrize("layers", [2, 4, 5, 6])
def test_a_target_without_three_taps_is_refused(layers: int) -> None:
    with pytest.raises(UserError, match=f"With {layers} layers these are .* at least 7 layers"):
        new_heads(HeadOptions.of(KINDS["eagle3"]), tiny_target(layers=layers), None)


def test_eagle3_starts_as_the_target_without_its_last_layers() -> None:
    heads: Any = new_heads(HeadOptions.of(KINDS["eagle3"]), target("eagle3"), None)
    heads.borrow(target("eagle3").model)
    ids = text(1, 10)
    features = features_of(target("eagle3").model, heads, ids)
    found = trained_logits(heads, ids, features)
    model = target("eagle3").model
    logits = model.lm_head(model.model.norm(features[3]))[0]
    for depth in range(1, DEPTH + 1):
        torch.testing.assert_close(found[depth][: 9 - depth], logits[: 9 - depth])
    assert {name.partition(".")[0] for name in heads.state_dict()} == {
        "fc",
        "midlayer",
        "norm",
        "output",
    }
    assert heads.midlayer.self_attn.q_proj.weight.shape == (32, 64)
    weight = heads.output.of(3)[0]
    assert weight.shape == (VOCAB, 32)
    # The nearest product of rank 8, and the same logits from its factors and from it.
    low: Any = new_heads(
        HeadOptions.of(KINDS["eagle3"] | {"output_rank": 8}), target("eagle3"), None
    )
    values = torch.linalg.svdvals(weight.double())
    torch.testing.assert_close(
        (low.output.of(3)[0] - weight).double().norm(), values[8:].norm(), rtol=1e-5, atol=0
    )
    assert torch.linalg.matrix_rank(low.output.of(3)[0]) == 8
    states = torch.randn(5, 32)
    logits = low.output.at(3, states)
    expand(low.output.layers)
    torch.testing.assert_close(low.output.at(3, states), logits, rtol=1e-4, atol=1e-5)
    assert [name for name, _ in low.output.named_parameters()] == ["layers.0.weight"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"type": "eagle1", "output": "own"}, "output is .own."),
        ({"type": "eagle1", "decay": 0.5}, "have no option 'decay'"),
        ({"type": "eagle3", "steps": 0}, "steps is 0"),
        ({"type": "hydra", "decay": 0.0}, "decay is 0"),
        ({"type": "eagle"}, "unknown type of heads 'eagle'"),
        ({"type": "eagle1", "output_rank": 0}, "output_rank is 0"),
        ({"type": "pass", "output_rank": 8}, "output_rank is 8; expected None"),
    ],
)
def test_bad_options_are_refused(given: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        HeadOptions.of(given)


def test_factors_that_save_nothing_are_refused() -> None:
    with pytest.raises(UserError, match=r"output_rank is 31: .* layer \[300, 32\]"):
        new_heads(HeadOptions.of({"type": "eagle1", "output_rank": 31}), target(), None)
