"""Complete Hugging Face model directories: their problems, and names that older readers need.

Among them the target of a drafter that was trained together with it (Medusa-2, 2401.10774, section
2.2.2), here called its backbone. Such a drafter works only with that new model, so the model is
exported too: as a plain model directory, which every engine reads.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from decode.base.artifact import MANIFEST, verify_directory, write_directory
from decode.base.errors import UserError
from decode.base.paths import from_home
from draftsmith.export.file_schema import (
    DTYPE_NAMES,
    TensorSpec,
    is_count,
    key_problems,
    read_json,
    read_tensors,
    require_none,
    tensor_problems,
)

README = "README.md"


def model_problems(directory: Path) -> list[str]:
    """Return the problems that keep a directory from being a complete causal language model with
    its tokenizer."""
    config = read_json(directory / "config.json")
    if config is None:
        return ["config.json is missing or is not JSON"]
    problems = key_problems(
        {
            "architectures": lambda x: (
                isinstance(x, list)
                and len(x) == 1
                and str(x[0]).endswith(("ForCausalLM", "LMHeadModel"))
            ),
            "model_type": lambda x: x in transformers.CONFIG_MAPPING,
            "vocab_size": is_count,
            "dtype": lambda x: x in DTYPE_NAMES,
        },
        config,
        "config.json",
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if read_json(directory / name) is None:
            problems.append(f"{name} is missing or is not JSON")
    if problems:
        return problems
    tensors, unreadable = read_tensors(sorted(directory.glob("*.safetensors")))
    expected = model_tensors(directory, DTYPE_NAMES[config["dtype"]])
    return unreadable + tensor_problems(expected, tensors)


def model_tensors(directory: Path, dtype: str) -> dict[str, TensorSpec]:
    """Return the tensors that a directory's config requires, according to the model's class. Tied
    tensors are stored once."""
    config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    tied = model.all_tied_weights_keys if config.tie_word_embeddings else {}
    return {
        name: TensorSpec(tuple(tensor.shape), (dtype,))
        for name, tensor in model.state_dict().items()
        if name not in tied
    }


def older_rotation(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys in which transformers 4, and engines built on it, read rotary positions.
    rope: `rope_parameters`, where transformers 5 has them all. It takes `rope_scaling` for those,
    if a config has both, and the base from `rope_theta`.

    >>> older_rotation({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
    {'rope_theta': 10000.0, 'rope_scaling': {'rope_type': 'linear', 'factor': 2.0}}
    """
    if isinstance(by_layer := rope.get("full_attention"), Mapping):  # of Gemma 3
        windowed = older_rotation(rope.get("sliding_attention") or {})
        local = {"rope_local_base_freq": windowed["rope_theta"]} if "rope_theta" in windowed else {}
        return older_rotation(by_layer) | local
    outer = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if rope.get(key)}
    scaling = {key: x for key, x in rope.items() if key not in outer}
    if scaling.get("rope_type", "default") == "default":
        return outer
    if scaling["rope_type"] == "longrope":
        # There its length stands outside. Without one inside, transformers 5 takes another.
        outer["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    return outer | {"rope_scaling": scaling}


def older_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """As `older_rotation`, for a model's config: some families had names of their own."""
    keys = older_rotation(config.get("rope_parameters") or {})
    if config.get("model_type") == "gpt_neox":
        names = {"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"}
        keys |= {name: keys[key] for key, name in names.items() if key in keys}
    if config.get("model_type") == "phi3" and "rope_scaling" in keys:
        # Their own check accepts this name of the type and two lists of factors. It refuses more,
        # which no reader may lose.
        outside = ("rope_type", "original_max_position_embeddings")
        more = {key: x for key, x in keys["rope_scaling"].items() if key not in outside}
        keys["rope_scaling"] = {"type": "longrope", **more}
    if config.get("model_type") in ("apertus", "gpt_oss"):
        # Without this key theirs is that of their first models.
        keys.setdefault("rope_scaling", None)
    return keys


def rotates_all(directory: Path) -> bool:
    """Whether each number of a head is rotated, by what the model computes. Its config may name a
    part that its family does not read."""
    config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "default" or rope.get("partial_rotary_factor") is None:
        return False
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotated = [2 * len(x) for name, x in model.named_buffers() if name.endswith("inv_freq")]
    return bool(rotated) and set(rotated) == {head}


def for_older_readers(directory: Path, dtype: str) -> None:
    """Add to a model directory the names that transformers 4 and engines built on it need."""
    file = directory / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    # This is an old name of the target. It says nothing about the drafter.
    config.pop("_model_name_or_path", None)
    config["dtype"] = config["torch_dtype"] = dtype
    if rotates_all(directory):
        # Other engines read this key for families of which transformers 5 does not.
        config.pop("partial_rotary_factor", None)
        (config.get("rope_parameters") or {}).pop("partial_rotary_factor", None)
    config |= older_names(config)
    file.write_text(json.dumps(config, indent=2), encoding="utf-8")
    file = directory / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    for local in ("is_local", "local_files_only"):
        settings.pop(local, None)
    file.write_text(json.dumps(settings, indent=2), encoding="utf-8")


def find_backbone(drafter: Path, target: str | None) -> Path:
    """Return the directory of such a drafter's target: `target`, else the one that its stage wrote.
    Raises UserError if it does not exist, is damaged or is not a complete model."""
    backbone = from_home(target) if target else drafter.resolve().parent / "target"
    if not backbone.is_dir():
        raise UserError(
            f"{drafter} was trained together with its target, but {backbone} does not exist. It is "
            "the target/ directory that its stage wrote beside drafter/. Give it with --target DIR"
        )
    if (backbone / MANIFEST).exists():
        verify_directory(backbone)
    what = f"{backbone}, the target of {drafter}, is not a valid model directory"
    require_none(model_problems(backbone), what)
    return backbone


def write_backbone(backbone: Path, out: Path, card: str) -> None:
    """Copy a model directory, completely or not at all, and add the settings that older readers
    need."""

    def fill(directory: Path) -> None:
        for file in sorted(backbone.iterdir()):
            if file.is_file() and file.name not in (MANIFEST, README):
                shutil.copyfile(file, directory / file.name)
        config: Any = read_json(directory / "config.json")
        for_older_readers(directory, config["dtype"])
        (directory / README).write_text(card, encoding="utf-8")

    write_directory(out, fill)
