"""Low-rank adapters on the linear layers of a drafter (LoRA, 2106.09685): W·x + B·(A·x).

An adapted module shares every part of its base that has no adapter, packed weights included. So
several adapters of one base need its memory once.

Shapes: R rank, I inputs and O outputs of a linear layer.
"""

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from decode.base.errors import UserError
from decode.model.forward.lean_forward import LeanForward
from decode.model.forward.lean_layer import LeanLayer
from decode.model.forward.lean_parts import ACTIVATIONS, PackedLinear, Product
from decode.model.forward.transformers_forward import TransformersForward

M = TypeVar("M", bound=nn.Module)
# An adapter by the id of the weight that it belongs to: modules that share a weight share it.
ByWeight = Mapping[int, "LowRank"]


class LowRank(nn.Module):
    """An adapter of one linear layer. first: [R, I]. second: [O, R], with the adapter's scale."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        super().__init__()
        self.first = nn.Parameter(first, requires_grad=False)
        self.second = nn.Parameter(second, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] → [..., O]"""
        return linear(linear(x, self.first), self.second)


class AdaptedProduct(Product):
    """A product of one or several linear layers, of which some have an adapter.

    base: computes the product without adapters. parts: the adapters, with the index of each one's
    first output.
    """

    def __init__(self, base: nn.Module, parts: Mapping[int, LowRank]) -> None:
        super().__init__()
        self.base = base
        self.starts, self.parts = tuple(parts), nn.ModuleList(parts.values())

    def forward(self, x: Tensor, activation: str = "none", algorithm: str = "") -> Tensor:
        result: Tensor = self.base(x)
        for start, part in zip(self.starts, self.parts, strict=True):
            added = part(x)
            result[..., start : start + added.shape[-1]] += added
        return result if activation == "none" else ACTIVATIONS[activation, algorithm](result)

    def combined(self, x: Tensor, other: Tensor, operation: str) -> Tensor:
        result = self(x)
        return other + result if operation == "add" else other * result


def adapted(base: M, adapters: Mapping[str, LowRank], keep: Any = None) -> M:
    """The module with adapters on its linear layers, by name. It shares all else with `base`.

    keep: an object that lives at least as long as the result. Raises UserError for a name that is
    no linear layer of the base, and for an adapter of another size.
    """
    by_weight: dict[int, LowRank] = {}
    for name, adapter in adapters.items():
        try:
            layer: Any = base.get_submodule(name)
        except AttributeError:
            layer = None
        if not isinstance(layer, nn.Linear | Conv1D | PackedLinear):
            raise UserError(
                f"the adapter has weights for {name}, which is no linear layer of "
                f"{type(base).__name__}; use the base that the adapter was trained on"
            )
        sizes = len(adapter.second), adapter.first.shape[1]
        if sizes != _sizes(layer):
            raise UserError(
                f"the adapter's weights for {name} are for {sizes[1]} inputs and {sizes[0]} "
                f"outputs, but the layer of {type(base).__name__} has {_sizes(layer)[::-1]}; use "
                "the base that the adapter was trained on"
            )
        by_weight[id(layer.weight)] = adapter
    other = _with_adapters(base, by_weight, {})
    # In a tuple, so that the base is not a part.
    other._adapts = (base, by_weight, keep)  # type: ignore[assignment]
    return other


def adapters_of(module: nn.Module) -> tuple[Any, ByWeight] | None:
    """What `adapted` made the module from: the base, and the adapters. None: something else."""
    found: Any = getattr(module, "_adapts", None)
    return None if found is None else found[:2]


def adapted_forward(
    forward: LeanForward | TransformersForward, adapters: ByWeight
) -> LeanForward | TransformersForward:
    """The prepared forward of a base with its adapters. It shares all else with it."""
    if isinstance(forward, LeanForward):
        return _with_adapters(forward, adapters, {})
    return TransformersForward(_with_adapters(forward.model, adapters, {}))


def _sizes(layer: Any) -> tuple[int, int]:
    """The number of outputs and of inputs."""
    if isinstance(layer, PackedLinear):
        return _sizes(layer.layers[0])
    outputs, inputs = layer.weight.shape
    return (inputs, outputs) if isinstance(layer, Conv1D) else (outputs, inputs)


def _with_adapters(module: M, adapters: ByWeight, known: dict[int, nn.Module]) -> M:
    """A copy of the module's parts on the way to a layer with an adapter; all others are shared.
    The module itself if it has no such layer. known: the results for its parts, by their ids."""
    if id(module) not in known:
        made = _product(module, adapters) or _copied(module, adapters, known)
        known[id(module)] = made
    other: Any = known[id(module)]
    return other


def _product(part: nn.Module, adapters: ByWeight) -> AdaptedProduct | None:
    """The product in the place of a linear layer or a product, if it has an adapter."""
    if isinstance(part, nn.Linear | Conv1D):
        layers = [part]
    elif isinstance(part, PackedLinear):
        layers = list(part.layers)
    else:
        return None
    start, parts = 0, {}
    for layer in layers:
        if id(layer.weight) in adapters:
            parts[start] = adapters[id(layer.weight)]
        start += _sizes(layer)[0]
    return AdaptedProduct(part, parts) if parts else None


def _copied(part: nn.Module, adapters: ByWeight, known: dict[int, nn.Module]) -> nn.Module:
    """The part with its own parts adapted; the same object if none of them has an adapter."""
    parts = {k: v for k, v in part._modules.items() if v is not None}
    new: dict[str, Any] = {k: _with_adapters(v, adapters, known) for k, v in parts.items()}
    # Some modules hide others in lists, so that those are no parts of them.
    hidden = {k: v for k, v in vars(part).items() if isinstance(v, list)}
    hidden = {k: v for k, v in hidden.items() if all(isinstance(x, nn.Module) for x in v)}
    lists = {k: [_with_adapters(x, adapters, known) for x in v] for k, v in hidden.items()}
    if all(new[k] is v for k, v in parts.items()) and all(
        x is y for k, v in hidden.items() for x, y in zip(lists[k], v, strict=True)
    ):
        return part
    other = copy.copy(part)
    # A shallow copy shares the dictionaries of parameters, parts and hooks.
    other.__dict__ |= {k: v.copy() for k, v in vars(part).items() if isinstance(v, dict)} | lists
    other._modules |= new
    if isinstance(other, LeanLayer):
        other.few_rows = None  # its C++ would read the packed weights of the base
    return other
