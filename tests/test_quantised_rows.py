"""Weights in the form of a GGUF file: the same bits as with float32 weights."""

from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import nn

from decode.model.forward import huge_pages
from decode.model.forward.few_rows import FORMS
from decode.model.forward.huge_pages import in_huge_pages
from decode.model.forward.lean_parts import PackedLinear
from decode.model.forward.prepare_model import refresh_packed
from decode.model.forward.quantised_rows import FIRST, TYPES, QuantisedFile, unpacked
from decode.model.forward.quantised_rows import FORMS as OWN_FORMS
from tests.export import needs_few_rows


@pytest.fixture(autouse=True)
def compiled() -> None:
    needs_few_rows(torch.float32)


def stored(name: str, rows: int, size: int, seed: int = 0) -> tuple[Any, np.ndarray]:
    """A tensor of a file: its type and random bytes, with scales of both signs."""
    rng = np.random.default_rng(seed)
    kind = GGMLQuantizationType[name]
    of_block, count = GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (rows, size // of_block, count), dtype=np.uint8)
    halves = rng.normal(0, 0.02, (rows, size // of_block, 2)).astype(np.float16).view(np.uint8)
    if name == "Q6_K":
        raw[..., 208:] = halves[..., :2]
    else:
        wide = 2 if name in ("Q4_0", "Q5_0", "Q8_0") else 4
        raw[..., :wide] = halves[..., :wide]
    return kind, raw.reshape(rows, -1)


def layer_of(kind: Any, raw: np.ndarray, order: Any, file: QuantisedFile | None) -> nn.Linear:
    """A layer with rows of a tensor in an order, and the file that they are from."""
    numbers = torch.from_numpy(dequantize(raw, kind))[order]
    layer = nn.Linear(numbers.shape[1], len(numbers), bias=False).requires_grad_(False)
    layer.weight.copy_(numbers)
    if file is not None:
        layer.weight.quantised_file = file
    return layer


@pytest.mark.parametrize(
    "names", [[name] for name in TYPES] + [["Q4_K", "Q6_K"], ["Q8_0", "Q4_0", "Q8_0"]], ids="-".join
)
def test_products_have_the_bits_of_float32(names: list[str]) -> None:
    torch.manual_seed(0)
    tensors = [stored(name, 48, 256, seed) for seed, name in enumerate(names)]
    file = QuantisedFile(tensors)
    # A reader may change the order of rows, as transformers does for queries and keys.
    orders = [torch.randperm(48), *[slice(None)] * (len(names) - 1)]
    rows = zip(tensors, orders, strict=True)
    own, plain = [], []
    for (kind, raw), order in rows:
        own.append(layer_of(kind, raw, order, file))
        plain.append(layer_of(kind, raw, order, None))
    product, other = PackedLinear(*own), PackedLinear(*plain)
    form = OWN_FORMS[product.blocks[0].form - FIRST]
    assert form == (TYPES[names[0]].form if len(set(names)) == 1 else OWN_FORMS[-1])
    assert other.blocks[0].form == FORMS[torch.float32]
    bits = form.bits + (32 if form.whole else 16) * (1 + form.least) / form.group
    assert product.blocks[0].data.nbytes == 48 * len(names) * 256 * bits / 8
    x = torch.randn(40, 256)
    for count in (1, 2, 3, 6, 7, 13, 40):
        assert torch.equal(product(x[:count]), other(x[:count])), count
    weights = torch.cat([layer.weight for layer in own])
    assert torch.equal(unpacked(product.blocks[0], torch.float32), weights)


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x0001, 0x83FF])
@pytest.mark.parametrize("name", TYPES)
def test_infinite_and_subnormal_scales_give_the_bits_of_float32(name: str, bits: int) -> None:
    """A row whose first scale is ±∞, or the smallest or the largest subnormal number of float16."""
    kind, raw = stored(name, 32, 256)
    at = GGML_QUANT_SIZES[kind][1] - 2 if name == "Q6_K" else 0
    raw[3, at : at + 2] = np.array([bits], np.uint16).view(np.uint8)
    file = QuantisedFile([(kind, raw)])
    with np.errstate(invalid="ignore"):  # ∞ · 0 is no number: such a weight is packed as any other
        own, plain = (PackedLinear(layer_of(kind, raw, slice(None), x)) for x in (file, None))
    assert own.blocks[0].form >= FIRST or bits & 0x7C00
    x = torch.randn(13, 256, generator=torch.Generator().manual_seed(0))
    for count in (1, 5, 13):
        assert torch.equal(own(x[:count]).view(torch.int32), plain(x[:count]).view(torch.int32))


def test_a_changed_or_foreign_weight_is_packed_as_any_other() -> None:
    kind, raw = stored("Q4_1", 32, 64)
    file = QuantisedFile([(kind, raw)])
    x = torch.randn(3, 64)
    changed = layer_of(kind, raw, slice(None), file)
    product = PackedLinear(changed)
    assert product.blocks[0].form >= FIRST
    changed.weight[7, 5] += 0.01
    refresh_packed(product)
    assert product.blocks[0].form == FORMS[torch.float32]
    torch.testing.assert_close(product(x), changed(x))
    # The first numbers of a row find it, and the others do not fit.
    foreign = layer_of(*stored("Q4_1", 32, 64, seed=1), slice(None), file)
    assert PackedLinear(foreign).blocks[0].form == FORMS[torch.float32]
    broken = raw.copy()
    broken[3, :2] = np.array([np.nan], np.float16).view(np.uint8)
    with_nan = layer_of(kind, broken, slice(None), QuantisedFile([(kind, broken)]))
    assert PackedLinear(with_nan).blocks[0].form == FORMS[torch.float32]


def test_other_types_of_a_file_are_left() -> None:
    kind = GGMLQuantizationType.TQ2_0
    raw = gguf.quants.quantize(
        np.random.default_rng(0).normal(size=(16, 256)).astype(np.float32), kind
    )
    file = QuantisedFile([(kind, raw)])
    assert not file.tensors
    assert file.rows(np.zeros((16, 256), np.float32)) is None


def test_huge_pages_hold_what_was_packed_until_its_last_tensor_ends() -> None:
    sizes = [1, 63, 4096, huge_pages.ROOM + 5]
    data = [torch.arange(size, dtype=torch.int32).to(torch.int8) for size in sizes]
    copies = [in_huge_pages(x) for x in data]
    assert all(x.data_ptr() % 64 == 0 for x in copies)
    # A copy of one does not copy the others.
    assert [x.untyped_storage().nbytes() for x in copies] == sizes
    assert all(map(torch.equal, copies, data))
    turned = torch.arange(12.0).view(3, 4).t()
    assert in_huge_pages(turned).is_contiguous()
    assert torch.equal(in_huge_pages(turned), turned)
    assert in_huge_pages(torch.empty(0, 4)).shape == (0, 4)
    del copies[:3]
    assert torch.equal(copies[0], data[3])
