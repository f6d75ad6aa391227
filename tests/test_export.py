"""Exports: what is written reads back as the same model, and what cannot be is refused by name."""

import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from typer.testing import CliRunner

from decode.base.artifact import MANIFEST, CorruptArtifact
from decode.base.errors import UserError
from decode.drafters.draft_vocabulary import reduce_output, save_with_vocabulary
from decode.drafters.small_lm import SmallLMDrafter
from decode.model.loading import Target, load_model_and_tokenizer, load_target
from decode.opening.directory import save_drafter
from draftsmith.cli import main as cli
from draftsmith.export import ExportOptions, export_directory
from draftsmith.export.export_directory import (
    Measuring,
    check_export,
    export_drafter,
    push_export,
    reload_export,
)
from draftsmith.export.file_schema import StoredTensor, TensorSpec, key_problems, tensor_problems
from draftsmith.export.formats import EXPORT_FILE, FORMATS, format_for
from draftsmith.export.formats.layer_format import llama_settings
from draftsmith.export.model_card import drafter_card
from draftsmith.export.model_directory import for_older_readers, older_names
from draftsmith.export.trained_drafter import TrainedDrafter
from tests.export import FEW
from tests.test_target import write_gguf
from tests.tiny import save_tiny, shortened, tiny_model, tiny_target, tiny_tokenizer

IDS = torch.tensor([[5, 17, 250, 9, 42, 7, 111]])
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@pytest.fixture(scope="module")
def target_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target") / "target.gguf"
    write_gguf(path)
    return path


@pytest.fixture(scope="module")
def target(target_file: Path) -> Target:
    return load_target(str(target_file))


def make_drafter(
    path: Path,
    target: Target,
    family: str = "llama",
    kept: torch.Tensor | None = None,
    trained: bool = True,
    rank: int | None = None,
    **shape: Any,
) -> Any:
    """A drafter directory; kept: ids of a reduced vocabulary, `trained` ones differing from the
    rows of the whole layer, in a layer of this rank. Returns the model as it drafts."""
    model = tiny_model(family, **({"layers": 1, "seed": 7} | shape))
    reduced = None
    if kept is not None:
        reduced = reduce_output(model, kept, rank)
        if trained:
            with torch.no_grad():
                for weight in model.get_output_embeddings().parameters():
                    weight.mul_(1.5)

    def write(directory: Path) -> None:
        save_with_vocabulary(model, reduced, directory)
        tiny_tokenizer().save_pretrained(directory)

    settings = {"losses": {"forward_kl": 1.0}, "text": "answers"}
    provenance = {"stage": "distill", "run": "t", "settings": settings}
    save_drafter(path, "small_lm", write, target=target, provenance=provenance)
    return model


def measuring() -> Measuring:
    texts = [[*[5, 17, 250, 9, 42][: 2 + i], 20 + i] for i in range(4)]
    return Measuring(lambda target: texts, max_new_tokens=8)


def reloaded_logits(out: Path, target: Target) -> torch.Tensor:
    record = check_export(out)
    drafter = reload_export(out, record, target)
    assert isinstance(drafter, SmallLMDrafter)
    with torch.no_grad():
        found: torch.Tensor = drafter.lm.model(IDS).logits
    return found


@pytest.mark.parametrize("rows", [300, 304, 320])
@pytest.mark.parametrize("tie", [True, False])
def test_an_export_has_the_targets_number_of_rows(rows: int, tie: bool, tmp_path: Path) -> None:
    """Models of one family pad the same tokens to different sizes."""
    padded_target = tiny_target(vocab=304)
    model = make_drafter(tmp_path / "drafter", padded_target, vocab=rows, tie=tie)
    source = TrainedDrafter.open(tmp_path / "drafter").small_lm(None)
    found = source.model(IDS).logits
    assert source.model.config.vocab_size == found.shape[-1] == 304
    torch.testing.assert_close(found[..., :300], model(IDS).logits[..., :300])
    if rows == 300:  # the rows that are added repeat the last one
        assert torch.equal(found[..., 300:], found[..., 299:300].expand(-1, -1, 4))


def test_an_export_needs_a_row_for_each_token(tmp_path: Path) -> None:
    make_drafter(tmp_path / "drafter", tiny_target(vocab=290))
    with pytest.raises(UserError, match="300 rows for 300 tokens, its target 290"):
        TrainedDrafter.open(tmp_path / "drafter").small_lm(None)


@pytest.mark.parametrize(
    ("form", "family", "tie"),
    shortened(
        [
            *(("gguf", family, tie) for family in FAMILIES for tie in (True, False)),
            ("hf", "llama", True),
            ("hf", "qwen3", False),
        ],
        [*(("gguf", family, family == "llama") for family in FAMILIES), ("hf", "qwen3", False)],
    ),
)
def test_the_export_is_the_same_model(
    form: str, family: str, tie: bool, tmp_path: Path, target: Target
) -> None:
    # transformers reads no head size from a qwen3 file, and takes the 128 that all of them have.
    shape = {"head_dim": 128} if family == "qwen3" else {}
    model = make_drafter(tmp_path / "drafter", target, family, tie=tie, **shape)
    export_drafter(tmp_path / "drafter", form, tmp_path / "out", ExportOptions(gamma=3))
    with torch.no_grad():
        expected = model(IDS).logits
    torch.testing.assert_close(reloaded_logits(tmp_path / "out", target), expected, rtol=0, atol=0)


@pytest.mark.parametrize("form", ["hf", "gguf"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_dtype_of_the_weights(form: str, dtype: str, tmp_path: Path, target: Target) -> None:
    model = make_drafter(tmp_path / "drafter", target)
    export_drafter(tmp_path / "drafter", form, tmp_path / "out", ExportOptions(dtype=dtype))
    assert check_export(tmp_path / "out")["facts"]["dtype"] == dtype
    with torch.no_grad():
        gap = (reloaded_logits(tmp_path / "out", target) - model(IDS).logits).abs().max()
    # bfloat16 keeps 8 bits; the logits are up to 10.
    assert 0 < gap < 0.5


@pytest.mark.parametrize(
    ("form", "trained", "rank"),
    shortened(
        [
            (form, *how)
            for form in ("hf", "gguf")
            for how in ((True, None), (False, None), (True, 9))
        ],
        [("hf", True, None), ("gguf", False, None), ("gguf", True, 9)],
    ),
)
def test_a_reduced_vocabulary_is_filled_from_the_target(
    form: str, trained: bool, rank: int | None, tmp_path: Path, target: Target
) -> None:
    kept = torch.arange(0, 300, 2)
    model = make_drafter(tmp_path / "drafter", target, kept=kept, trained=trained, rank=rank)
    with torch.no_grad():
        expected = model(IDS).logits
        hidden = model.base_model(IDS).last_hidden_state
        others = target.model.get_output_embeddings()(hidden)
    export_drafter(tmp_path / "drafter", form, tmp_path / "out", measuring=FEW)
    found = reloaded_logits(tmp_path / "out", target)
    # Two factors are one matrix in the file, whose sums round otherwise.
    within = 1e-6 if rank is None else 1e-5
    torch.testing.assert_close(found[..., kept], expected, rtol=0, atol=within)
    torch.testing.assert_close(found[..., 1::2], others[..., 1::2], rtol=0, atol=1e-6)
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert "150 tokens of the vocabulary" in card
    assert "the target's output layer" in card
    assert "as trained (reduced vocabulary)" in card


def test_another_hidden_size_is_filled_from_its_own_layer(tmp_path: Path, target: Target) -> None:
    kept = torch.arange(100)
    make_drafter(tmp_path / "drafter", target, kept=kept, hidden=16, heads=2, kv_heads=1)
    export_drafter(tmp_path / "drafter", "hf", tmp_path / "out", measuring=FEW)
    assert "before it was reduced" in check_export(tmp_path / "out")["facts"]["filled_from"]


def test_a_reduced_vocabulary_must_be_measured(tmp_path: Path, target: Target) -> None:
    make_drafter(tmp_path / "drafter", target, kept=torch.arange(100))
    with pytest.raises(UserError, match=r"must be measured: give --prompts"):
        export_drafter(tmp_path / "drafter", "hf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_export_that_accepts_less_is_refused(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target itself as a drafter is always accepted; with its weights spoilt on the way it is
    not, and nothing is left behind."""
    make_drafter(tmp_path / "drafter", target, layers=2, seed=0)
    export_drafter(tmp_path / "drafter", "hf", tmp_path / "sound", measuring=measuring())
    rows = check_export(tmp_path / "sound")["acceptance"]
    assert [row["draft_efficiency"] for row in rows] == [1.0, 1.0]
    # What an engine should accept at each place, and of which prompts.
    assert {*rows[1]["acceptance_by_position"]} == {1.0}
    assert len(rows[1]["acceptance_by_position"]) == rows[1]["gamma"]
    assert rows[0]["prompts_sha256"] == rows[1]["prompts_sha256"]
    for (low, high), reached in zip(
        rows[1]["interval_by_position"], rows[1]["reached_by_position"], strict=True
    ):
        assert (low, high) == pytest.approx((reached / (reached + 1.96**2), 1.0), abs=1e-3)

    form = type(FORMATS["hf"])
    original = form.reload

    def spoilt(self: Any, directory: Path, target: Target) -> Any:
        drafter: Any = original(self, directory, target)
        with torch.no_grad():
            drafter.lm.model.base_model.norm.weight.neg_()
        return drafter

    monkeypatch.setattr(form, "reload", spoilt)
    with pytest.raises(UserError, match=r"loses too much.*Nothing was written"):
        export_drafter(tmp_path / "drafter", "hf", tmp_path / "out", measuring=measuring())
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["drafter", "sound"]


def test_the_gguf_has_the_tokenizer_of_the_targets(
    tmp_path: Path, target: Target, target_file: Path
) -> None:
    make_drafter(tmp_path / "drafter", target)
    export_drafter(tmp_path / "drafter", "gguf", tmp_path / "out")
    ours = gguf.GGUFReader(tmp_path / "out" / "drafter.gguf").fields
    theirs = gguf.GGUFReader(target_file).fields
    names = [name for name in theirs if name.startswith("tokenizer.")]
    assert len(names) >= 7
    for name in names:
        assert ours[name].contents() == theirs[name].contents()
        assert ours[name].types == theirs[name].types


def test_the_hf_export_drafts_a_constant_number(tmp_path: Path, target: Target) -> None:
    make_drafter(tmp_path / "drafter", target)
    export_drafter(tmp_path / "drafter", "hf", tmp_path / "out", ExportOptions(gamma=5))
    model = load_model_and_tokenizer(str(tmp_path / "out")).model
    settings = model.generation_config
    assert settings.num_assistant_tokens == 5
    assert settings.num_assistant_tokens_schedule == "constant"
    assert settings.assistant_confidence_threshold == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert config["torch_dtype"] == "float32"


SCALED = {
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 20.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "longrope": {
        "short_factor": [1.0, 1.5, 2.0, 2.5],
        "long_factor": [2.0, 2.5, 3.0, 3.5],
        "original_max_position_embeddings": 32,
    },
}


@pytest.mark.parametrize("kind", SCALED)
def test_rotary_positions_are_written_for_transformers_4_too(
    kind: str, tmp_path: Path, target: Target
) -> None:
    """Its `rope_theta` and `rope_scaling` are the numbers of `rope_parameters`, of a small LM and
    of a layer. Read with 4.57.1 and 5.24.0, they gave the same frequencies."""
    rope = {"rope_type": kind, "rope_theta": 5e5} | SCALED[kind]
    make_drafter(tmp_path / "drafter", target, "llama", rope_parameters=rope)
    export_drafter(tmp_path / "drafter", "hf", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    layer = llama_settings(transformers.LlamaConfig(**copy.deepcopy(written)), "Layer", "float32")
    for config in (written, layer):
        assert config["rope_parameters"].items() >= rope.items()
        assert config["rope_scaling"] == {"rope_type": kind} | SCALED[kind]
        outer = {"original_max_position_embeddings": 32} if kind == "longrope" else {}
        assert config.items() >= ({"rope_theta": 5e5} | outer).items()
        del config["rope_parameters"]
        older = transformers.LlamaConfig(**copy.deepcopy(config)).rope_parameters
        assert {key: older[key] for key in rope} == rope
    written["rope_scaling"]["factor"] = 3.0
    (tmp_path / "out" / "config.json").write_text(
        json.dumps(written | {"rope_parameters": rope}), "utf-8"
    )
    problems = FORMATS["hf"].problems(tmp_path / "out")
    assert any("rope_scaling is" in problem for problem in problems)


@pytest.mark.parametrize(("family", "part"), [("llama", None), ("glm", 0.5)])
def test_a_rotated_part_that_a_family_does_not_read_is_not_written(
    family: str, part: float | None, tmp_path: Path
) -> None:
    """transformers 5 rotates all of llama's heads, whatever the config says, and half of GLM's.
    Other engines read the key for both."""
    rope = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    config = transformers.AutoConfig.for_model(
        family, rope_parameters=rope, head_dim=8, hidden_size=32, num_attention_heads=4,
        num_hidden_layers=1, num_key_value_heads=2, intermediate_size=32, vocab_size=16,
        pad_token_id=0,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}", "utf-8")
    for_older_readers(tmp_path, "float32")
    written = json.loads((tmp_path / "config.json").read_text("utf-8"))
    assert written.get("partial_rotary_factor") == part
    assert written["rope_parameters"].get("partial_rotary_factor") == part


@pytest.mark.parametrize("family", ["apertus", "gpt_oss"])
def test_unscaled_positions_are_written_where_transformers_4_would_scale_them(family: str) -> None:
    rope = {"rope_type": "default", "rope_theta": 5e5}
    config = transformers.AutoConfig.for_model(family, rope_parameters=rope).to_dict()
    older = older_names(config)
    assert older == {"rope_theta": 5e5, "rope_scaling": None}
    again = type(transformers.AutoConfig.for_model(family))(**copy.deepcopy(config | older))
    assert again.rope_parameters.items() >= rope.items()


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("phi3", {}),
        ("phi3", {"factor": 4.0}),
        ("phimoe", {"short_mscale": 1.25, "long_mscale": 1.5}),
    ],
)
def test_numbers_of_longrope_reach_every_reader(family: str, more: dict[str, float]) -> None:
    """By its source, transformers 4.57.6 takes the first and the last, and refuses the second,
    which it has no name for."""
    rope = {"rope_type": "longrope", "rope_theta": 5e5} | SCALED["longrope"] | more
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "original_max_position_embeddings": 32}
    kind = type(transformers.AutoConfig.for_model(family))
    config = kind(**sizes, rope_parameters=copy.deepcopy(rope)).to_dict()
    older = older_names(config)
    lists = {key: rope[key] for key in ("short_factor", "long_factor")} | more
    if family == "phi3":
        assert older["rope_scaling"] == {"type": "longrope"} | lists
    assert older["rope_scaling"].items() >= lists.items()
    again = kind(**copy.deepcopy(config | older)).rope_parameters
    assert {key: again[key] for key in rope} == rope


def test_the_readme_says_what_a_hub_page_should(tmp_path: Path, target: Target) -> None:
    run = tmp_path / "run"
    drafter = run / "stages" / "01-distill" / "drafter"
    make_drafter(drafter, target)
    evaluation = {
        "draft_efficiency": 0.25, "acceptance_rate": 0.4, "tokens_per_step": 1.5, "drafted": 99,
        "prompts": 7, "gamma": 2, "dtype": "bfloat16", "timed_prompts": 4,
        "speedup": {"value": 1.2, "low": 1.1, "high": 1.3},
    }  # fmt: skip
    # Of two, as earlier versions left them, the newer one counts, whatever its number is.
    for number, shown in (("01", evaluation | {"prompts": 1}), ("03", evaluation)):
        path = run / "evaluations" / f"{number}-distill" / "evaluation.json"
        path.parent.mkdir(parents=True)
        record = {"stage": "distill", "drafter": "small_lm", "evaluation": shown}
        path.write_text(json.dumps(record), "utf-8")
        os.utime(path, (int(number), int(number)))
    write_run(run, tmp_path)
    licences = {"licence": "MIT", "data_licence": "ours"}
    export_drafter(
        drafter, "hf", tmp_path / "out", ExportOptions(**licences, repository="org/name")
    )
    path = tmp_path / "out" / "README.md"
    card, front = path.read_text("utf-8"), ModelCard.load(path).data
    assert (front.license, front.pipeline_tag) == ("mit", "text-generation")
    assert "draft-model" in front.tags
    row = "| in its run | 7 | bfloat16 | 2 | 99 | 0.4 | 0.25 | 1.5 | 1.20× [1.10, 1.30] | 4 |"
    assert row in card
    assert "5 answers that the target wrote to 4 prompts of the train rows (greedy" in card
    assert "train rows: `rows.jsonl`" in card
    assert "`draftsmith train my.yaml data.train=rows.jsonl 'trackers=[]'`" in card
    assert "licence of the training data: ours" in card
    assert '"model": "org/name", "num_speculative_tokens": 2' in card
    assert f"revision: `{target.revision}`" in card
    assert "losses forward_kl: 1.0" in card
    # The target's path on the exporter's disk is nobody's business.
    assert str(tmp_path) not in card
    assert str(Path(target.name).parent) not in card
    record = json.loads((tmp_path / "out" / EXPORT_FILE).read_text("utf-8"))
    (measured,) = record["acceptance"]
    few = measured | {"speedup": {"value": 1.2}}
    assert "| 1.5 | 1.20× | 4 |" in drafter_card(record | {"acceptance": [few]})
    for licence, named in (("Mine: 1", ("other", "Mine: 1")), (None, (None, None))):
        other = ModelCard(drafter_card(record | {"licence": licence})).data
        assert (other.license, other.license_name) == named


def write_run(run: Path, place: Path) -> None:
    """What a run leaves beside a drafter that learnt from answers of the target."""
    rows, sampling = str(place / "rows.jsonl"), {"temperature": 0.0}
    answers = {"name": "answers", "kind": "generate", "sampling": sampling, "self_prompts": None}
    data = {"train": rows, "dev": None, "test": None}
    summary = {"answers": 5, "prompts": 4, "tokens": 60}
    argv = [str(place / "draftsmith"), "train", str(place / "my.yaml"), f"data.train={rows}"]
    (run / "stages" / "00-answers").mkdir()
    for name, value in (
        ("config.json", {"data": data, "stages": [answers]}),
        ("provenance.json", [{"argv": [*argv, "trackers=[]"]}]),
        ("stages/00-answers/done.json", {"summary": summary}),
    ):
        (run / name).write_text(json.dumps(value), "utf-8")


# Refusals


def test_what_cannot_be_exported(tmp_path: Path, target: Target) -> None:
    drafter = tmp_path / "drafter"
    make_drafter(drafter, target)
    out = tmp_path / "out"
    with pytest.raises(UserError, match="tgi cannot hold a small_lm drafter; use --format"):
        export_drafter(drafter, "tgi", out)
    with pytest.raises(UserError, match=r"unknown export format 'hg'.*hf"):
        export_drafter(drafter, "hg", out)
    with pytest.raises(UserError, match=r"ngram is not trained.*prompt_lookup"):
        export_drafter(Path("ngram"), "hf", out)
    with pytest.raises(UserError, match="does not exist"):
        export_drafter(tmp_path / "nothing", "hf", out)
    save_tiny(tmp_path / "plain")
    with pytest.raises(UserError, match="is not a drafter directory"):
        export_drafter(tmp_path / "plain", "hf", out)
    with pytest.raises(UserError, match="dtype is 'int8', but layout hf holds float32, "):
        export_drafter(drafter, "hf", out, ExportOptions(dtype="int8"))
    assert not out.exists()


def test_an_engine_may_be_named_for_its_format(tmp_path: Path, target: Target) -> None:
    make_drafter(tmp_path / "drafter", target)
    for engine, layout in (("vllm", "hf"), ("mlx", "hf"), ("llama-server", "gguf")):
        export_drafter(tmp_path / "drafter", engine, tmp_path / engine)
        assert check_export(tmp_path / engine)["layout"] == layout
    assert format_for("vllm", "medusa").name == "medusa"
    assert format_for("vllm", "pard") is FORMATS["pard"]
    for name in ("gguf", "llama-server", "llama.cpp", "eagle3-gguf"):
        assert format_for(name, "eagle3").name == "eagle3-gguf"
    assert format_for("llama.cpp", "small_lm").name == "gguf"
    with pytest.raises(UserError, match="cannot hold a small_lm drafter; use --format gguf or hf"):
        format_for("eagle3-gguf", "small_lm")
    # Readers that would draft one token after the other.
    for name in ("transformers", "sglang", "hf", "gguf"):
        with pytest.raises(UserError, match="cannot hold a pard drafter; use --format pard"):
            format_for(name, "pard")


def test_nothing_is_overwritten(tmp_path: Path, target: Target) -> None:
    make_drafter(tmp_path / "drafter", target)
    export_drafter(tmp_path / "drafter", "hf", tmp_path / "out")
    for taken in (tmp_path / "out", tmp_path / "drafter" / "config.json"):
        before = taken.stat().st_mtime_ns
        with pytest.raises(UserError, match="exists, and nothing is overwritten"):
            export_drafter(tmp_path / "drafter", "hf", taken)
        assert taken.stat().st_mtime_ns == before
    (tmp_path / "empty").mkdir()
    export_drafter(tmp_path / "drafter", "hf", tmp_path / "empty")


def test_a_half_written_drafter_is_refused(tmp_path: Path, target: Target) -> None:
    make_drafter(tmp_path / "drafter", target)
    (tmp_path / "drafter" / "model.safetensors").unlink()
    with pytest.raises(CorruptArtifact, match=r"model\.safetensors.*missing"):
        export_drafter(tmp_path / "drafter", "hf", tmp_path / "out")


def test_a_drafter_of_another_target_is_refused(tmp_path: Path, target: Target) -> None:
    make_drafter(tmp_path / "drafter", target)
    save_tiny(tmp_path / "other", vocab=320)
    other = ExportOptions(target=str(tmp_path / "other"))
    with pytest.raises(UserError, match="has another vocabulary than the target"):
        export_drafter(tmp_path / "drafter", "hf", tmp_path / "out", other, measuring=measuring())
    with pytest.raises(UserError, match=r"takes the tokenizer from the target's GGUF.*--target"):
        export_drafter(tmp_path / "drafter", "gguf", tmp_path / "out", other)


@pytest.mark.parametrize(
    ("family", "shape", "what"),
    [
        ("gpt2", {}, "is gpt2"),
        ("llama", {"attention_bias": True}, "has biases"),
        ("mistral", {"sliding_window": 64}, "a sliding window of 64"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type linear",
        ),
    ],
)
def test_gguf_refuses_what_it_would_write_wrongly(
    family: str, shape: dict[str, Any], what: str, tmp_path: Path, target: Target
) -> None:
    make_drafter(tmp_path / "drafter", target, family, **shape)
    with pytest.raises(UserError, match=f"{what}.*convert_hf_to_gguf"):
        export_drafter(tmp_path / "drafter", "gguf", tmp_path / "out")


# Schemas


def test_tables_name_every_difference() -> None:
    expected = {"a": TensorSpec((2, 3)), "b": TensorSpec((4,), ("F32",)), "c": TensorSpec((1,))}
    found = {
        "a": StoredTensor((3, 2), "F32"),
        "b": StoredTensor((4,), "BF16", finite=False),
        "d": StoredTensor((1,), "F32"),
    }
    assert tensor_problems(expected, found) == [
        "tensor c is missing",
        "tensor d is not expected",
        "tensor a has shape [3, 2], expected [2, 3]",
        "tensor b is BF16, expected F32",
        "tensor b holds values that are NaN or infinite",
    ]
    wanted = {"x": 1, "y": lambda value: value > 0, "z": 2}
    assert key_problems(wanted, {"x": 1, "y": -1}, "f") == [
        "f: y is -1, which is not valid",
        "f has no z",
    ]


# The hub and the command line


def test_push_hands_over_a_sound_directory(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_drafter(tmp_path / "drafter", target)
    export_drafter(tmp_path / "drafter", "hf", tmp_path / "out")
    calls: list[tuple[str, dict[str, Any]]] = []
    standin = export_directory.huggingface_hub
    monkeypatch.setattr(
        standin, "create_repo", lambda name, **kw: calls.append(("create", {"id": name, **kw}))
    )

    def upload(**kw: Any) -> str:
        calls.append(("upload", kw))
        return "https://hub/org/name"

    monkeypatch.setattr(standin, "upload_folder", upload)
    assert push_export(tmp_path / "out", "org/name") == "https://hub/org/name"
    assert calls[0] == ("create", {"id": "org/name", "repo_type": "model", "exist_ok": True})
    assert calls[1][1]["folder_path"] == tmp_path / "out"
    assert calls[1][1]["repo_id"] == "org/name"

    def refuses(**kw: Any) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr(standin, "upload_folder", refuses)
    with pytest.raises(UserError, match=r"was not pushed to org/name \(no route\)"):
        push_export(tmp_path / "out", "org/name")
    calls.clear()
    (tmp_path / "out" / "config.json").write_text("{}", "utf-8")
    with pytest.raises(CorruptArtifact):
        push_export(tmp_path / "out", "org/name")
    assert calls == []


def test_the_command(tmp_path: Path, target: Target) -> None:
    make_drafter(tmp_path / "drafter", target)

    def ask(*words: object) -> tuple[int, str]:
        found = CliRunner().invoke(cli.app, ["export", *map(str, words)])
        return found.exit_code, found.output

    drafter, out = tmp_path / "drafter", tmp_path / "out"
    status, said = ask(drafter, "--format", "vllm", "--out", out, "--target", tmp_path)
    assert status == 0
    config = f'{{"method": "draft_model", "model": "{out}", "num_speculative_tokens": 4}}'
    assert f"to serve it in vLLM:\nvllm serve {tmp_path} --speculative-config '{config}'\n" in said
    status, said = ask("--check", out, "--json", tmp_path / "figures.json")
    assert status == 0
    figures = {"layout": "hf", "kind": "small_lm", "acceptance": []}
    assert json.loads((tmp_path / "figures.json").read_text("utf-8")) == figures
    assert "a valid hf export of a small_lm drafter" in said
    for words, message in (
        ((drafter,), "nothing to do"),
        ((drafter, "--format", "hf"), "--format was given without --out"),
        ((out, "--verify", "transformers"), "--verify needs --prompts"),
        (("--check", drafter), "export.json"),
        (("--check", tmp_path / "no"), "does not exist"),
    ):
        status, said = ask(*words)
        assert status == 2, said
        assert message in said


def test_a_copy_without_its_manifest_is_no_export(tmp_path: Path, target: Target) -> None:
    make_drafter(tmp_path / "drafter", target)
    export_drafter(tmp_path / "drafter", "hf", tmp_path / "out")
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    (tmp_path / "copy" / MANIFEST).unlink()
    with pytest.raises(CorruptArtifact):
        check_export(tmp_path / "copy")
    (tmp_path / "out" / EXPORT_FILE).unlink()
    with pytest.raises(CorruptArtifact, match=EXPORT_FILE):
        check_export(tmp_path / "out")
