"""EAGLE's layer that starts as the target's last one."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from decode.base.errors import UserError
from distill.teacher.feature_sources import LiveFeatures
from heads.heads_directory import new_heads
from heads.heads_module import HeadBatch, HeadOptions
from heads.last_layer import copy_last_layer, require_last_layer
from tests.stages import LOOP, drafter_weights, make_stage, plan_stage, run_stage, stage_context
from tests.tiny import VOCAB, tiny_target
from train.stages import STAGES

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

EAGLE1 = {"type": "eagle1", "depth": 2}
EAGLE3 = {"type": "eagle3", "steps": 2}


def scaled_target(layers: int = 7) -> Any:
    """A target whose norms have scales that count."""
    target = tiny_target(layers=layers)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, weight in target.model.named_parameters():
            if "norm" in name:
                weight.copy_(0.5 + torch.rand_like(weight))
    return target


def test_eagle3_starts_with_the_targets_last_layer_over_its_highest_features() -> None:
    """Its first step then computes what the target computes without the layers in between."""
    target = scaled_target()
    heads: Any = new_heads(HeadOptions.of(EAGLE3), target, None)
    copy_last_layer(heads, target.model, torch.tensor([[5, 9, 20]]))
    heads.borrow(target.model)
    ids = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    features = LiveFeatures(target.model, heads.captured_layers).features(
        ids, torch.ones_like(ids), []
    )
    batch = HeadBatch(ids, torch.ones_like(ids, dtype=torch.bool), features)
    first = next(iter(heads.predictions(batch, [1])))

    layers = target.model.model.layers
    tap = heads.captured_layers[-1]
    target.model.model.layers = nn.ModuleList([*layers[: tap + 1], layers[-1]])
    target.model.config.num_hidden_layers = tap + 2
    expected = target.model.model(ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(first.states, expected[first.positions], rtol=1e-4, atol=1e-5)


def test_eagle1_computes_the_targets_last_layer_in_the_scale_of_features() -> None:
    """On states of the size that was measured: final norm of the last layer of h, over the final
    norm of h."""
    target = scaled_target(2)
    with torch.no_grad():  # a scale for each number would move the size, which a norm divides by
        target.model.model.norm.weight.fill_(1.7)
    heads: Any = new_heads(HeadOptions.of(EAGLE1), target, None)
    ids = torch.randint(3, VOCAB, (1, 9), generator=torch.Generator().manual_seed(1))
    copy_last_layer(heads, target.model, ids)
    states: list[torch.Tensor] = []
    norm = target.model.model.norm
    handle = norm.register_forward_pre_hook(lambda module, inputs: states.append(inputs[0]))
    target.model(ids)
    handle.remove()
    size = states[0].square().mean(-1).sqrt().median()
    h = states[0] / states[0].square().mean(-1, keepdim=True).sqrt() * size
    positions = torch.arange(9)[None]
    turns = target.model.model.rotary_emb(h, positions)
    expected = target.model.model.layers[-1](h, position_embeddings=turns) * 1.7 / size

    def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=True
        )

    feature = norm(h)
    found = heads.layers[0](feature, feature, turns, attend)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("heads", "layer"), [(EAGLE1, "layers.0"), (EAGLE3, "midlayer")])
def test_a_stage_trains_from_there(heads: Any, layer: str, tmp_path: Path) -> None:
    """What reads and writes the residual stream inside the layer is the target's, but for one tiny
    step. A sharded target is refused."""
    target = scaled_target()
    settings: Any = {
        "heads": heads,
        "losses": {"forward_kl": 1.0},
        "loop": LOOP | {"max_steps": 1},
        "optimizer": {"lr": 1e-9, "warmup_steps": 0},
    }
    context = stage_context(tmp_path, target)
    stage = make_stage("heads", "copied", copy_last_layer=True, **settings)
    plan_stage(context, stage)
    weights = drafter_weights(run_stage(context, stage))
    last = target.model.model.layers[-1].state_dict()
    same = {"mlp.gate_proj", "mlp.up_proj"}
    if heads is EAGLE3:
        same |= {"mlp.down_proj", "self_attn.o_proj", "post_attention_layernorm"}
    for name in same:
        found = weights[f"heads.safetensors {layer}.{name}.weight"]
        torch.testing.assert_close(found, last[f"{name}.weight"], rtol=0, atol=1e-6)
    assert STAGES["heads"].needs_complete_target(stage) == "copy_last_layer"


@pytest.mark.parametrize(
    ("options", "target", "message"),
    [
        ({"type": "medusa"}, "llama", "is for eagle1 and eagle3 heads, but these are medusa"),
        (EAGLE3, "qwen3", r"has self_attn.k_norm.weight \[\d+\]; expected nothing"),
        (EAGLE3, "gemma", "SiLU, a final RMS norm and plain weights, but GemmaForCausalLM"),
        (EAGLE1, "gpt2", "one list of layers, .* but GPT2LMHeadModel is of another"),
        (
            EAGLE3 | {"layer": {"intermediate_size": 48}},
            "llama",
            r"mlp.down_proj.weight \[32, 64\]; expected mlp.down_proj.weight \[32, 48\]",
        ),
    ],
)
def test_a_layer_that_does_not_fit_is_refused_by_its_parts(
    options: Any, target: str, message: str
) -> None:
    other = tiny_target(target, layers=7)
    heads = new_heads(HeadOptions.of(options), other, None)
    with pytest.raises(UserError, match=f"stage x: copy_last_layer .*{message}"):
        require_last_layer(heads, other.model, stage="x")


def test_heads_that_are_continued_have_their_layer(tmp_path: Path) -> None:
    first = make_stage("heads", "first", heads=EAGLE3)
    with pytest.raises(UserError, match="copy_last_layer is for new heads"):
        make_stage("heads", "x", first, heads=EAGLE3, start="first", copy_last_layer=True)
