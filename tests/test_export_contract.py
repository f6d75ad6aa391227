"""What all layouts of exports promise: an export drafts the same and is imported as it was, what it
cannot hold is refused before anything is written, and every fault of a directory is found
(`Format.problems`), because loaders do not."""

import functools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from decode.base.errors import UserError
from decode.drafters.pard import mark_parallel
from decode.model.loading import Target, load_target
from draftsmith.export import ExportOptions, ImportOptions
from draftsmith.export.export_directory import check_export, export_drafter
from draftsmith.export.formats import FORMATS
from draftsmith.export.formats.readers import KNOWN, READERS
from draftsmith.export.import_directory import import_drafter
from heads.heads_directory import read_heads
from tests.export import (
    DFLASH,
    DFLASH2,
    DOMINO,
    DSPARK,
    EAGLE1,
    EAGLE3,
    FEW,
    KEPT,
    MEDUSA,
    NEWER3,
    OTHER3,
    P_EAGLE,
    SHAPE,
    XPRESS,
    assert_drafts_the_same,
    edit_json,
    edit_weights,
    make_heads,
    reloaded,
    rewrite_gguf,
)
from tests.test_target import write_gguf
from tests.tiny import save_small_lm, shortened, tiny_llama
from tests.training import assert_equal

WINDOW = {"window": 4}
# By layout: the options of heads, and the tokens of a reduced draft vocabulary.
HEADS: dict[str, tuple[dict[str, Any], torch.Tensor | None]] = {
    "medusa": (MEDUSA | {"output": "shared"}, None),
    "eagle1": (EAGLE1, None),
    "eagle1-sglang": (EAGLE1, None),
    "eagle3": (EAGLE3, KEPT),
    "eagle3-gguf": (EAGLE3, KEPT),
    "speculators": (EAGLE3, KEPT),
    "p_eagle": (P_EAGLE, KEPT),
    "speculators-peagle": (P_EAGLE, KEPT),
    "dflash": (DFLASH, None),
    "dflash2": (DFLASH2, None),
    "domino": (DOMINO, None),
    "dspark": (DSPARK, None),
    "dflash-gguf": (DFLASH | WINDOW, KEPT),
    "dflash2-gguf": (DFLASH2, None),
    "dspark-gguf": (DSPARK, KEPT),
    "speculators-dflash": (DFLASH, KEPT),
    "speculators-dspark": (DSPARK, KEPT),
    "speculators-dflash2": (DFLASH2, None),
    "speculators-xpress": (XPRESS, KEPT),
}
SMALL_LMS = ("hf", "pard", "gguf")
LAYOUTS = (*HEADS, *SMALL_LMS)
# Our own directories have no table of tensors, and a target with its module is a layout of its own.
ELSEWHERE = {"draftsmith", "mtp", "mtp-gguf", "speculators-mtp"}

Change = Callable[[Path], Any]
Made = Callable[[str], tuple[str | None, Target]]


@pytest.fixture(scope="module")
def target(spare: Target) -> Target:
    return spare


# --- refusals -------------------------------------------------------------------------------------

# Options of heads, a format, and why it cannot hold them.
UNHELD: list[tuple[dict[str, Any], str, str]] = [
    (MEDUSA, "gguf", r"llama\.cpp has no Medusa heads; vLLM has them up to 0\.32, TGI too"),
    (MEDUSA, "llama-server", r"llama\.cpp has no Medusa heads"),
    (MEDUSA, "sglang", "sglang cannot hold a medusa drafter; use --format medusa"),
    (EAGLE1, "gguf", r"llama\.cpp has no EAGLE-1; serve it with vLLM"),
    (EAGLE3, "tgi", "cannot hold a eagle3 drafter; use --format eagle3"),
    (EAGLE3, "gguf", "takes the tokenizer from the target's GGUF file"),
    (EAGLE3 | {"norm_output": True}, "gguf", "has norm_output, .* with vLLM"),
    (EAGLE3 | {"norm_output": True}, "openvino", "has norm_output, .* serve it with vllm$"),
    (EAGLE1 | {"output_rank": 8}, "sglang", "has an output layer of its own .output_rank., but"),
    (DSPARK, "sglang", "format sglang cannot hold a dspark drafter; use --format dspark"),
    (DSPARK, "gguf", "takes the tokenizer from the target's GGUF file"),
    (
        DFLASH2 | {"candidates": 8},
        "gguf",
        "8 candidates, .* hidden size of 72, and its target has 64",
    ),
    ({"type": "blockwise", "k": 4, "hidden": 8}, "vllm", "no engine supports Blockwise heads"),
    ({"type": "hydra", "heads": 3}, "vllm", "no engine supports Hydra heads"),
    ({"type": "hydra_plus", "heads": 3}, "vllm", r"no engine supports Hydra\+\+ heads"),
    # Readers that would ignore a window.
    (EAGLE1 | WINDOW, "vllm", "a window of 4 tokens, .*; train it without window"),
    (EAGLE3 | WINDOW, "sglang", "a window of 4 tokens, .*; export it as speculators"),
    (EAGLE3 | WINDOW, "gguf", "a window of 4 tokens, .*; export it as speculators"),
    (DFLASH | WINDOW, "vllm", "a window .*; export it as dflash-gguf or speculators-dflash"),
    (DSPARK | WINDOW, "speculators", "a window of 4 tokens, .*; export it as dspark-gguf"),
    (EAGLE3 | WINDOW | {"sinks": 2}, "speculators", "no engine keeps sinks"),
]
# Heads with a reduced draft vocabulary, and why vLLM cannot read them.
UNREDUCED = [
    (MEDUSA, "must be measured: give --prompts"),
    (EAGLE1, "must be measured: give --prompts"),
    (DFLASH, "reduced draft vocabulary, .*; export them as speculators-dflash"),
    (DFLASH2, "reduced draft vocabulary, which no engine reads; train them without"),
]


@pytest.mark.parametrize(
    ("options", "kept", "form", "gamma", "message"),
    [
        *((options, None, form, None, message) for options, form, message in UNHELD),
        *((options, KEPT, "vllm", None, message) for options, message in UNREDUCED),
        *((x, None, "vllm", 4, "gamma is 4, but .* at most 3 tokens") for x in (MEDUSA, EAGLE1)),
    ],
)
def test_what_cannot_be_exported_is_refused_by_name(
    options: dict[str, Any],
    kept: torch.Tensor | None,
    form: str,
    gamma: int | None,
    message: str,
    tmp_path: Path,
    target: Target,
) -> None:
    make_heads(tmp_path / "drafter", target, options, kept)
    with pytest.raises(UserError, match=message):
        export_drafter(tmp_path / "drafter", form, tmp_path / "out", ExportOptions(gamma=gamma))
    assert not (tmp_path / "out").exists()


def test_an_export_says_that_the_newest_engine_does_not_read_it(
    tmp_path: Path, target: Target
) -> None:
    for options, said in (
        (MEDUSA, ["note: vLLM reads layout medusa up to 0.32, and 0.33 does not"]),
        (EAGLE3, []),
    ):
        place, lines = tmp_path / str(options["type"]), []
        make_heads(place / "drafter", target, options)
        export_drafter(place / "drafter", "vllm", place / "out", say=lines.append)
        assert lines == said
    assert "vLLM up to 0.32:" in (tmp_path / "medusa" / "out" / "README.md").read_text("utf-8")


def test_every_layout_is_in_the_table_of_readers() -> None:
    assert set(READERS) == set(FORMATS)
    for readers in READERS.values():
        for engine, reads in readers.items():
            assert bool(reads.since) == bool(KNOWN[engine].newest)
            assert reads.until != KNOWN[engine].newest or not reads.until


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, target: Target) -> Made:
    """Of a layout: the file that is served, where it is another one, and the target of drafters."""
    place = tmp_path_factory.mktemp("files")
    write_gguf(place / "target.gguf", layers=7)
    of_file = load_target(str(place / "target.gguf"))
    # Block drafters need ids that are no tokens, which a tokenizer of a file does not have.
    write_gguf(place / "spare.gguf", layers=7, vocab=target.vocab_size, **SHAPE)

    def of_layout(layout: str) -> tuple[str | None, Target]:
        if layout in (*SMALL_LMS, "eagle3-gguf"):
            return None, of_file
        return str(place / "spare.gguf") if "gguf" in layout else None, target

    return of_layout


# --- round trips ----------------------------------------------------------------------------------

OF_TARGET = {"output": "target"}
# Heads that are written otherwise than those of HEADS: layout, options, tokens.
VARIANTS: dict[str, tuple[str, dict[str, Any], torch.Tensor | None]] = {
    "eagle3": ("eagle3", EAGLE3, None),
    "eagle3, other": ("eagle3", OTHER3, KEPT),
    "eagle3, 3.1": ("eagle3", NEWER3, KEPT),
    "eagle3, target's": ("eagle3", EAGLE3 | OF_TARGET, None),
    "eagle3, target's, reduced": ("eagle3", EAGLE3 | OF_TARGET, KEPT),
    "eagle3, low rank": ("eagle3", EAGLE3 | OF_TARGET | {"output_rank": 16}, KEPT),
    "eagle3-gguf": ("eagle3-gguf", EAGLE3, None),
    "eagle3-gguf, target's": ("eagle3-gguf", EAGLE3 | OF_TARGET, None),
    "speculators": ("speculators", EAGLE3, None),
    "speculators, 3.1": ("speculators", NEWER3, KEPT),
    "p_eagle": ("p_eagle", P_EAGLE, None),
    "speculators-peagle": (
        "speculators-peagle",
        P_EAGLE | {"embeddings": "trained", "norm_before_residual": True},
        None,
    ),
    "medusa, own": ("medusa", MEDUSA | {"layers": 2}, None),
    "dflash2, window": ("dflash2", DFLASH2 | {"window": 16}, None),
    "speculators, window": ("speculators", EAGLE3 | WINDOW, None),
    "p_eagle, window": ("p_eagle", P_EAGLE | WINDOW, None),
    "speculators-dflash, window": ("speculators-dflash", DFLASH | WINDOW, None),
    "dflash-gguf, layer": ("dflash-gguf", DFLASH | {"layer": {"rms_norm_eps": 1e-5}}, None),
    "dspark-gguf": ("dspark-gguf", DSPARK | {"confidence": False}, None),
    "speculators-dflash": ("speculators-dflash", DFLASH, None),
    "speculators-dspark": ("speculators-dspark", DSPARK, None),
    "speculators-xpress": ("speculators-xpress", XPRESS, None),
}
TRIPS = {layout: (layout, *HEADS[layout]) for layout in HEADS} | VARIANTS
SHORT_TRIPS = [trip for trip in TRIPS if trip in HEADS or "window" in trip]
# Our captured layers are outputs, counted from 0; these readers count the layers that read them.
READ: dict[str, tuple[str, list[int]]] = {
    "speculators": ("eagle_aux_hidden_state_layer_ids", [2, 3, 4]),
    "speculators-peagle": ("eagle_aux_hidden_state_layer_ids", [2, 3, 4]),
    "speculators-dflash": ("aux_hidden_state_layer_ids", [1, 3]),
    "speculators-dspark": ("aux_hidden_state_layer_ids", [1, 3]),
    "eagle3-gguf": ("eagle3.target_layers", [2, 3, 4]),
    "dflash-gguf": ("dflash.target_layers", [1, 3]),
    "dspark-gguf": ("dflash.target_layers", [1, 3]),
}


@pytest.mark.parametrize("trip", shortened(TRIPS, SHORT_TRIPS))
def test_an_export_drafts_the_same_and_is_imported_as_it_was(
    trip: str, tmp_path: Path, made: Made
) -> None:
    layout, options, kept = TRIPS[trip]
    drafter, out = tmp_path / "drafter", tmp_path / "out"
    served, on = made(layout)
    make_heads(drafter, on, options, kept, moved=0.1)
    export_drafter(drafter, layout, out, ExportOptions(gamma=3, target=served), measuring=FEW)
    assert_drafts_the_same(drafter, out, on)
    if "window" in options:
        assert reloaded(out, on).heads.options.window == options["window"]
    facts = check_export(out)["facts"]
    assert (facts["max_depth"], facts["kept"]) == (3, None if kept is None else len(KEPT))
    assert facts["filled_from"] is None
    (file,) = (*out.glob("*.safetensors"), *out.glob("*.gguf"))
    is_gguf = file.suffix == ".gguf"
    if layout in READ:
        key, numbers = READ[layout]
        config = json.loads((out / "config.json").read_text("utf-8")) if not is_gguf else {}
        found = gguf.GGUFReader(file).fields[key].contents() if is_gguf else config[key]
        assert found == numbers
    if options.get("window") and not is_gguf:
        config = json.loads((out / "config.json").read_text("utf-8"))
        layers = config.get("transformer_layer_config", config)
        assert layers["layer_types"] == ["sliding_attention"] * layers["num_hidden_layers"]
        assert layers.get("use_sliding_window", True)
    # Written as other options that compute the same, or read by one engine only.
    if (
        layout in ("eagle3-gguf", "eagle1-sglang")
        or options is OTHER3
        or OF_TARGET.items() <= options.items()
    ):
        return
    depth = 3 if "eagle" in layout or layout == "speculators" else None
    source = str(file if is_gguf else out)
    import_drafter(source, on, tmp_path / "again", ImportOptions(depth=depth))
    before, after = (read_heads(path, on) for path in (drafter, tmp_path / "again"))
    assert before.options == after.options
    assert_equal(after.state_dict(), before.state_dict())


# --- faults ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, made: Made) -> Callable[[str], Path]:
    """A directory in each layout without a fault, which is only read."""
    place = tmp_path_factory.mktemp("exports")

    @functools.cache
    def exported(layout: str) -> Path:
        drafter, out = place / f"{layout}-drafter", place / layout
        served, on = made(layout)
        if layout in HEADS:
            make_heads(drafter, on, *HEADS[layout], provenance=private(place))
        else:
            model = tiny_llama(layers=1, seed=7, tie=False)
            if layout == "pard":
                mark_parallel(model.config, 1)
            kind = "pard" if layout == "pard" else "small_lm"
            save_small_lm(drafter, model, on, kind, private(place))
        export_drafter(drafter, layout, out, ExportOptions(gamma=3, target=served))
        assert FORMATS[layout].problems(out) == []
        return out

    return exported


def private(place: Path) -> dict[str, Any]:
    """Where a run was, in the ways in which its settings can say it."""
    return {
        "run": str(place / "runs" / "mine"),
        "command": ["train", f"{place}/my run.yaml", f"output_dir={place}/runs"],
        "data": {"train": [f"{place}/a.jsonl", str(Path.home() / "texts" / "b c.jsonl")]},
        "note": f"started from {place}/drafter, file://{Path.home()}/x",
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_file_of_an_export_names_a_directory_of_this_machine(
    layout: str, sound: Callable[[str], Path], target: Target
) -> None:
    out = sound(layout)
    files = [file for file in out.rglob("*") if file.is_file()]
    assert {file.name for file in files} >= {"README.md", "export.json"}
    # Also in the headers of weights.
    for place in (out.parent, Path(target.name).parent, Path.home() / "texts"):
        for file in files:
            assert str(place).encode() not in file.read_bytes(), file


def test_every_layout_is_here_or_elsewhere() -> None:
    assert {*LAYOUTS} == {*FORMATS} - ELSEWHERE


def edit_one(directory: Path, change: Callable[[dict[str, Any], str], Any]) -> str:
    """Change one of the tensors in a directory. Returns its name."""
    names: list[str] = []

    def edit(tensors: dict[str, Any]) -> None:
        names.append(min(name for name in tensors if name.endswith("weight")))
        change(tensors, names[0])

    if (directory / "drafter.gguf").exists():
        rewrite_gguf(directory / "drafter.gguf", lambda keys, tensors: edit(tensors))
    else:
        edit_weights(edit)(directory)
    return names[0]


DAMAGE: dict[str, Callable[[dict[str, Any], str], Any]] = {
    "tensor {} is missing": lambda tensors, name: tensors.pop(name),
    "tensor x is not expected": lambda tensors, name: tensors.update(x=tensors[name] * 1),
    "tensor {} has shape": lambda tensors, name: tensors.update({name: tensors[name][:-1] * 1}),
    "tensor {} holds values that are NaN": lambda tensors, name: tensors.update(
        {name: tensors[name] * math.nan}
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_are_compared_with_those_that_are_expected(
    layout: str, sound: Callable[[str], Path], tmp_path: Path
) -> None:
    for number, (said, change) in enumerate(DAMAGE.items()):
        out = Path(shutil.copytree(sound(layout), tmp_path / str(number)))
        name = edit_one(out, change)
        assert said.format(name) in "\n".join(FORMATS[layout].problems(out))
    (file,) = (*out.glob("*.safetensors"), *out.glob("*.gguf"))
    file.write_bytes(file.read_bytes()[:-100])
    problem = FORMATS[layout].problems(out)[0]
    assert "cannot be read" in problem or "cut short" in problem


settings = functools.partial(edit_json, "config.json")


def nested(*keys: str, **changes: Any) -> Change:
    """Sets keys of config.json, or of an object within it."""

    def edit(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text("utf-8"))
        inner = config
        for key in keys:
            inner = inner[key]
        inner.update(changes)
        (directory / "config.json").write_text(json.dumps(config), "utf-8")

    return edit


def edit_gguf(change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> Change:
    return lambda directory: rewrite_gguf(directory / "drafter.gguf", change)


def metadata(**changes: Any) -> Change:
    """Sets keys of a GGUF file, with __ for a point; None takes one away."""

    def change(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        for name, value in changes.items():
            key = name.replace("__", ".")
            if value is None:
                del keys[key]
            else:
                keys[key] = value

    return edit_gguf(change)


NO_WINDOW = {"layer_types": ["sliding_attention"], "sliding_window": 0}
# By layout and by what is said: the fault.
FAULTS: dict[str, dict[str, Change]] = {
    "hf": {
        "expected [301, 32]": settings(vocab_size=301),
        "architectures is ['LlamaModel']": settings(architectures=["LlamaModel"]),
        "config.json has no rope_theta": settings(rope_theta=None),
        "num_assistant_tokens_schedule is 'heuristic'": edit_json(
            "generation_config.json", num_assistant_tokens_schedule="heuristic"
        ),
        "tokenizer.json is missing": lambda directory: (directory / "tokenizer.json").unlink(),
    },
    "pard": {
        "pard_token is 300, which is not valid": settings(pard_token=300),
        "config.json has no pard_token": settings(pard_token=None),
        "spd_type is 'eagle', expected 'pard'": settings(spd_type="eagle"),
    },
    "gguf": {
        "has shape [32, 32], expected [32, 64]": metadata(llama__attention__head_count=8),
        "vocab_size is 299, expected 300": metadata(llama__vocab_size=299),
        "block_count is 2, expected 1": metadata(llama__block_count=2),
        "has no llama.rope.freq_base": metadata(llama__rope__freq_base=None),
        "architecture is 'gpt2'": metadata(general__architecture="gpt2"),
    },
    "medusa": {
        "config.json is missing or is not JSON": lambda directory: (
            directory / "config.json"
        ).write_text("{", "utf-8"),
        "has architectures, which is not expected": settings(architectures=["MedusaModel"]),
        "config.json has no medusa_num_heads": settings(medusa_num_heads=None),
        "tensor 3.0.linear.bias is missing": settings(medusa_num_heads=4),
        "tensor 0.0.linear.bias is F32, expected F16": settings(torch_dtype="float16"),
        "original_lm_head is set, but tensor 2.1.weight differs from head 0's": edit_weights(
            lambda found: found["2.1.weight"].add_(1)
        ),
    },
    "eagle1": {
        "architectures is ['LlamaForCausalLMEagle'], expected ['LlamaForCausalLM']": settings(
            architectures=["LlamaForCausalLMEagle"]
        ),
    },
    "eagle3": {
        "has eagle_config, which is not expected": settings(
            eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
        ),
        "config.json has no draft_vocab_size": settings(draft_vocab_size=None),
        "d2t does not give distinct token ids": edit_weights(
            lambda found: found["d2t"].add_(torch.arange(150))
        ),
        "t2d does not mark the tokens of d2t": edit_weights(
            lambda found: found["t2d"].logical_not_()
        ),
        "rope_theta is 0, expected 10000.0": settings(rope_theta=0),
    },
    "eagle3-gguf": {
        "d2t does not hold distinct token ids": edit_gguf(
            lambda keys, tensors: tensors.update({"d2t": tensors["d2t"] + 2})
        ),
        "in ascending order": edit_gguf(
            lambda keys, tensors: tensors.update({"d2t": tensors["d2t"][::-1].copy()})
        ),
        "[32, 96], expected [32, 64]": metadata(eagle3__target_layers=[2, 3]),
        "has no eagle3.target_layers": metadata(eagle3__target_layers=None),
        "norm_before_residual is True, expected False": metadata(eagle3__norm_before_residual=True),
        "architecture is 'llama', expected one of eagle3": metadata(general__architecture="llama"),
    },
    "dflash-gguf": {
        "is [True, False], expected [True, True]": metadata(
            dflash__attention__sliding_window_pattern=[True, False]
        ),
        "mask_token_id is 304, but there is no such token": metadata(
            tokenizer__ggml__mask_token_id=304
        ),
        "tensor fc.weight has shape [64, 128], expected [64, 64]": metadata(
            dflash__target_layers=[3]
        ),
        "d2t does not hold distinct token ids": edit_gguf(
            lambda keys, tensors: tensors.update({"d2t": tensors["d2t"] + 9})
        ),
    },
    "dspark-gguf": {
        "sample_from_anchor is False, expected True": metadata(dflash__sample_from_anchor=False),
    },
    "dflash2-gguf": {
        "has no dflash.selector_top_k": metadata(dflash__selector_top_k=None),
    },
    "speculators": {
        "speculators_config is {'algorithm': 'eagle',": nested(
            "speculators_config", algorithm="eagle"
        ),
        "speculators_config is {'algorithm': 'eagle3'": nested(
            "speculators_config", "verifier", name_or_path=None
        ),
        "norm_before_residual is 'after', which is not valid": settings(
            norm_before_residual="after"
        ),
        "transformer_layer_config is []": settings(transformer_layer_config=[]),
        "down_proj.weight has shape [64, 128], expected [64, 64]": nested(
            "transformer_layer_config", intermediate_size=64
        ),
        "tensor fc.weight has shape [64, 192], expected [64, 128]": nested(
            eagle_aux_hidden_state_layer_ids=[2, 3]
        ),
        "model_type, which is not expected": settings(model_type="llama"),
        "sliding_window": nested("transformer_layer_config", **NO_WINDOW),
    },
    "p_eagle": {
        "sliding_window": settings(**NO_WINDOW),
        "pard_token is 304, but there is no such embedding": settings(pard_token=304),
    },
    "speculators-dflash": {
        "sliding_window": nested("transformer_layer_config", **NO_WINDOW),
        # The tokens of a block would see only those before them.
        "sliding_window_non_causal is False, expected True": lambda directory: (
            nested("transformer_layer_config", sliding_window=4)(directory),
            settings(sliding_window_non_causal=False)(directory),
        ),
    },
    "speculators-peagle": {
        "speculators_config is {'algorithm': 'eagle3'": nested(
            "speculators_config", algorithm="eagle3"
        ),
        "norm_output is True, expected False": settings(norm_output=True),
        "embed_requires_grad is False": settings(embed_requires_grad=False),
    },
    "dflash": {
        "the target's layers are [0, 7], which is not valid": settings(
            dflash_config={"mask_token_id": 3, "target_layer_ids": [0, 7]}
        ),
        "dflash_config is {'target_layer_ids'": settings(
            dflash_config={"target_layer_ids": [0, 2]}
        ),
        "layer_types is ['full_attention', 'sliding_attention']": settings(
            layer_types=["full_attention", "sliding_attention"]
        ),
    },
    "dflash2": {"is_causal is True, expected False": settings(is_causal=True)},
    "domino": {"emb_dim is 9, and dflash_config.emb_dim 8": settings(emb_dim=9)},
    "dspark": {
        "markov_head_type is 'gated', expected 'vanilla'": settings(markov_head_type="gated"),
    },
}


@pytest.mark.parametrize(
    ("layout", "said"), [(layout, said) for layout in FAULTS for said in FAULTS[layout]]
)
def test_a_fault_is_named(
    layout: str, said: str, sound: Callable[[str], Path], tmp_path: Path
) -> None:
    out = Path(shutil.copytree(sound(layout), tmp_path / "out"))
    FAULTS[layout][said](out)
    assert said in "\n".join(FORMATS[layout].problems(out))
