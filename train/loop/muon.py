"""Muon (Jordan, kellerjordan.github.io/posts/muon; 2502.16982) for the matrices between embeddings
and output layers, and AdamW for all other weights, as one optimizer.

Muon adds up the gradients of a matrix with a decay, and steps by the orthogonal matrix that is
nearest to this sum. All directions of a matrix then learn at one rate. The step is scaled by
0.2·√max(rows, columns), as in 2502.16982: its entries are then as large as those of AdamW's steps,
so a learning rate of AdamW can be kept.

`torch.optim.Muon` computes the same, always in bfloat16, which takes many times longer on a CPU
without instructions for it. It also knows neither AdamW's weights nor shards.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from decode.base.strict import Strict
from heads.heads_module import Heads

# Of the quintic iteration of Newton and Schulz in the post, and the number of iterations.
A, B, C, ITERATIONS = 3.4445, -4.7750, 2.0315, 5


class MuonConfig(Strict):
    """Muon for matrices. AdamW still trains embeddings, output layers, norms and biases."""

    lr_ratio: float = Field(1.0, gt=0)
    """The learning rate of the matrices divided by the one that AdamW would have for them. Muon's
    steps are as large as AdamW's are late in a training. AdamW's first steps are five times as
    large, so a training of a few hundred steps may need 5."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """The decay of the mean of the gradients. Steps look ahead by Nesterov's rule."""


class MuonAdamW(torch.optim.AdamW):
    """AdamW, whose groups with `muon` are stepped by Muon instead. The groups' other settings hold
    for both, and so does the state, which is stored as AdamW's is."""

    def step(self, closure: Any = None) -> Any:
        groups = self.param_groups
        for group in groups:
            if group["muon"]:
                self._step_matrices(group)
        self.param_groups = [group for group in groups if not group["muon"]]
        try:
            return super().step(closure)
        finally:
            self.param_groups = groups

    def __setstate__(self, state: dict[str, Any]) -> None:
        # AdamW's own method looks for the state of its weights in every group.
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def _step_matrices(self, group: dict[str, Any]) -> None:
        momentum, lr = group["momentum"], group["lr"]
        for matrix in group["params"]:
            if matrix.grad is None:
                continue
            state = self.state[matrix]
            if "mean" not in state:
                state["mean"] = torch.zeros_like(matrix)
            state["mean"].lerp_(matrix.grad, 1 - momentum)
            ahead = matrix.grad.lerp(state["mean"], momentum)
            matrix.mul_(1 - lr * group["weight_decay"])
            matrix.add_(_whole(nearest_orthogonal, ahead), alpha=-lr * _scale(matrix))


def nearest_orthogonal(matrix: Tensor) -> Tensor:
    """A matrix [m, n] with singular values of about 1 (0.7 to 1.2) in place of its own. 0 for 0.

    In bfloat16 on accelerators, in float32 on a CPU.
    """
    x = matrix.float() if matrix.device.type == "cpu" else matrix.bfloat16()
    wide = x if len(x) <= x.shape[1] else x.T
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        product = wide @ wide.T
        wide = torch.addmm(
            wide, torch.addmm(product, product, product, beta=B, alpha=C), wide, beta=A
        )
    return (wide if len(x) <= x.shape[1] else wide.T).to(matrix.dtype)


def _whole(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x) of a matrix of which this rank may hold a part, as x is held."""
    if not isinstance(x, DTensor):
        return function(x)
    return distribute_tensor(
        function(x.full_tensor()), x.device_mesh, x.placements, src_data_rank=None
    )


def _scale(matrix: Tensor) -> float:
    return 0.2 * float(max(matrix.shape)) ** 0.5


def muon_groups(
    module: nn.Module, groups: Iterable[dict[str, Any]], config: MuonConfig
) -> list[dict[str, Any]]:
    """The groups of AdamW's weights and of Muon's, each in two: the trained matrices of `module`
    that Muon steps have groups of their own."""
    matrices = hidden_matrices(module)
    parts = []
    for group in groups:
        for muon in (False, True):
            members = [p for p in group["params"] if (id(p) in matrices) == muon]
            ratio = config.lr_ratio if muon else 1.0
            lr = group["lr"] * ratio
            own = {"params": members, "lr": lr, "base_lr": lr, "muon": muon}
            parts += [group | own | {"momentum": config.momentum}] * bool(members)
    return parts


def hidden_matrices(module: nn.Module) -> set[int]:
    """The ids of the weights of linear layers, without output layers and what heads read directly.

    These, embeddings, norms, biases, and experts in one tensor stay with AdamW.
    """
    outside: set[nn.Module] = set()
    for part in module.modules():
        if isinstance(part, PreTrainedModel):
            outside.add(part.get_output_embeddings())
        elif isinstance(part, Heads):
            for name in part.read_directly:
                outside |= set(part.get_submodule(name).modules())
    linears = (x for x in module.modules() if isinstance(x, nn.Linear | Conv1D))
    return {id(x.weight) for x in linears if x not in outside}
