"""GGUF targets compute what the models did that they were written from, or are refused by name."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from decode.base.errors import UserError
from decode.model.loading import load_target
from decode.model.pretrained import longest_text
from decode.model.without_weights import load_shapes
from tests.gguf_models import ARCHITECTURES, BASE, small_gguf_model, write_model

IDS = torch.tensor([[5, 17, 250, 9, 42, 7, 8, 100, 200, 30, 31, 32] * 3])


def scaled(kind: str, **fields: Any) -> dict[str, Any]:
    return BASE | {"rope_type": kind} | fields


YARN = scaled("yarn", factor=4.0, original_max_position_embeddings=64)
FULL = {"rope_type": "default", "rope_theta": 1e6}


def keys(**values: Any) -> Callable[[Any], None]:
    """Adds keys of the architecture that is written, with _ for the dots of `rope.scaling.`."""

    def add(writer: Any) -> None:
        for name, value in values.items():
            key = f"{writer.arch}.rope.scaling.{name}"
            if isinstance(value, str):
                writer.add_string(key, value)
            else:
                (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(key, value)

    return add


def same_logits(path: Path, model: Any) -> Any:
    """Load the file, compare its logits with the model's, and return the loaded target."""
    target = load_target(str(path), dtype="float32", device="cpu")
    assert torch.allclose(target.model(IDS).logits, model(IDS).logits, atol=2e-4)
    assert load_shapes(str(path)).model.config.to_dict() == target.model.config.to_dict()
    return target


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_what_a_file_says_is_what_its_model_computes(architecture: str, tmp_path: Path) -> None:
    model = small_gguf_model(architecture)
    write_model(tmp_path / "model.gguf", architecture, model)
    same_logits(tmp_path / "model.gguf", model)


@pytest.mark.parametrize(
    ("architecture", "fields", "extra"),
    [
        (
            "llama",
            {"rope_parameters": scaled("linear", factor=4.0)},
            keys(type="linear", factor=4.0),
        ),
        (
            "llama",
            {"rope_parameters": YARN},
            keys(type="yarn", factor=4.0, original_context_length=64),
        ),
        (
            "qwen2",
            {
                "rope_parameters": YARN
                | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3}
            },
            keys(
                type="yarn",
                factor=4.0,
                original_context_length=64,
                yarn_beta_fast=16.0,
                yarn_beta_slow=2.0,
                yarn_attn_factor=1.3,
            ),
        ),
        (
            "gemma3",
            {
                "rope_parameters": {
                    "full_attention": FULL | {"rope_type": "linear", "factor": 8.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
            keys(type="linear", factor=8.0),
        ),
        (
            "nemotron",
            {"rope_parameters": scaled("linear", factor=2.0, partial_rotary_factor=0.5)},
            keys(type="linear", factor=2.0),
        ),
    ],
)
def test_scaled_positions(
    architecture: str, fields: dict[str, Any], extra: Callable[[Any], None], tmp_path: Path
) -> None:
    model = small_gguf_model(architecture, **fields)
    write_model(tmp_path / "model.gguf", architecture, model, extra)
    target = same_logits(tmp_path / "model.gguf", model)
    target.model.save_pretrained(tmp_path / "saved")
    target.tokenizer.save_pretrained(tmp_path / "saved")
    again = load_target(str(tmp_path / "saved"), dtype="float32", device="cpu")
    assert torch.equal(again.model(IDS).logits, target.model(IDS).logits)


@pytest.mark.parametrize("original", [64, 8192])
def test_slowed_frequencies(original: int, tmp_path: Path) -> None:
    """Llama 3.1's factors, which a file has as a tensor; others are taken as they are."""
    rope = scaled(
        "llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=original,
    )
    model = small_gguf_model("llama", rope_parameters=rope | {"rope_theta": 500000.0})
    plain = 500000.0 ** -(torch.arange(0, 8, 2).float() / 8)
    slow = plain / ROPE_INIT_FUNCTIONS["llama3"](model.config, torch.device("cpu"))[0]
    assert slow.max() > 1
    path = tmp_path / "model.gguf"
    write_model(path, "llama", model, tensors={"rope_freqs.weight": slow})
    config = same_logits(path, model).model.config
    assert longest_text(config) == model.config.max_position_embeddings
    assert config.rope_parameters["rope_type"] == ("llama3" if original == 8192 else "longrope")


@pytest.mark.parametrize("part", [1.0, 0.5])
def test_longrope(part: float, tmp_path: Path) -> None:
    pairs = int(8 * part) // 2
    short, long = [1.0 + n for n in range(pairs)], [2.0 + 3 * n for n in range(pairs)]
    rope = scaled("longrope", short_factor=short, long_factor=long, partial_rotary_factor=part)
    model = small_gguf_model(
        "phi3", rope_parameters=rope, original_max_position_embeddings=64, sliding_window=20
    )
    attention = math.sqrt(1 + math.log(256 / 64) / math.log(64))
    factors = {"short": short, "long": long}
    write_model(
        tmp_path / "model.gguf",
        "phi3",
        model,
        keys(type="longrope", original_context_length=64, attn_factor=attention),
        {f"rope_factors_{name}.weight": torch.tensor(factor) for name, factor in factors.items()},
    )
    target = same_logits(tmp_path / "model.gguf", model)
    # Above, another scaling starts, which a cache of keys cannot follow.
    assert target.max_positions == 64


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_largest_gemma_divides_attention_otherwise(
    architecture: str, layers: int, tmp_path: Path
) -> None:
    model = small_gguf_model(architecture, num_hidden_layers=layers, query_pre_attn_scalar=8)
    write_model(tmp_path / "model.gguf", architecture, model)
    assert load_shapes(str(tmp_path / "model.gguf")).model.config.query_pre_attn_scalar == 8


def test_gemma_without_windows(tmp_path: Path) -> None:
    model = small_gguf_model("gemma3", layer_types=["full_attention"] * 6)
    write_model(tmp_path / "model.gguf", "gemma3", model)
    same_logits(tmp_path / "model.gguf", model)


def foreign_key(key: str, value: Any) -> Callable[[Any], None]:
    return lambda writer: writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))


@pytest.mark.parametrize(
    ("extra", "tensors", "message"),
    [
        (
            foreign_key("llama.attention.scale", 0.5),
            {},
            r"attention\.scale = 0\.5, which is not read",
        ),
        (foreign_key("llama.attention.causal", False), {}, r"attention\.causal = False"),
        (foreign_key("llama.a.key.of.tomorrow", 3), {}, r"llama\.a\.key\.of\.tomorrow = 3"),
        (foreign_key("llama.rope.scaling.type", "new"), {}, r"scaling\.type = 'new'"),
        (foreign_key("llama.rope.scaling.yarn_log_multiplier", 0.1), {}, "yarn_log_multiplier"),
        (foreign_key("llama.rope.dimension_count_swa", 4), {}, "dimension_count_swa"),
        (foreign_key("llama.attention.sliding_window", 16), {}, "sliding_window"),
        (foreign_key("adapter.type", "lora"), {}, r"the key adapter\.type"),
        (foreign_key("general.type", "mmproj"), {}, "holds a mmproj"),
        (foreign_key("split.count", 3), {}, r"part 1 of 3 .*llama-gguf-split --merge"),
        (None, {"blk.0.attn_q.bias": torch.ones(32)}, r"tensors .* blk\.0\.attn_q\.bias"),
        (None, {"rope_factors_long.weight": torch.ones(4)}, "do not go together"),
    ],
)
def test_what_is_not_read_is_refused_by_name(
    extra: Callable[[Any], None] | None, tensors: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, "llama", small_gguf_model("llama"), extra or (lambda writer: None), tensors)
    with pytest.raises(UserError, match=message):
        load_target(str(path), dtype="float32", device="cpu")


def test_keys_without_effect_pass(tmp_path: Path) -> None:
    def extra(writer: Any) -> None:
        for key, value in {
            "llama.attention.clamp_kqv": 0.0,
            "llama.expert_count": 0,
            "llama.rope.scaling.type": "none",
            "llama.rope.scaling.finetuned": True,
            "general.sampling.temp": 0.5,
            "quantize.imatrix.entries_count": 3,
            "tool.of.someone": "note",
        }.items():
            foreign_key(key, value)(writer)

    model = small_gguf_model("llama")
    write_model(tmp_path / "model.gguf", "llama", model, extra)
    same_logits(tmp_path / "model.gguf", model)


def test_types_of_weights_that_the_package_does_not_know(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, "llama", small_gguf_model("llama"))
    data = path.read_bytes()
    name = b"blk.0.attn_q.weight"
    kind = data.index(name) + len(name) + 4 + 2 * 8  # behind the count of dimensions and two
    path.write_bytes(data[:kind] + (137).to_bytes(4, "little") + data[kind + 4 :])
    with pytest.raises(UserError, match=r"attn_q\.weight .* 137\) .* Install a newer gguf"):
        load_target(str(path))


def test_a_file_is_parsed_once_into_plain_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, parsed = tmp_path / "model.gguf", []
    write_model(path, "llama", small_gguf_model("llama"))

    class Counted(gguf.GGUFReader):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            parsed.append(type(self.data))

    monkeypatch.setattr(gguf, "GGUFReader", Counted)
    for load in (load_target, load_shapes):
        parsed.clear()
        load(str(path))
        assert parsed == [np.ndarray]
