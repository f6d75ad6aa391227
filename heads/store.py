"""Heads as drafter directories: config.json, heads.safetensors, and the tree they draft in.

config.json says what they are and which shapes they were made for; the safetensors file holds the
weights, the token ids of a reduced draft vocabulary, and a sample of the target's weights, by which
another target is refused. tree.json, where it is there, is the calibrated tree.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from decode.artifact import CorruptArtifact
from decode.drafters.directory import save_drafter
from decode.errors import UserError
from decode.target.loading import Target
from decode.target.packed import can_pack, pack_layers
from decode.target.same_weights import require_same_weights, sample_weights
from decode.trees.static import Static
from decode.trees.stored import TREE, stored_shape
from decode.trees.structure import Structure
from heads.base import HEADS, HeadOptions, Heads, output_layer

CONFIG, WEIGHTS = "config.json", "heads.safetensors"
# Beside the weights in their file.
IDS, SAMPLE = "draft_vocabulary", "target_sample"


def build_heads(
    options: HeadOptions, target: Target, vocabulary: Tensor | None, device: str = "cpu"
) -> Heads:
    """Heads of the right shapes with weights of no meaning; on `meta` they take no memory.

    vocabulary: int64 [V'], ascending, of a reduced draft vocabulary. Raises UserError for more
    heads than the target's context has room for.
    """
    kind: Any = HEADS[options.type]
    with torch.device(device):
        heads: Heads = kind(options, target.model, vocabulary)
    if heads.depth + 1 >= target.max_positions:
        raise UserError(
            f"{heads.depth} heads draft beyond the target's context of {target.max_positions} "
            "tokens; expected fewer"
        )
    return heads


def new_heads(options: HeadOptions, target: Target, vocabulary: Tensor | None) -> Heads:
    """Heads on the CPU as training starts from them, with what they borrow of the target missing.
    Raises UserError as `build_heads` does."""
    heads = build_heads(options, target, vocabulary)
    heads.start_from(target.model)
    return heads


def make_ready(heads: Heads, target: Target, dtype: torch.dtype) -> None:
    """Make heads fit to draft with, in place: on the target's device, with what they borrow,
    packed where that is possible."""
    heads.to(target.device, dtype)
    if heads.vocabulary is not None:
        heads.vocabulary = heads.vocabulary.to(target.device)
    heads.borrow(target.model, dtype, target.device)
    if can_pack(heads):
        pack_layers(heads)
        heads.output.pack()


def save_heads(
    path: Path,
    heads: Heads,
    *,
    target: Target,
    provenance: dict[str, Any],
    tree: Structure | None = None,
) -> None:
    """Write a drafter directory, whole or not at all."""

    def write(directory: Path) -> None:
        write_heads(directory, heads, target, tree)

    save_drafter(path, heads.options.type, write, target=target, provenance=provenance)


def write_heads(directory: Path, heads: Heads, target: Target, tree: Structure | None) -> None:
    """Write what `load_heads` reads."""
    config = {
        "model_type": heads.options.type,
        "options": heads.options.model_dump(mode="json"),
        "hidden_size": heads.hidden_size,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": heads.rows,
        "target_dtype": str(target.dtype).removeprefix("torch."),
    }
    weights = {name: x.detach().cpu().contiguous() for name, x in heads.state_dict().items()}
    weights[SAMPLE] = sample_weights(target.model)
    if heads.vocabulary is not None:
        weights[IDS] = heads.vocabulary.cpu()
    (directory / CONFIG).write_text(json.dumps(config, indent=2))
    save_file(weights, directory / WEIGHTS)
    if tree is not None:
        tree.save(directory / TREE)


def stored_options(path: Path) -> HeadOptions:
    """The options of the heads in a directory. Raises UserError where there are none."""
    return HeadOptions.of(_read_config(path)["options"])


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / CONFIG).read_text())
        return {
            "options": dict(config["options"]),
            "hidden_size": int(config["hidden_size"]),
            "target_dtype": str(config["target_dtype"]),
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptArtifact(path, CONFIG, f"is no description of heads ({error!r})") from error


def load_heads(path: Path, target: Target, dtype: torch.dtype) -> tuple[Heads, Static | None]:
    """The heads in a directory, on the target's device, and the shape stored with them, if any.
    Raises UserError as `read_heads` does."""
    heads = read_heads(path, target)
    make_ready(heads, target, dtype)
    return heads, stored_shape(path)


def read_heads(path: Path, target: Target) -> Heads:
    """The heads in a directory as they are stored, on the CPU, with what they borrow missing.

    Raises UserError where they were made for another hidden size or for other weights than this
    target's, and for files that do not fit together. (`decode.drafters.directory.open_drafter` has
    compared the vocabularies by then.)
    """
    config = _read_config(path)
    hidden, made_in = config["hidden_size"], config["target_dtype"]
    own = output_layer(target.model).in_features
    if hidden != own:
        raise UserError(
            f"the heads {path} read hidden states of {hidden} numbers and the target {target.name} "
            f"has {own}; use the target they were made for"
        )
    weights = load_file(path / WEIGHTS)
    sample, ids = weights.pop(SAMPLE), weights.pop(IDS, None)
    require_same_weights(sample, made_in, target.model, f"the target of the heads {path}")
    heads = build_heads(HeadOptions.of(config["options"]), target, ids, "meta")
    try:
        heads.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise CorruptArtifact(path, WEIGHTS, f"does not hold these heads ({error})") from error
    return heads
