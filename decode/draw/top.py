"""The largest value of many, and the largest few, which are found faster than by sorting."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from decode.base.device import reads_are_free
from decode.model.forward import few_rows

# The size of the groups whose maxima are compared.
SIEVE = 16

# The most values that C++ keeps in order while it reads all.
IN_ORDER = 16


def top(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest values of [..., V], largest first, and their indices int64, as from
    `topk`. Of values that tie for the last positions, any may be returned. A NaN counts as the
    largest, but in C++ one with a sign as the least."""
    places = _largest_in_cpp(values, count)
    return _by_groups(values, count) if places is None else (values.gather(-1, places), places)


def places_of_top(values: Tensor, count: int) -> Tensor:
    """int64 [..., count]: the indices from `top`."""
    places = _largest_in_cpp(values, count)
    return _by_groups(values, count)[1] if places is None else places


def top_with_shares(values: Tensor, count: int) -> tuple[Tensor, Tensor] | None:
    """The indices from `top`, and the shares of these values in the softmax of all, float32 [...,
    count], which C++ computes in one call. None where it does not."""
    shares = torch.empty(*values.shape[:-1], count, dtype=torch.float32)
    places = _largest_in_cpp(values, count, shares)
    return None if places is None else (places, shares)


def _by_groups(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`top`, where C++ does not look."""
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


def argmax(logits: Tensor) -> Tensor:
    """int64 [...]: the index of the first maximum of [..., V], or of a NaN without a sign if there
    is one. Where C++ does not look, −0 of 16 bits is less than 0."""
    found = _peaks_in_cpp(logits)
    if found is not None:
        return found[0]
    if not reads_are_free(logits.device):
        return logits.argmax(-1)
    # NumPy's is many times faster than PyTorch's.
    if logits.dtype.itemsize != 2:
        return torch.as_tensor(logits.detach().numpy().argmax(-1))
    # The bits of 16-bit floats have the order of integers, but that of negative numbers is turned.
    bits = logits.detach().view(torch.int16).numpy()
    places = bits.argmax(-1)
    negative = bits.max(-1) < 0
    if negative.any():
        places = np.where(negative, bits.argmin(-1), places)
    return torch.as_tensor(places)


def peaks(logits: Tensor) -> tuple[Tensor, Tensor]:
    """int64 [...]: as `argmax`; and the maximum itself, [...], which is NaN if one of the V numbers
    is."""
    return _peaks_in_cpp(logits) or (argmax(logits), logits.amax(-1))


def _peaks_in_cpp(logits: Tensor) -> tuple[Tensor, Tensor] | None:
    """`peaks`, which reads the logits once. None where C++ does not do it."""
    found = _library(logits)
    if found is None:
        return None
    logits, shape = logits.contiguous(), logits.shape[:-1]
    places, most = torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.float32)
    where = logits.data_ptr(), places.data_ptr(), most.data_ptr()
    found.peaks(*where, places.numel(), logits.shape[-1])
    return places, most


def _largest_in_cpp(values: Tensor, count: int, shares: Tensor | None = None) -> Tensor | None:
    """`places_of_top`. shares: gets those of `top_with_shares`. None where C++ does not look, as at
    values that would be copied."""
    size = values.shape[-1]
    library = _library(values) if 0 < count <= min(IN_ORDER, size) else None
    if library is None or not values.is_contiguous():
        return None
    places = torch.empty(*values.shape[:-1], count, dtype=torch.int64)
    where = places.data_ptr(), None if shares is None else shares.data_ptr()
    library.largest(values.data_ptr(), *where, values.numel() // size, size, count)
    return places


def _library(values: Tensor) -> Any:
    """What C++ knows of values of this dtype. None where it does not look."""
    if not reads_are_free(values.device) or not values.shape[-1]:
        return None
    return few_rows.library(values.dtype)
