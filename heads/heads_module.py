"""Base class of all kinds of heads: weights on top of a frozen target, trained as one module.

A kind registers itself in `HEADS`, and its drafter in `decode.drafters.DRAFTERS` under the same
name.

Positions: head d = 1, 2, … reads the hidden states at position t and predicts the token at
t + d + 1. The target predicts the token at t + 1 from the same hidden states. So after the
target's token at t + 1, head d drafts the d-th token.

Shapes: B rows, T tokens, H hidden size, D heads (the depth), V vocabulary, V' ≤ V draft vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from decode.base.registry import Registry
from decode.model.hidden_states import FINAL
from decode.model.loading import Target
from distill.flops import TextFlops, products_flops
from heads.layers.target_layers import (
    BorrowedEmbeddings,
    HeadOutput,
    output_layer,
    require_embeddings,
)

# What heads need of a text to repeat their drafts; see `Heads.replayed_from`.
Replayed = Literal["draft", "text", ""]


@dataclass
class HeadBatch:
    """A batch of text with the target's hidden states.

    input_ids: int64 [B, T]. loss_mask: bool [B, T], True where the token is trained on. features:
    hidden states [B, T, H] by captured layer. inputs: [B, T, H], what heads that attend to the text
    make of them (`AttendingHeads.fuse`), where only that was kept. replayed: the trained tokens
    are those that one head drafted, whatever comes before them; only this head is computed.
    """

    input_ids: Tensor
    loss_mask: Tensor
    features: Mapping[int, Tensor]
    inputs: Tensor | None = None
    replayed: bool = False

    def of(self, captured_layers: Sequence[int]) -> Tensor:
        """[B, T, F]: the hidden states of these layers, concatenated in this order."""
        return torch.cat([self.features[layer] for layer in captured_layers], -1)


@dataclass
class Prediction:
    """The output of head `depth` for n tokens.

    states: [n, H], the input of the head's output layer. positions: bool [B, T] with n True values,
    the positions t that the head reads, in order. extra_loss: [n], what is added to the loss of
    each token; None adds nothing. added: rows [n, R] and a weight [V', R]; their product is added
    to the logits. confidence: [n], the logits of the acceptance that the heads estimate, which is
    learnt from the loss `total_variation`.
    """

    depth: int
    positions: Tensor
    states: Tensor
    extra_loss: Tensor | None = None
    added: tuple[Tensor, Tensor] | None = None
    confidence: Tensor | None = None

    @cached_property
    def places(self) -> Tensor:
        """int64 [n]: `positions` as places of the flattened text. Only here a GPU is waited for."""
        return self.positions.flatten().nonzero()[:, 0]

    def of(self, x: Tensor) -> Tensor:
        """[n, …]: x [B, T, …] at the positions."""
        return x.flatten(0, 1)[self.places]


class Heads(nn.Module, ABC):
    """Heads on the target.

    captured_layers: the layers whose hidden states are captured (`decode.model.hidden_states`).
    depth: D, the max depth of a draft. rows: V', the rows of the output layer. vocabulary: the
    token ids of these rows, int64 [V'], ascending; None means all tokens. reserved_tokens: ids that
    the heads use for themselves, so texts must not contain them. estimates: the heads estimate the
    acceptance of their tokens. batch_parts: how many parts a batch computes one after the other;
    several are computed inside `recomputed` each. tokens_per_part: the tokens that a part computes,
    at most, for each token of a text. mask_pairs: the entries of the mask that these heads train
    under, at most, for each pair of tokens of a text; 0 for heads that need no such mask. masks:
    how many copies of it are kept for the backward pass. gradient_checkpointing: see `recomputed`.

    A new module has arbitrary weights. Call `init_weights` to set the init weights, or load a state
    dict. All trained weights are float32.
    """

    captured_layers: tuple[int, ...] = (FINAL,)
    reserved_tokens: tuple[int, ...] = ()
    estimates: bool = False
    # What is kept of a text so that these heads can learn from their drafts, which `predictions`
    # then says again: the hidden states of the token that a draft was made from, or the input
    # states of all tokens. "": that is not enough, and they do not learn online.
    replayed_from: ClassVar[Replayed] = ""
    # The parts whose weights are also read without their products: they get no adapter.
    read_directly: ClassVar[tuple[str, ...]] = ("output",)
    # λ₀: the loss weight of the heads when the target is trained too. None: this kind supports
    # only a frozen target.
    joint_weight: float | None = None

    @classmethod
    def for_target(cls, options: Any, target: Target) -> Any:
        """The options with all that depends on the target. Raises UserError for what does not fit
        it."""
        return options

    def __init__(
        self, options: Any, depth: int, model: PreTrainedModel, vocabulary: Tensor | None
    ) -> None:
        """model: the target. Only its shapes are used here."""
        super().__init__()
        self.options, self.depth = options, depth
        self.batch_parts, self.tokens_per_part = depth, 1.0
        self.mask_pairs, self.masks = 0.0, 1
        self.gradient_checkpointing = False
        self.vocabulary = vocabulary
        layer = output_layer(model)
        self.hidden_size: int = layer.in_features
        self.rows = layer.out_features if vocabulary is None else len(vocabulary)
        self.output = HeadOutput(options.output, depth, layer, self.rows, options.output_rank)

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
        parameter = _first_parameter(self)
        assert parameter is not None
        device = parameter.device.type
        autocast = torch.is_autocast_enabled(device)
        return torch.get_autocast_dtype(device) if autocast else parameter.dtype

    def recomputed(self, compute: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """compute(*inputs), a part of `predictions` that draws no random numbers.

        With `gradient_checkpointing` its activations are not kept: the backward pass computes the
        part again (1604.06174). So one part at a time is in memory, and the inputs of all.
        """
        if not self.gradient_checkpointing or not torch.is_grad_enabled():
            return compute(*inputs)
        outputs: Tensor = checkpoint(
            compute, *inputs, use_reentrant=False, preserve_rng_state=False
        )
        return outputs

    @property
    def trains_all(self) -> bool:
        """Whether `predictions` now has all positions of every head, not a sample of them."""
        return True

    def loss_weights(self, uniform: float) -> dict[int, float]:
        """Loss weights by depth for one minibatch. Heads that are missing are not computed.

        Here that of head k is decay^(k − 1), or 1 for heads without the option `decay`. uniform: a
        random number in [0, 1), drawn anew for each minibatch.
        """
        decay: float = getattr(self.options, "decay", 1.0)
        return {k: decay ** (k - 1) for k in range(1, self.depth + 1)}

    def body_flops(self) -> TextFlops | None:
        """The FLOPs of a training step, without the output layers and the target. None: not known.

        Heads that compute other tokens than the text's, such as masks, compute a sample of them.
        """
        if self.tokens_per_part != 1:
            return None
        parts = [part for name, part in self.named_children() if name != "output"]
        return TextFlops(per_prediction=products_flops(*parts))

    @abstractmethod
    def predictions(self, batch: HeadBatch, depths: Sequence[int]) -> Iterator[Prediction]:
        """Yield the predictions of these heads for a batch. depths: in ascending order."""


class TokenHeads(Heads):
    """Heads with token embeddings: the target's, or a trained table of the same shape.

    Raises UserError if the target's embedding size is not H.
    """

    embeddings: BorrowedEmbeddings | nn.Embedding

    def __init__(
        self, options: Any, depth: int, model: PreTrainedModel, vocabulary: Tensor | None
    ) -> None:
        super().__init__(options, depth, model, vocabulary)
        require_embeddings(model, self.hidden_size)
        self.embeddings = BorrowedEmbeddings()

    def borrow(
        self,
        model: PreTrainedModel,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().borrow(model, dtype, device)
        if isinstance(self.embeddings, BorrowedEmbeddings):
            self.embeddings.borrow(model, dtype, device)


HEADS: Registry[type[Heads]] = Registry("type of heads")


def _first_parameter(module: nn.Module) -> nn.Parameter | None:
    """As the first of `parameters`, which builds the names of all of them. A draft asks often."""
    for parameter in module._parameters.values():
        if parameter is not None:
            return parameter
    for part in module._modules.values():
        found = None if part is None else _first_parameter(part)
        if found is not None:
            return found
    return None


def shift_left(x: Tensor, count: int) -> Tensor:
    """[B, T, …]: x shifted left by `count` tokens, with 0 (False) past the end.

    >>> shift_left(torch.tensor([[1, 2, 3]]), 1).tolist()
    [[2, 3, 0]]
    """
    shifted = torch.zeros_like(x)
    if count < x.shape[1]:
        shifted[:, : x.shape[1] - count] = x[:, count:]
    return shifted


def trained_positions(loss_mask: Tensor, depth: int) -> Tensor:
    """bool [B, T]: the positions t on which head `depth` is trained.

    For these, the token at t + depth + 1 exists and is trained on.
    """
    return shift_left(loss_mask, depth + 1)
