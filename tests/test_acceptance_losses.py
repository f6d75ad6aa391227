"""The losses of the acceptance rate: their relation to TV and KL, and what they learn from.

Their values, closed forms, caches and chunks are tested with all other losses in `test_losses`.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from decode.base.errors import UserError
from distill.losses import WeightedLoss
from distill.teacher.teacher_signal import TeacherLogits

LK = ["negative_log_acceptance", "lk_hybrid"]


def fused(loss: str, student: Tensor, teacher: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Value [n] and gradient [n, V]."""
    terms = WeightedLoss({loss: {"weight": 1.0, **options}})
    labels = torch.zeros(len(student), dtype=torch.int64)
    values, gradient = terms.fused(student, TeacherLogits(teacher), labels)
    return values[0], gradient


def acceptance(student: Tensor, teacher: Tensor) -> Tensor:
    return torch.minimum(student.softmax(-1), teacher.softmax(-1)).sum(-1)


@pytest.mark.parametrize("loss", LK)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_zero_for_equals_and_only_for_them(loss: str, dtype: torch.dtype):
    teacher = torch.randn(20, 300, dtype=dtype)
    value, gradient = fused(loss, teacher, teacher)
    assert value.abs().max() == 0
    assert gradient.abs().max() < 1e-6
    value, _ = fused(loss, teacher + 3, teacher)  # a constant changes no distribution
    assert (value >= 0).all()
    assert value.max() < 1e-6
    moved = teacher.clone()
    moved[:, 0] += 1
    assert (fused(loss, moved, teacher)[0] > 1e-5).all()


def test_without_overlap_they_still_have_a_gradient_where_tv_has_none():
    """p on token 0, q on token 1; the overlap e⁻²⁰⁰ is no number in float32."""
    student, teacher = torch.zeros(1, 8), torch.zeros(1, 8)
    student[0, 1] = teacher[0, 0] = 200.0
    assert fused("total_variation", student, teacher)[1].abs().max() < 1e-30
    value, gradient = fused("negative_log_acceptance", student, teacher)
    exact = student.double().requires_grad_()
    expected = torch.minimum(exact.log_softmax(-1), teacher.double().log_softmax(-1)).logsumexp(-1)
    (slope,) = torch.autograd.grad(-expected.sum(), exact)
    torch.testing.assert_close(value.double(), -expected.detach())
    torch.testing.assert_close(gradient.double(), slope, rtol=1e-5, atol=1e-5)
    assert gradient[0, 1] > 0.5
    _, gradient = fused("lk_hybrid", student, teacher)
    torch.testing.assert_close(gradient[0, :2], torch.tensor([-1.0, 1.0]))


def test_the_blend_is_kl_without_eta_and_tv_with_a_large_one_and_lambda_is_a_constant():
    student, teacher = 2 * torch.randn(30, 11).double(), 2 * torch.randn(30, 11).double()
    kl, tv = (fused(name, student, teacher) for name in ("forward_kl", "total_variation"))
    for eta, limit in ((0, kl), (1e6, tv)):
        for found, expected in zip(
            fused("lk_hybrid", student, teacher, eta=eta), limit, strict=True
        ):
            torch.testing.assert_close(found, expected)
    share = (-3 * acceptance(student, teacher)).exp()
    value, gradient = fused("lk_hybrid", student, teacher)
    torch.testing.assert_close(value, share * kl[0] + (1 - share) * tv[0])
    share = share[:, None]
    torch.testing.assert_close(gradient, share * kl[1] + (1 - share) * tv[1])


def test_an_eta_out_of_range_is_refused():
    for eta in (-0.1, float("nan"), True, "large"):
        with pytest.raises(UserError, match="expected a number >= 0"):
            WeightedLoss({"lk_hybrid": {"eta": eta}})
    for name, meant in (("nla", "negative_log_acceptance"), ("lk_lambda", "lk_hybrid")):
        with pytest.raises(UserError, match=f'Did you mean "{meant}"'):
            WeightedLoss({name: 1.0})


def climb(loss: str, steps: int = 60) -> float:
    """The acceptance rate that descent reaches from logits that are sure of the wrong tokens."""
    g = torch.Generator().manual_seed(0)
    teacher = 2 * torch.randn(16, 40, generator=g)
    student = torch.zeros(16, 40)
    student.scatter_(1, teacher.argmin(-1, keepdim=True), 10.0)
    assert acceptance(student, teacher).mean() < 0.01
    for _ in range(steps):
        student -= 2 * fused(loss, student, teacher)[1]
    return acceptance(student, teacher).mean().item()


def test_they_learn_from_a_start_from_which_tv_does_not():
    assert climb("total_variation") < 0.05
    assert climb("negative_log_acceptance") > 0.9
    assert climb("lk_hybrid") > 0.9
