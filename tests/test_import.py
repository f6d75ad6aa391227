"""Published drafters as drafter directories: what they compute, what comes back when they are
exported, what is refused, and how they are measured."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file
from typer.testing import CliRunner

from decode.base.errors import UserError
from decode.model.loading import Target
from decode.opening.directory import open_drafter
from distill.teacher.feature_sources import LiveFeatures
from draftsmith.cli.main import app
from draftsmith.export import ImportOptions
from draftsmith.export.export_directory import check_export, export_drafter
from draftsmith.export.import_directory import import_drafter, measure_import
from heads.heads_directory import read_heads
from heads.heads_module import HeadBatch
from tests.export import KEPT, PROMPTS, make_taught, save_target
from tests.published import LAYOUTS, Published, first_logits, maps
from tests.tiny import VOCAB, save_tiny, write_rows
from tests.training import assert_equal

# The indices of the hidden states that each layout reads.
TAPS = {"eagle1": [-1], "eagle1_bias": [-1], "nemo_eagle3": [2, 4, 7]}
FORMS = {
    "speculators_eagle3": "speculators",
    "speculators_p_eagle": "speculators-peagle",
    "eagle1_bias": "eagle1-sglang",
}
# What a published file may have beside what is exported: it follows from the rest.
IMPLIED = ("embed_tokens.weight", "d2t", "t2d")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Eight layers, so that the inputs of 2, 4 and 7 are not those that engines read by default."""
    return save_target(tmp_path_factory.mktemp("target") / "target", layers=8, tie=False)


@pytest.fixture
def target_of(target: Target, seven: Target, spare: Target) -> Callable[[str], Target]:
    """The target of a layout."""
    return lambda layout: (
        target if layout == "nemo_eagle3" else spare if "p_eagle" in layout else seven
    )


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "medusa" not in name])
def test_an_imported_layer_computes_what_the_published_one_does(
    layout: str, tmp_path: Path, target_of: Callable[[str], Target]
) -> None:
    """Against a forward from the published tensors and settings alone."""
    chosen = target_of(layout)
    published = LAYOUTS[layout](chosen)
    import_drafter(str(published.save(tmp_path / "published")), chosen, tmp_path / "out")
    heads: Any = read_heads(tmp_path / "out", chosen).float().eval()
    heads.borrow(chosen.model, torch.float32)
    ids = torch.tensor([[3, 17, 250, 9, 42, 5, 120, 77]])
    mask = torch.ones_like(ids)
    features = LiveFeatures(chosen.model, heads.captured_layers).features(ids, mask, [])
    batch = HeadBatch(ids, mask.bool(), features)
    with torch.no_grad():
        (prediction,) = heads.predictions(batch, [1])
        logits = heads.output.at(1, prediction.states)
    taps = TAPS.get(layout, [2, 3, 4])
    expected = first_logits(published, chosen, ids[0], taps)
    torch.testing.assert_close(logits, expected[: len(logits)], rtol=1e-3, atol=1e-4)
    if "p_eagle" in layout:
        with torch.no_grad():
            _, prediction = heads.predictions(batch, [1, 2])
            last = heads.output.at(2, prediction.states)[-1]
        text = ids[0, : prediction.positions[0].nonzero()[-1] + 2]
        expected = first_logits(published, chosen, text, taps, stand_ins=1)[-1]
        torch.testing.assert_close(last, expected, rtol=1e-3, atol=1e-4)
    if "eagle3" in layout and "speculators" not in layout:
        assert torch.equal(heads.vocabulary, KEPT)


def test_a_reduced_vocabulary_may_come_by_frequency(tmp_path: Path, seven: Target) -> None:
    """As ModelOpt's. The rows of the output move with their tokens."""
    made = LAYOUTS["specforge_eagle3"](seven)
    import_drafter(str(made.save(tmp_path / "a")), seven, tmp_path / "in-order")
    order = torch.randperm(len(KEPT), generator=torch.Generator().manual_seed(0))
    made.tensors["d2t"] = KEPT[order] - torch.arange(len(KEPT))
    made.tensors["lm_head.weight"] = made.tensors["lm_head.weight"][order]
    import_drafter(str(made.save(tmp_path / "b")), seven, tmp_path / "by-frequency")
    expected, found = (read_heads(tmp_path / name, seven) for name in ("in-order", "by-frequency"))
    assert torch.equal(found.vocabulary, KEPT)
    assert_equal(found.state_dict(), expected.state_dict())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_export_gives_the_published_tensors_back(
    layout: str, tmp_path: Path, target_of: Callable[[str], Target]
) -> None:
    """Bit by bit, in their dtype, and importing the export once more changes nothing."""
    chosen = target_of(layout)
    published = LAYOUTS[layout](chosen)
    source = str(published.save(tmp_path / "published"))
    imported = import_drafter(source, chosen, tmp_path / "out")
    kind = imported.kind
    assert open_drafter(str(tmp_path / "out"), chosen).max_depth(9) == imported.depth
    form = FORMS.get(layout, kind)
    export_drafter(tmp_path / "out", form, tmp_path / "export")
    record = check_export(tmp_path / "export")
    (file,) = (tmp_path / "export").glob("*.safetensors")
    exported = load_file(file)
    for name, tensor in published.tensors.items():
        plain = our_name(name)
        if plain in exported:
            assert exported[plain].dtype == tensor.dtype, name
            assert torch.equal(exported[plain], tensor), name
        else:
            assert plain in IMPLIED or "inv_freq" in name or name == "lm_head.weight", name
    config = json.loads((tmp_path / "export" / "config.json").read_text("utf-8"))
    stated = published.config | published.config.get("transformer_layer_config", {})
    config |= config.get("transformer_layer_config", {})
    for key in ("num_key_value_heads", "rms_norm_eps", "rope_theta", "head_dim", "fc_norm"):
        if key in stated:
            assert config[key] == stated[key], key
    options = ImportOptions(depth=None if kind == "medusa" else imported.depth)
    again = import_drafter(str(tmp_path / "export"), chosen, tmp_path / "again", options)
    assert again.layout == ("eagle1" if kind == "eagle1" else record["layout"])
    assert again.settings == imported.settings
    first, second = (load_file(tmp_path / name / "heads.safetensors") for name in ("out", "again"))
    assert_equal(second, first)


def our_name(name: str) -> str:
    """The name of a published tensor in our export of it."""
    if name.startswith("blocks."):
        head, _, layer, parameter = name.removeprefix("blocks.").split(".")
        return f"{head}.{layer}.linear.{parameter}"
    is_nemo = name.startswith("model.")
    name = name.removeprefix("model.")
    return name.replace("layers.0", "midlayer") if is_nemo else name


def test_what_an_import_knows(tmp_path: Path, target: Target, seven: Target) -> None:
    """Depth, dtype, notes and layers, and that a pickle is read only when asked for."""
    made = LAYOUTS["speculators_eagle3"](seven)
    imported = import_drafter(str(made.save(tmp_path / "a")), seven, tmp_path / "a-out")
    assert (imported.depth, imported.dtype) == (5, "float32")  # speculative_tokens
    assert imported.settings == {"steps": 5, "norm_before_residual": True}
    made = LAYOUTS["nemo_eagle3"](target)
    imported = import_drafter(str(made.save(tmp_path / "b")), target, tmp_path / "b-out")
    assert imported.settings == {"norm_before_fc": True, "captured_layers": [1, 3, 6]}
    assert imported.notes == ["it reads the outputs of layers [1, 3, 6], not the usual ones"]
    made = LAYOUTS["medusa"](seven)
    made.file = "medusa_lm_head.pt"
    source = str(made.save(tmp_path / "c"))
    with pytest.raises(UserError, match=r"only pickled weights \(medusa_lm_head.pt\).*--allow-pi"):
        import_drafter(source, seven, tmp_path / "c-out")
    imported = import_drafter(source, seven, tmp_path / "c-out", ImportOptions(pickled=True))
    assert (imported.depth, imported.dtype) == (3, "float16")
    assert imported.notes == ["its config says 2 heads, and its file has 3"]


def test_a_pickle_that_is_more_than_tensors_does_not_run(tmp_path: Path, seven: Target) -> None:
    made = LAYOUTS["medusa"](seven)
    made.file = "medusa_lm_head.pt"
    made.tensors["code"] = Path(tmp_path / "ran")  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"holds more than tensors.*nothing of it was run"):
        import_drafter(
            str(made.save(tmp_path / "c")), seven, tmp_path / "out", ImportOptions(pickled=True)
        )
    assert not (tmp_path / "out").exists()


Change = Callable[[Published], Any]


def config(**changes: Any) -> Change:
    return lambda made: made.config.update(changes)


def eagle_config(**changes: Any) -> Change:
    return lambda made: made.config["eagle_config"].update(changes)


def tensors(**changes: torch.Tensor) -> Change:
    names = {key.replace("__", "."): x for key, x in changes.items()}
    return lambda made: made.tensors.update(names)


def without(name: str) -> Change:
    return lambda made: made.tensors.pop(name)


TOP_IDS, OTHER_IDS = "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"
# By layout and by what is said: the fault.
FAULTS: dict[str, dict[str, Change]] = {
    "safeailab_eagle3": {
        "rope_scaling is {'rope_type': 'mystery', 'factor': 2.0}, which is not valid": config(
            rope_scaling={"rope_type": "mystery", "factor": 2.0}
        ),
        "config.json has residual_scale, which this import does not know": config(residual_scale=2),
        "layer_types is ['linear_attention'], expected full_attention or sliding": config(
            layer_types=["linear_attention"]
        ),
        "max_position_embeddings is 96, from which its rotary positions": config(
            max_position_embeddings=96, rope_scaling={"type": "dynamic", "factor": 2.0}
        ),
        "rope_scaling is {'rope_type': 'linear', 'factor': 2.0, 'sections': 3}, which": config(
            rope_scaling={"rope_type": "linear", "factor": 2.0, "sections": 3}
        ),
        "beside it stands {'factor': 4.0}": config(
            rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
            rope_scaling={"type": "linear", "factor": 4.0},
        ),
        "partial_rotary_factor is 0.5, expected 1": config(partial_rotary_factor=0.5),
        "use_sliding_window is True, expected False": config(use_sliding_window=True),
        "model_type is 'gemma', expected 'llama'": config(model_type="gemma"),
        "inputs of layers [0, 3, 5]; expected numbers from 1 to 7 in ascending order": config(
            **{OTHER_IDS: [0, 3, 5]}
        ),
        f"{TOP_IDS} is '1,2,3'; expected a list of layer numbers": config(**{TOP_IDS: "1,2,3"}),
        f"{OTHER_IDS} is [1, 2, -1]; expected a list": config(**{OTHER_IDS: [1, 2, -1]}),
        "[1, 3, 5] in target_layer_ids, a key of block drafters": config(
            target_layer_ids=[1, 3, 5]
        ),
        "config.json has captured_layers, which": config(captured_layers=[1, 3, 5]),
        "hidden_size is 32, expected 64": config(hidden_size=32),
        "target_hidden_size is 128, expected 64": config(target_hidden_size=128),
        "vocab_size is 301, expected 300": config(vocab_size=301),
        "num_hidden_layers is 2": config(num_hidden_layers=2),
        "attention_bias is True": config(attention_bias=True),
        "2 query heads and 1 key heads of size 32, but q_proj has 64 rows and k_proj 64": config(
            num_key_value_heads=1
        ),
        "hidden_size 64 is not a multiple of num_attention_heads 3": config(
            num_attention_heads=3, num_key_value_heads=None
        ),
        "both stand for fc.weight": tensors(model__fc__weight=torch.zeros(64, 192)),
        "both stand for midlayer.mlp.up_proj.weight": tensors(
            layers__0__mlp__up_proj__weight=torch.zeros(128, 64)
        ),
        "d2t does not give distinct token ids in ascending order: it holds the ids": tensors(
            d2t=KEPT
        ),
        "t2d does not mark the tokens of d2t": tensors(t2d=maps(KEPT + 1)["t2d"]),
        "tensor d2t is missing": without("d2t"),
        "d2t is torch.int64 of shape [9]": tensors(d2t=KEPT[:9]),
        "fc.weight reads 128 numbers, which are 2 hidden states of size 64; expected 3": tensors(
            fc__weight=torch.zeros(64, 128)
        ),
        "tensor midlayer.hidden_norm.weight is missing": without("midlayer.hidden_norm.weight"),
        "tensor norm.weight is missing": without("norm.weight"),
    },
    "specforge_eagle3": {
        "4 query heads and 1 key heads of size 32, but q_proj has 64 rows and k_proj 16": config(
            head_dim=32
        ),
        "4 query heads cannot share 3 key heads": config(num_key_value_heads=3),
    },
    "nemo_eagle3": {
        "d2t does not give distinct token ids": tensors(d2t=maps()["d2t"] + 10),
        "which are 3 hidden states of size 64; expected 2": eagle_config(**{TOP_IDS: [2, 4]}),
        "names the inputs of layers [2, 18, 33]; expected numbers from 1 to 8": eagle_config(
            **{TOP_IDS: [2, 18, 33]}
        ),
        "use_aux_hidden_state is False": eagle_config(use_aux_hidden_state=False),
        "there is no lm_head.weight, so its output layer is its embeddings": lambda made: (
            made.tensors.pop("lm_head.weight"),
            made.config.update(tie_word_embeddings=True),
        ),
        "use_last_layernorm is False, expected True": eagle_config(use_last_layernorm=False),
        "config.json has eagle_config.post_norm, which": eagle_config(post_norm=True),
        f"[2, 4, 7] in eagle_config.{TOP_IDS} and [0, 3, 6] in eagle_config.{OTHER_IDS}": (
            eagle_config(**{OTHER_IDS: [0, 3, 6]})
        ),
    },
    "speculators_eagle3": {
        "they may be meant as outputs. Measure both with --prompts": config(**{TOP_IDS: [1, 2, 3]}),
        "is 'all'; expected a list": config(**{TOP_IDS: "all"}),
        "config.json has transformer_layer_config.logit_scale, which": lambda made: made.config[
            "transformer_layer_config"
        ].update(logit_scale=2.0),
        "config.json has speculators_config.proposal_methods.alpha, which": lambda made: (
            made.config["speculators_config"]["proposal_methods"][0].update(alpha=0.5)
        ),
        "config.json has speculators_config.proposal_methods.beta, which": lambda made: made.config[
            "speculators_config"
        ]["proposal_methods"].append([{"beta": 0.5}]),
        "default_proposal_method is {'temperature': 5}, expected text": lambda made: made.config[
            "speculators_config"
        ].update(default_proposal_method={"temperature": 5}),
        "has no norm_before_residual, and readers assume different values": lambda made: (
            made.config.pop("norm_before_residual")
        ),
    },
    "p_eagle": {
        "pard_token is None, expected the id of the embedding that stands for unknown tokens": (
            lambda made: made.config.pop("pard_token")
        ),
        "fc_norm is True, expected False, because P-EAGLE heads have no such norm": config(
            fc_norm=True
        ),
        "tensor layers.1.input_layernorm.weight is not expected": config(num_hidden_layers=1),
        "tensor mask_hidden has shape [1, 1, 64], expected [1, 1, 192]": tensors(
            mask_hidden=torch.zeros(64, dtype=torch.bfloat16)
        ),
        "tensor embed_tokens.weight has shape [299, 64], expected [304, 64]": tensors(
            embed_tokens__weight=torch.zeros(299, 64, dtype=torch.bfloat16)
        ),
    },
    "speculators_p_eagle": {
        "mask_token_id is 304, expected the id of the embedding": config(mask_token_id=VOCAB + 4),
        "mask_token_id is 9, which": config(mask_token_id=9),
        "tensor mask_hidden is missing": without("mask_hidden"),
        "config.json has pard_token, which": config(pard_token=VOCAB + 1),
    },
    "eagle1": {
        "differs from the target's embeddings in 2 of 300 rows": lambda made: made.tensors[
            "embed_tokens.weight"
        ][5:7].add_(1.0),
        "tensor layers.0.input_layernorm.weight is not expected": tensors(
            layers__0__input_layernorm__weight=torch.ones(64, dtype=torch.float16)
        ),
        "tensor fc.weight holds values that are NaN": lambda made: made.tensors["fc.weight"].fill_(
            torch.nan
        ),
        "has quantised weights": config(quantization_config={"bits": 4}),
        "has weights in F8_E4M3; expected float32": tensors(
            x=torch.zeros(2).to(torch.float8_e4m3fn)
        ),
        "in no layout that can be imported": lambda made: (
            made.tensors.pop("fc.weight"),
            made.config.update(spd_type="another"),
        ),
    },
    "eagle1_bias": {"fc has a bias, but tensor fc.bias is missing": without("fc.bias")},
    "medusa": {
        "tensor 1.0.linear.bias is missing": without("1.0.linear.bias"),
        "tensor 1.2.weight has shape [299, 64], expected [300, 64]": lambda made: (
            made.tensors.update({"1.2.weight": torch.zeros(299, 64).half()})
        ),
    },
    "medusa_vllm": {
        "hidden_size is 32, but the target": config(hidden_size=32),
        "config.json has medusa_activation, which": config(medusa_activation="relu"),
        "both stand for 0.1.weight": tensors(lm_heads__0__weight=torch.zeros(VOCAB, 64)),
    },
}


@pytest.mark.parametrize(
    ("layout", "said"), [(layout, said) for layout in FAULTS for said in FAULTS[layout]]
)
def test_a_fault_is_refused_by_name(
    layout: str, said: str, tmp_path: Path, target_of: Callable[[str], Target]
) -> None:
    chosen = target_of(layout)
    published = LAYOUTS[layout](chosen)
    FAULTS[layout][said](published)
    with pytest.raises(UserError) as refused:
        import_drafter(str(published.save(tmp_path / "published")), chosen, tmp_path / "out")
    assert said in str(refused.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["", "eagle_config"])
@pytest.mark.parametrize("key", [TOP_IDS, OTHER_IDS])
def test_each_key_that_names_the_layers_is_read(
    place: str, key: str, tmp_path: Path, target: Target
) -> None:
    made = LAYOUTS["safeailab_eagle3"](target)
    named = {key: [2, 4, 7]}
    made.config.update({place: named} if place else named)
    imported = import_drafter(str(made.save(tmp_path / "published")), target, tmp_path / "out")
    assert imported.settings is not None
    assert imported.settings["captured_layers"] == [1, 3, 6]


YARN = {"rope_type": "yarn", "factor": 2.0}


@pytest.mark.parametrize(
    ("stated", "read"),
    [
        (
            {"rope_theta": 5e5, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            {"rope_theta": 5e5, "factor": 2.0},
        ),
        (
            {"original_max_position_embeddings": 96, "rope_parameters": YARN},
            {"original_max_position_embeddings": 96},
        ),
        (
            {"max_position_embeddings": 96, "rope_scaling": YARN},
            {"original_max_position_embeddings": 96},
        ),
    ],
)
def test_rotary_settings_of_all_places_are_read(
    stated: dict[str, Any], read: dict[str, Any], tmp_path: Path, seven: Target
) -> None:
    """As in transformers, one place may leave out what stands in another."""
    made = LAYOUTS["safeailab_eagle3"](seven)
    made.config |= stated
    imported = import_drafter(str(made.save(tmp_path / "published")), seven, tmp_path / "out")
    assert imported.settings is not None
    assert imported.settings["layer"]["rope_parameters"].items() >= read.items()


def test_a_key_may_be_ignored_by_name(tmp_path: Path, seven: Target) -> None:
    """What transformers 4 writes is not refused, and what nobody knows only if nobody says so."""
    made = LAYOUTS["safeailab_eagle3"](seven)
    made.config |= {"use_cache": True, "top_k": 50, "id2label": {"0": "LABEL_0"}, "extra": None}
    made.config |= {"logo": "x", "eagle_config": {"author": "y", "temperature": 2.0}}
    source = str(made.save(tmp_path / "published"))
    with pytest.raises(
        UserError, match=r"(?s)--ignore-keys eagle_config.author.*\.temperature.*--ignore-keys logo"
    ):
        import_drafter(source, seven, tmp_path / "out")
    options = ImportOptions(ignore_keys="logo, eagle_config.author, eagle_config.temperature")
    imported = import_drafter(source, seven, tmp_path / "out", options)
    assert "its config has logo, which was not read (--ignore-keys)" in imported.notes


def test_another_tokenizer_is_refused(tmp_path: Path, seven: Target) -> None:
    made = LAYOUTS["eagle1"](seven)
    text = (Path(seven.name) / "tokenizer.json").read_text("utf-8")
    made.texts["tokenizer.json"] = text
    import_drafter(str(made.save(tmp_path / "same")), seven, tmp_path / "out")
    made.texts["tokenizer.json"] = text.replace('"<|im_end|>"', '"</s>"')
    with pytest.raises(UserError, match=r"another tokenizer .*id 2 is '</s>' there and '<\|im_end"):
        import_drafter(str(made.save(tmp_path / "other")), seven, tmp_path / "other-out")
    made.texts = {"tokenizer.model": "not read"}
    imported = import_drafter(str(made.save(tmp_path / "model")), seven, tmp_path / "model-out")
    (note,) = imported.notes
    assert note.startswith("its tokenizer (tokenizer.model) was not compared with the target's")


def test_a_small_model_keeps_its_weights(tmp_path: Path, seven: Target) -> None:
    """In its dtype, whatever the config says; code that comes with it does not run."""
    source = save_tiny(tmp_path / "small", layers=1)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    model.save_pretrained(source)
    settings = json.loads((source / "config.json").read_text("utf-8"))
    settings |= {"dtype": "float32", "auto_map": {"AutoModelForCausalLM": "code.Model"}}
    # Words of a model's code need not be keys that it reads.
    settings |= {"use_qk_norm": True, "rope_theta": 1e4, "scaling": 2.0}
    settings["rope_parameters"] |= {"residual_scale": 2}
    # Nor is what it reads, or what is harmless, at the top of a config known in an object.
    settings["rope_scaling"] = settings["rope_parameters"] | {"hidden_size": 7, "temperature": 2}
    (source / "config.json").write_text(json.dumps(settings), "utf-8")
    (source / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')", "utf-8")
    imported = import_drafter(str(source), seven, tmp_path / "out")
    assert (imported.layout, imported.kind, imported.dtype) == ("hf", "small_lm", "bfloat16")
    assert imported.notes == [
        "its config has rope_parameters.residual_scale, rope_scaling.hidden_size, "
        "rope_scaling.residual_scale, rope_scaling.temperature, scaling, use_qk_norm, which "
        "transformers does not read",
        "its config names code (auto_map), which was neither read nor run",
    ]
    export_drafter(tmp_path / "out", "hf", tmp_path / "export")
    before, after = (load_file(p / "model.safetensors") for p in (source, tmp_path / "export"))
    assert_equal(after, before)
    # A model that only that code can run is refused.
    settings["model_type"] = "custom"
    (source / "config.json").write_text(json.dumps(settings), "utf-8")
    with pytest.raises(UserError, match=r"type 'custom', .* code: code\.Model \(auto_map\)"):
        import_drafter(str(source), seven, tmp_path / "other")
    assert not (tmp_path / "ran").exists()


def test_only_data_comes_from_the_hub(
    tmp_path: Path, seven: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No code, and no pickle before it is asked for."""
    directory = LAYOUTS["eagle1"](seven).save(tmp_path / "published")
    files = ["config.json", "pytorch_model.bin", "code.py"]
    patterns: list[str] = []

    def download(source: str, revision: str | None, allow_patterns: list[str]) -> str:
        assert (source, revision) == ("org/drafter", "main")
        patterns.extend(allow_patterns)
        return str(directory)

    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda *_, **__: files)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    options = ImportOptions(revision="main")
    with pytest.raises(UserError, match=r"only pickled weights \(pytorch_model.bin\)"):
        import_drafter("org/drafter", seven, tmp_path / "out", options)
    assert patterns == []
    files[1] = "model.safetensors"
    import_drafter("org/drafter", seven, tmp_path / "out", options)
    assert not any(name.endswith((".py", ".bin", ".pt")) for name in patterns)
    with pytest.raises(UserError, match="only hub ids have revisions"):
        import_drafter(str(directory), seven, tmp_path / "other", options)


def test_acceptance_is_measured_beside_the_claim(tmp_path: Path, seven: Target) -> None:
    """By the command: a taught drafter, exported, its card read, imported and measured as itself.
    The wrong meaning of its layer numbers is heard of in the measurement."""
    taught = tmp_path / "taught"
    make_taught(taught, seven, {"type": "eagle3", "steps": 3}, steps=70)
    export_drafter(taught, "speculators", tmp_path / "published")
    front = {
        "model-index": [{"results": [{"metrics": [{"type": "acceptance_length", "value": 2.3}]}]}]
    }
    card = f"---\n{json.dumps(front)}\n---\n# A drafter\n"
    (tmp_path / "published" / "README.md").write_text(card, "utf-8")
    rows = [{"prompt": "The sea shells"}, {"prompt": "A fox"}]
    write_rows(tmp_path / "prompts.jsonl", rows)
    words = ["import", str(tmp_path / "published"), "--target", seven.name, "--out"]
    asked = ["--prompts", str(tmp_path / "prompts.jsonl"), "--json", str(tmp_path / "found.json")]
    done = CliRunner().invoke(app, [*words, str(tmp_path / "out"), *asked])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "found.json").read_text("utf-8"))
    assert (found["layout"], found["kind"], found["claimed"]) == ("speculators", "eagle3", 2.3)
    assert found["measured"]["prompts"] == 2
    assert found["measured"]["gamma"] == 3 == found["depth"]
    expected = measure_import(taught, seven, PROMPTS[:8], max_new_tokens=24)
    measured = measure_import(tmp_path / "out", seven, PROMPTS[:8], max_new_tokens=24)
    assert measured == expected
    assert measured["tokens_per_step"] > 2
    shifted = ImportOptions(layer_ids="outputs")
    import_drafter(str(tmp_path / "published"), seven, tmp_path / "shifted", shifted)
    worse = measure_import(tmp_path / "shifted", seven, PROMPTS[:8], max_new_tokens=24)
    assert worse["tokens_per_step"] < measured["tokens_per_step"] - 0.5
    refused = CliRunner().invoke(app, [*words, str(tmp_path / "x"), "--claimed", "2"])
    assert refused.exit_code == 2
    assert "give --prompts FILE too" in refused.output
    again = CliRunner().invoke(app, [*words, str(tmp_path / "out")])
    assert "exists, and nothing is overwritten" in again.output
