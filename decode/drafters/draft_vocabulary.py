"""A reduced draft vocabulary: an output layer with rows for some tokens only.

For a small drafter the output layer is most of the cost, and most of its rows are rarely used.
The drafter's q over the full vocabulary is still exact: its probabilities on the kept tokens, 0
elsewhere. Decoding stays lossless. A removed token is never drafted.

The reduced layer may also be of low rank (`decode.model.forward.low_rank_output`).
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.base.errors import UserError
from decode.model.forward.low_rank_output import LowRankLinear, factors

FILE = "draft_vocabulary.safetensors"


@dataclass
class ReducedVocabulary:
    """ids: int64 [n], ascending, the token of each row. full: the full output layer before."""

    ids: Tensor
    full: nn.Linear


def reduce_output(
    model: PreTrainedModel, ids: Tensor, rank: int | None = None
) -> ReducedVocabulary:
    """Gives `model` a separate output layer with only these rows, copied from the full one. rank:
    of the layer, which is then as near to those rows as it can be; None: a full layer. Raises
    UserError for a rank that saves no weights."""
    vocabulary = _replace_output(model, ids, rank)
    full = vocabulary.full
    rows = full.weight.detach()[ids]
    weights = [rows] if rank is None else factors(rows, rank)
    if full.bias is not None:
        weights.append(full.bias[ids])
    with torch.no_grad():
        for parameter, values in zip(
            model.get_output_embeddings().parameters(), weights, strict=True
        ):
            parameter.copy_(values)
    return vocabulary


def _replace_output(model: PreTrainedModel, ids: Tensor, rank: int | None) -> ReducedVocabulary:
    """Gives `model` an output layer with a row for each of these tokens, whatever is in them."""
    full = model.get_output_embeddings()
    if rank is None:
        reduced = nn.Linear(full.in_features, len(ids), bias=full.bias is not None)
    else:
        reduced = LowRankLinear(full, len(ids), rank)
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
    last = rows["up.weight" if "up.weight" in rows else "weight"]
    if not fits or len(last) != len(ids):
        raise UserError(
            f"{path / FILE} has {len(ids)} token ids and {len(last)} rows; expected one row for "
            f"each id, and ascending ids ≥ 0 and < {size}. Make the drafter again"
        )
    vocabulary = _replace_output(model, ids, last.shape[1] if "up.weight" in rows else None)
    model.get_output_embeddings().load_state_dict(rows)
    model.get_output_embeddings().requires_grad_(False)
    return vocabulary
