"""One gradient of embeddings that are the output layer: PyTorch's sum, without its second part."""

from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distill.distillation_loss import Distillation
from distill.losses import WeightedLoss
from distill.tied_gradient import TiedWeight
from tests.tiny import tiny_llama

PADDING = 7


class _Lookups(TorchDispatchMode):
    """Counts the gradients of lookups that have all rows."""

    count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += operator is torch.ops.aten.embedding_dense_backward.default
        return operator(*args, **(kwargs or {}))


def trained(tie: bool, tokens: int | None, accumulated: int) -> tuple[list[torch.Tensor], int]:
    student = tiny_llama(tie=tie, layers=1)
    student.get_input_embeddings().padding_idx = PADDING
    torch.manual_seed(0)
    ids = torch.randint(0, 20, (2, 9))
    ids[0, 3] = ids[1, 8] = PADDING
    module = Distillation(student, WeightedLoss({"cross_entropy": 1.0}), chunk=4, tokens=tokens)
    mask = torch.ones_like(ids)
    with _Lookups() as lookups:
        for _ in range(accumulated):
            loss, _sums = module(ids, mask, mask.bool())
            loss.backward()
    assert module.tied.tensor is None
    return [loss.detach(), *(p.grad for p in student.parameters())], lookups.count


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("tokens", [None, 40], ids=["all", "without padding rows"])
def test_it_is_the_sum_of_both(monkeypatch, tokens, accumulated):
    found, lookups = trained(True, tokens, accumulated)
    assert lookups == 0
    monkeypatch.setattr(TiedWeight, "following", lambda *_: nullcontext())
    expected, lookups = trained(True, tokens, accumulated)
    assert lookups == accumulated
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_embeddings_of_their_own_get_pytorchs_gradient():
    assert trained(False, None, 1)[1] == 1


def test_without_gradients_nothing_changes():
    student = tiny_llama(tie=True, layers=1)
    tied = TiedWeight()
    with torch.no_grad(), tied.following(student):
        student(torch.arange(4)[None])
        assert tied.tensor is None
