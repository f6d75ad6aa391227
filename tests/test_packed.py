"""Packed weights: the same results, nothing changed in the model, and they follow its weights."""

import copy
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from decode.base.errors import UserError
from decode.drafters import DRAFTERS
from decode.drafters.draft_vocabulary import reduce_output
from decode.drafters.small_lm import SmallLMDrafter
from decode.loop.decoding import Decoder
from decode.model.cache.cached_model import CachedLM
from decode.model.forward.lean_forward import LeanForward
from decode.model.forward.lean_parts import PackedLinear
from decode.model.forward.prepare_model import (
    can_pack,
    has_products,
    packed_copy,
    prepare,
    reason_against_lean,
)
from decode.model.forward.recognition import NotLean, lean_forward
from decode.model.forward.transformers_forward import TransformersForward
from decode.shapes import SHAPES
from tests.tiny import forbid_packing, own_text, tiny_model

# In which this CPU has matrix products; PyTorch converts without them.
DTYPES = [x for x in (torch.float32, torch.bfloat16, torch.float16) if has_products(x)]
IDS = torch.randint(3, 300, (2, 9), generator=torch.Generator().manual_seed(0))


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found


def through_slots(lm: CachedLM) -> torch.Tensor:
    lm.reset(2, 16)
    with torch.inference_mode():
        return lm.forward(IDS, np.zeros(2, dtype=np.int64))


@pytest.mark.parametrize(
    ("family", "dtype", "our_attention"),
    [
        ("llama", torch.float32, True),
        ("gpt2", torch.float32, True),
        ("gemma", torch.bfloat16, False),
        ("gpt2", torch.bfloat16, False),
    ],
)
def test_results_are_those_of_the_model(
    family: str, dtype: torch.dtype, our_attention: bool
) -> None:
    if not has_products(dtype):
        pytest.skip(f"this CPU has no products in {dtype}")
    model = tiny_model(family).to(dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert can_pack(model)
    packed = packed_copy(model, our_attention=our_attention)
    linear = [m for m in packed.modules() if isinstance(m, PackedLinear)]
    # Four of attention (gpt-2: two) and two or three of the MLP in each layer, and the output.
    assert len(linear) >= 2 * 4 + 1
    # Sums of 32 to 64 terms in another order.
    torch.testing.assert_close(
        logits(packed), logits(model), rtol=0, atol=2e-4 if dtype == torch.float32 else 0.25
    )
    assert not any(isinstance(m, PackedLinear) for m in model.modules())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    shared = {id(p) for p in model.parameters()}
    assert all(id(p) in shared for p in packed.parameters())


def test_changed_weights_are_packed_again() -> None:
    model = tiny_model("llama")
    lm = CachedLM(model)
    assert isinstance(lm.forward_pass, LeanForward)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(input_ids=IDS, labels=IDS).loss.backward()
    stale = through_slots(lm)
    optimizer.step()
    torch.testing.assert_close(through_slots(lm), logits(model), rtol=0, atol=2e-4)
    assert (stale - logits(model)).abs().max() > 0.1


def test_models_that_others_have_wrapped_stay_as_they_are() -> None:
    hooked = tiny_model("llama")
    hooked.model.layers[0].register_forward_hook(lambda *args: None)
    assert not can_pack(hooked)
    assert not can_pack(tiny_model("llama").to(torch.float64))
    forward = prepare(hooked)
    assert isinstance(forward, TransformersForward)
    assert forward.model is hooked


def test_a_model_is_prepared_once_and_freed_with_it() -> None:
    model = tiny_model("llama")
    prepared = prepare(model)
    drafter = SmallLMDrafter(model)
    assert Decoder(model, drafter).lm.forward_pass is prepared is drafter.lm.forward_pass
    freed = weakref.ref(prepared)
    del model, prepared, drafter
    gc.collect()
    assert freed() is None


def test_the_choice_stays_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    assert not isinstance(prepare(model, lean=False), LeanForward)
    assert not isinstance(CachedLM(model).forward_pass, LeanForward)
    assert CachedLM(model).forward_pass is not prepare(model, lean=True)
    assert isinstance(CachedLM(model).forward_pass, LeanForward)
    with pytest.raises(UserError, match="cannot run through the lean forward"):
        prepare(tiny_model("gpt2"), lean=True)
    forbid_packing(monkeypatch)
    with pytest.raises(UserError, match="cannot run through the lean forward"):
        prepare(tiny_model("llama"), lean=True)


def test_free_memory_decides_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two decoders that are compared run on the same kernels, however memory changes meanwhile."""
    model = tiny_model("llama")
    plain = Decoder(model, DRAFTERS["none"]())
    forbid_packing(monkeypatch)
    assert Decoder(model, DRAFTERS["ngram"]()).lm.forward_pass is plain.lm.forward_pass


def test_a_model_that_was_rebuilt_is_prepared_again() -> None:
    model = tiny_model("llama", tie=False)
    before = prepare(model)
    reduce_output(model, torch.arange(5, 50))
    assert prepare(model) is not before
    assert through_slots(CachedLM(model)).shape[-1] == 45


def test_an_output_layer_of_low_rank_runs_as_two_packed_products() -> None:
    model = tiny_model("llama", tie=False)
    reduce_output(model, torch.arange(5, 50), 7)
    lm = CachedLM(model)
    torch.testing.assert_close(through_slots(lm), logits(model), rtol=0, atol=2e-4)
    products: Any = lm.forward_pass.output
    assert [x.inputs[0] for x in products] == [32, 7]


LEAN: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": {"head_dim": 8, "sliding_window": 64},
    "gemma3_text": {"head_dim": 8, "sliding_window": 64},
    "phi3": {},
    "smollm3": {"layers": 4},
    "olmo2": {},
}


PROMPTS = [[5, 17, 250, 9, 5, 17], [7, 11, 13]]


def texts_in_the_loop(model: Any) -> list[list[int]]:
    """Greedy texts with chains that are often wrong; then the same with trees."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_output_embeddings().weight.mul_(torch.linspace(0.8, 1.2, 300)[:, None])
    texts = []
    for shape in ("chain", "static:widths=[2,1,2]"):
        drafter = SmallLMDrafter(other, shape=SHAPES.make(shape))
        run = Decoder(model, drafter, gamma=3, rule="exact").decode(PROMPTS, 12)
        assert run.counts.accepted.sum() > 0
        texts.append(run.outputs)
    assert texts[0] == texts[1]
    return texts[0]


@pytest.mark.parametrize("family", LEAN)
def test_standard_decoders_are_lean(family: str) -> None:
    model = tiny_model(family, **LEAN[family])
    lm = CachedLM(model)
    assert isinstance(lm.forward_pass, LeanForward)
    torch.testing.assert_close(through_slots(lm), logits(model), rtol=0, atol=1e-4)
    if family in ("phi3", "smollm3", "olmo2"):  # test_loop has texts of the others
        expected = [own_text(model, prompt, 12) for prompt in PROMPTS]
        assert texts_in_the_loop(model) == expected


def adapted(model: Any) -> str:
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(0)
    targets = ["q_proj", "v_proj", "down_proj"]
    inject_adapter_in_model(LoraConfig(r=4, target_modules=targets, init_lora_weights=False), model)
    return "Linear is no class of transformers or PyTorch"


def half_attention(*arguments: Any, **named: Any) -> Any:
    out, weights = sdpa_attention_forward(*arguments, **named)
    return 0.5 * out, weights


def registered(model: Any) -> str:
    """An attention of a user's own."""
    AttentionInterface.register("half", half_attention)
    AttentionMaskInterface.register("half", sdpa_mask)
    model.set_attn_implementation("half")
    return "its attention is 'half', not 'sdpa'"


def hooked(model: Any) -> str:
    layer = model.model.layers[0]
    layer.register_forward_hook(lambda module, inputs, output: 0.9 * output)
    return "another library has wrapped or quantised the model"


@pytest.mark.parametrize("change", [adapted, registered, hooked])
def test_a_changed_model_falls_back_says_why_once_and_decodes_its_text(
    change: Callable[[Any], str], caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("llama").eval()
    before = own_text(model, PROMPTS[0], 12)
    assert isinstance(prepare(model), LeanForward)
    assert not caplog.records
    reason = change(model)
    expected = [own_text(model, prompt, 12) for prompt in PROMPTS]
    assert expected[0] != before
    copied = copy.deepcopy(model)
    with caplog.at_level("WARNING"):
        assert texts_in_the_loop(model) == expected
        assert isinstance(prepare(model), TransformersForward)
    # One line for the target, one for the drafter.
    lines = [record.getMessage() for record in caplog.records]
    assert [line.endswith(f"than the lean one: {reason}") for line in lines] == [True] * 2
    caplog.clear()
    prepare(copied, lean=False)
    assert not caplog.records
    assert reason_against_lean(model) == reason


def test_a_switched_adapter_changes_the_text() -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    model = tiny_model("llama").eval()
    plain = [own_text(model, prompt, 12) for prompt in PROMPTS]
    adapted(model)
    assert texts_in_the_loop(model) != plain
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            layer.enable_adapters(False)
    assert texts_in_the_loop(model) == plain


def test_a_copy_has_no_dropout() -> None:
    """A model may still be in training mode when it is prepared."""
    model = tiny_model("gpt2", resid_pdrop=0.5)
    expected = [own_text(model.eval(), prompt, 12) for prompt in PROMPTS]
    model.train()
    prepare(model)
    assert texts_in_the_loop(model.eval()) == expected


def test_an_activation_that_differs_far_from_zero_is_not_lean() -> None:
    with pytest.raises(NotLean, match="parts of another kind"):
        lean_forward(tiny_model("llama", hidden_act="gelu_10"))


def test_why_products_are_not_packed_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(tiny_model("llama").to(torch.float64))
    prepare(tiny_model("gpt2"))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1000))
    prepare(tiny_model("llama"))
    dtype, kind, memory = (record.getMessage() for record in caplog.records)
    assert dtype.endswith("this CPU has no matrix products in float64")
    assert kind.startswith("GPT2LMHeadModel runs through transformers' forward")
    assert "half of the free memory" in memory


@pytest.mark.parametrize("family", ["gpt2", "granite", "cohere", "phi"])
def test_models_of_another_kind_run_through_transformers(family: str) -> None:
    """Granite has llama's parts, and scales what a layer adds."""
    options = {"residual_multiplier": 0.5} if family == "granite" else {}
    model = tiny_model(family, **options)
    with pytest.raises(NotLean):
        lean_forward(model)
    lm = CachedLM(model)
    torch.testing.assert_close(through_slots(lm), logits(model), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_small_factor_is_seen_in_16_bits_too(dtype: torch.dtype) -> None:
    """Granite with all factors 1 is a llama. Rounding hides no factor of 5%."""
    neutral = {"residual_multiplier": 1.0, "embedding_multiplier": 1.0, "logits_scaling": 1.0}
    lean_forward(tiny_model("granite", **neutral).to(dtype))
    for name, reason in (
        ("logits_scaling", "between its layers and its logits"),
        ("embedding_multiplier", "between its embedding and its layers"),
        ("residual_multiplier", "computes something else"),
    ):
        model = tiny_model("granite", **(neutral | {name: 1.05})).to(dtype)
        with pytest.raises(NotLean, match=reason):
            lean_forward(model)


def halved(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda x: 0.5 * forward(x)


def gelu(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = torch.nn.GELU()
    # The lean layer knows this activation, but not with what else the layer does.
    halved(model)


def relu(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = torch.nn.ReLU()


def without_norm(model: Any) -> None:
    model.model.layers[1].input_layernorm.forward = lambda x: x


def scaled_embedding(model: Any) -> None:
    embed = model.model.embed_tokens
    forward = model.model.forward
    model.model.forward = lambda input_ids, **options: forward(
        **(options | {"inputs_embeds": 3.0 * embed(input_ids)})
    )


def scaled_logits(model: Any) -> None:
    forward = model.forward

    def scaled(**options: Any) -> Any:
        out = forward(**options)
        out.logits = out.logits * 1.5
        return out

    model.forward = scaled


@pytest.mark.parametrize(
    "change", [halved, gelu, relu, without_norm, scaled_embedding, scaled_logits]
)
def test_a_model_that_computes_something_else_is_found(change: Callable[[Any], None]) -> None:
    """With the same parts, in 16 bits too: layers are compared in float32."""
    for dtype in DTYPES:
        model = tiny_model("llama").to(dtype)
        lean_forward(model)
        change(model)
        with pytest.raises(NotLean):
            lean_forward(model)


@pytest.mark.parametrize("kind", ["dynamic", "yarn", "llama3"])
def test_scaled_rotary_positions(kind: str) -> None:
    rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 10000.0}
    rope |= {"original_max_position_embeddings": 64}
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = tiny_model("llama", rope_parameters=rope)
    lm = CachedLM(model)
    assert isinstance(lm.forward_pass, LeanForward)
    # Twice as long as the text that the positions are scaled for.
    ids = torch.randint(3, 300, (2, 128), generator=torch.Generator().manual_seed(1))
    lm.reset(2, 128)
    with torch.inference_mode():
        found = lm.forward(ids, np.zeros(2, dtype=np.int64))
        torch.testing.assert_close(found, model(input_ids=ids).logits, rtol=0, atol=1e-4)
