"""One copy of a target's layers in memory, for commands that only decode.

On a CPU the lean forward has a packed copy of every linear layer (`few_rows.packed_blocks`), and
nothing reads the model's own copy. So the model gives it up: a layer's weight becomes a function of
the packed one (`torch.nn.utils.parametrize`), which is computed whenever it is read. All works as
before, but the model's own forward takes longer. Embeddings and the output layer stay, because
drafters read them.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from decode.model.forward import few_rows
from decode.model.forward.few_rows import Blocks
from decode.model.forward.lean_forward import LeanForward
from decode.model.forward.lean_parts import PackedLinear
from decode.model.forward.prepare_model import keep_prepared, prepare
from decode.model.forward.quantised_rows import unpacked
from decode.model.identity import keep_identity


class Unpacked(nn.Module):
    """A weight [out, in] of a dtype as a function of its packed form, of which it gets the data."""

    def __init__(self, form: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.form, self.dtype = form, dtype

    def forward(self, data: Tensor) -> Tensor:
        return unpacked(Blocks(data, self.form), self.dtype)


def keep_packed_alone(model: PreTrainedModel) -> int:
    """Keep only the packed form of a model's layers. Returns the bytes that this freed: 0 for a
    model that does not run on products of few rows. The model cannot be trained after this."""
    forward = prepare(model)
    if not isinstance(forward, LeanForward):
        return 0
    every = (x for x in forward.layers.modules() if isinstance(x, PackedLinear) and x.has_blocks)
    products = [product for product in every if not product.is_only_copy]
    if products:
        keep_identity(model)
    freed = sum(_give_up(product) for product in products)
    if freed:
        keep_prepared(model)
        # A C library keeps what was freed, and glibc gives it back when asked.
        getattr(ctypes.CDLL(None), "malloc_trim", lambda size: None)(0)
    return freed


@torch.no_grad()
def _give_up(product: PackedLinear) -> int:
    """Have the layers of a product read their weights from its packed form."""
    (blocks, _), first, freed = product.blocks, 0, 0
    product._parameters.pop("weight", None)  # that of a single layer
    for layer in product.layers:
        dtype, size = layer.weight.dtype, layer.weight.nbytes
        last = first + len(layer.weight) // few_rows.NUMBERS[dtype].outputs
        # Unsafe: torch would try the function on the weight, before it gets the packed form.
        function = Unpacked(blocks.form, dtype)
        parametrize.register_parametrization(layer, "weight", function, unsafe=True)
        parametrizations: Any = layer.parametrizations
        data = nn.Parameter(blocks[first:last].data, requires_grad=False)
        parametrizations.weight.original = data
        freed += size
        first = last
    product.is_only_copy = True
    return freed
