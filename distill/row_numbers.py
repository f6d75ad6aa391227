"""Random numbers of a training step that are the same for any number of ranks."""

import torch
from torch import Tensor

from decode.draw.random_numbers import CounterRNG


def row_numbers(
    rows: int,
    count: int,
    *,
    training: bool = True,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """[rows, count] in [0, 1]: the random numbers of each row of this rank's batch.

    They are a function of the row's place in the global batch and of one number of torch's random
    state. Checkpoints store this state, and it is the same on all ranks. Rank r has the rows r,
    r + world, … of the global batch. The first numbers of a row do not depend on `count`, so
    padding does not change them. Outside of training they are always the same.
    """
    seed = int(torch.randint(2**62, ())) if training else 0
    rank, world = 0, 1
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    numbers = torch.empty(rows, count, device=device, dtype=dtype)
    places = rank + world * torch.arange(rows, device=device)
    # Not all rows at once: the numbers are made of integers of 64 bits.
    together = max(1, 2**22 // max(1, count))
    for begin in range(0, rows, together):
        part = slice(begin, begin + together)
        numbers[part] = CounterRNG(seed, places[part]).uniforms(0, 0, count)
    return numbers
