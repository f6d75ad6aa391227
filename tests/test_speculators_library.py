"""The library speculators beside ours. Drafters that it saved: our import reads them, our export
writes them again, and the library loads the export. A step of EAGLE-3's training in both."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks import speculators
from decode.model.loading import Target, load_target
from draftsmith.export import ExportOptions
from draftsmith.export.export_directory import export_drafter
from draftsmith.export.import_directory import import_drafter
from heads.heads_directory import read_heads
from heads.layers.unrolled_attention import causal_attention
from tests.export import KEPT, make_heads, require_environment, save_target
from tests.mtp_targets import save_mtp_target
from tests.tiny import VOCAB, save_tiny
from tools.child_job import run_job
from tools.imports import ROOT
from train.engines.child_process import package_version

LIBRARY, CHILD = "speculators", ROOT / "tools" / "speculators_child.py"
FORM = "speculators-mtp"
# A free id, for masks.
BLOCK = {"mask_token_id": VOCAB + 1, "target_layer_ids": [1, 3]}
REDUCED = {"ids": KEPT.tolist()}
# The options of the library's trainer by case, with the layout of our export.
SAVED: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": (
        "speculators",
        {"algorithm": "eagle3", "norm_before_residual": True, "ttt_steps": 3, **REDUCED},
    ),
    "eagle31": (
        "speculators",
        {
            "algorithm": "eagle3",
            "norm_before_residual": False,
            "ttt_steps": 5,
            "fc_norm": True,
            "norm_output": True,
            "target_layer_ids": [1, 3, 6],
        },
    ),
    "peagle": (
        "speculators-peagle",
        {"algorithm": "peagle", "mask_token_id": VOCAB + 1, "num_depths": 4},
    ),
    "dflash": ("speculators-dflash", {"algorithm": "dflash", "block_size": 4, **BLOCK, **REDUCED}),
    "dspark": (
        "speculators-dspark",
        {"algorithm": "dspark", "block_size": 3, "markov_rank": 8, **BLOCK},
    ),
    "dflash2": (
        "speculators-dflash2",
        {"algorithm": "dflash2", "block_size": 4, "selector_rank": 8, "selector_top_k": 5, **BLOCK},
    ),
    "xpress": (
        "speculators-xpress",
        {"algorithm": "xpress", "block_size": 4, "xpress_rank": 8, "num_jacobi_passes": 3}
        | {**BLOCK, **REDUCED},
    ),
}
# The target's tensors: the library saves or leaves them out, and fills them in when it loads.
TARGETS = {"embed_tokens.weight", "lm_head.weight"}
# The library holds these beside a drafter, to train it, and never saves them.
TEACHER = {"verifier_lm_head.weight", "verifier_norm.weight"}


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_saved_drafters_are_imported_exported_and_loaded(tmp_path: Path) -> None:
    """Bit by bit, with the same settings."""
    require_environment(
        None if package_version(LIBRARY, LIBRARY) else "the library speculators is not installed",
        "make engine-speculators",
    )
    target = save_target(tmp_path / "target", layers=7, vocab=VOCAB + 4)
    base = {"directory": str(tmp_path), "target": "target"}
    saved = {str(tmp_path / name): options for name, (_, options) in SAVED.items()}
    run_job(LIBRARY, CHILD, base | {"save": saved, "load": {}})
    for name, (form, _) in SAVED.items():
        imported = tmp_path / f"{name}-imported"
        depth = import_drafter(str(tmp_path / name), target, imported).depth
        assert depth is not None
        export_drafter(imported, form, tmp_path / f"{name}-export", ExportOptions(gamma=depth))
        theirs, ours = tensors_in(tmp_path / name), tensors_in(tmp_path / f"{name}-export")
        assert theirs.keys() - TARGETS == ours.keys() - TARGETS, name
        assert_equal(theirs, ours)
    loaded = {str(tmp_path / f"{name}-export"): str(tmp_path / f"{name}.st") for name in SAVED}
    answer = run_job(LIBRARY, CHILD, base | {"save": {}, "load": loaded})
    for name in SAVED:
        export = tmp_path / f"{name}-export"
        held, ours = load_file(tmp_path / f"{name}.st"), tensors_in(export)
        assert held.keys() - TARGETS == (ours.keys() - TARGETS) | TEACHER, name
        assert_equal(held, ours)
        assert answer["classes"][str(export)] == config_of(tmp_path / name)["architectures"][0]
        assert_same_settings(config_of(tmp_path / name), answer["settings"][str(export)])


@pytest.mark.engine
def test_modules_of_multi_token_prediction_compute_the_same_in_the_library(tmp_path: Path) -> None:
    """Those that it saved, of each family, and one that we made for a family without modules."""
    require_environment(
        None if package_version(LIBRARY, LIBRARY) else "the library speculators is not installed",
        "make engine-speculators",
    )
    saved, names = {}, ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
    targets = {name: load_target(str(save_mtp_target(tmp_path / name, name))) for name in names}
    for name in names:
        saved[str(tmp_path / f"{name}-saved")] = {
            **{"target": name, "algorithm": "mtp", "num_speculative_steps": 2},
        }
    run_job(LIBRARY, CHILD, {"directory": str(tmp_path), "target": "", "save": saved, "load": {}})
    for name in names:
        imported = import_drafter(
            str(tmp_path / f"{name}-saved"), targets[name], tmp_path / f"{name}-drafter"
        )
        assert (imported.layout, imported.depth) == ("speculators-mtp", 2)
    save_tiny(tmp_path / "qwen3", "qwen3")
    targets["qwen3"] = load_target(str(tmp_path / "qwen3"))
    make_heads(tmp_path / "qwen3-drafter", targets["qwen3"], {"type": "mtp", "depth": 2}, moved=0.2)
    run, expected = {}, {}
    ids = torch.tensor([[3, 17, 250, 9, 42, 5, 120, 77]])
    for name, target in targets.items():
        export, file = tmp_path / f"{name}-export", tmp_path / f"{name}.st"
        export_drafter(tmp_path / f"{name}-drafter", FORM, export, ExportOptions(gamma=2))
        with torch.no_grad():
            states = target.model.model(ids).last_hidden_state
            expected[name] = first_step(tmp_path / f"{name}-drafter", target, ids, states)
        save_file({"input_ids": ids, "hidden_states": states}, file)
        run[str(export)] = str(file)
    load = {directory: f"{file}-loaded" for directory, file in run.items()}
    job = {"directory": str(tmp_path), "target": "", "save": {}, "load": load, "run": run}
    answer = run_job(LIBRARY, CHILD, job)
    for name in targets:
        export = tmp_path / f"{name}-export"
        found = load_file(run[str(export)])["logits"][0]
        torch.testing.assert_close(found, expected[name][: len(found)], rtol=1e-4, atol=1e-4)
        ours, held = tensors_in(export), load_file(load[str(export)])
        assert held.keys() - TARGETS == ours.keys()
        assert_equal(held, ours)
        if name != "qwen3":
            assert_equal(tensors_in(tmp_path / f"{name}-saved"), ours)
            assert tensors_in(tmp_path / f"{name}-saved").keys() == ours.keys()
            assert_same_settings(
                config_of(tmp_path / f"{name}-saved"), answer["settings"][str(export)]
            )


def first_step(
    drafter: Path, target: Target, ids: torch.Tensor, states: torch.Tensor
) -> torch.Tensor:
    """[T − 1, V]: what heads of multi-token prediction say after each state and the next token.
    ids: int64 [1, T]. states: [1, T, H]."""
    heads: Any = read_heads(drafter, target)
    heads.borrow(target.model)
    positions = torch.arange(ids.shape[1] - 1)[None]
    outputs = heads.step(states[:, :-1], ids[:, 1:], positions, causal_attention)
    logits: torch.Tensor = heads.output.at(1, outputs)[0]
    return logits


def tensors_in(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def config_of(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text("utf-8"))
    return config


def assert_equal(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    for name in some.keys() & others.keys():
        assert some[name].dtype == others[name].dtype, name
        assert torch.equal(some[name], others[name]), name


def assert_same_settings(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Every setting of the first is in the second. The special tokens of the layers do not count:
    no reader uses them, and ours are the target's."""
    layers = "transformer_layer_config"
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    assert {k: x for k, x in before.items() if k != layers} == {
        k: x for k, x in after.items() if k != layers
    }
    for key, value in before[layers].items():
        if key not in special:
            assert after[layers][key] == value, key


@pytest.mark.engine
def test_a_training_step_is_the_librarys(tmp_path: Path) -> None:
    """The benchmark's: the same loss and gradient, from the same weights and hidden states, also
    after steps of AdamW. The library's trainer takes none without an accelerator."""
    require_environment(speculators.missing_library(), "make engine-speculators")
    target = save_target(tmp_path / "target", layers=7)
    results, error = speculators.compare(
        target,
        tmp_path,
        lengths=(24,),
        vocabularies=(64,),
        texts=3,
        half=False,
    )
    differences = {
        name: value for name, value in speculators.ratios(results).items() if "difference" in name
    }
    assert len(differences) == 2 * len(speculators.ATTENTIONS)
    assert max(differences.values()) < 1e-5, differences
    assert error is not None
    assert "accelerator" in error
