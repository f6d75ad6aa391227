"""The module of multi-token prediction: imported, trained, and given back to a checkpoint."""

import hashlib
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from decode.base.errors import UserError
from decode.model.hidden_states import FINAL
from decode.model.loading import Target, load_target
from decode.opening.directory import open_drafter
from draftsmith.auditing.verify_export import verify_export
from draftsmith.export import ExportOptions, ImportOptions
from draftsmith.export.export_directory import check_export, export_drafter, reload_export
from draftsmith.export.formats import FORMATS
from draftsmith.export.import_directory import import_drafter
from heads.heads_directory import new_heads, read_heads, save_heads
from heads.heads_module import HeadBatch
from heads.layers.family_layer import run_layer
from heads.mtp_checkpoint import INDEX
from heads.mtp_heads import MtpHeads
from heads.options import HeadOptions
from tests.export import assert_same_counts, needs, task
from tests.mtp_targets import change_tensors, save_mtp_target, write_qwen_gguf
from tests.stages import make_stage, run_stage, stage_context
from tests.tiny import finish_gguf, tiny_target
from tests.training import assert_equal

SPECULATORS = "speculators-mtp"


def in_shards(directory: Path) -> None:
    """Distribute the only file of a checkpoint over three."""
    file = directory / "model.safetensors"
    weights, places = load_file(file), {}
    for number in range(3):
        part = {name: weights[name] for name in sorted(weights)[number::3] if "mtp" not in name}
        if number == 2:
            part |= {name: x for name, x in weights.items() if "mtp" in name}
        save_file(part, directory / f"model-{number}.safetensors", {"format": "pt"})
        places |= dict.fromkeys(part, f"model-{number}.safetensors")
    file.unlink()
    size = sum(x.nbytes for x in weights.values())
    (directory / INDEX).write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": places}), "utf-8"
    )


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    return {name: x for file in files for name, x in load_file(file).items()}


def hashes(directory: Path) -> dict[str, str]:
    files = [*directory.glob("*.safetensors"), *directory.glob("*.json")]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def with_its_module(
    place: Path, family: str = "qwen3_5_text", depth: int | None = None, **shape: int
) -> Target:
    """The target of a checkpoint `target`, whose module is imported into `read`."""
    directory = save_mtp_target(place / "target", family, **shape)
    target = load_target(str(directory))
    import_drafter(str(directory), target, place / "read", ImportOptions(depth=depth))
    return target


def changed(directory: Path, target: Any, out: Path) -> Path:
    """The drafter with another projection."""
    heads: Any = read_heads(directory, target)
    with torch.no_grad():
        heads.layers[0].eh_proj.weight[0, 0] += 1
    save_heads(out, heads, target=target, provenance={})
    return out


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5_moe_text"])
def test_a_module_that_is_given_back_changes_no_other_bit(family: str, tmp_path: Path) -> None:
    directory = save_mtp_target(tmp_path / "target", family)
    weights = {name: x.bfloat16() for name, x in tensors(directory).items()}
    change_tensors(directory, weights)
    if family != "deepseek_v3":
        in_shards(directory)
    target = load_target(str(directory))
    imported = import_drafter(str(directory), target, tmp_path / "read", ImportOptions(depth=2))
    assert (imported.kind, imported.layout, imported.depth) == ("mtp", "mtp", 2)
    assert "has a module of 1 layer" in imported.notes[0]
    drafter = changed(tmp_path / "read", target, tmp_path / "drafter")
    export_drafter(drafter, "mtp", tmp_path / "out")
    found, before = tensors(tmp_path / "out"), tensors(directory)
    other = [name for name in before if not torch.equal(found[name], before[name])]
    assert found.keys() == before.keys()
    assert [name.split(".")[-2] for name in other] == [
        "eh_proj" if family == "deepseek_v3" else "fc"
    ]
    assert found[other[0]].dtype == torch.bfloat16
    files = hashes(directory)
    untouched = {name for name, each in files.items() if hashes(tmp_path / "out")[name] == each}
    assert files.keys() - untouched == {
        "model.safetensors" if family == "deepseek_v3" else "model-2.safetensors"
    }
    again: Any = reload_export(tmp_path / "out", check_export(tmp_path / "out"), target)
    heads = read_heads(drafter, target).bfloat16().float()
    assert_equal(dict(again.heads.state_dict()), dict(heads.state_dict()))
    assert again.heads.depth == 2


@pytest.mark.parametrize("sharded", [False, True])
def test_a_module_that_a_fine_tuning_lost_comes_back(sharded: bool, tmp_path: Path) -> None:
    """The original's module is read for the new weights, and added to their checkpoint."""
    original = save_mtp_target(tmp_path / "original", "qwen3_5_text")
    tuned = save_mtp_target(tmp_path / "tuned", "qwen3_5_text")
    weight = "model.layers.1.mlp.down_proj.weight"
    change_tensors(tuned, {weight: load_file(tuned / "model.safetensors")[weight] * 1.1}, "mtp.")
    config = json.loads((tuned / "config.json").read_text("utf-8"))
    config["mtp_num_hidden_layers"] = 1
    (tuned / "config.json").write_text(json.dumps(config), "utf-8")
    if sharded:
        in_shards(tuned)
    target = load_target(str(tuned))
    with pytest.raises(UserError, match="Fine-tuning tools often leave it out"):
        open_drafter("mtp", target)
    import_drafter(str(original), target, tmp_path / "read", ImportOptions())
    export_drafter(tmp_path / "read", "mtp", tmp_path / "out")
    found, before = tensors(tmp_path / "out"), tensors(tuned)
    module = {name: x for name, x in tensors(original).items() if name.startswith("mtp.")}
    assert found.keys() == before.keys() | module.keys()
    assert all(torch.equal(found[name], x) for name, x in (before | module).items())
    whole = load_target(str(tmp_path / "out"))
    mine: Any = open_drafter(str(tmp_path / "read"), target)
    own: Any = open_drafter("mtp", whole)
    assert_equal(dict(own.heads.state_dict()), dict(mine.heads.state_dict()))


def test_what_cannot_be_given_back_is_refused(tmp_path: Path) -> None:
    target = with_its_module(tmp_path)
    export_drafter(tmp_path / "read", "mtp", tmp_path / "out")
    shard = load_file(tmp_path / "out" / "model.safetensors")
    shard["mtp.fc.weight"][0, 0] = float("nan")
    save_file(shard, tmp_path / "out" / "model.safetensors")
    (tmp_path / "out" / "manifest.json").unlink(missing_ok=True)
    assert FORMATS["mtp"].problems(tmp_path / "out") == [
        "mtp.fc.weight has values that are NaN or infinite"
    ]
    change_tensors(tmp_path / "target", {"mtp.layers.3.norm.weight": torch.ones(2)})
    with pytest.raises(UserError, match=r"has mtp\.layers\.3\.norm\.weight, which"):
        import_drafter(str(tmp_path / "target"), target, tmp_path / "again", ImportOptions())


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_the_layout_of_the_library_speculators_comes_back(family: str, tmp_path: Path) -> None:
    target = with_its_module(tmp_path, family, depth=2)
    export_drafter(tmp_path / "read", SPECULATORS, tmp_path / "out", ExportOptions(gamma=2))
    stored, heads = tensors(tmp_path / "out"), read_heads(tmp_path / "read", target)
    module = tensors(tmp_path / "target")
    assert torch.equal(stored["mtp_layers.0.input_proj.weight"], module["mtp.fc.weight"])
    back = reload_export(tmp_path / "out", check_export(tmp_path / "out"), target)
    imported = import_drafter(str(tmp_path / "out"), target, tmp_path / "again")
    assert (imported.layout, imported.depth) == (SPECULATORS, 2)
    again = read_heads(tmp_path / "again", target)
    for found in (getattr(back, "heads"), again):  # noqa: B009 (of another type)
        assert_equal(dict(found.state_dict()), dict(heads.state_dict()))
    assert str(tmp_path) not in (tmp_path / "out" / "config.json").read_text("utf-8")


LAYER = "transformer_layer_config"
# By what is said: the place in the config and its value, or a tensor.
FAULTS: dict[str, tuple[str, Any]] = {
    f"{LAYER}.rms_norm_eps is 0.001, expected 1e-06, the target's": (f"{LAYER}.rms_norm_eps", 1e-3),
    f"{LAYER}.logit_scale is 2.0, expected None": (f"{LAYER}.logit_scale", 2.0),
    f"{LAYER}.model_type is 'qwen3', expected 'qwen3_5_text'": (f"{LAYER}.model_type", "qwen3"),
    "rms_norm_eps' expected": (f"{LAYER}.rms_norm_eps", "small"),
    "num_nextn_predict_layers is 2, expected 1": ("num_nextn_predict_layers", 2),
    "config.json has norm_output, which this import does not know": ("norm_output", True),
    "input_proj.weight has shape [32, 32], expected [32, 64]": (
        "mtp_layers.0.input_proj.weight",
        torch.zeros(32, 32),
    ),
    "tensor mtp_layers.1.mlp.up_proj.weight is not expected": (
        "mtp_layers.1.mlp.up_proj.weight",
        torch.zeros(2),
    ),
    "differs from the target's embeddings in 300 of 300 rows": (
        "embed_tokens.weight",
        torch.zeros(300, 32),
    ),
}


def test_a_fault_in_the_layout_of_the_library_speculators_is_named(tmp_path: Path) -> None:
    target = with_its_module(tmp_path)
    export_drafter(tmp_path / "read", SPECULATORS, tmp_path / "out")
    for number, (said, (place, value)) in enumerate(FAULTS.items()):
        broken = Path(shutil.copytree(tmp_path / "out", tmp_path / f"broken-{number}"))
        if isinstance(value, torch.Tensor):
            change_tensors(broken, {place: value})
        else:
            config = json.loads((broken / "config.json").read_text("utf-8"))
            outer, _, key = place.rpartition(".")
            (config[outer] if outer else config)[key] = value
            (broken / "config.json").write_text(json.dumps(config), "utf-8")
        with pytest.raises(UserError, match=re.escape(said)):
            import_drafter(str(broken), target, tmp_path / "x")
        assert not (tmp_path / "x").exists()
        # The schema does not know the target.
        is_targets = place in (f"{LAYER}.rms_norm_eps", f"{LAYER}.logit_scale")
        assert is_targets or FORMATS[SPECULATORS].problems(broken)
    ignored = ImportOptions(ignore_keys=f"{LAYER}.rms_norm_eps")
    import_drafter(str(tmp_path / "broken-0"), target, tmp_path / "y", ignored)


@pytest.mark.parametrize(
    ("family", "layers", "said"),
    [
        ("glm4_moe", 1, r"of the family glm4_moe, .* qwen3_5_moe_text\. Use --format mtp"),
        ("glm4_moe", 2, "has 2 layers, and the library speculators reads modules of one"),
    ],
)
def test_modules_that_the_library_speculators_cannot_read_are_refused(
    family: str, layers: int, said: str, tmp_path: Path
) -> None:
    with_its_module(tmp_path, family, layers=layers)
    with pytest.raises(UserError, match=said):
        export_drafter(tmp_path / "read", SPECULATORS, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def trained(context: Any, **settings: Any) -> tuple[float, float]:
    """The loss of the first and the last epoch of a stage."""
    stage = make_stage(
        "heads",
        settings.pop("name"),
        heads={"type": "mtp", "depth": 2},
        losses={"forward_kl": 1},
        optimizer={"lr": 3e-3, "warmup_steps": 1},
        loop={"epochs": 6, "tokens_per_batch": 300, "log_every": 1},
        **settings,
    )
    outcome = run_stage(context, stage)
    history = outcome.summary["training"]["history"]
    return history[0]["loss"], history[-1]["loss"]


@pytest.mark.slow
def test_a_module_is_restored_by_training(tmp_path: Path) -> None:
    """From the one in the checkpoint, whose routing has a buffer that no training changes."""
    target = with_its_module(tmp_path, "glm4_moe", depth=2)
    context = stage_context(tmp_path, target)
    first, last = trained(context, name="restored", start=str(tmp_path / "read"))
    assert last < 0.9 * first
    export_drafter(tmp_path / "restored" / "drafter", "mtp", tmp_path / "out")
    before, found = tensors(tmp_path / "target"), tensors(tmp_path / "out")
    other = {name for name in before if not torch.equal(before[name], found[name])}
    assert len(other) > 10
    assert all(name.startswith("model.layers.2.") for name in other)


@pytest.mark.engine
def test_vllm_drafts_with_a_module_from_the_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the token, once our loop does two things that transformers and SGLang do not: vLLM leaves
    out the embedding of the first entry, and its second step for GLM-4 reads the state before the
    norm (vllm-project/vllm#47448 says so of GLM-5)."""
    needs("vllm")
    target = with_its_module(tmp_path, "glm4_moe", depth=2, head_dim=32)
    context = stage_context(tmp_path, target)
    trained(context, name="restored", start=str(tmp_path / "read"))
    export_drafter(tmp_path / "restored" / "drafter", "mtp", tmp_path / "out")

    def step(
        heads: Any, states: Any, tokens: Any, positions: Any, attend: Any, number: int = 0
    ) -> Any:
        layer = heads.layers[number]
        layer.use_post_norm = False
        embedded = heads.embeddings(tokens) * (positions > 0)[..., None]
        turns = heads._rotary.in_layer(number, positions + 1, states)
        return run_layer(layer, embedded, states, positions + 1, turns, attend)

    monkeypatch.setattr(MtpHeads, "step", step)
    monkeypatch.setattr(
        MtpHeads, "readout", lambda heads, states: heads.layers[0].post_norm(states)
    )
    found = verify_export("vllm", task(target, tmp_path / "out", gamma=2))
    assert_same_counts(found)
    assert found.ours.accepted > 30


@pytest.mark.engine
def test_llama_server_drafts_with_a_module_from_the_targets_file(tmp_path: Path) -> None:
    """The text is that without drafts. A few drafts differ from ours."""
    needs("llama-server")
    shape = {"head_dim": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
    directory = save_mtp_target(tmp_path / "target", "qwen3_5_text", **shape)
    # llama.cpp also ends a text at the padding token.
    target = replace(load_target(str(directory)), eos_token_ids=(0, 2))
    file = write_qwen_gguf(target, tmp_path / "target.gguf")
    import_drafter(str(directory), target, tmp_path / "read", ImportOptions(depth=2))
    options = ExportOptions(target=str(file))
    export_drafter(tmp_path / "read", "mtp-gguf", tmp_path / "out", options)
    asked = task(target, tmp_path / "out", gamma=2, target_spec=str(file))
    found = verify_export("llama-server", asked)
    assert found.failures == []
    assert found.ours.accepted > 10


def test_at_the_start_a_step_is_the_target() -> None:
    """With trained norms the states have another size, but the same order."""
    target = tiny_target("qwen3")
    heads: Any = new_heads(HeadOptions.of({"type": "mtp"}), target, None)
    heads.borrow(target.model)
    ids = torch.tensor([[5, 17, 250, 9, 42, 7]])
    states = target.model.model(ids).last_hidden_state
    batch = HeadBatch(ids, torch.ones_like(ids, dtype=torch.bool), {FINAL: states})
    (prediction,) = heads.predictions(batch, [1])
    expected = states[prediction.positions]
    torch.testing.assert_close(prediction.states, expected, rtol=1e-3, atol=1e-3)


def gguf_of(target: Any, path: Path, **keys: int) -> Path:
    """A file that stands for the target's, with what an export reads and two quantised tensors."""
    config = target.model.config
    writer = gguf.GGUFWriter(path, "qwen35")
    counts = {
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
    }
    for key, value in (counts | keys).items():
        writer.add_uint32(f"qwen35.{key}", value)
    writer.add_array("qwen35.rope.dimension_sections", [11, 11, 10, 0])
    writer.add_token_list([f"token {i}" for i in range(7)])
    numbers = np.random.default_rng(0)
    for name, kind in (("token_embd.weight", "Q8_0"), ("blk.1.ffn_down.weight", "Q4_0")):
        stored = gguf.GGMLQuantizationType[kind]
        values = numbers.normal(size=(7, 64)).astype(np.float32)
        writer.add_tensor(name, gguf.quants.quantize(values, stored), raw_dtype=stored)
    writer.add_tensor("output_norm.weight", np.ones(32, dtype=np.float32))
    finish_gguf(writer)
    return path


def test_the_targets_gguf_file_gets_the_module_and_changes_no_other_bit(tmp_path: Path) -> None:
    target = with_its_module(tmp_path, depth=3)
    file = gguf_of(target, tmp_path / "target.gguf")
    options = ExportOptions(target=str(file))
    export_drafter(tmp_path / "read", "llama-server", tmp_path / "out", options)
    assert FORMATS["mtp-gguf"].problems(tmp_path / "out") == []
    before, after = gguf.GGUFReader(file), gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    for key, field in before.fields.items():
        if not key.startswith("GGUF.") and key != "qwen35.block_count":
            assert after.fields[key].contents() == field.contents(), key
            assert after.fields[key].types == field.types
    counts = ("qwen35.block_count", "qwen35.nextn_predict_layers")
    assert [after.fields[key].contents() for key in counts] == [3, 1]
    stored = {tensor.name: tensor for tensor in after.tensors}
    for tensor in before.tensors:
        assert stored[tensor.name].tensor_type == tensor.tensor_type
        assert np.array_equal(stored.pop(tensor.name).data, tensor.data)
    # The names of llama.cpp's own package. It knows those of the module for another family.
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN35, 3)
    others = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GLM4_MOE, 3)
    apart = {
        "mtp.fc": "eh_proj",
        "mtp.pre_fc_norm_embedding": "enorm",
        "mtp.pre_fc_norm_hidden": "hnorm",
        "mtp.norm": "shared_head.norm",
    }
    module = {
        name: x for name, x in tensors(tmp_path / "target").items() if name.startswith("mtp.")
    }
    for name, values in module.items():
        part = name.removesuffix(".weight")
        place = f"model.layers.2.{apart.get(part, part.removeprefix('mtp.layers.0.'))}"
        known = names.get_name(place) or others.get_name(place)
        expected = values + 1.0 if values.dim() == 1 else values
        assert np.array_equal(stored.pop(f"{known}.weight").data, expected.numpy()), name
    assert not stored
    mine: Any = open_drafter(str(tmp_path / "read"), target)
    back: Any = FORMATS["mtp-gguf"].reload(tmp_path / "out", target)
    assert back.heads.depth == 3
    for name, values in mine.heads.state_dict().items():
        torch.testing.assert_close(back.heads.state_dict()[name], values, rtol=1e-6, atol=1e-6)
    held = gguf_of(target, tmp_path / "held.gguf", nextn_predict_layers=1)
    with pytest.raises(UserError, match=r"nextn_predict_layers of .*held.gguf is 1, expected 0"):
        export_drafter(
            tmp_path / "read", "mtp-gguf", tmp_path / "x", ExportOptions(target=str(held))
        )
