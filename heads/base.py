"""What every kind of heads is: weights on top of a frozen target, trained together as one module.

A kind is one file with one registration in `HEADS`, and in `decode.drafters.DRAFTERS` under the
same name. Positions: head d = 1, 2, … reads the hidden states of the token at t, from which the
target itself predicts t + 1, and predicts the token at t + d + 1. So with the token at t + 1 from
the target, head d drafts the d-th token after it.

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
    """Settings of a kind of heads, named by `type`.

    output: `own`, an output layer for each head; `shared`, one for all; both start as the
    target's and are trained. `target`: the target's own, frozen and not stored.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    type: str
    output: Outputs = "own"

    @classmethod
    def of(cls, given: Any) -> "HeadOptions":
        """From a mapping that names its `type`. Raises UserError for anything that does not fit."""
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
            raise UserError(f"heads: {key} is {item['input']!r}: {item['msg']}") from None


@dataclass
class Given:
    """A batch of text with what the target said of it. input_ids int64 and loss_mask bool [B, T],
    True where the token is learnt; features [B, T, H] by tap."""

    input_ids: Tensor
    loss_mask: Tensor
    features: Mapping[int, Tensor]


@dataclass
class Prediction:
    """What head `depth` makes of n tokens: states [n, H], from which its output layer makes logits.

    places: bool [B, T], n of them True: the tokens t that it reads, in order. extra: what its loss
    adds to that of its logits, a sum over the n tokens; None: nothing.
    """

    depth: int
    places: Tensor
    states: Tensor
    extra: Tensor | None = None


class Heads(nn.Module, ABC):
    """taps: the hidden states that are read (`decode.target.hidden_states`). depth: how many tokens
    ahead is drafted, D. rows: V', of the output layer. vocabulary: their token ids, int64 [V'],
    ascending; None: all.

    The module is made with weights of no meaning; `start_from` makes them what training starts
    from, or loading a state does. Everything that is trained is float32.
    """

    Options: ClassVar[type[HeadOptions]]
    taps: tuple[int, ...] = (FINAL,)
    # λ₀, the weight of the heads' loss beside the target's own where both are trained; None: this
    # kind is for a frozen target only.
    joint_weight: float | None = None

    def __init__(
        self, options: Any, depth: int, model: PreTrainedModel, vocabulary: Tensor | None
    ) -> None:
        """model: the target; here only its shapes are looked at."""
        super().__init__()
        self.options, self.depth = options, depth
        self.vocabulary = vocabulary
        layer = output_layer(model)
        self.hidden_size: int = layer.in_features
        self.rows = layer.out_features if vocabulary is None else len(vocabulary)
        self.output = HeadOutput(options.output, depth, layer, self.rows)

    @torch.no_grad()
    def start_from(self, model: PreTrainedModel) -> None:
        """Set the weights that training starts from. Draws from torch's random state."""
        self.output.start_from(output_layer(model), self.vocabulary)

    def borrow(
        self,
        model: PreTrainedModel,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Take what is the target's own and not stored, in `dtype` and on `device`, or its own."""
        self.output.borrow(output_layer(model), self.vocabulary, dtype, device)

    @property
    def dtype(self) -> torch.dtype:
        """What the states are computed in."""
        device = next(self.parameters()).device.type
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
        return next(self.parameters()).dtype

    @abstractmethod
    def sub_losses(self, uniform: float) -> dict[int, float]:
        """By depth, the weights of the losses that a minibatch trains; heads left out are not
        computed. uniform: in [0, 1), drawn anew for each minibatch."""

    @abstractmethod
    def predictions(self, given: Given, depths: Sequence[int]) -> Iterator[Prediction]:
        """What these heads, ascending, make of a batch's tokens."""


HEADS: Registry[type[Heads]] = Registry("type of heads")


def output_layer(model: PreTrainedModel) -> nn.Linear:
    """The target's output layer; UserError where it is not a linear one."""
    layer = model.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        raise UserError(f"{type(model).__name__} has no linear output layer for heads to work with")
    return layer


def feed_forward_size(config: Any) -> int:
    """Width of the feed-forward layers of a model with this (text) config."""
    return getattr(config, "intermediate_size", None) or 4 * int(config.hidden_size)


def ahead(x: Tensor, by: int) -> Tensor:
    """[B, T, …]: at each token what stands `by` tokens further on; 0 (False) past the end.

    >>> ahead(torch.tensor([[1, 2, 3]]), 1).tolist()
    [[2, 3, 0]]
    """
    found = torch.zeros_like(x)
    if by < x.shape[1]:
        found[:, : x.shape[1] - by] = x[:, by:]
    return found


def trained_places(loss_mask: Tensor, depth: int) -> Tensor:
    """bool [B, T]: the tokens t from which head `depth` learns, those whose token t + depth + 1
    exists and is learnt."""
    return ahead(loss_mask, depth + 1)
