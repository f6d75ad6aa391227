"""A reduced draft vocabulary: an output layer with rows for some tokens only.

For a small drafter the output layer is most of the cost, and most of its rows are rarely used.
The drafter's q over the full vocabulary is still exact: its probabilities on the kept tokens, 0
elsewhere. Decoding stays lossless. A removed token is never drafted.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.base.errors import UserError

FILE = "draft_vocabulary.safetensors"


@dataclass
class ReducedVocabulary:
    """ids: int64 [n], ascending, the token of each row. full: the full output layer before."""

    ids: Tensor
    full: nn.Linear


def reduce_output(model: PreTrainedModel, ids: Tensor) -> ReducedVocabulary:
    """Gives `model` a separate output layer with only these rows, copied from the full one."""
    full = model.get_output_embeddings()
    reduced = nn.Linear(full.in_features, len(ids), bias=full.bias is not None)
    with torch.no_grad():
        reduced.weight.copy_(full.weight[ids])
        if full.bias is not None:
            reduced.bias.copy_(full.bias[ids])
    model.set_output_embeddings(reduced.to(full.weight.device, full.weight.dtype))
    return ReducedVocabulary(ids.to(model.device), full)


def save_with_vocabulary(
    model: PreTrainedModel, vocabulary: ReducedVocabulary | None, path: Path
) -> None:
    """Writes a model's files into a directory, and its reduced output layer, if any, beside them.

    The model's files hold the full output layer, so that transformers can still read the
    directory.
    """
    if vocabulary is None:
        model.save_pretrained(path)
        return
    reduced = model.get_output_embeddings()
    rows = {name: x.detach().cpu().contiguous() for name, x in reduced.named_parameters()}
    save_file(rows | {"ids": vocabulary.ids.cpu()}, path / FILE)
    model.set_output_embeddings(vocabulary.full)
    try:
        model.save_pretrained(path)
    finally:
        model.set_output_embeddings(reduced)


def load_vocabulary(path: Path, model: PreTrainedModel) -> ReducedVocabulary | None:
    """Gives `model`, loaded from `path`, the reduced output layer stored there, if there is one.

    Raises UserError if its ids are not ascending ids of the model's vocabulary.
    """
    if not (path / FILE).exists():
        return None
    rows = load_file(path / FILE)
    ids = rows.pop("ids")
    size = model.config.get_text_config().vocab_size
    fits = len(ids) and ids[0] >= 0 and ids[-1] < size and bool((ids.diff() > 0).all())
    if not fits or rows["weight"].shape[0] != len(ids):
        raise UserError(
            f"{path / FILE} has {len(ids)} token ids and {rows['weight'].shape[0]} rows; expected "
            f"one row for each id, and ascending ids ≥ 0 and < {size}. Make the drafter again"
        )
    vocabulary = reduce_output(model, ids)
    model.get_output_embeddings().load_state_dict(rows)
    model.get_output_embeddings().requires_grad_(False)
    return vocabulary
