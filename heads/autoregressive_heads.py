"""The base classes of EAGLE and of multi-token prediction: heads that read what they drafted.

One step reads a hidden state and the embedding of the next token. It returns the next hidden state,
which predicts the token after that. The first state comes from the target, the later ones from the
heads. Steps attend to the text, or to a window of it. `heads.eagle_drafter` drafts with them.

Shapes: B rows, n tokens, T tokens of a text, H hidden size.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.flops import TextFlops, attention_flops, products_flops
from heads.attending_heads import AttendingHeads
from heads.heads_module import HeadBatch, Prediction, TokenHeads, shift_left, trained_positions
from heads.layers.layer_config import layer_config
from heads.layers.llama_layer import Attend, DraftLayer, Rotary
from heads.layers.unrolled_attention import UnrolledAttention


class AutoregressiveHeads(TokenHeads, AttendingHeads):
    """Heads that draft step by step. A subclass defines one step in `step`.

    "Head" d is step d after the last token with features. It drafts at depth d and has its own loss
    and figures.
    """

    replayed_from = "text"

    @abstractmethod
    def step(
        self,
        states: Tensor,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        read: Tensor | None = None,
    ) -> Tensor:
        """Return the next states [B, n, H].

        states: [B, n, H]. tokens: int64 [B, n], the tokens that follow. positions: int64 [B, n] or
        [1, n], the positions of `states`. read: int64 [m], places of the flattened tokens, whose
        next states alone are returned, [m, H]. None: those of all.
        """

    def trained_step(
        self, depth: int, attention: UnrolledAttention
    ) -> tuple[Callable[..., Tensor], Attend]:
        """The step at a depth in training, and its attention."""
        return self.step, attention.at(depth)

    def readout(self, states: Tensor) -> Tensor:
        """[..., H]: the input of the output layer, computed from states [..., H]."""
        return states

    def predictions(self, batch: HeadBatch, depths: Sequence[int]) -> Iterator[Prediction]:
        states = self.inputs_of(batch)
        attention = UnrolledAttention(self.window)
        positions = torch.arange(states.shape[1], device=states.device)[None]
        for depth in range(1, max(depths) + 1):
            tokens = shift_left(batch.input_ids, depth)
            prediction = Prediction(depth, trained_positions(batch.loss_mask, depth), states)
            step, attend = self.trained_step(depth, attention)
            # No later step reads the last one's states, so a prompt needs only keys and values.
            read = prediction.places if depth == max(depths) else None
            states = self.recomputed(step, states, tokens, positions + depth - 1, attend, read)
            if depth in depths:
                prediction.states = self.readout(prediction.of(states) if read is None else states)
                yield prediction


class EagleHeads(AutoregressiveHeads):
    """EAGLE-1 and EAGLE-3.

    config: a one-layer llama config that describes the drafter. Engines get it unchanged.
    """

    computed_once = "fc"  # the others are computed in each step

    def __init__(
        self, options: Any, depth: int, model: PreTrainedModel, vocabulary: Tensor | None
    ) -> None:
        super().__init__(options, depth, model, vocabulary)
        self.config = layer_config(model, options.layer)
        self._rotary = Rotary(self.config)

    def body_flops(self) -> TextFlops:
        """Each of the `parts` steps goes through all weights but those of `computed_once`, the last
        one after its attention only where a token is predicted."""
        parts = {name: part for name, part in self.named_children() if name != "output"}
        once = parts.pop(self.computed_once, nn.Identity())
        (layer,) = (part for part in self.modules() if isinstance(part, DraftLayer))
        after = products_flops(layer.self_attn.o_proj, layer.mlp)
        per_token = (
            products_flops(once) + self.batch_parts * products_flops(*parts.values()) - after
        )
        width = self.batch_parts * self.config.num_attention_heads * self.config.head_dim
        return TextFlops(per_token, per_prediction=after) + attention_flops(width, trained=True)
