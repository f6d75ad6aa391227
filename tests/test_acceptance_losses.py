"""The losses of the acceptance rate: their relation to TV and KL, and what they learn from.

Their values, closed forms, caches and chunks are tested with all other losses in `test_losses`.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from decode.base.errors import UserError
from decode.drafters.draft_vocabulary import reduce_output
from distill.distillation_loss import Distillation
from distill.losses import WeightedLoss
from distill.teacher.feature_sources import LiveFeatures
from distill.teacher.linear_logits import split_model
from distill.teacher.live_teacher import LiveTeacher
from distill.teacher.teacher_signal import TeacherLogits
from distill.teacher.top_k_cache import top_k
from heads.head_training import HeadTraining
from heads.heads_directory import new_heads
from heads.heads_module import HeadOptions
from tests.tiny import VOCAB, tiny_llama, tiny_target

LK = ["negative_log_acceptance", "lk_hybrid"]


def fused(loss: str, student: Tensor, teacher: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Value [n] and gradient [n, V]."""
    terms = WeightedLoss({loss: {"weight": 1.0, **options}})
    labels = torch.zeros(len(student), dtype=torch.int64)
    values, gradient = terms.fused(student, TeacherLogits(teacher), labels)
    return values[0], gradient


def acceptance(student: Tensor, teacher: Tensor) -> Tensor:
    return torch.minimum(student.softmax(-1), teacher.softmax(-1)).sum(-1)


def test_minus_log_alpha_is_a_bound_on_tv_with_its_gradient_over_alpha():
    student, teacher = 2 * torch.randn(50, 11).double(), 2 * torch.randn(50, 11).double()
    tv, slope = fused("total_variation", student, teacher)
    value, gradient = fused("negative_log_acceptance", student, teacher)
    alpha = acceptance(student, teacher)
    torch.testing.assert_close(value, -alpha.log())
    torch.testing.assert_close(value, -(1 - tv).log())
    assert (value > tv).all()
    torch.testing.assert_close(gradient, slope / alpha[:, None])


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


def test_for_a_certain_token_it_is_the_cross_entropy():
    student, labels = torch.randn(9, 11).double(), torch.randint(11, (9,))
    value, gradient = fused("negative_log_acceptance", student, 800.0 * one_hot(labels, 11))
    expected, slope = WeightedLoss({"cross_entropy": 1.0}).fused(student, None, labels)
    torch.testing.assert_close(value, expected[0])
    torch.testing.assert_close(gradient, slope)


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


def batch() -> dict[str, Tensor]:
    """ids, attention and loss mask [4, 12]: the first text has padding and a prompt."""
    ids = torch.randint(3, VOCAB, (4, 12), generator=torch.Generator().manual_seed(1))
    attention, mask = torch.ones_like(ids), torch.ones_like(ids, dtype=torch.bool)
    attention[0, 9:] = 0
    mask[0, 9:] = mask[0, :4] = False
    return {"input_ids": ids, "attention_mask": attention, "loss_mask": mask}


@pytest.mark.parametrize("loss", LK)
@pytest.mark.parametrize("teacher", ["live", "reduced", "cached"])
def test_a_tiny_student_that_is_trained_is_accepted_more_often(loss: str, teacher: str):
    target, student = tiny_llama(seed=0), tiny_llama(seed=1, layers=1)
    tokens = batch()
    ids = torch.arange(0, VOCAB, 3) if teacher == "reduced" else None
    if ids is not None:
        reduce_output(student, ids)
    live = LiveTeacher(split_model(target), vocabulary=ids).signal(**tokens, ids=[])
    signal: Any = (lambda part: top_k(live(part).logits, 16)) if teacher == "cached" else live
    module = Distillation(student, WeightedLoss({loss: 1.0}), vocabulary=ids, chunk=7)
    whole = LiveTeacher(split_model(target)).signal(**tokens, ids=[])

    def expected() -> float:
        sums = module(**tokens, agreement_with=whole)[1]
        return float(sums[0] / sums[3])

    optimizer = torch.optim.Adam(student.parameters(), lr=5e-3)
    before = expected()
    for _ in range(25):
        optimizer.zero_grad()
        module(**tokens, teacher=signal)[0].backward()
        optimizer.step()
    assert expected() > 1.5 * before


@pytest.mark.parametrize("loss", LK)
def test_heads_learn_by_them_too(loss: str):
    target = tiny_target()
    heads = copy.deepcopy(new_heads(HeadOptions.of({"type": "medusa", "heads": 2}), target, None))
    heads.borrow(target.model, torch.float32)
    module = HeadTraining(heads, WeightedLoss({loss: 1.0, "total_variation": 1e-9}), target.model)
    tokens = batch()
    ids, attention, mask = tokens.values()
    features = LiveFeatures(target.model, module.captured_layers).features(ids, attention, [])
    optimizer = torch.optim.Adam(heads.parameters(), lr=5e-3)
    lost = []
    for _ in range(15):
        optimizer.zero_grad()
        value, sums = module(ids, mask, features, heads.loss_weights(0.0))
        value.backward()
        optimizer.step()
        figures = module.figures(dict(zip(module.sums, sums.tolist(), strict=True)))
        lost.append(figures["head1/total_variation"])
    assert 1 - lost[-1] > 1.2 * (1 - lost[0])
