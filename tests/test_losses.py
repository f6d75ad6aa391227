"""Every loss against its definition, its closed form against autograd, in float64 and in bfloat16;
the chunked form against the eager one."""

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from decode.base.errors import UserError
from distill.chunked_loss import LossSum, TokenLoss, chunked_loss
from distill.losses import LOSSES, Loss, LossRows, WeightedLoss
from distill.teacher.teacher_signal import Signal, TeacherLogits, TopK

DIVERGENCES = [
    "forward_kl",
    "reverse_kl",
    "jsd",
    "total_variation",
    "negative_log_acceptance",
    "lk_hybrid",
]
ALL = {
    "forward_kl": 0.7,
    "reverse_kl": 0.2,
    "jsd": {"weight": 1.5, "beta": 0.3},
    "total_variation": 1.1,
    "negative_log_acceptance": 0.6,
    "lk_hybrid": {"weight": 0.4, "eta": 2.0},
    "cross_entropy": 0.3,
}


def eager_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    signal: Signal | None,
    labels: Tensor,
    weighted_loss: WeightedLoss,
) -> Tensor:
    """The same weighted sum, from all logits [n, V] at once: the oracle of `chunked_loss`."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    return weighted_loss.weigh(weighted_loss.values(logits, signal, labels).sum(-1))


def problem(n: int = 37, hidden: int = 8, vocab: int = 53, dtype: torch.dtype = torch.float64):
    g = torch.Generator().manual_seed(0)
    h = torch.randn(n, hidden, generator=g, dtype=dtype).requires_grad_()
    w = torch.randn(vocab, hidden, generator=g, dtype=dtype).requires_grad_()
    b = torch.randn(vocab, generator=g, dtype=dtype).requires_grad_()
    teacher = torch.randn(n, vocab, generator=g, dtype=dtype) * 2
    labels = torch.randint(vocab, (n,), generator=g)
    return h, w, b, teacher, labels


def top_k(logits: Tensor, k: int) -> TopK:
    """The signal that a cache would hold for these logits."""
    log_p = logits.log_softmax(-1)
    kept, ids = log_p.topk(k)
    tail = log_p.exp().scatter(1, ids, 0.0).sum(-1).log()
    return TopK(ids, kept, tail)


def values(name: str, student: Tensor, teacher: Tensor, **options: float) -> Tensor:
    terms = WeightedLoss({name: {"weight": 1.0, **options}})
    labels = torch.zeros(len(student), dtype=torch.int64)
    return terms.values(student, TeacherLogits(teacher), labels)[0]


# --- definitions ----------------------------------------------------------------------------------


def by_hand(name: str, p: list[float], q: list[float]) -> float:
    def kl(a: list[float], b: list[float]) -> float:
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))

    m = [0.3 * x + 0.7 * y for x, y in zip(p, q, strict=True)]
    tv = sum(abs(x - y) for x, y in zip(p, q, strict=True)) / 2
    share = math.exp(-3 * (1 - tv))
    return {
        "forward_kl": kl(p, q),
        "reverse_kl": kl(q, p),
        "jsd": 0.3 * kl(p, m) + 0.7 * kl(q, m),
        "total_variation": tv,
        "negative_log_acceptance": -math.log(sum(map(min, p, q))),
        "lk_hybrid": share * kl(p, q) + (1 - share) * tv,
    }[name]


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_divergence_is_its_definition_and_zero_only_for_equals(name: str):
    student, teacher = torch.randn(5, 11).double(), torch.randn(5, 11).double()
    options = {"beta": 0.3} if name == "jsd" else {}
    found = values(name, student, teacher, **options)
    for row in range(5):
        p, q = teacher[row].softmax(-1).tolist(), student[row].softmax(-1).tolist()
        assert found[row].item() == pytest.approx(by_hand(name, p, q), rel=1e-10)
    assert (found > 1e-3).all()
    assert values(name, teacher, teacher, **options).abs().max() < 1e-12


def test_cross_entropy_is_minus_log_q_of_the_label():
    student, labels = torch.randn(4, 7).double(), torch.tensor([0, 3, 6, -100])
    found = WeightedLoss({"cross_entropy": 1.0}).values(student, None, labels)[0]
    q = student.softmax(-1)
    expected = [-math.log(q[i, label]) for i, label in enumerate(labels[:3])]
    torch.testing.assert_close(found, torch.tensor([*expected, 0.0], dtype=torch.float64))


def test_temperatures_divide_the_logits_of_the_divergences_and_not_of_the_text():
    student, teacher = torch.randn(6, 11).double(), torch.randn(6, 11).double()
    labels = torch.randint(11, (6,))
    terms = WeightedLoss(
        {"forward_kl": 1.0, "cross_entropy": 1.0}, teacher_temperature=2, drafter_temperature=0.5
    )
    kl, ce = terms.values(student, TeacherLogits(teacher), labels)
    torch.testing.assert_close(kl, values("forward_kl", student * 2, teacher / 2))
    torch.testing.assert_close(
        ce, torch.nn.functional.cross_entropy(student, labels, reduction="none")
    )


# --- closed forms ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize("losses", [*({name: 1.0} for name in LOSSES), ALL])
def test_the_closed_form_has_the_value_and_gradient_of_the_definition(
    losses: dict[str, float], temperature: float, cached: bool
):
    g = torch.Generator().manual_seed(3)
    student = (2 * torch.randn(9, 31, generator=g).double()).requires_grad_()
    teacher = 2 * torch.randn(9, 31, generator=g).double()
    labels = torch.randint(31, (9,), generator=g)
    labels[4] = -100
    terms = WeightedLoss(losses, drafter_temperature=temperature)
    signal: Signal = top_k(teacher, 6) if cached else TeacherLogits(teacher)
    expected = terms.values(student, signal, labels)
    terms.weigh(expected).sum().backward()
    found, gradient = terms.fused(student.detach(), signal, labels)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradient, student.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("noise", [0.02, 0.2, 2.0])
def test_bfloat16_logits_stay_within_one_per_cent_at_a_large_vocabulary(name: str, noise: float):
    """Value and gradient at V = 32k, down to p ≈ q, where a careless KL is all rounding."""
    g = torch.Generator().manual_seed(1)
    teacher = (4 * torch.randn(8, 32_000, generator=g)).bfloat16()
    student = (teacher.float() + noise * torch.randn(8, 32_000, generator=g)).bfloat16()
    labels = torch.zeros(8, dtype=torch.int64)
    terms = WeightedLoss({name: 1.0})
    exact = student.double().requires_grad_()
    expected = terms.values(exact, TeacherLogits(teacher.double()), labels)
    expected.sum().backward()
    found, gradient = terms.fused(student.float(), TeacherLogits(teacher), labels)
    assert ((found - expected).abs() <= 0.01 * expected).all()
    error = (gradient - exact.grad).norm(dim=-1) / exact.grad.norm(dim=-1)
    assert error.max() < 0.01


def test_a_loss_with_only_a_definition_works_all_the_same():
    @dataclass(frozen=True)
    class Chi2(Loss):
        def value(self, rows: LossRows) -> Tensor:
            p, q = rows.log_p.exp(), rows.log_q.exp()
            return ((p - q) ** 2 / q).sum(-1)

    student = torch.randn(5, 11).double().requires_grad_()
    log_p = torch.randn(5, 11).double().log_softmax(-1)
    labels = torch.zeros(5, dtype=torch.int64)
    expected = Chi2().value(LossRows(student.log_softmax(-1), log_p, labels))
    expected.sum().backward()
    found, gradient = Chi2().fused(LossRows(student.detach().log_softmax(-1), log_p, labels))
    torch.testing.assert_close(found, expected.detach())
    torch.testing.assert_close(gradient, student.grad)


# --- top k and tail -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DIVERGENCES)
def test_taking_the_tail_together_never_adds_and_with_all_tokens_loses_nothing(name: str):
    student, teacher = torch.randn(40, 20).double(), 2 * torch.randn(40, 20).double()
    labels = torch.zeros(40, dtype=torch.int64)
    whole = values(name, student, teacher)
    before = torch.zeros(40).double()
    for k in (1, 4, 10, 19):
        coarse = WeightedLoss({name: 1.0}).values(student, top_k(teacher, k), labels)[0]
        assert (coarse >= before - 1e-12).all()
        assert (coarse <= whole + 1e-12).all()
        before = coarse
    torch.testing.assert_close(before, whole)


def test_a_tail_without_mass_is_finite():
    student = torch.zeros(1, 8)
    student[0, :2] = 300.0
    signal = TopK(torch.tensor([[0, 1]]), torch.full((1, 2), -math.log(2)), torch.tensor([-90.0]))
    for name in DIVERGENCES:
        found, gradient = WeightedLoss({name: 1.0}).fused(student, signal, torch.zeros(1).long())
        assert found.isfinite().all()
        assert gradient.isfinite().all()


# --- chunks ---------------------------------------------------------------------------------------


@contextmanager
def made_sizes() -> Iterator[dict[torch.dtype, list[int]]]:
    """The sizes of the tensors that are made inside, by dtype. Views are none."""
    sizes: dict[torch.dtype, list[int]] = defaultdict(list)

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            given = {x.data_ptr() for x in args if isinstance(x, Tensor)}
            for tensor in made if isinstance(made, tuple | list) else [made]:
                if isinstance(tensor, Tensor) and tensor.data_ptr() not in given:
                    sizes[tensor.dtype].append(tensor.numel())
            return made

    with Watch():
        yield sizes


@pytest.mark.parametrize("chunk", [1, 8, 37, 1000])
@pytest.mark.parametrize("losses", [{"forward_kl": 1.0}, {"cross_entropy": 2.0}, ALL])
def test_chunked_loss_equals_the_eager_oracle(chunk: int, losses: dict[str, float], monkeypatch):
    monkeypatch.setattr("distill.chunked_loss.CPU_BLOCK", 3 * 53)
    h, w, b, teacher, labels = problem()
    terms = WeightedLoss(losses)
    value = eager_loss(h, w, b, TeacherLogits(teacher), labels, terms)
    (value * 1.7).backward()
    expected = [x.grad.clone() for x in (h, w, b)]
    h.grad = w.grad = b.grad = None

    whole = TeacherLogits(teacher)
    loss, parts = chunked_loss(h, w, b, lambda part: whole[part], labels, terms, chunk=chunk)
    (loss * 1.7).backward()
    assert loss.item() == pytest.approx(value.item(), rel=1e-12)
    assert terms.weigh(parts).item() == pytest.approx(value.item())
    for found, wanted in zip((h.grad, w.grad, b.grad), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("outer", [1.0, 0.37])
def test_losses_of_one_layer_have_the_gradients_of_their_sum(outer: float):
    """Two losses read a layer and an added weight, a third one reads another layer."""
    h, w, b, teacher, labels = problem()
    generator = torch.Generator().manual_seed(7)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=h.dtype).requires_grad_()

    later, rows, columns, own = drawn(*h.shape), drawn(len(h), 2), drawn(len(w), 2), drawn(*w.shape)
    terms, whole = WeightedLoss(ALL), TeacherLogits(teacher)
    of_tokens = torch.rand(len(h), generator=generator, dtype=h.dtype)
    parameters = (h, later, rows, w, b, columns, own)

    per_token = [
        terms.weigh(values)
        for logits in (
            h @ w.t() + b,
            later @ w.t() + b + rows @ columns.t(),
            later @ own.t() + rows @ columns.t(),
        )
        for values in [terms.values(logits, whole, labels)]
    ]
    value = per_token[0].sum() + 0.8 * (per_token[1] * of_tokens).sum() + 0.3 * per_token[2].sum()
    expected = torch.autograd.grad(outer * value, parameters)

    losses, signal = LossSum(terms, chunk=8), whole.__getitem__
    added = (rows, columns)
    second = TokenLoss(later, w, b, labels, scale=0.8, weights=of_tokens, added=added)
    losses.add(signal, TokenLoss(h, w, b, labels), second)
    losses.add(signal, TokenLoss(later, own, None, labels, scale=0.3, added=added))
    assert losses.total.item() == pytest.approx(value.item(), rel=1e-12)
    found = torch.autograd.grad(outer * losses.total, parameters)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_losses_of_the_same_places_ask_a_teacher_once():
    """As apart, each with its rows of the signal: values, gradients, ranks and terms. The memory is
    that of one loss."""
    _, w, b, teacher, labels = problem()
    places = [torch.arange(37), torch.arange(3, 31), torch.tensor([0, 1, 9, 10, 11, 22, 36])]
    terms, whole = WeightedLoss(ALL), TeacherLogits(teacher)
    generator = torch.Generator().manual_seed(7)
    states = [torch.randn(len(x), 8, generator=generator).double().requires_grad_() for x in places]
    scales = (1.0, 0.8, 0.3)
    inputs = [*states, w, b]

    def losses(numbers: list[Tensor | None]) -> list[TokenLoss]:
        return [
            TokenLoss(
                x,
                w,
                b,
                labels[read],
                scale=scale,
                places=of_loss,
                ranks=torch.full((len(x),), -1),
                values=torch.zeros(len(x), len(ALL)),
            )
            for x, read, scale, of_loss in zip(states, places, scales, numbers, strict=True)
        ]

    apart, apart_sums, oracles = LossSum(terms, chunk=8), [], losses([None] * 3)
    for loss, read in zip(oracles, places, strict=True):
        apart_sums.append(apart.add(whole[read].__getitem__, loss)[0])
    expected = torch.autograd.grad(apart.total, inputs)

    asked: list[slice] = []

    def signal(part: slice) -> TeacherLogits:
        asked.append(part)
        return whole[part]

    together, together_losses = LossSum(terms, chunk=8), losses([*places])
    with made_sizes() as sizes:
        sums = together.add(signal, *together_losses)
    assert asked == [slice(0, 8), slice(8, 16), slice(16, 24), slice(24, 32), slice(32, 37)]
    assert max(sizes[torch.float64]) <= 8 * 53
    torch.testing.assert_close(sums, torch.stack(apart_sums), rtol=1e-12, atol=1e-12)
    assert together.total.item() == pytest.approx(apart.total.item(), rel=1e-12)
    for one, other in zip(together_losses, oracles, strict=True):
        assert torch.equal(one.ranks, other.ranks)
        torch.testing.assert_close(one.values, other.values)
    for ours, theirs in zip(torch.autograd.grad(together.total, inputs), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rank_is_the_number_of_greater_logits(dtype: torch.dtype):
    h, w, b, _, labels = (x.to(dtype) if x.is_floating_point() else x for x in problem())
    labels[5] = -100
    loss = TokenLoss(h, w, b, labels, ranks=torch.full((37,), -1))
    LossSum(WeightedLoss({"cross_entropy": 1.0}), chunk=8).add(None, loss)
    logits = torch.cat([torch.nn.functional.linear(x, w, b) for x in h.split(8)])
    expected = [53 if y < 0 else int((x > x[y]).sum()) for x, y in zip(logits, labels, strict=True)]
    assert loss.ranks.tolist() == expected


def test_without_gradients_none_is_made():
    h, w, b, teacher, labels = problem()
    with torch.no_grad(), made_sizes() as sizes:
        chunked_loss(h, w, b, lambda p: TeacherLogits(teacher[p]), labels, WeightedLoss(ALL))
    assert w.numel() not in sizes[w.dtype]


def test_a_frozen_output_layer_gets_no_gradient_and_the_same_one_flows_back():
    h, w, b, teacher, labels = problem()
    terms, whole = WeightedLoss(ALL), TeacherLogits(teacher)
    eager_loss(h, w, b, whole, labels, terms).backward()
    expected, h.grad = h.grad, None
    loss, _ = chunked_loss(h, w.detach(), b.detach(), lambda p: whole[p], labels, terms)
    loss.backward()
    torch.testing.assert_close(h.grad, expected)


def test_no_large_float32_tensor_is_ever_made(monkeypatch):
    """bfloat16 logits of one chunk, and float32 rows for a few tokens at a time: never [n, V]."""
    monkeypatch.setattr("distill.chunked_loss.CPU_BLOCK", 4 * 500)
    g = torch.Generator().manual_seed(0)
    h = torch.randn(64, 8, generator=g).bfloat16().requires_grad_()
    w = torch.randn(500, 8, generator=g).bfloat16().requires_grad_()
    states = torch.randn(64, 8, generator=g).bfloat16()
    labels = torch.randint(500, (64,), generator=g)

    with made_sizes() as sizes:
        loss, _ = chunked_loss(
            h,
            w,
            None,
            lambda p: TeacherLogits(states[p] @ w.detach().t()),
            labels,
            WeightedLoss(ALL),
            chunk=16,
        )
        loss.backward()
    assert max(sizes[torch.bfloat16]) <= 16 * 500
    assert max(sizes[torch.float32]) <= 500 * 8  # the output layer's gradient; 4·500 for the rows


def test_a_bfloat16_layers_gradient_is_the_same_in_blocks(monkeypatch):
    """On the CPU its parts become float32 a few rows of the layer at a time."""
    h, w, _, teacher, labels = problem(dtype=torch.float32)
    states, terms = h.bfloat16(), WeightedLoss({"forward_kl": 1.0})
    gradients = []
    for size in (1 << 18, 3 * 8):  # numbers of the layer: 53 rows of 8, and 3 of them
        monkeypatch.setattr("distill.chunked_loss.CPU_BLOCK", size)
        layer = w.detach().bfloat16().requires_grad_()
        loss, _ = chunked_loss(
            states, layer, None, TeacherLogits(teacher).__getitem__, labels, terms, chunk=8
        )
        gradients += torch.autograd.grad(loss, [layer])
    whole, blocks = gradients
    # bfloat16 has eight bits, and each of five chunks is rounded once.
    assert (whole - blocks).abs().max() <= 2**-6 * whole.abs().max()
    assert whole.abs().amin(1).max() > 0


def test_no_tokens_give_zero_loss_and_zero_gradients():
    h, w, b, teacher, labels = problem()
    loss, _ = chunked_loss(
        h[:0], w, b, lambda part: TeacherLogits(teacher[part]), labels[:0], WeightedLoss(ALL)
    )
    loss.backward()
    assert loss.item() == 0
    assert w.grad.abs().max() == 0


def test_unknown_losses_options_and_numbers_out_of_range_are_refused():
    with pytest.raises(UserError, match='Did you mean "forward_kl"'):
        WeightedLoss({"forward_kll": 1.0})
    with pytest.raises(UserError, match="expected a number > 0"):
        WeightedLoss({"forward_kl": 0.0})
    with pytest.raises(UserError, match="no loss"):
        WeightedLoss({})
    with pytest.raises(UserError, match=r"no option 'betta'.*Did you mean .beta"):
        WeightedLoss({"jsd": {"betta": 0.5}})
    for beta in (0, 1, -0.5, 2.0, "half"):
        with pytest.raises(UserError, match="between 0 and 1"):
            WeightedLoss({"jsd": {"beta": beta}})
    with pytest.raises(UserError, match="teacher_temperature is 0"):
        WeightedLoss({"forward_kl": 1.0}, teacher_temperature=0)
