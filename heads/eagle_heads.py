"""EAGLE's heads. EAGLE-1 (2401.15077) predicts the target's next feature, and a token from it.
EAGLE-3 (2503.01840) reads features of several layers and trains on its own states.

One step reads a hidden state and the embedding of the next token. It returns the next hidden state,
which predicts the token after that. The first state comes from the target, the later ones from the
heads. Steps attend to the text, or to a window of it. `heads.eagle_drafter` drafts with them.

Shapes: B rows, n tokens, T tokens of a text, F features of a token, H hidden size.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from decode.model.hidden_states import FINAL
from distill.flops import TextFlops, attention_flops, products_flops
from distill.row_numbers import row_numbers
from heads.attending_heads import AttendingHeads, AttendingOptions
from heads.heads_module import (
    HEADS,
    HeadBatch,
    Prediction,
    TokenHeads,
    shift_left,
    trained_positions,
)
from heads.layers.eagle_taps import captured_outputs
from heads.layers.layer_config import LayerSettings, layer_config
from heads.layers.llama_layer import Attend, DraftLayer, Rotary
from heads.layers.target_layers import copy_norm
from heads.layers.unrolled_attention import UnrolledAttention


class AutoregressiveOptions(AttendingOptions):
    """Options of all autoregressive heads."""

    layer: LayerSettings | None = None
    """Settings of the decoder layer that differ from the target's. None: it has the target's."""


class AutoregressiveHeads(TokenHeads, AttendingHeads):
    """Heads that draft step by step. A subclass defines one step in `advance`.

    "Head" d is step d after the last token with features. It drafts at depth d and has its own loss
    and figures.

    config: a one-layer llama config that describes the drafter. Engines get it unchanged.
    """

    replayed_from = "text"
    computed_once = "fc"  # the others are computed in each step

    def __init__(
        self, options: Any, depth: int, model: PreTrainedModel, vocabulary: Tensor | None
    ) -> None:
        super().__init__(options, depth, model, vocabulary)
        self.config = layer_config(model, options.layer)
        self._rotary = Rotary(self.config)

    @abstractmethod
    def advance(
        self,
        states: Tensor,
        embedded: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attend: Attend,
    ) -> Tensor:
        """Return the next states [B, n, H].

        states: [B, n, H]. embedded: [B, n, H], the embeddings of the next tokens.
        position_embeddings: cos and sin of the positions.
        """

    def readout(self, states: Tensor) -> Tensor:
        """[..., H]: the input of the output layer, computed from states [..., H]."""
        return states

    def extra_loss(
        self, states: Tensor, batch: HeadBatch, depth: int, positions: Tensor
    ) -> Tensor | None:
        """The extra loss (see `Prediction`) for the states [n, H] of step `depth` at `positions`.

        positions: bool [B, T] with n True values.
        """
        return None

    def step(self, states: Tensor, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return the next states [B, n, H].

        states: [B, n, H]. tokens: int64 [B, n], the tokens that follow. positions: int64 [B, n] or
        [1, n], the positions of `states`.
        """
        dtype = self.dtype
        states, embedded = states.to(dtype), self.embeddings(tokens).to(dtype)
        return self.advance(states, embedded, self._rotary(positions, states), attend)

    def body_flops(self) -> TextFlops:
        """Each of the `parts` steps goes through all weights but those of `computed_once`."""
        parts = {name: part for name, part in self.named_children() if name != "output"}
        once = parts.pop(self.computed_once, nn.Identity())
        per_token = products_flops(once) + self.parts * products_flops(*parts.values())
        width = self.parts * self.config.num_attention_heads * self.config.head_dim
        return TextFlops(per_token) + attention_flops(width, trained=True)

    def predictions(self, batch: HeadBatch, depths: Sequence[int]) -> Iterator[Prediction]:
        states = self.inputs_of(batch)
        attention = UnrolledAttention(self.window)
        positions = torch.arange(states.shape[1], device=states.device)[None]
        for depth in range(1, max(depths) + 1):
            tokens = shift_left(batch.input_ids, depth)
            attend = attention.at(depth)
            states = self.recomputed(self.step, states, tokens, positions + depth - 1, attend)
            if depth in depths:
                trained = trained_positions(batch.loss_mask, depth)
                trained_states = states[trained]
                extra_loss = self.extra_loss(trained_states, batch, depth, trained)
                yield Prediction(depth, trained, self.readout(trained_states), extra_loss)


class Eagle1Options(AutoregressiveOptions):
    """Options of EAGLE-1 heads (2401.15077). The token loss is one of the stage's `losses` (the
    paper's w_cls: `forward_kl: 0.1`)."""

    type: Literal["eagle1"] = "eagle1"
    output: Literal["target"] = "target"
    """The output layer: the target's, frozen and not stored."""
    depth: int = Field(7, ge=1)
    """The max depth of a draft, also used to evaluate on dev text. At least `steps`."""
    steps: int = Field(1, ge=1)
    """The steps that are trained, each on the states of the one before. HASS (2408.15766) has 3."""
    regression: float = Field(1.0, ge=0)
    """w_reg, the loss weight of the feature loss."""
    noise: float = Field(0.1, ge=0)
    """a; training adds noise from U(−a, a) to the features."""
    bias: bool = False
    """A bias in `fc`. vLLM reads no drafter with one; SGLang reads only those."""

    @property
    def longest_draft(self) -> int:
        return max(self.depth, self.steps)


@HEADS.register("eagle1")
class Eagle1Heads(AutoregressiveHeads):
    """One decoder layer over fc(embedding of the next token ; feature) (section 4.1).

    The layer has no norm before attention. Its output is the next feature. The target's output
    layer reads it. Features are the target's hidden states after its final norm.

    The loss of section 4.2 has two parts: regression · smooth L1 against the target's next feature
    (the mean over the H numbers of a feature), and the stage's losses on the token.

    The paper does not give the init weights. Here fc first copies the feature and the layer changes
    nothing. So each step starts as the target's distribution one token earlier. Tensors have the
    names that engines use.
    """

    Options = Eagle1Options
    computed_once = ""

    def __init__(
        self, options: Eagle1Options, model: PreTrainedModel, vocabulary: Tensor | None = None
    ) -> None:
        super().__init__(options, options.longest_draft, model, vocabulary)
        self.parts = options.steps
        self.fc = nn.Linear(2 * self.hidden_size, self.hidden_size, bias=options.bias)
        self.layers = nn.ModuleList([DraftLayer(self.config, self.hidden_size)])

    @torch.no_grad()
    def init_weights(self, model: PreTrainedModel) -> None:
        super().init_weights(model)
        layer: Any = self.layers[0]
        layer.init_weights(self.config.initializer_range)
        self.fc.weight.zero_()
        self.fc.weight[:, self.hidden_size :] = torch.eye(self.hidden_size)
        if self.options.bias:
            self.fc.bias.zero_()

    def loss_weights(self, uniform: float) -> dict[int, float]:
        return dict.fromkeys(range(1, self.parts + 1), 1.0)

    def advance(
        self,
        states: Tensor,
        embedded: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attend: Attend,
    ) -> Tensor:
        mixed = self.fc(torch.cat([embedded, states], -1))
        next_states: Tensor = self.layers[0](mixed, mixed, position_embeddings, attend)
        return next_states

    def with_noise(self, features: Tensor) -> Tensor:
        if not self.training or not self.options.noise:
            return features
        rows, length, size = features.shape
        dtype, device = features.dtype, features.device
        uniform = row_numbers(rows, length * size, device=device, dtype=dtype).view_as(features)
        return features + self.options.noise * (2 * uniform - 1)

    def extra_loss(
        self, states: Tensor, batch: HeadBatch, depth: int, positions: Tensor
    ) -> Tensor | None:
        if not self.options.regression:
            return None
        dtype = torch.promote_types(states.dtype, torch.float32)
        features = shift_left(batch.features[FINAL], depth)[positions].to(dtype)
        losses = smooth_l1_loss(states.to(dtype), features, reduction="none")
        return self.options.regression * losses.mean(-1)


class Eagle3Options(AutoregressiveOptions):
    """Options of EAGLE-3 heads (2503.01840). The losses are the stage's `losses`; the paper trains
    on the target's distribution, `forward_kl: 1`."""

    type: Literal["eagle3"] = "eagle3"
    output: Literal["shared", "target"] = "shared"
    """The output layer. `shared`: one separate layer that starts as a copy of the target's and is
    trained. `target`: the target's output layer itself, frozen and not stored."""
    steps: int = Field(7, ge=1)
    """The number of steps of the training-time test, and the max depth of a draft. Each step reads
    the states of the previous step."""
    decay: float = Field(0.8, gt=0, le=1)
    """The loss weight of step k is decay^(k − 1)."""
    fc_norm: bool = False
    """Of EAGLE-3.1 (2605.09992): a norm for each of the three features before `fc`."""
    norm_output: bool = False
    """Of EAGLE-3.1: the next step reads the state after the final norm. EAGLE-3: before it."""
    norm_before_fc: bool = False
    """One norm for the concatenated features before `fc`, as in drafters published for gpt-oss."""
    norm_before_residual: bool = False
    """The residual stream of the layer starts with the normed state, as in drafters that the
    library speculators trained. EAGLE-3: with the state itself."""
    captured_layers: list[int] | None = Field(None, min_length=1)
    """The layers of the target whose outputs are read, counted from 0. None: the outputs of 1,
    n // 2 − 1 and n − 4, which engines read by default."""

    @property
    def longest_draft(self) -> int:
        return self.steps


class Eagle3Layer(DraftLayer):
    """Attention reads the normed embedding and the normed state, concatenated."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    @torch.no_grad()
    def init_weights(self, spread: float) -> None:
        super().init_weights(spread)
        self.input_layernorm.weight.fill_(1.0)
        self.hidden_norm.weight.fill_(1.0)


@HEADS.register("eagle3")
class Eagle3Heads(AutoregressiveHeads):
    """fc fuses the features of three layers into one state (section 3.1).

    The decoder layer computes the next state from this state and the embedding of the next token.
    Later steps read these states unchanged. The output layer reads them through a norm. There is no
    loss on features, only on tokens.

    The paper does not give the init weights. Here fc copies the feature of the highest of the three
    layers, the decoder layer changes nothing, and norm and output layer are the target's. So the
    heads start as the target without its last layers. Tensors have the names that engines use,
    except the output layer: `output.layers.0` here, `lm_head` in engines.

    EAGLE-3.1 is `fc_norm` and `norm_output`: the scale of the states then stays the same from step
    to step.
    """

    Options = Eagle3Options

    def __init__(
        self, options: Eagle3Options, model: PreTrainedModel, vocabulary: Tensor | None = None
    ) -> None:
        super().__init__(options, options.steps, model, vocabulary)
        layers = model.config.get_text_config().num_hidden_layers
        self.captured_layers = captured_outputs(options.captured_layers, layers)
        size = self.hidden_size
        read = len(self.captured_layers) * size
        self.fc = nn.Linear(read, size, bias=False)
        if options.norm_before_fc:
            self.input_norm = LlamaRMSNorm(read, eps=self.config.rms_norm_eps)
        self.fc_norm = nn.ModuleList(
            LlamaRMSNorm(size, eps=self.config.rms_norm_eps)
            for _ in (self.captured_layers if options.fc_norm else ())
        )
        self.midlayer = Eagle3Layer(self.config)
        self.norm = LlamaRMSNorm(size, eps=self.config.rms_norm_eps)

    @torch.no_grad()
    def init_weights(self, model: PreTrainedModel) -> None:
        super().init_weights(model)
        self.midlayer.init_weights(self.config.initializer_range)
        self.fc.weight.zero_()
        self.fc.weight[:, -self.hidden_size :] = torch.eye(self.hidden_size)
        norms: Any = self.fc_norm
        for norm in norms:
            norm.weight.fill_(1.0)
        if self.options.norm_before_fc:
            self.input_norm.weight.fill_(1.0)
        copy_norm(self.norm, model)

    def loss_weights(self, uniform: float) -> dict[int, float]:
        return {k: self.options.decay ** (k - 1) for k in range(1, self.depth + 1)}

    def fuse(self, features: Tensor) -> Tensor:
        if self.options.norm_before_fc:
            features = self.input_norm(features)
        if len(self.fc_norm):
            taps = features.chunk(len(self.fc_norm), -1)
            features = torch.cat([norm(x) for norm, x in zip(self.fc_norm, taps, strict=True)], -1)
        fused: Tensor = self.fc(features)
        return fused

    def advance(
        self,
        states: Tensor,
        embedded: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attend: Attend,
    ) -> Tensor:
        layer = self.midlayer
        normed = layer.hidden_norm(states)
        inputs = torch.cat([layer.input_layernorm(embedded), normed], -1)
        residual = normed if self.options.norm_before_residual else states
        next_states: Tensor = layer(residual, inputs, position_embeddings, attend)
        return self.norm(next_states) if self.options.norm_output else next_states

    def readout(self, states: Tensor) -> Tensor:
        return states if self.options.norm_output else self.norm(states)
