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


def fused(loss: str, student: Tensor, teacher: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Value [n] and gradient [n, V]."""
    terms = WeightedLoss({loss: {"weight": 1.0, **options}})
    labels = torch.zeros(len(student), dtype=torch.int64)
    values, gradient = terms.fused(student, TeacherLogits(teacher), labels)
    return values[0], gradient


def acceptance(student: Tensor, teacher: Tensor) -> Tensor:
    return torch.minimum(student.softmax(-1), teacher.softmax(-1)).sum(-1)


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
