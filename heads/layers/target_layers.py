"""The target's layers that heads use: its output layer, copied or borrowed, its embeddings, and the
layers whose outputs heads read.

Shapes: H hidden size, V' rows (draft vocabulary), D heads.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.base.errors import UserError
from decode.model.compiled import uncompiled
from decode.model.forward.lean_parts import PackedLinear
from decode.model.forward.low_rank_output import LowRankLinear, factors
from decode.model.pretrained import replaced
from heads.options import OutputKind


def output_layer(model: PreTrainedModel) -> nn.Linear:
    """Return the target's output layer. Raises UserError if it is not linear, or reads other states
    than those of the last layer."""
    layer, name = uncompiled(model.get_output_embeddings()), type(model).__name__
    if not isinstance(layer, nn.Linear):
        raise UserError(f"{name} has no linear output layer for heads to work with")
    states = getattr(model.config.get_text_config(decoder=True), "hidden_size", layer.in_features)
    if layer.in_features != states:
        raise UserError(
            f"{name} changes its hidden states of {states} numbers before its output layer, which "
            f"reads {layer.in_features}; heads need a target whose output layer reads them as they "
            "are"
        )
    return layer


class HeadOutput(nn.Module):
    """The output layers of all heads.

    kind: `own`, one layer per head; `shared`, one for all heads; `target`, the target's layer,
    which is not a parameter of this module. rank: of the layers, which are then never the
    target's; None: full layers.
    """

    def __init__(
        self, kind: OutputKind, depth: int, layer: nn.Linear, rows: int, rank: int | None = None
    ) -> None:
        super().__init__()
        count = {"own": depth, "shared": 1, "target": 0 if rank is None else 1}[kind]
        self.layers = nn.ModuleList(
            _empty(layer, rows) if rank is None else LowRankLinear(layer, rows, rank)
            for _ in range(count)
        )
        self._rank = rank
        # A list hides the layer from `parameters` and from engines.
        self._borrowed: list[nn.Module] = []
        self._layer_in_use: tuple[Tensor, Tensor | None] | None = None

    def init_weights(self, layer: nn.Linear, vocabulary: Tensor | None) -> None:
        """Copy the target's rows into every layer, or what is nearest to them."""
        rows = _rows(layer, vocabulary)
        if self._rank is not None:
            rows[:1] = factors(rows[0], self._rank)
        for head_layer in self.layers:
            for parameter, values in zip(head_layer.parameters(), rows, strict=True):
                parameter.copy_(values)

    def borrow(
        self,
        layer: nn.Linear,
        vocabulary: Tensor | None,
        dtype: torch.dtype | None,
        device: torch.device | None,
    ) -> None:
        """Take the target's rows if these heads have no output layers of their own."""
        if len(self.layers):
            return
        weight, *bias = _rows(layer, vocabulary)
        with torch.device("meta"):
            borrowed = _empty(layer, len(weight))
        for name, rows in zip(("weight", "bias"), (weight, *bias), strict=False):
            rows = rows.to(device or rows.device, dtype or rows.dtype)
            setattr(borrowed, name, nn.Parameter(rows, requires_grad=False))
        self._borrowed = [borrowed]

    def using(self, weight: Tensor, bias: Tensor | None) -> AbstractContextManager[None]:
        """Use these rows instead of the borrowed layer inside the context. They may be trained."""
        return replaced(self, "_layer_in_use", None if len(self.layers) else (weight, bias))

    def pack(self) -> None:
        """Pack the borrowed layer (`decode.model.forward.lean_parts`).

        The module's own layers are packed elsewhere, like all other layers.
        """
        if self._borrowed and isinstance(self._borrowed[0], nn.Linear):
            self._borrowed = [PackedLinear(self._borrowed[0])]

    def of(self, depth: int) -> tuple[Tensor, Tensor | None]:
        """Weight [V', H] and bias [V'] of the head at depth 1, 2, …"""
        if self._layer_in_use is not None:
            return self._layer_in_use
        layer = self._layer(depth)
        assert isinstance(layer, nn.Linear | PackedLinear)
        return layer.weight, layer.bias

    def last_product(self, depth: int, states: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rows [n, R], weight [V', R] and bias [V']: the product that makes the logits of the head
        at depth 1, 2, … from states [n, H]. R is H, or the rank."""
        layer = self._layer(depth) if self._layer_in_use is None else None
        if isinstance(layer, LowRankLinear):
            return layer.down(states), layer.up.weight, layer.up.bias
        return states, *self.of(depth)

    def logits(self, states: Tensor) -> Tensor:
        """Return logits [B, d, V'] for states [B, d, H] of the first d heads."""
        if len(self.layers) <= 1:
            return self.at(1, states)
        depths = range(1, states.shape[1] + 1)
        return torch.stack([self.at(d, states[:, d - 1]) for d in depths], 1)

    def at(self, depth: int, states: Tensor) -> Tensor:
        """Return logits [..., V'] for states [..., H] of the head at depth 1, 2, …"""
        logits: Tensor = self._layer(depth)(states)
        return logits

    def _layer(self, depth: int) -> nn.Module:
        if self._borrowed:
            return self._borrowed[0]
        assert len(self.layers), "the target's layer is not borrowed yet"
        return uncompiled(self.layers[depth - 1 if len(self.layers) > 1 else 0])


def _empty(layer: nn.Linear, rows: int) -> nn.Linear:
    return nn.Linear(layer.in_features, rows, bias=layer.bias is not None)


def _rows(layer: nn.Linear, vocabulary: Tensor | None) -> list[Tensor]:
    """The weight rows of `vocabulary`, and the bias rows if there is a bias."""
    parameters = [p.detach() for p in (layer.weight, layer.bias) if p is not None]
    if vocabulary is None:
        return parameters
    return [x[vocabulary.to(x.device)] for x in parameters]


def require_layers(option: str, numbers: Sequence[int], count: int) -> None:
    """Raise UserError unless these are distinct layers of a target with `count` layers, in
    ascending order. option: its name."""
    if not numbers or list(numbers) != sorted(set(numbers) & set(range(count))):
        raise UserError(
            f"{option} are {list(numbers)}; expected numbers from 0 to {count - 1} in ascending "
            f"order, because the target has {count} layers"
        )


def auxiliary_layers(layers: int) -> tuple[int, int, int]:
    """Return the auxiliary layers of a target with n layers: the inputs of 2, n // 2 and n − 3.

    Layers are counted from 0. The input of a layer is the output of the layer before it, so the
    returned numbers are one lower. vLLM, SGLang and llama.cpp use the same default if a drafter's
    config names no layers.

    Raises UserError if these three layers are not distinct and in ascending order.

    >>> auxiliary_layers(30)
    (1, 14, 26)
    """
    low, middle, high = 2, layers // 2, layers - 3
    if not low < middle < high:
        raise UserError(
            f"EAGLE-3 reads the inputs of the target's layers 2, n // 2 and n − 3. With "
            f"{layers} layers these are {low}, {middle} and {high}; expected a target with at "
            "least 7 layers. Train eagle1 heads instead"
        )
    return low - 1, middle - 1, high - 1


def captured_outputs(named: Sequence[int] | None, layers: int) -> tuple[int, ...]:
    """Return the layers whose outputs EAGLE-3 and P-EAGLE capture. named: None stands for
    `auxiliary_layers`. Raises UserError for layers that a target with n layers does not have, and
    for layers that are not in ascending order."""
    if named is None:
        return auxiliary_layers(layers)
    require_layers("captured_layers", named, layers)
    return tuple(named)


def copy_norm(norm: nn.Module, model: PreTrainedModel) -> None:
    """Copy the scale of the target's final RMS norm. Without such a norm it is 1."""
    weight, target_norm = norm.weight, getattr(model.base_model, "norm", None)
    assert isinstance(weight, Tensor)
    scale = torch.ones(1, len(weight), dtype=model.dtype, device=model.device)
    if target_norm is not None and type(target_norm).__name__.endswith("RMSNorm"):
        # Its output for ones is its scale, also for norms that add 1 to the stored weight.
        scale = target_norm(scale)
    weight.copy_(scale[0])


def require_embeddings(model: PreTrainedModel, hidden_size: int) -> None:
    """Raise UserError if the target's embeddings [V, E] have E ≠ H."""
    embedding_size = model.get_input_embeddings().weight.shape[1]
    if embedding_size != hidden_size:
        raise UserError(
            f"{type(model).__name__} has embeddings of size {embedding_size} and hidden states of "
            f"size {hidden_size}; heads that read tokens need equal sizes, so train medusa or "
            "blockwise heads"
        )


class BorrowedEmbeddings:
    """The stored embedding table, without the scale that some targets apply after the lookup.

    It is not a module, so neither `parameters` nor an engine sees it.
    """

    def __init__(self) -> None:
        self._table: Tensor | None = None

    def borrow(
        self, model: PreTrainedModel, dtype: torch.dtype | None, device: torch.device | None
    ) -> None:
        """Take the target's table in `dtype` and on `device`. None keeps those of the target."""
        table = model.get_input_embeddings().weight.detach()
        self._table = table.to(device or table.device, dtype or table.dtype)

    def __call__(self, ids: Tensor) -> Tensor:
        """[..., H]: the embeddings of token ids, int64 [...]."""
        assert self._table is not None, "the target's embeddings are not borrowed yet"
        return torch.embedding(self._table, ids)  # without the checks of `functional`
