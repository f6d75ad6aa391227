"""Targets that are not whole numbers on one device: offloaded, shared out, quantised; and Apple's
mps, which no test machine has."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, TorchAoConfig
from typer.testing import CliRunner

import heads.kinds  # noqa: F401  (registers its kinds)
from decode.base.errors import UserError
from decode.drafters import Drafter, NoDrafter
from decode.drafters.lookup.ngram import NgramDrafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder
from decode.model.cache.slots import Slots
from decode.model.forward.lean_forward import LeanForward
from decode.model.forward.prepare_model import can_pack, prepare
from decode.model.identity import require_same_weights, sample_weights, sampled_weights_sha256
from decode.model.loading import load_target, resolve_device
from decode.model.pretrained import input_device, require_finite
from decode.model.without_weights import load_shapes
from decode.opening.directory import open_drafter
from decode.shapes import SHAPES
from distill.teacher.feature_sources import LiveFeatures
from distill.teacher.linear_logits import linear_logits
from distill.untrained_student import student_from_layers
from draftsmith.cli.main import app
from heads.heads_directory import new_heads, save_heads
from heads.options import HeadOptions
from tests.tiny import as_target, save_tiny, tiny_model, tiny_target, tiny_tokenizer
from train.base.console import Reporter
from train.run.config_checks import validate_config
from train.run.run import Run

PROMPTS = [[5, 17, 250, 9, 42], [7], [30] * 9]
TREE = "static:widths=[2,1]"


def require_plain_text(model: Any, expected: Any, drafters: dict[str, Drafter]) -> None:
    """Rows start at different slots, and end at different times (EOS)."""
    for name, drafter in drafters.items():
        run = Decoder(model, drafter, gamma=3, eos_token_ids=range(0, 300, 9))
        found = run.decode(PROMPTS, 16)
        assert found.outputs == expected.outputs, name
        assert found.counts.accepted.sum() > 0, name


def plain_text(model: Any) -> Any:
    found = Decoder(model, NoDrafter(), eos_token_ids=range(0, 300, 9)).decode(PROMPTS, 16)
    assert len({len(output) for output in found.outputs}) > 1
    return found


def small(**options: Any) -> SmallLMDrafter:
    """The same model as the target, whole."""
    return SmallLMDrafter(tiny_model("llama", tie=False), **options)


# --- shared out and offloaded ---------------------------------------------------------------------


def _dispatched(model: Any, last: str, directory: Path) -> Any:
    places = dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.norm"), "cpu")
    places |= {"model.rotary_emb": "cpu", "model.layers.1": last, "lm_head": last}
    return accelerate.dispatch_model(
        model, places, main_device="cpu", offload_dir=directory, force_hooks=True
    )


PLACED: dict[str, Callable[[Any, Path], Any]] = {
    "cpu offload": lambda model, _: accelerate.cpu_offload(model, execution_device="cpu"),
    "disk offload": lambda model, path: accelerate.disk_offload(
        model, path, execution_device=torch.device("cpu")
    ),
    "part on disk": lambda model, path: _dispatched(model, "disk", path),
    "hooks only": lambda model, path: _dispatched(model, "cpu", path),
}


@pytest.mark.parametrize("how", PLACED)
def test_targets_under_a_device_map_say_the_same(how: str, tmp_path: Path) -> None:
    whole = tiny_model("llama", tie=False).requires_grad_(False)
    expected = plain_text(whole)
    target = as_target(PLACED[how](whole, tmp_path))
    assert not can_pack(target.model)
    assert target.device == input_device(target.model) == torch.device("cpu")
    tree = small(shape=SHAPES.make(TREE))
    drafters = {"chain": small(), "tree": tree}
    require_plain_text(target.model, expected, drafters)
    # Sampled, all random numbers are on the device of the inputs.
    sampling = Sampling(1.0, top_k=20)
    runs = [
        Decoder(model, small(), sampling=sampling).decode(PROMPTS, 8).outputs
        for model in (target.model, tiny_model("llama", tie=False))
    ]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("how", ["cpu offload", "part on disk"])
def test_what_reads_offloaded_weights_is_refused(how: str, tmp_path: Path) -> None:
    whole = as_target(tiny_model("llama", tie=False).requires_grad_(False))
    made = new_heads(HeadOptions.of({"type": "medusa", "heads": 2}), whole, None)
    save_heads(tmp_path / "heads", made, target=whole, provenance={})
    placed = as_target(PLACED[how](tiny_model("llama", tie=False), tmp_path / "off"))
    with pytest.raises(
        UserError, match=r"heads on the target must read .*LlamaForCausalLM's are off"
    ):
        open_drafter(str(tmp_path / "heads"), placed)
    with pytest.raises(UserError, match="a cache of them, must read the target's weights"):
        sampled_weights_sha256(placed.model)
    with pytest.raises(UserError, match="training on the target's distribution must read"):
        linear_logits(placed.model)
    with pytest.raises(UserError, match=r"cannot be copied: .*quantised nor offloaded"):
        student_from_layers(placed.model, [0, 1])


class OneDevice(TorchDispatchMode):
    """Refuses operations on tensors of several devices, as two accelerators do."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = {x.device for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        copies = op in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        assert copies or len(found) <= 1, (op, found)
        return op(*args, **(kwargs or {}))


def test_layers_of_several_devices_keep_their_slots() -> None:
    """The device `meta` stands for another accelerator: it has no values, but it is another."""
    devices = (torch.device("cpu"), torch.device("meta"), torch.device("cpu"))
    slots = Slots(3, 2, 12, torch.device("cpu"))

    def feed(start: np.ndarray, rows: int) -> None:
        slots.place(start, 3)
        for layer, device in zip(slots.layers, devices, strict=True):
            states = torch.ones(rows, 2, 3, 4, device=device)
            with OneDevice():
                keys, _ = layer.update(states, states)
            assert keys.device == device

    feed(np.array([0, 0]), 2)
    with OneDevice():
        slots.commit(np.array([0, 0]), np.array([[0, 2, 2], [0, 1, 2]]), np.array([2, 3]))
    feed(np.array([2, 3]), 2)  # ragged
    with OneDevice():
        slots.keep_rows(np.array([1]))
    feed(np.array([6]), 1)
    assert [layer.keys.shape[0] for layer in slots.layers] == [1, 1, 1]


def _evaluated(path: Path, *options: str) -> dict[str, Any]:
    arguments = ["evaluate", "--drafter", "ngram", "--prompts", str(path / "rows.jsonl")]
    arguments += ["--target", str(path / "model"), "--max-new-tokens", "8", "--timed-prompts", "1"]
    arguments += ["--json", str(path / "figures.json"), *options]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    (row,) = json.loads((path / "figures.json").read_text("utf-8"))["rows"]
    figures: dict[str, Any] = row["evaluation"]
    return figures


def test_a_target_is_loaded_by_a_device_map(tmp_path: Path) -> None:
    """By the device of each part, and by name with so little memory that layers are on the disk."""
    path = str(save_tiny(tmp_path / "model", tie=False))
    expected, tree = plain_text(load_target(path).model), {"tree": small(shape=SHAPES.make(TREE))}
    places = dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.norm"), "cpu")
    places |= {"model.layers.1": "disk", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    for options in ({"device_map": places}, {"device_map": "auto", "max_memory": {"cpu": "90KB"}}):
        placed = load_target(path, **options)
        layers = placed.model.model.layers
        assert [next(x.parameters()).device.type for x in layers][1] == "meta"
        assert placed.device.type == "cpu"
        require_plain_text(placed.model, expected, tree)
    with pytest.raises(UserError, match="device 'cpu' and a device_map were given"):
        load_target(path, device="cpu", device_map="auto")
    with pytest.raises(UserError, match=r"unknown device_map 'autos'.*Did you mean \"auto"):
        load_target(path, device_map="autos")
    with pytest.raises(UserError, match="leave one of them out"):
        load_target(path, device_map="auto", sharded=True)
    with pytest.raises(UserError, match="no device_map was named"):
        load_target(path, max_memory={"cpu": "1GiB"})


def test_commands_and_configs_spread_a_target(tmp_path: Path, fresh_accelerate: None) -> None:
    save_tiny(tmp_path / "model", tie=False)
    row = json.dumps({"prompt": "the fox sells", "response": "a dog sells the fox"})
    (tmp_path / "rows.jsonl").write_text(f"{row}\n" * 3, "utf-8")
    spread = ("--device-map", 'auto:max_memory={"cpu":"90KB"}')
    one, several = (_evaluated(tmp_path, *options) for options in ((), spread))
    assert several["identical_to_plain"] == 1
    for figures in (one, several):
        del figures["draft_lengths"]["ms_per_step"]
    assert one["draft_lengths"] == several["draft_lengths"]
    raw: dict[str, Any] = {
        "name": "spread",
        "output_dir": str(tmp_path),
        "trackers": [],
        "target": {
            "model": str(tmp_path / "model"),
            "device_map": "auto",
            "max_memory": {"cpu": "90KB"},
        },
        "data": {"train": "rows.jsonl", "test": "rows.jsonl", "duplicates": "keep"},
        "evaluation": {"baselines": []},
        "stages": [{"name": "answers", "kind": "generate", "max_new_tokens": 6}],
    }

    def run_of(raw: dict[str, Any]) -> Run:
        config = validate_config(raw, base_dir=tmp_path)
        return Run(config, Accelerator(cpu=True), Reporter(silent=True))

    run = run_of(raw)
    run.execute()
    assert next(run.target.model.model.layers[1].parameters()).device.type == "meta"
    placed, plain = (
        LiveFeatures(target.model, [0, 1]).features(ids, torch.ones_like(ids), [])
        for ids in [torch.tensor([[5, 9, 7]])]
        for target in (run.target, load_target(str(tmp_path / "model")))
    )
    # A layer that accelerate moves is multiplied by PyTorch's own library.
    for layer in plain:
        torch.testing.assert_close(placed[layer], plain[layer])
    # A cache stores a hash of the target's weights. Offloaded ones show before the first stage.
    states = {"name": "states", "kind": "feature_cache", "captured_layers": [0, 1]}
    cached = raw | {"name": "cached", "stages": [*raw["stages"], states]}
    with pytest.raises(UserError, match="a cache of hidden states must read the target's weights"):
        run_of(cached).execute()
    assert not (tmp_path / "cached" / "stages").exists()
    raw["stages"].append({"name": "heads", "kind": "heads", "heads": {"type": "medusa"}})
    with pytest.raises(UserError, match=r"heads \(kind: heads\) needs the target on one device"):
        validate_config(raw, base_dir=tmp_path)


# --- mps ------------------------------------------------------------------------------------------


def test_mps_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no float64. Only what is chosen can be tested: there is no such machine here."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(UserError, match="mps' has no float64"):
        resolve_device("mps")


# --- quantised ------------------------------------------------------------------------------------


class Int8Linear(nn.Module):
    """Weights in 8 bits with a scale for each row, as parameters, like bitsandbytes has them."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        rounded = (layer.weight.detach() / scale).round().to(torch.int8)
        self.weight = nn.Parameter(rounded, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)


def _int8(model: Any) -> Any:
    for part in list(model.base_model.modules()):
        for name, child in part.named_children():
            if type(child) is nn.Linear:
                setattr(part, name, Int8Linear(child))
    return model


TORCHAO = "torchao is not installed; install it with: make test-quantised"


def _torchao(model: Any) -> Any:
    torchao = pytest.importorskip("torchao.quantization", reason=TORCHAO)
    torchao.quantize_(model.base_model, torchao.Int8WeightOnlyConfig())
    return model


@pytest.mark.filterwarnings("ignore")  # of the packages that are optional
@pytest.mark.parametrize("quantise", [_int8, pytest.param(_torchao, marks=pytest.mark.quantised)])
def test_quantised_targets(quantise: Callable[[Any], Any], tmp_path: Path) -> None:
    """Text is plain decoding's. Heads are for the quantised target that they were made for, and not
    for the model that it was made of."""
    whole = tiny_model("llama", tie=False).requires_grad_(False)
    target = as_target(quantise(tiny_model("llama", tie=False)).requires_grad_(False).eval())
    model = target.model
    assert not can_pack(model)
    expected = plain_text(model)
    tree = SmallLMDrafter(model, shape=SHAPES.make(TREE))
    made = new_heads(HeadOptions.of({"type": "eagle1", "depth": 2}), target, None)
    save_heads(tmp_path / "heads", made, target=target, provenance={})
    opened = open_drafter(str(tmp_path / "heads"), target)
    run = Decoder(model, opened, gamma=2, eos_token_ids=range(0, 300, 9)).decode(PROMPTS, 16)
    assert run.outputs == expected.outputs
    assert run.counts.drafted.sum() > 0
    lookup = NgramDrafter(1, 3)
    found = Decoder(model, lookup, eos_token_ids=range(0, 300, 9)).decode(PROMPTS, 16)
    assert found.outputs == expected.outputs
    require_plain_text(model, expected, {"small": SmallLMDrafter(model), "tree": tree})
    with pytest.raises(UserError, match=r"cannot be copied: .*quantised nor offloaded"):
        student_from_layers(model, [0])
    assert (
        sampled_weights_sha256(model)
        == sampled_weights_sha256(model)
        != sampled_weights_sha256(whole)
    )
    with pytest.raises(UserError, match=r"other weights|another model"):
        require_same_weights(sample_weights(model), "float32", whole, "it")


def _save_float8(directory: Path) -> Path:
    """A checkpoint in 8-bit floats with a scale for each block of 16 × 16 numbers."""
    save_tiny(directory, tie=False)
    weights = load_file(directory / "model.safetensors")
    for name in [name for name, x in weights.items() if ".layers." in name and x.ndim == 2]:
        rows, columns = weights[name].shape
        blocks = weights[name].view(rows // 16, 16, columns // 16, 16)
        scale = blocks.abs().amax((1, 3), keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
        weights[name] = (blocks / scale).view(rows, columns).to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = scale.view(rows // 16, columns // 16)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text("utf-8"))
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [16, 16],
        "modules_to_not_convert": ["lm_head"],
    }
    (directory / "config.json").write_text(json.dumps(config), "utf-8")
    return directory


def test_a_checkpoint_in_8_bits_is_loaded_by_its_quantiser(tmp_path: Path) -> None:
    """On a CPU transformers' quantiser gives plain weights, so the loop runs the lean forward."""
    path = _save_float8(tmp_path / "target")
    target = load_target(str(path), dtype="float32", device="cpu")
    whole = tiny_model("llama", tie=False)
    for name, weight in target.model.named_parameters():
        expected = whole.get_parameter(name)
        step = 0.07 * expected.abs().max() if ".layers." in name and weight.ndim == 2 else 0
        assert (weight - expected).abs().max() <= step, name
    assert type(prepare(target.model)) is LeanForward
    require_plain_text(target.model, plain_text(target.model), {"small": small()})
    # A plan counts the bytes of the files: a byte for each number that is quantised.
    planned = load_shapes(str(path)).weight_bytes
    assert planned == (path / "model.safetensors").stat().st_size
    assert planned < sum(p.nbytes for p in whole.parameters())


@pytest.mark.quantised
@pytest.mark.filterwarnings("ignore")  # of torchao
@pytest.mark.parametrize("bits", [8, 4])
def test_a_checkpoint_of_torchao_decodes_as_it_says(bits: int, tmp_path: Path) -> None:
    """transformers quantises the weights, stores them, and loads them by their config."""
    torchao = pytest.importorskip("torchao.quantization", reason=TORCHAO)
    plain, path = save_tiny(tmp_path / "plain", tie=False), tmp_path / "target"
    config = torchao.Int8WeightOnlyConfig()
    if bits == 4:
        config = torchao.IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=torchao.granularity.PerGroup(32)
        )
    AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, quantization_config=TorchAoConfig(config)
    ).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    target = load_target(str(path), dtype="float32", device="cpu")
    model = target.model
    assert type(model.model.layers[0].mlp.up_proj.weight) is not nn.Parameter
    assert not can_pack(model)
    tree = SmallLMDrafter(model, shape=SHAPES.make(TREE))
    require_plain_text(model, plain_text(model), {"small": SmallLMDrafter(model), "tree": tree})
    sizes = [load_shapes(str(place)).weight_bytes for place in (plain, path)]
    assert sizes[1] < sizes[0]
    # A weight that is not quantised is still checked.
    model.model.norm.weight.data[0] = torch.nan
    with pytest.raises(UserError, match=r"NaN or infinite: model\.norm\.weight"):
        require_finite(model, "it")


def test_an_integer_that_differs_is_another_target() -> None:
    model = _int8(tiny_target(tie=False).model)
    sample = sample_weights(model)
    require_same_weights(sample, "float32", model, "it")
    model.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    with pytest.raises(UserError, match="it has other weights than the target in use"):
        require_same_weights(sample, "float32", model, "it")
