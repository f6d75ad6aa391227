"""Products of a training by oneDNN: where, the same numbers, forward and backward."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from decode.base import processor
from distill import float32_products as products
from distill.chunked_loss import chunked_loss
from distill.losses import WeightedLoss
from distill.teacher.teacher_signal import TeacherLogits

# Sums of at most 53 numbers in another order.
ROUNDING = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture
def one_dnn(monkeypatch):
    """A processor on which oneDNN is the faster library. Returns the products that it made."""
    made: list[tuple[int, ...]] = []
    operator = torch.ops.mkldnn._linear_pointwise

    def counted(x, *others):
        made.append(tuple(x.shape))
        return operator(x, *others)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", counted)
    monkeypatch.setattr(products, "is_faster", lambda: True)
    return made


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("vendor_id : AuthenticAMD\nflags : avx2 avx512f", True),
        ("vendor_id : GenuineIntel\nflags : avx2 avx512f", False),
        ("vendor_id : AuthenticAMD\nflags : avx2", False),
    ],
)
def test_it_is_for_processors_whose_avx512_mkl_leaves_out(tmp_path, monkeypatch, words, expected):
    (tmp_path / "cpuinfo").write_text(words, "utf-8")
    monkeypatch.setattr(processor, "CPU_FLAGS", tmp_path / "cpuinfo")
    assert products.is_faster.__wrapped__() == expected


def gradients(module: nn.Module, x: torch.Tensor, recompute: bool) -> list[torch.Tensor]:
    outputs = checkpoint(module, x, use_reentrant=False) if recompute else module(x)
    return [outputs, *torch.autograd.grad(outputs.sin().sum(), [x, *module.parameters()])]


@pytest.mark.parametrize("recompute", [False, True])
def test_linear_layers_have_the_outputs_and_gradients_of_pytorchs(one_dnn, recompute):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 4, bias=False))
    x = torch.randn(2, 5, 8, requires_grad=True)
    expected = gradients(module, x, recompute)
    assert not one_dnn
    with products.float32_products(module):
        found = gradients(module, x, recompute)
    torch.testing.assert_close(found, expected, **ROUNDING)
    assert len(one_dnn) == 6 + 2 * recompute
    assert [type(x) for x in module] == [nn.Linear, nn.SiLU, nn.Linear]


def test_what_is_frozen_gets_no_product_of_a_gradient(one_dnn):
    module = nn.Linear(8, 4).requires_grad_(False)
    x = torch.randn(3, 8, requires_grad=True)
    with products.float32_products(module):
        module(x).sum().backward()
    assert one_dnn == [(3, 8), (3, 4)]


def test_other_dtypes_and_autocast_stay_pytorchs(one_dnn):
    module, half = nn.Linear(8, 4), nn.Linear(8, 4, dtype=torch.bfloat16)
    x = torch.randn(3, 8)
    with products.float32_products(nn.ModuleList([module, half])):
        half(x.bfloat16())
        with torch.autocast("cpu", torch.bfloat16):
            assert module(x).dtype == torch.bfloat16
    assert not one_dnn


@pytest.mark.parametrize("chunk", [5, 37])
def test_a_chunked_loss_has_the_gradients_of_one_by_pytorch(one_dnn, monkeypatch, chunk):
    g = torch.Generator().manual_seed(0)
    inputs = [torch.randn(*shape, generator=g) for shape in ((37, 8), (53, 8), (53,), (37, 53))]
    *trained, teacher = inputs
    labels = torch.randint(53, (37,), generator=g)
    terms = WeightedLoss({"forward_kl": 0.7, "cross_entropy": 0.3})

    def values() -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in trained]
        total, sums = chunked_loss(
            *leaves, lambda part: TeacherLogits(teacher[part]), labels, terms, chunk=chunk
        )
        return [total.detach(), sums, *torch.autograd.grad(total, leaves)]

    found = values()
    assert len(one_dnn) == 3 * -(-37 // chunk)
    monkeypatch.setattr(products, "is_faster", lambda: False)
    torch.testing.assert_close(found, values(), **ROUNDING)
