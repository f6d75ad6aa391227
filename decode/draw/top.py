"""The largest few values of many, which are found faster than by sorting."""

import torch
from torch import Tensor

# The size of the groups whose maxima are compared.
SIEVE = 16


def top(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest values of [..., V], largest first, and their indices int64, as from
    `topk`. Of values that tie for the last positions, any may be returned."""
    size = values.shape[-1]
    stride = size // SIEVE
    if values.device.type != "cpu" or 4 * count > stride:
        largest = values.topk(count, dim=-1)
        return largest.values, largest.indices
    # The `count` groups with the largest maxima hold all the values searched for. The groups
    # interleave, so a few vector passes compute all maxima.
    aligned = stride * SIEVE
    groups = values[..., :aligned].unflatten(-1, (SIEVE, stride)).amax(-2).topk(count, -1).indices
    within = stride * torch.arange(SIEVE)
    ids = (groups[..., None] + within).flatten(-2)
    rest = torch.arange(aligned, size).expand(*ids.shape[:-1], -1)
    ids = torch.cat([ids, rest], -1)
    largest = values.gather(-1, ids).topk(count, dim=-1)
    return largest.values, ids.gather(-1, largest.indices)
