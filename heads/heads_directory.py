"""Stores heads as drafter directories: config.json, heads.safetensors and an optional tree.json.

config.json holds the options of the heads and the shapes they were made for. The safetensors file
holds the weights, the token ids of a reduced draft vocabulary, and a sample of the target's
weights. Loading compares the sample to refuse another target. tree.json is the calibrated tree.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from decode.base.artifact import CorruptArtifact
from decode.base.device import dtype_name
from decode.base.errors import UserError
from decode.drafters import DRAFTERS
from decode.loop.parts import require_no_encoder
from decode.model.forward.prepare_model import can_pack, pack_layers
from decode.model.identity import require_same_weights, sample_weights
from decode.model.loading import Target
from decode.model.pretrained import require_finite
from decode.opening.directory import save_drafter
from decode.shapes.static import TREE, Static, stored_shape
from decode.shapes.structure import Structure
from heads.heads_module import HEADS, Heads, output_layer
from heads.layers.llama_layer import DraftLayer
from heads.options import HeadOptions

CONFIG, WEIGHTS = "config.json", "heads.safetensors"
# Stored in the weights file, next to the weights.
IDS, SAMPLE = "draft_vocabulary", "target_sample"


def build_heads(
    options: HeadOptions, target: Target, vocabulary: Tensor | None, device: str = "cpu"
) -> Heads:
    """Create heads of the right shapes with arbitrary weights. On `meta` they take no memory.

    vocabulary: int64 [V'], ascending, the token ids of a reduced draft vocabulary. Raises UserError
    if the options do not fit the target, if there are more heads than fit into its context, or if
    heads of this kind need a decoder-only target.
    """
    kind: Any = HEADS[options.type]
    if target.has_encoder:
        require_no_encoder(DRAFTERS[options.type], f"a drafter with {options.type} heads")
    options = kind.for_target(options, target)  # may try the target, on its own device
    with torch.device(device):
        heads: Heads = kind(options, target.model, vocabulary)
    if heads.depth + 1 >= target.max_positions:
        raise UserError(
            f"{heads.depth} heads draft beyond the target's context of {target.max_positions} "
            "tokens; expected fewer heads"
        )
    return heads


def new_heads(options: HeadOptions, target: Target, vocabulary: Tensor | None) -> Heads:
    """Create heads on the CPU with init weights, without the weights borrowed from the target.

    Raises UserError as `build_heads` does.
    """
    heads = build_heads(options, target, vocabulary)
    heads.init_weights(target.model)
    return heads


def make_ready(heads: Heads, target: Target, dtype: torch.dtype) -> None:
    """Prepare heads for drafting, in place.

    Moves them to the target's device, borrows the target's weights, and packs the layers if
    possible.
    """
    heads.to(target.device, dtype)
    if heads.vocabulary is not None:
        heads.vocabulary = heads.vocabulary.to(target.device)
    heads.borrow(target.model, dtype, target.device)
    if can_pack(heads):
        for layer in heads.modules():
            if isinstance(layer, DraftLayer):
                layer.make_lean()
        pack_layers(heads, keep=DraftLayer)
        heads.output.pack()


def save_heads(
    path: Path,
    heads: Heads,
    *,
    target: Target,
    provenance: dict[str, Any],
    tree: Structure | None = None,
    weights: str | None = None,
) -> None:
    """Write a drafter directory atomically: completely or not at all. weights: as `save_drafter`
    takes them."""

    def write(directory: Path) -> None:
        write_heads(directory, heads, target, tree)

    kind = heads.options.type
    save_drafter(path, kind, write, target=target, provenance=provenance, weights=weights)


def write_heads(directory: Path, heads: Heads, target: Target, tree: Structure | None) -> None:
    """Write the files that `load_heads` reads."""
    config = {
        "model_type": heads.options.type,
        "options": heads.options.model_dump(mode="json"),
        "hidden_size": heads.hidden_size,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": heads.rows,
        "target_dtype": dtype_name(target.dtype),
    }
    weights = {name: x.detach().cpu().contiguous() for name, x in heads.state_dict().items()}
    weights[SAMPLE] = sample_weights(target.model)
    if heads.vocabulary is not None:
        weights[IDS] = heads.vocabulary.cpu()
    (directory / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_file(weights, directory / WEIGHTS)
    if tree is not None:
        tree.save(directory / TREE)


def stored_options(path: Path) -> HeadOptions:
    """Return the options of the heads in a directory. Raises UserError if there are none."""
    return HeadOptions.of(_read_config(path)["options"])


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        return {
            "options": dict(config["options"]),
            "hidden_size": int(config["hidden_size"]),
            "target_dtype": str(config["target_dtype"]),
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptArtifact(path, CONFIG, f"does not describe heads ({error!r})") from error


def load_heads(path: Path, target: Target, dtype: torch.dtype) -> tuple[Heads, Static | None]:
    """Load heads onto the target's device, and the stored shape, if there is one.

    Raises UserError as `read_heads` does.
    """
    heads = read_heads(path, target)
    make_ready(heads, target, dtype)
    return heads, stored_shape(path)


def read_heads(path: Path, target: Target) -> Heads:
    """Read the stored heads onto the CPU, without the weights borrowed from the target.

    Raises UserError if the heads were made for another hidden size or other target weights, if
    weights are NaN or infinite, or if the files do not fit together.
    (`decode.opening.directory.open_drafter` compares the vocabularies before this.)
    """
    config = _read_config(path)
    hidden_size = output_layer(target.model).in_features
    if config["hidden_size"] != hidden_size:
        raise UserError(
            f"the heads {path} read hidden states of size {config['hidden_size']}, but the target "
            f"{target.name} has size {hidden_size}; use the target they were made for"
        )
    weights = load_file(path / WEIGHTS)
    sample, ids = weights.pop(SAMPLE), weights.pop(IDS, None)
    if target.has_weights:  # a plan has none to compare
        require_same_weights(
            sample, config["target_dtype"], target.model, f"the target of the heads {path}"
        )
    heads = build_heads(HeadOptions.of(config["options"]), target, ids, "meta")
    try:
        heads.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise CorruptArtifact(path, WEIGHTS, f"does not hold these heads ({error})") from error
    require_finite(heads, str(path))
    return heads
