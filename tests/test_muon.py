"""Muon for matrices beside AdamW: what it computes, which weights it steps, and how it goes on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from torch import nn

from decode.base.errors import UserError
from distill.losses import WeightedLoss
from heads.head_training import HeadTraining
from heads.heads_directory import new_heads
from heads.heads_module import HeadOptions
from tests.stages import make_stage, plan_stage, stage_context
from tests.tiny import tiny_target
from tests.training import (
    RICH,
    ask_to_stop,
    assert_equal,
    at_batch,
    figures,
    scramble,
    state_of,
    tiny_student,
    tiny_trainer,
)
from train.loop.checkpoint import Stopped
from train.loop.muon import MuonConfig, nearest_orthogonal
from train.loop.optimizer import GroupConfig, OptimizerConfig, make_optimizer

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(6, 9)
        self.tall = nn.Linear(9, 5, bias=False)
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.tall(self.wide(x).relu())


def test_steps_are_those_of_torch_up_to_its_bfloat16() -> None:
    """torch's Muon on the matrices and its AdamW on the rest, with a decay of weights."""
    torch.manual_seed(0)
    ours, theirs = Three(), Three()
    theirs.load_state_dict(ours.state_dict())
    config = OptimizerConfig(lr=1e-2, weight_decay=0.3, muon=MuonConfig(lr_ratio=2.0, momentum=0.9))
    matrices = [theirs.wide.weight, theirs.tall.weight]
    rest = [theirs.wide.bias, theirs.scale]
    muon = torch.optim.Muon(
        matrices, lr=2e-2, weight_decay=0.3, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(rest, lr=1e-2, weight_decay=0.3, betas=(0.9, 0.95))
    optimizers = {ours: [make_optimizer(ours, config)], theirs: [muon, adamw]}
    before = {name: x.clone() for name, x in ours.state_dict().items()}
    for _ in range(5):
        x, y = torch.randn(7, 6), torch.randn(7, 5)
        for module, steppers in optimizers.items():
            (module(x) - y).square().sum().backward()
            for stepper in steppers:
                stepper.step()
                stepper.zero_grad()
    for name, x in ours.state_dict().items():
        moved = (x - before[name]).abs().max().item()
        torch.testing.assert_close(x, theirs.state_dict()[name], rtol=0, atol=0.03 * moved)


def test_a_step_has_no_preferred_direction() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(8, 3) @ torch.diag(torch.tensor([10.0, 1.0, 0.2])) @ torch.randn(3, 20)
    for given in (matrix, matrix.T):
        values = torch.linalg.svdvals(nearest_orthogonal(given))
        assert 0.6 < values[2] <= values[0] < 1.3  # the rank is 3
    assert nearest_orthogonal(torch.zeros(3, 4)).abs().max() == 0


@pytest.mark.parametrize("options", [{"type": "eagle1"}, {"type": "medusa", "output_rank": 4}])
def test_matrices_of_heads_are_muons_and_the_rest_is_adamws(options: Any) -> None:
    target = tiny_target()
    heads = new_heads(HeadOptions.of(options), target, None)
    module = HeadTraining(heads, WeightedLoss({"cross_entropy": 1.0}), target.model)
    names = {id(p): name for name, p in module.named_parameters()}
    groups = make_optimizer(module, OptimizerConfig(muon=MuonConfig())).param_groups
    by_rule = {
        muon: {names[id(p)] for g in groups if g["muon"] is muon for p in g["params"]}
        for muon in (False, True)
    }
    assert by_rule[False] | by_rule[True] == set(names.values())
    assert by_rule[False] == {
        name for name in names.values() if "output" in name or "norm" in name or "bias" in name
    }


def test_matrices_between_the_tied_embeddings_of_a_model_are_muons() -> None:
    student = tiny_student()
    config = OptimizerConfig(
        lr=1e-2,
        muon=MuonConfig(lr_ratio=3.0),
        groups={"*c_fc.weight": GroupConfig(lr=1e-3), "*wte*": GroupConfig(lr=2e-3)},
    )
    names = {id(p): name for name, p in student.named_parameters()}
    found = {
        names[id(p)]: (group["muon"], group["base_lr"])
        for group in make_optimizer(student, config).param_groups
        for p in group["params"]
    }
    assert found["transformer.wte.weight"] == (False, 2e-3)
    assert found["transformer.wpe.weight"] == (False, 1e-2)
    assert found["transformer.h.0.ln_1.weight"] == (False, 1e-2)
    assert found["transformer.h.0.mlp.c_fc.weight"] == (True, pytest.approx(3e-3))
    assert found["transformer.h.0.attn.c_attn.weight"] == (True, pytest.approx(3e-2))


def test_a_stopped_training_goes_on_bit_by_bit(tmp_path: Path) -> None:
    """With an average, groups and clipping: the mean of the gradients is stored and read again."""
    optimizer = RICH | {"muon": MuonConfig()}
    torch.manual_seed(1)
    whole = tiny_trainer(tmp_path / "whole", 12, optimizer=optimizer)
    before = figures(whole.fit())
    torch.manual_seed(1)
    hook = at_batch(13, ask_to_stop)
    stopped = tiny_trainer(tmp_path / "parts", 12, optimizer=optimizer, hook=hook, save_every=100)
    with pytest.raises(Stopped):
        stopped.fit()
    scramble()
    second = tiny_trainer(tmp_path / "parts", 12, optimizer=optimizer)
    assert figures(second.fit()) == before
    assert_equal(state_of(second), state_of(whole))
    assert sum(name.endswith(" mean") for name in state_of(second)) == 4


def test_deepspeed_is_refused_before_anything_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = stage_context(tmp_path, tiny_target())
    stage = make_stage("heads", "heads", heads={"type": "medusa"}, optimizer={"muon": {}})
    plan_stage(context, stage)
    monkeypatch.setattr(type(context.accelerator), "distributed_type", DistributedType.DEEPSPEED)
    with pytest.raises(UserError, match=r"stage heads: optimizer\.muon .* launch DDP or FSDP2"):
        plan_stage(context, stage)
