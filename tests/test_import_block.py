"""Published drafters that draft in one pass, as drafter directories: DFlash, DSpark, PARD."""

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from decode.base.errors import UserError
from decode.drafters.pard import ParallelLMDrafter
from decode.model.loading import Target
from decode.opening.directory import open_drafter
from draftsmith.export import ImportOptions
from draftsmith.export.export_directory import export_drafter
from draftsmith.export.formats import FORMATS
from draftsmith.export.formats.published_layer import published_window
from draftsmith.export.import_directory import import_drafter
from draftsmith.export.published import Checkpoint
from heads.dflash_heads import DFlashDrafter
from tests.export import (
    DFLASH,
    DFLASH2,
    DSPARK,
    assert_drafts_the_same,
    edit_json,
    edit_weights,
    make_heads,
    save_target,
)
from tests.published import HIDDEN, Published, layer_shapes, llama_config, random_tensors
from tests.tiny import save_tiny
from tests.training import assert_equal

ROWS = 304
settings = functools.partial(edit_json, "config.json")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """With ids that are no tokens, for the mask."""
    return save_target(tmp_path_factory.mktemp("target") / "target", layers=4, vocab=ROWS)


def z_lab(layers: int = 4) -> Published:
    """Layers with other heads than the target's, in bfloat16, with what transformers writes.
    layers: of the target."""
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, 2 * HIDDEN)}
    norms = {"norm": HIDDEN, "hidden_norm": HIDDEN}
    for layer in ("layers.0", "layers.1"):
        shapes |= layer_shapes(layer, HIDDEN, heads=4, keys=1, size=16)
        norms[f"{layer}.input_layernorm"] = HIDDEN
        norms |= {f"{layer}.self_attn.{part}_norm": 16 for part in "qk"}
    shapes |= {f"{name}.weight": (size,) for name, size in norms.items()}
    config = llama_config(
        architectures=["DFlashDraftModel"],
        model_type="qwen3",
        auto_map={"AutoModel": "dflash.DFlashDraftModel"},
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        layer_types=["full_attention"] * 2,
        max_window_layers=2,
        sliding_window=None,
        use_sliding_window=False,
        rope_scaling=None,
        rope_theta=1e6,
        attention_bias=False,
        block_size=4,
        num_target_layers=layers,
        dflash_config={"mask_token_id": 301, "target_layer_ids": [1, 2]},
        vocab_size=ROWS,
    )
    return Published(config, random_tensors(shapes, torch.bfloat16))


def exported_again(
    published: Published, form: str, target: Target, directory: Path
) -> tuple[Any, dict[str, torch.Tensor], dict[str, Any]]:
    """Import a checkpoint and export it. Both draft the same. Returns what the import says, and the
    tensors and the config of the export."""
    imported = import_drafter(str(published.save(directory / "a")), target, directory / "out")
    export_drafter(directory / "out", form, directory / "export")
    assert_drafts_the_same(directory / "out", directory / "export", target)
    config = json.loads((directory / "export" / "config.json").read_text("utf-8"))
    return imported, load_file(directory / "export" / "model.safetensors"), config


def test_an_export_gives_the_published_tensors_back(tmp_path: Path, target: Target) -> None:
    published = z_lab()
    imported, exported, config = exported_again(published, "vllm", target, tmp_path)
    assert (imported.layout, imported.depth, imported.dtype) == ("dflash", 3, "bfloat16")
    assert "its config names code (auto_map), which was neither read nor run" in imported.notes
    assert imported.settings is not None
    assert (imported.settings["taps"], imported.settings["mask_token"]) == ([1, 2], 301)
    assert imported.settings["layer"]["num_attention_heads"] == 4
    assert isinstance(open_drafter(str(tmp_path / "out"), target), DFlashDrafter)
    assert_equal(exported, published.tensors)
    for key in ("dflash_config", "block_size", "head_dim", "rope_theta", "num_target_layers"):
        assert config[key] == published.config[key], key


def stored_layers(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text("utf-8"))
    return config["transformer_layer_config"]


# By layout and by what is said: the fault.
FAULTS: dict[str, dict[str, Callable[[Path], Any]]] = {
    "dflash": {
        "layer_types is ['full_attention', 'sliding_attention'] and sliding_window None": settings(
            layer_types=["full_attention", "sliding_attention"]
        ),
        "num_target_layers is 36, expected 4": settings(num_target_layers=36),
        "dflash_config is": settings(dflash_config={"mask_token_id": 303}),
        "taps are [0, 4]; expected numbers from 0 to 3 in ascending order": settings(
            dflash_config={"mask_token_id": 303, "target_layer_ids": [0, 4]}
        ),
        "block_size is 256; expected from 2 to 255: the target's context has 256 tokens": settings(
            block_size=256
        ),
        "mask_token is 9, which": settings(
            dflash_config={"mask_token_id": 9, "target_layer_ids": [0, 2]}
        ),
        "tensor layers.1.self_attn.q_norm.weight is missing": edit_weights(
            lambda tensors: tensors.pop("layers.1.self_attn.q_norm.weight")
        ),
        "both stand for fc.weight": edit_weights(
            lambda tensors: tensors.update({"model.fc.weight": torch.zeros(64, 128)})
        ),
        "has mask_embedding.pt, a trained embedding of its mask token": lambda directory: (
            torch.save(torch.zeros(64), directory / "mask_embedding.pt")
        ),
    },
    "speculators-dflash": {
        "lm_head.weight differs from the target's output layer in 2 of 304 rows": edit_weights(
            lambda tensors: tensors["lm_head.weight"][5:7].add_(1.0)
        ),
        "tensor d2t is missing": settings(draft_vocab_size=150),
        "sample_from_anchor is True, expected False": settings(sample_from_anchor=True),
        "embed_tokens.weight differs from the target's embeddings in 1 of": edit_weights(
            lambda tensors: tensors["embed_tokens.weight"][5].fill_(torch.nan)
        ),
        "tensor lm_head.weight has dtype torch.int32, expected the target's": edit_weights(
            lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].int()})
        ),
        "layers.0.self_attn.q_proj.weight has shape []": edit_weights(
            lambda tensors: tensors.update({"layers.0.self_attn.q_proj.weight": torch.zeros(())})
        ),
        "has no readable config.json (maximum recursion": lambda directory: (
            directory / "config.json"
        ).write_text('{"a":' * 9999 + "1" + "}" * 9999, "utf-8"),
        "and 35 more": lambda directory: settings(
            **{"transformer_layer_config": stored_layers(directory) | {"num_hidden_layers": 7}}
        )(directory),
    },
    # The library and vLLM read a missing one differently.
    "speculators-dspark": {"has no sample_from_anchor": settings(sample_from_anchor=None)},
}


@pytest.mark.parametrize(
    ("layout", "said"), [(layout, said) for layout in FAULTS for said in FAULTS[layout]]
)
def test_a_fault_is_refused_by_name(layout: str, said: str, tmp_path: Path, target: Target) -> None:
    make_heads(tmp_path / "drafter", target, DSPARK if "dspark" in layout else DFLASH)
    export_drafter(tmp_path / "drafter", layout, tmp_path / "export")
    FAULTS[layout][said](tmp_path / "export")
    with pytest.raises(UserError) as refused:
        import_drafter(str(tmp_path / "export"), target, tmp_path / "out")
    assert said in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_a_published_dflash2_says_all_that_readers_need(tmp_path: Path, target: Target) -> None:
    """The block size is in `dflash_config`. Layers with a window are causal unless the config says
    otherwise. Scaled logits are refused by name."""
    make_heads(tmp_path / "drafter", target, DFLASH2 | {"window": 16})
    export_drafter(tmp_path / "drafter", "vllm", tmp_path / "export")
    config = json.loads((tmp_path / "export" / "config.json").read_text("utf-8"))
    assert "block_size" not in config
    assert config["dflash_config"] == {
        "mask_token_id": 303,
        "target_layer_ids": [0, 2],
        "block_size": 4,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 8,
        "selector_top_k": 5,
    }
    scaled = config["dflash_config"] | {"output_multiplier": 0.2}
    for change, message in (
        ({"is_causal": None}, "a token of a block sees only those before it"),
        ({"dflash_config": scaled}, "dflash_config.output_multiplier is 0.2, expected 1"),
    ):
        edit_json("config.json", **config | change)(tmp_path / "export")
        with pytest.raises(UserError, match=message):
            import_drafter(str(tmp_path / "export"), target, tmp_path / "x")


def model_optimizer(kind: str = "dflash", **inner: Any) -> Published:
    """As Model Optimizer 0.47 writes it: with `causal` always, the settings of DSpark and Domino
    in `dflash_config`, and DSpark's tensors by other names. inner: other settings there."""
    published, rank = z_lab(), 8
    published.config["dflash_config"] |= {"causal": False} | inner
    if kind == "dspark":
        published.config["dflash_config"] |= {
            "projector_type": "dspark",
            "shift_label": True,
            "markov_rank": rank,
            "markov_head_type": "vanilla",
            "use_confidence_head": True,
        } | inner
        shapes = {f"markov_w{n}.weight": (ROWS, rank) for n in (1, 2)}
        shapes |= {"confidence_proj.weight": (1, HIDDEN + rank), "confidence_proj.bias": (1,)}
        published.tensors.update(random_tensors(shapes, torch.bfloat16))
    if kind == "domino":
        published.config |= {"emb_dim": rank}
        published.config["dflash_config"] |= {
            "projector_type": "domino",
            "shift_label": True,
            "pure_draft_prefix_len": 1,
            "gru_hidden_dim": 6,
            "emb_dim": rank,
        } | inner
        shapes = {"embed_proj.0.weight": (rank, HIDDEN + 6), "embed_proj.2.weight": (ROWS, rank)}
        shapes |= {f"prefix_gru.weight_{x}_l0": (18, n) for x, n in (("ih", HIDDEN), ("hh", 6))}
        published.tensors.update(random_tensors(shapes, torch.bfloat16))
    return published


def test_model_optimizers_dspark_is_the_authors(tmp_path: Path, target: Target) -> None:
    published = model_optimizer("dspark")
    imported, exported, config = exported_again(published, "vllm", target, tmp_path)
    assert imported.layout == "dspark"
    for theirs, ours in (
        ("markov_w1.weight", "markov_head.markov_w1.weight"),
        ("markov_w2.weight", "markov_head.markov_w2.weight"),
        ("confidence_proj.weight", "confidence_head.proj.weight"),
        ("confidence_proj.bias", "confidence_head.proj.bias"),
        ("layers.1.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight"),
    ):
        assert torch.equal(exported[ours], published.tensors[theirs]), ours
    assert config["confidence_head_with_markov"] is True
    assert config["target_layer_ids"] == [1, 2]


def test_model_optimizers_domino_comes_back(tmp_path: Path, target: Target) -> None:
    published = model_optimizer("domino")
    imported, exported, config = exported_again(published, "sglang", target, tmp_path)
    assert (imported.layout, imported.depth) == ("domino", 4)
    assert_equal(exported, published.tensors)
    before = {key: x for key, x in published.config["dflash_config"].items() if key != "causal"}
    assert (config["dflash_config"], config["emb_dim"]) == (before, 8)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_model_optimizers_window_is_that_of_all_layers(
    kind: str, tmp_path: Path, target: Target
) -> None:
    """Although the config calls them layers of full attention. What was trained from stored states
    counts no layers of the target."""
    published = model_optimizer(kind, use_swa=True, swa_window_size=16)
    published.config |= {"sliding_window": 16, "num_target_layers": 0}
    imported = import_drafter(str(published.save(tmp_path / "a")), target, tmp_path / "out")
    assert (imported.layout, (imported.settings or {})["window"]) == (kind, 16)


@pytest.mark.parametrize(
    ("kind", "inner", "outer", "said"),
    [
        ("dflash", {"causal": True}, {}, "a token of a block sees only those before it"),
        ("dflash", {"attention_sink_bias": True}, {}, "these heads have no learnt sinks"),
        ("dflash", {}, {"attention_sink_bias": True}, "these heads have no learnt sinks"),
        ("dflash", {"projector_type": "eagle"}, {}, "'eagle', heads that are not read here"),
        ("domino", {"pure_draft_prefix_len": 2}, {}, "dflash_config is {"),
        ("domino", {"shift_label": False}, {}, "dflash_config is {"),
        ("domino", {}, {"emb_dim": 4}, "emb_dim is 4, and dflash_config.emb_dim 8"),
        ("dflash", {"use_swa": True}, {}, "expected one kind of layers, and a window"),
        ("dflash", {"emb_dim": 8}, {}, "has dflash_config.emb_dim, which this import does not"),
        ("dflash", {}, {"gate": 8}, "config.json has gate, which this import does not know"),
        ("dspark", {"markov_head_type": "rnn"}, {}, "markov_head_type is 'rnn', expected"),
        ("dspark", {"shift_label": False}, {}, "shift_label is False, expected True"),
        ("dspark", {}, {"markov_rank": 4}, "markov_rank is 4, and dflash_config.markov_rank 8"),
    ],
)
def test_what_a_block_cannot_compute_is_refused_by_name(
    kind: str,
    inner: dict[str, Any],
    outer: dict[str, Any],
    said: str,
    tmp_path: Path,
    target: Target,
) -> None:
    published = model_optimizer(kind, **inner)
    published.config.update(outer)
    with pytest.raises(UserError, match=re.escape(said)):
        import_drafter(str(published.save(tmp_path / "a")), target, tmp_path / "out")


def test_a_window_that_says_it_is_not_causal_is_read(tmp_path: Path, target: Target) -> None:
    published = z_lab()
    published.config |= {"layer_types": ["sliding_attention"] * 2, "sliding_window": 16}
    published.config |= {"use_sliding_window": True}
    with pytest.raises(UserError, match="a token of a block sees only those before it"):
        import_drafter(str(published.save(tmp_path / "a")), target, tmp_path / "out")
    published.config["dflash_config"]["causal"] = False
    imported = import_drafter(str(published.save(tmp_path / "b")), target, tmp_path / "out")
    assert (imported.settings or {})["window"] == 16


def test_a_published_window_is_that_of_sliding_layers() -> None:
    sliding = {"layer_types": ["sliding_attention"], "sliding_window": 9}
    assert published_window(sliding) == (9, [])
    assert published_window({"sliding_window": 9}) == (None, [])
    assert published_window({"layer_types": ["full_attention"], "sliding_window": 9}) == (None, [])
    others: list[dict[str, Any]] = [{"layer_types": ["sliding_attention", "other"]}]
    for wrong in (*others, {"layer_types": ["other"]}, {"sliding_window": None}):
        window, problems = published_window(sliding | wrong)
        assert window is None
        assert "layer_types" in problems[0]


def test_other_types_of_the_library_speculators_are_refused_by_name(
    tmp_path: Path, target: Target
) -> None:
    published = z_lab()
    published.config["speculators_model_type"] = "new"
    with pytest.raises(UserError, match=r"of type 'new'; .*not known"):
        import_drafter(str(published.save(tmp_path / "a")), target, tmp_path / "out")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"speculators_model_type": ["dflash"]},
            "type is ['dflash'], expected text",
        ),
        ({"model_type": {"qwen3": 1}}, "model_type is {'qwen3': 1}, expected text"),
        ({"layer_types": 2}, "layer_types is 2, expected a list of texts"),
        (
            {"layer_types": [["full_attention"]]},
            "is [['full_attention']], expected a list",
        ),
        ({"architectures": [{}]}, "architectures is [{}], expected a list of texts"),
        ({"dflash_config": [1, 2]}, "dflash_config is [1, 2], expected an object"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope_scaling.rope_type is ['yarn'], expect"),
        (
            {"rope_scaling": {"type": {"yarn": 2}}},
            "is {'type': {'yarn': 2}}, which is not valid",
        ),
        ({"num_hidden_layers": 10**9}, "names 1000000000 layers, but there are 25 tensors"),
        ({"head_dim": 10**9}, "head_dim is 1000000000, expected at most hidden_size, 64"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf, which is not valid"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_name(
    settings: dict[str, Any], said: str, tmp_path: Path, target: Target
) -> None:
    """Also where the key would be looked up in a table or counted to."""
    published = z_lab()
    published.config.update(settings)
    with pytest.raises(UserError, match=re.escape(said)):
        import_drafter(str(published.save(tmp_path / "a")), target, tmp_path / "out")


def test_layer_numbers_may_mean_inputs(tmp_path: Path, target: Target) -> None:
    source = str(z_lab().save(tmp_path / "a"))
    options = ImportOptions(layer_ids="inputs", depth=3)
    imported = import_drafter(source, target, tmp_path / "out", options)
    assert imported.settings is not None
    assert imported.settings["taps"] == [0, 1]
    with pytest.raises(UserError, match=r"--depth is 2, but .* drafts blocks of 3 tokens"):
        import_drafter(source, target, tmp_path / "x", ImportOptions(depth=2))


def test_a_parallel_small_model_keeps_its_weights(tmp_path: Path, target: Target) -> None:
    source = save_tiny(tmp_path / "small", layers=1, vocab_size=ROWS)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    model.config.pard_token = 302
    model.save_pretrained(source)
    imported = import_drafter(str(source), target, tmp_path / "out")
    assert (imported.layout, imported.kind, imported.dtype) == ("pard", "pard", "bfloat16")
    drafter = open_drafter(str(tmp_path / "out"), target)
    assert isinstance(drafter, ParallelLMDrafter)
    assert drafter.mask_token == 302
    export_drafter(tmp_path / "out", "vllm", tmp_path / "export")
    card = (tmp_path / "export" / "README.md").read_text("utf-8")
    assert '"parallel_drafting": true' in card
    before, after = (load_file(p / "model.safetensors") for p in (source, tmp_path / "export"))
    assert_equal(after, before)
    edit_json("config.json", pard_token=ROWS)(source)
    with pytest.raises(UserError, match="from 0 to 303"):
        import_drafter(str(source), target, tmp_path / "x")
    edit_json("config.json", pard_token=9)(source)
    with pytest.raises(UserError, match=r"pard_token is 9, which .* uses in texts"):
        import_drafter(str(source), target, tmp_path / "x")
    edit_json("config.json", pard_token=None)(source)
    checkpoint = Checkpoint.open(str(source))
    assert [name for name in FORMATS if FORMATS[name].recognises(checkpoint)] == ["hf"]
    with pytest.raises(UserError, match="has no pard_token"):
        import_drafter(str(source), target, tmp_path / "x", ImportOptions(form="pard"))
