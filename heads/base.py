"""Base class of all kinds of heads: weights on top of a frozen target, trained as one module.

Each kind is one file. It registers itself in `HEADS`, and its drafter in
`decode.drafters.DRAFTERS` under the same name.

Positions: head d = 1, 2, … reads the hidden states at position t and predicts the token at
t + d + 1. The target predicts the token at t + 1 from the same hidden states. So after the
target's token at t + 1, head d drafts the d-th token.

Shapes: B rows, T tokens, H hidden size, D heads (the depth), V vocabulary, V' ≤ V draft vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.errors import UserError, nearest
from decode.registry import Registry
from decode.target.hidden_states import FINAL
from heads.output import HeadOutput, Outputs


class HeadOptions(BaseModel):
    """Settings of a kind of heads."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True
    )

    type: str
    """The kind of heads."""
    output: Outputs = "own"
    """The output layer. `own`: one per head. `shared`: one for all heads. Both start as a copy of
    the target's output layer and are trained. `target`: the target's output layer itself, frozen
    and not stored."""

    @classmethod
    def of(cls, given: Any) -> "HeadOptions":
        """Build options from a mapping with a `type` key. Raises UserError if it is not valid."""
        if isinstance(given, HeadOptions):
            return given
        if not isinstance(given, Mapping) or not isinstance(given.get("type"), str):
            raise UserError(
                f"heads are {given!r}; expected their type and its options, such as "
                f"{{type: {next(iter(HEADS))}}}; known: {', '.join(HEADS)}"
            )
        kind = HEADS[given["type"]].Options
        try:
            return kind.model_validate(dict(given))
        except ValidationError as error:
            item = error.errors()[0]
            key = ".".join(str(part) for part in item["loc"])
            if item["type"] == "extra_forbidden":
                raise UserError(
                    f"heads of type {given['type']} have no option {key!r}; they have "
                    f"{', '.join(kind.model_fields)}.{nearest(key, kind.model_fields)}"
                ) from None
            reason = item["msg"].replace("Input should be", "expected")
            raise UserError(f"heads: {key} is {item['input']!r}; {reason}") from None


@dataclass
class Given:
    """A batch of text with the target's hidden states.

    input_ids: int64 [B, T]. loss_mask: bool [B, T], True where the token is trained on. features:
    hidden states [B, T, H] by captured layer.
    """

    input_ids: Tensor
    loss_mask: Tensor
    features: Mapping[int, Tensor]


@dataclass
class Prediction:
    """The output of head `depth` for n tokens.

    states: [n, H], the input of the head's output layer. places: bool [B, T] with n True values,
    the positions t that the head reads, in order. extra: a loss added to the loss on the logits,
    summed over the n tokens; None adds nothing.
    """

    depth: int
    places: Tensor
    states: Tensor
    extra: Tensor | None = None


class Heads(nn.Module, ABC):
    """Heads on the target.

    captured_layers: the layers whose hidden states are captured (`decode.target.hidden_states`).
    depth: D, the max depth of a draft. rows: V', the rows of the output layer. vocabulary: the
    token ids of these rows, int64 [V'], ascending; None means all tokens.

    A new module has arbitrary weights. Call `init_weights` to set the init weights, or load a state
    dict. All trained weights are float32.
    """

    Options: ClassVar[type[HeadOptions]]
    captured_layers: tuple[int, ...] = (FINAL,)
    # λ₀: the loss weight of the heads when the target is trained too. None: this kind supports
    # only a frozen target.
    joint_weight: float | None = None

    def __init__(
        self, options: Any, depth: int, model: PreTrainedModel, vocabulary: Tensor | None
    ) -> None:
        """model: the target. Only its shapes are used here."""
        super().__init__()
        self.options, self.depth = options, depth
        self.vocabulary = vocabulary
        layer = output_layer(model)
        self.hidden_size: int = layer.in_features
        self.rows = layer.out_features if vocabulary is None else len(vocabulary)
        self.output = HeadOutput(options.output, depth, layer, self.rows)

    @torch.no_grad()
    def init_weights(self, model: PreTrainedModel) -> None:
        """Set the init weights for training. Draws from torch's random state."""
        self.output.init_weights(output_layer(model), self.vocabulary)

    def borrow(
        self,
        model: PreTrainedModel,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Take the target's weights that are used but not stored.

        They are converted to `dtype` and moved to `device`. None keeps those of the target.
        """
        self.output.borrow(output_layer(model), self.vocabulary, dtype, device)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the states are computed."""
        device = next(self.parameters()).device.type
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
        return next(self.parameters()).dtype

    @abstractmethod
    def loss_weights(self, uniform: float) -> dict[int, float]:
        """Loss weights by depth for one minibatch. Heads that are missing are not computed.

        uniform: a random number in [0, 1), drawn anew for each minibatch.
        """

    @abstractmethod
    def predictions(self, given: Given, depths: Sequence[int]) -> Iterator[Prediction]:
        """Yield the predictions of these heads for a batch. depths: in ascending order."""


HEADS: Registry[type[Heads]] = Registry("type of heads")


def output_layer(model: PreTrainedModel) -> nn.Linear:
    """Return the target's output layer. Raises UserError if it is not linear."""
    layer = model.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        raise UserError(f"{type(model).__name__} has no linear output layer for heads to work with")
    return layer


def feed_forward_size(config: Any) -> int:
    """Width of the feed-forward layers of a model with this (text) config."""
    return getattr(config, "intermediate_size", None) or 4 * int(config.hidden_size)


def ahead(x: Tensor, by: int) -> Tensor:
    """[B, T, …]: x shifted left by `by` tokens, with 0 (False) past the end.

    >>> ahead(torch.tensor([[1, 2, 3]]), 1).tolist()
    [[2, 3, 0]]
    """
    found = torch.zeros_like(x)
    if by < x.shape[1]:
        found[:, : x.shape[1] - by] = x[:, by:]
    return found


def trained_places(loss_mask: Tensor, depth: int) -> Tensor:
    """bool [B, T]: the positions t on which head `depth` is trained.

    For these, the token at t + depth + 1 exists and is trained on.
    """
    return ahead(loss_mask, depth + 1)
