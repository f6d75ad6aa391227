"""Weights of a drafter in one byte a number, for the products of few rows (`few_rows`).

A weight [out, in] becomes whole numbers and a scale for each output. A product turns them back in
registers, so it reads half as much memory as in bfloat16. Only drafts change: the target decides
the text as before.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from decode.model.forward import few_rows
from decode.model.forward.few_rows import Blocks
from decode.model.forward.lean_parts import PackedLinear, joined
from decode.model.forward.prepare_model import refresh_packed

# The largest whole number, by the dtype of the states. In bfloat16, seven bits turn into a number
# with one instruction (`few_rows_bfloat16.h`).
MOST = {torch.bfloat16: 63, torch.float32: 127}


def packed_bytes(weights: Sequence[Tensor]) -> Blocks:
    """Weights [out, in] each, one after the other, as the functions for their dtype read them in
    bytes: int8 [blocks, bytes], in each block the whole numbers of some outputs, and then their
    scales in float32."""
    weight = joined(weights)
    (out, size), outputs = weight.shape, few_rows.NUMBERS[weight.dtype].outputs
    wide = weight.float()
    scales = wide.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / MOST[weight.dtype]
    whole = (wide / scales[:, None]).round().to(torch.int8)
    if weight.dtype == torch.bfloat16:
        # An instruction unpacks the two halves of each 16 bytes, four outputs of a pair each.
        pairs = (whole + 64).view(out // outputs, 2, 4, 4, size // 2, 2)
        blocks = pairs.permute(0, 4, 2, 1, 3, 5)
    else:
        blocks = whole.view(out // outputs, outputs, size).transpose(1, 2)
    return Blocks.of(torch.cat([blocks.flatten(1), scales.view(-1, outputs).view(torch.int8)], 1))


def use_bytes(module: nn.Module) -> int:
    """From now on, have the products of few rows in a module read bytes. Returns how many do."""
    layers = [x for x in _modules(module) if isinstance(x, PackedLinear) and x.has_blocks]
    for layer in layers:
        layer.pack, layer._packed_state = packed_bytes, []
    for part in _modules(module):
        refresh_packed(part)
    return len(layers)


def _modules(module: nn.Module) -> Iterator[nn.Module]:
    """All parts of a module, and those that a part hides in a list."""
    for part in module.modules():
        yield part
        for hidden in (x for some in vars(part).values() if isinstance(some, list) for x in some):
            if isinstance(hidden, nn.Module):
                yield from _modules(hidden)
