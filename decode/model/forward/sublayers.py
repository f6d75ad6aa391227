"""Sublayers of a model, its attention and MLP blocks by layer, and the model without some of them.

A skipped sublayer adds nothing to the residual stream.
"""

import copy
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.base.artifact import read_versioned, write_file
from decode.base.errors import UserError
from decode.model.forward.lean_forward import LeanForward
from decode.model.forward.transformers_forward import TransformersForward
from decode.model.hidden_states import layer_list_name
from decode.model.pretrained import is_hooked

FORMAT = 1
EXPECTED = "expected layer numbers and ranges, such as 3-8/12, or a list of numbers"


@dataclass(frozen=True)
class Sublayers:
    """attention, mlp: the layers, from 0, whose attention or MLP is meant.

    >>> Sublayers.of("1-3/5", [2])
    Sublayers(attention=frozenset({1, 2, 3, 5}), mlp=frozenset({2}))
    >>> str(Sublayers.of("1-3/5", [2]))
    'attention=1-3/5,mlp=2'
    """

    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls, attention: str | int | Sequence[int], mlp: str | int | Sequence[int]
    ) -> "Sublayers":
        """From layer numbers: `3-8/12`, one number, or a list. Raises UserError for anything
        else."""
        return cls(_numbers("attention", attention), _numbers("mlp", mlp))

    @classmethod
    def all(cls, layers: int) -> "Sublayers":
        """All sublayers of a model with `layers` layers."""
        return cls(frozenset(range(layers)), frozenset(range(layers)))

    @classmethod
    def later(cls, exit_layer: int, layers: int) -> "Sublayers":
        """All sublayers after the first `exit_layer` of `layers` layers. Raises UserError if no
        layer is left, or all are."""
        if not 1 <= exit_layer < layers:
            raise UserError(
                f"a draft runs the first {exit_layer} layers, but the target has {layers}; "
                f"expected an exit after layer 1 to {layers - 1}, so that a draft costs less than "
                "the target's pass"
            )
        return cls.all(layers) ^ cls.all(exit_layer)

    @classmethod
    def load(cls, path: Path) -> "Sublayers":
        """Read a file written by `save`. Raises UserError if it is not one."""
        content = read_versioned(
            path, FORMAT, ("attention", "mlp"), "a set of sublayers",
            "write one with draftsmith calibrate-layers",
        )  # fmt: skip
        return cls.of(content["attention"], content["mlp"])

    def save(self, path: Path, about: dict[str, Any]) -> None:
        """Write the set as JSON, with what is known about it."""
        content = {"format": FORMAT, **self.to_dict(), **about}
        write_file(path, json.dumps(content, indent=2))

    def to_dict(self) -> dict[str, list[int]]:
        """As JSON values."""
        return {"attention": sorted(self.attention), "mlp": sorted(self.mlp)}

    def __len__(self) -> int:
        return len(self.attention) + len(self.mlp)

    def __str__(self) -> str:
        parts = {"attention": self.attention, "mlp": self.mlp}
        return ",".join(f"{name}={_ranges(layers)}" for name, layers in parts.items() if layers)

    def __xor__(self, other: "Sublayers") -> "Sublayers":
        """The sublayers that are in one of the two sets only."""
        return Sublayers(self.attention ^ other.attention, self.mlp ^ other.mlp)

    def singles(self) -> list["Sublayers"]:
        """A set for each sublayer, layer by layer."""
        both = (
            Sublayers(**{part: frozenset([layer])})
            for layer in sorted(self.attention | self.mlp)
            for part in ("attention", "mlp")
        )
        return [single for single in both if single <= self]

    def __le__(self, other: "Sublayers") -> bool:
        return self.attention <= other.attention and self.mlp <= other.mlp

    def require_fit(self, layers: int) -> None:
        """Raises UserError unless a model with this number of layers has them all and keeps
        others."""
        outside = sorted(layer for layer in self.attention | self.mlp if layer >= layers)
        if outside:
            raise UserError(
                f"the set {self} has layer {outside[0]}, but the target has {layers} layers; "
                f"expected 0 to {layers - 1}"
            )
        if len(self) == 2 * layers:
            raise UserError(
                f"the set {self} skips all {layers} layers of the target, so nothing is left to "
                "draft with; keep some"
            )


def _numbers(name: str, spec: str | int | Sequence[int]) -> frozenset[int]:
    if isinstance(spec, str):
        parts = [part.split("-") for part in spec.split("/")] if spec else []
        if not all(len(part) <= 2 and all(map(str.isdecimal, part)) for part in parts):
            raise UserError(f"{name} is {spec!r}; {EXPECTED}")
        ranges = [range(int(part[0]), int(part[-1]) + 1) for part in parts]
        if not all(ranges):
            raise UserError(f"{name} is {spec!r}, which has a range without layers; {EXPECTED}")
        return frozenset(layer for one in ranges for layer in one)
    layers = [spec] if isinstance(spec, int) else spec
    valid = isinstance(layers, Sequence) and all(type(x) is int and x >= 0 for x in layers)
    if not valid:
        raise UserError(f"{name} is {spec!r}; {EXPECTED}")
    return frozenset(layers)


def _ranges(layers: Iterable[int]) -> str:
    """Layer numbers as `_numbers` reads them."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], layer]
        else:
            runs.append([layer])
    return "/".join("-".join(map(str, run)) for run in runs)


def changed_forward(
    forward: LeanForward | TransformersForward,
    skipped: Sublayers,
    embedding: nn.Module | None = None,
) -> LeanForward | TransformersForward:
    """The forward without these sublayers. It shares all weights with the forward. embedding: in
    the place of its layer of embeddings; None: its layer.

    Raises UserError if the set does not fit the model, or if the model's sublayers cannot be told
    apart.
    """
    if isinstance(forward, LeanForward):
        skipped.require_fit(len(forward.layers))
        return forward.changed(skipped.attention, skipped.mlp, embedding)
    model = _model_without(forward.model, skipped)
    if embedding is not None:
        model.set_input_embeddings(embedding)
    return TransformersForward(model)


def _model_without(model: PreTrainedModel, skipped: Sublayers) -> PreTrainedModel:
    """A copy of the model without these sublayers. All modules are shared, except the layers
    themselves and what holds them. Layers keep their numbers, by which a model may choose masks,
    slots and inputs."""
    name, kind = layer_list_name(model), type(model).__name__
    if name is None or is_hooked(model):
        raise UserError(
            f"the layers of {kind} cannot be skipped: it has no single list of layers, or another "
            "library has wrapped it; use a drafter that does not run the target's layers"
        )
    layers: Any = model.get_submodule(name)
    skipped.require_fit(len(layers))
    parts = name.split(".")
    holders = [model.get_submodule(".".join(parts[:end])) for end in range(len(parts) + 1)]
    copied = {id(module) for module in [*holders, *layers]}
    # Everything else is shared: packed weights cannot be copied.
    shared: list[Any] = [x for x in model.modules() if id(x) not in copied]
    shared += [*model.parameters(), *model.buffers()]
    other: PreTrainedModel = copy.deepcopy(model, {id(x): x for x in shared})
    new_layers: Any = other.get_submodule(name)
    dropped = skipped.attention & skipped.mlp
    for number, layer in enumerate(new_layers):
        if number in dropped:
            new_layers[number] = _NoLayer(layer)
            continue
        if number in skipped.attention:
            setattr(layer, _block(layer, "Attention", kind), _NoAttention())
        if number in skipped.mlp:
            setattr(layer, _block(layer, "MLP", kind), _NoMLP())
    return other


def _block(layer: nn.Module, ending: str, model: str) -> str:
    """The name of a layer's only part whose class has this ending."""
    names = [n for n, child in layer.named_children() if type(child).__name__.endswith(ending)]
    if len(names) != 1:
        raise UserError(
            f"the layers of {model} have no single module of a class …{ending}, so it cannot be "
            "skipped; skip attention and MLP of the same layers"
        )
    return names[0]


class _NoLayer(nn.Module):
    """In the place of a layer: it hands its input on, in the form of the layer's output.

    The first layer of a class computes once, because only its output shows the form.
    """

    _in_tuples: ClassVar[dict[type, bool]] = {}

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # a model may ask its layers for their kind
            return getattr(super().__getattr__("layer"), name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        kind = type(self.layer)
        if kind not in self._in_tuples:
            self._in_tuples[kind] = isinstance(self.layer(hidden_states, *args, **kwargs), tuple)
        return (hidden_states, None, None) if self._in_tuples[kind] else hidden_states


class _NoAttention(nn.Module):
    def forward(
        self, hidden_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, None]:
        return torch.zeros_like(hidden_states), None


class _NoMLP(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return torch.zeros_like(hidden_states)
