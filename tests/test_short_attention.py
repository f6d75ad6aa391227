"""The attention of a student's training on a CPU: where, and the same numbers."""

import pytest
import torch

from distill import short_attention as short
from distill.distillation_loss import Distillation
from distill.losses import WeightedLoss
from tests.tiny import tiny_llama


@pytest.fixture
def calls(monkeypatch):
    """The lengths of the texts that `short_attention` was called for."""
    lengths: list[int] = []
    original = short.short_attention

    def counted(queries, keys, values):
        lengths.append(queries.shape[2])
        return original(queries, keys, values)

    monkeypatch.setattr(short, "short_attention", counted)
    return lengths


def student_states(student, ids, mask, *, half):
    module = Distillation(student, WeightedLoss({"cross_entropy": 1.0}))
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        return module.hidden_states(ids, mask).float()


def test_a_padded_row_has_the_states_of_the_row_alone():
    student = tiny_llama().train()
    ids = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    both = student_states(student, ids, mask, half=False)
    alone = student_states(student, ids[1:, :7], mask[1:, :7], half=False)
    torch.testing.assert_close(both[1:, :7], alone)


@pytest.mark.parametrize("length", [9, short.SHORT + 1])
def test_a_training_in_bfloat16_has_the_gradients_of_float32(calls, length):
    student = tiny_llama(max_position_embeddings=512).train()
    ids = torch.randint(0, 50, (2, length), generator=torch.Generator().manual_seed(0))
    gradients = []
    for half in (False, True):
        student.zero_grad()
        student_states(student, ids, torch.ones_like(ids), half=half).square().mean().backward()
        parameters = [x.grad for x in student.base_model.parameters()]
        gradients.append(torch.cat([x.flatten() for x in parameters]))
    layers = student.config.num_hidden_layers
    assert calls == [length] * (layers if length <= short.SHORT else 0)
    exact, found = gradients
    assert (found - exact).norm() < 0.02 * exact.norm()  # bfloat16 has 8 bits


def test_passes_without_training_and_wide_batches_are_left_to_sdpa(calls, monkeypatch):
    student = tiny_llama()
    ids = torch.ones(2, 9, dtype=torch.int64)
    student_states(student.eval(), ids, ids, half=True)
    monkeypatch.setattr(short, "MOST_SCORES", 10)
    student_states(student.train(), ids, ids, half=True)
    assert not calls
