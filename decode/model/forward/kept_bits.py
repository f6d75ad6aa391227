"""Whether a product gives a row the bits that it has alone, however many rows it multiplies."""

import functools

import torch
from torch import Tensor, nn

from decode.model.forward.lean_parts import PackedLinear

TRIED_OUTPUTS = 512  # of a product in a trial


def products_keep_bits(model: nn.Module, rows: int) -> bool:
    """Whether the packed products of a model give a row of up to `rows` the bits that it has alone.
    True in float32, which promises no equal bits."""
    products = (x for x in model.modules() if isinstance(x, PackedLinear))
    return all(_keeps_bits(*x.inputs, rows) for x in products)


@functools.cache
def _keeps_bits(inputs: int, dtype: torch.dtype, rows: int) -> bool:
    """A trial on random numbers decides, because it depends on the machine's instructions. Some
    CPUs add up more than about a thousand products in an order that depends on the rows."""
    if dtype.itemsize != 2:
        return True
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        weight, x, other = (
            torch.randn(size, generator=generator).to(dtype)
            for size in ((TRIED_OUTPUTS, inputs), (rows, inputs), (rows, TRIED_OUTPUTS))
        )
        layer = nn.Linear(inputs, TRIED_OUTPUTS, bias=False, dtype=dtype)
        layer.weight.data = weight
        tried = PackedLinear(layer)

        def results(rows: slice) -> Tensor:
            return torch.stack([tried(x[rows]), tried.combined(x[rows], other[rows], "add")])

        alone = torch.cat([results(slice(row, row + 1)) for row in range(rows)], 1)
        return all(
            torch.equal(results(slice(count)), alone[:, :count]) for count in (2, 5, 11, rows)
        )
