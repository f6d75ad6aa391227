"""One gradient for embeddings that are the output layer too.

PyTorch makes a second gradient of all their rows, for the few that a text looks up, and adds it to
that of the losses. Here the rows that were looked up are added to the gradient of the losses. On a
GPU this sum would have no fixed order, so there PyTorch's way stays. The gradient is changed in
place, so a graph can go backward once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class TiedWeight:
    """The weight that losses read for a model's output layer.

    tensor: None before the model looked anything up, and where PyTorch's way stays.
    """

    def __init__(self) -> None:
        self.tensor: Tensor | None = None

    @contextmanager
    def following(self, model: PreTrainedModel) -> Iterator[None]:
        """Inside this context `tensor` belongs to the model's newest lookup."""
        layer: Any = model.get_input_embeddings()
        handle = layer.register_forward_hook(self._after) if _fits(layer, model) else None
        try:
            yield
        finally:
            self.tensor = None
            if handle is not None:
                handle.remove()

    def _after(self, layer: nn.Embedding, inputs: tuple[Tensor, ...], embedded: Tensor) -> Tensor:
        weight = layer.weight if self.tensor is None else self.tensor
        outputs: Tensor
        outputs, self.tensor = _Lookup.apply(
            inputs[0], embedded.detach(), weight, layer.padding_idx
        )
        return outputs


def _fits(layer: Any, model: PreTrainedModel) -> bool:
    if type(layer) is not nn.Embedding or torch.compiler.is_compiling():
        return False
    output: Any = model.get_output_embeddings()
    weight = layer.weight
    whole = type(weight) is nn.Parameter and weight.requires_grad  # not a shard
    plain = whole and weight.device.type == "cpu" and not layer.scale_grad_by_freq
    return plain and torch.is_grad_enabled() and weight is getattr(output, "weight", None)


class _Lookup(torch.autograd.Function):
    """The rows that were looked up, and the weight. Only losses read this weight, so that its
    gradient is no other tensor's and can be changed."""

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, embedded: Tensor, weight: Tensor, padding: int | None
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(ids)
        ctx.padding = padding
        return embedded.view_as(embedded), weight.view_as(weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_rows: Tensor, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        if ctx.padding is not None:
            of_rows = of_rows.masked_fill((ids == ctx.padding)[..., None], 0)
        gradient.index_add_(0, ids.flatten(), of_rows.flatten(0, -2))
        return None, None, gradient, None
