"""P-EAGLE (2602.01469): EAGLE-3 that drafts all tokens in one pass.

What EAGLE-3 reads at a step is not known at the later places of a draft: the token before, and the
state of the step before. Two learnt vectors stand for them. The places are trained as PARD's mask
tokens are (`distill.masked_copies`).

Shapes: B rows, n tokens, T tokens of a text, M places of stand-ins, N = T + M, K drafted tokens,
H hidden size.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from decode.base.device import to_device
from decode.base.errors import UserError
from decode.draft import Contexts
from decode.drafters import DRAFTERS
from decode.drafters.pard import free_token
from decode.drafters.trained import ParallelGrowth
from decode.draw.sampling import Sampling
from decode.model.forward.attention_mask import AttentionMask
from decode.model.loading import Target
from decode.shapes import Growth
from distill.masked_copies import copies_of_anchors, copies_of_depths
from distill.student_settings import kept_share
from heads.attending_heads import AttendingHeads
from heads.eagle3_heads import Eagle3Layer
from heads.heads_drafter import AttendingDrafter
from heads.heads_module import HEADS, HeadBatch, Prediction, TokenHeads, shift_left
from heads.layers.layer_config import layer_config
from heads.layers.llama_layer import Attend, DraftLayer, Rotary, init_layer
from heads.layers.target_layers import captured_outputs, copy_norm
from heads.options import PEagleOptions


class _NormedLayer(DraftLayer):
    """Attention reads the normed state."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, config.hidden_size)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


@HEADS.register("p_eagle")
class PEagleHeads(TokenHeads, AttendingHeads):
    """fc fuses the features of three layers. Place 1 of a draft reads them and the next token's
    embedding, as EAGLE-3 does; the later places read `mask_hidden` and `mask_embedding` instead.

    "Head" d is place d. All places have the same loss weight.

    The paper trains the embeddings too, which is `embeddings: trained` here. By default they are
    the target's, and only the vector of the stand-in is trained, `mask_embedding`. At first fc
    copies the feature of the highest of the three layers, and the decoder layers change nothing, as
    in `Eagle3Heads`. Tensors have the names that engines use, except the output layer and the
    embeddings.
    """

    replayed_from = "text"
    read_directly = ("output", "fc")

    @classmethod
    def for_target(cls, options: Any, target: Target) -> Any:
        options.require_window()
        if options.mask_token is not None and options.mask_token >= target.vocab_size:
            raise UserError(
                f"mask_token is {options.mask_token}, but {target.name} has embeddings of "
                f"{target.vocab_size} ids; expected an id that no text contains"
            )
        if options.embeddings == "target" or options.mask_token is not None:
            return options
        return options.model_copy(update={"mask_token": free_token(target)})

    def __init__(
        self, options: PEagleOptions, model: PreTrainedModel, vocabulary: Tensor | None = None
    ) -> None:
        super().__init__(options, options.tokens, model, vocabulary)
        count = model.config.get_text_config().num_hidden_layers
        self.captured_layers = captured_outputs(options.captured_layers, count)
        if options.mask_token is not None:
            self.reserved_tokens = (options.mask_token,)
        self.batch_parts = self.attending_layers = self.stacked_layers = options.layers
        places = range(1, options.tokens)
        kept = sum(kept_share(place, options.keep, options.keep_min) for place in places)
        self.tokens_per_part = 1 + kept
        self.mask_pairs = (1 + kept) ** 2
        self.config = layer_config(model, options.layer)
        self._rotary = Rotary(self.config)
        size, taps = self.hidden_size, len(self.captured_layers)
        self.fc = nn.Linear(taps * size, size, bias=False)
        self.mask_hidden = nn.Parameter(torch.empty(1, 1, taps * size))
        if options.embeddings == "trained":
            self.embeddings = nn.Embedding(*model.get_input_embeddings().weight.shape)
        else:
            self.mask_embedding = nn.Parameter(torch.empty(size))
        further = (_NormedLayer(self.config) for _ in range(options.layers - 1))
        self.layers = nn.ModuleList([Eagle3Layer(self.config), *further])
        self.norm = LlamaRMSNorm(size, eps=self.config.rms_norm_eps)

    @torch.no_grad()
    def init_weights(self, model: PreTrainedModel) -> None:
        super().init_weights(model)
        for layer in self.layers:
            init_layer(layer, self.config.initializer_range)
        self.fc.weight.zero_()
        self.fc.weight[:, -self.hidden_size :] = torch.eye(self.hidden_size)
        self.mask_hidden.normal_(std=self.config.initializer_range)
        table = model.get_input_embeddings().weight
        if isinstance(self.embeddings, nn.Embedding):
            self.embeddings.weight.copy_(table)
            self.embeddings.weight[self.reserved_tokens[0]] = table.float().mean(0)
        else:
            self.mask_embedding.copy_(table.float().mean(0))
        copy_norm(self.norm, model)

    @property
    def trains_all(self) -> bool:
        return not self.training

    def fuse(self, features: Tensor) -> Tensor:
        fused: Tensor = self.fc(features)
        return fused

    def run(
        self,
        states: Tensor,
        tokens: Tensor,
        unknown: Tensor,
        positions: Tensor,
        attends: Sequence[Attend],
        fc: Tensor | None = None,
    ) -> Tensor:
        """[B, n, H]: the input of the output layer.

        states: [B, n, H], fused features. tokens: int64 [B, n], the tokens that follow. unknown:
        bool [B, n], places that read the stand-ins instead of these. positions: int64 [B, n].
        attends: the attention of each layer. fc: [H, F], the
        weight of `fc` for the stand-in; None: as it is trained.
        """
        dtype = self.dtype
        masks = unknown[..., None]
        stand_in = linear(self.mask_hidden.to(dtype), self.fc.weight if fc is None else fc)
        states = torch.where(masks, stand_in, states.to(dtype))
        embedded = self._embedded(tokens, unknown).to(dtype)
        rotation = self._rotary(positions, states)
        first: Any = self.layers[0]
        normed = first.hidden_norm(states)
        inputs = torch.cat([first.input_layernorm(embedded), normed], -1)
        residual = normed if self.options.norm_before_residual else states
        states = self.recomputed(first, residual, inputs, rotation, attends[0])
        further: Any = self.layers[1:]
        for layer, attend in zip(further, attends[1:], strict=True):
            inputs = layer.input_layernorm(states)
            states = self.recomputed(layer, states, inputs, rotation, attend)
        outputs: Tensor = self.norm(states)
        return outputs

    def _embedded(self, tokens: Tensor, unknown: Tensor) -> Tensor:
        """[B, n, H]: the embeddings that `run` reads."""
        if isinstance(self.embeddings, nn.Embedding):
            return self.embeddings(tokens.masked_fill(unknown, self.reserved_tokens[0]))
        embedded = self.embeddings(tokens)
        return torch.where(unknown[..., None], self.mask_embedding.to(embedded), embedded)

    def predictions(self, batch: HeadBatch, depths: Sequence[int]) -> Iterator[Prediction]:
        options, ids = self.options, batch.input_ids
        # States of a record were made with it and go on, so the stand-in must not change it.
        fc = None if batch.inputs is None else self.fc.weight.detach()
        # Place 1 at position t predicts the token at t + 2.
        predicted = shift_left(batch.loss_mask, 1)
        if batch.replayed:
            masks = copies_of_anchors(shift_left(predicted, depths[0]), depths[0])
        else:
            masks = copies_of_depths(
                predicted, depths, options.keep, options.keep_min, training=not self.trains_all
            )
        rows, length = ids.shape
        count = masks.copies.shape[1]
        visible = masks.visible(torch.ones_like(ids))
        positions = masks.positions(length)
        if self.window is not None:
            # A stand-in sees the earlier ones of its draft, which are never as far away.
            seen = self.window.sees(positions[:, :, None], positions[:, None])
            visible = visible & seen[:, None]

        @functools.cache
        def mask(dtype: torch.dtype) -> AttentionMask:
            return AttentionMask(visible, dtype)

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            scale: float = queries.shape[-1] ** -0.5
            return mask(queries.dtype).attend(queries, keys, values, scale)

        states = self.run(
            pad(self.inputs_of(batch), (0, 0, 0, count)),
            pad(shift_left(ids, 1), (0, count)),
            torch.arange(length + count, device=ids.device).expand(rows, -1) >= length,
            positions,
            [attend] * self.attending_layers,
            fc,
        )
        for depth in depths:
            if depth == 1:
                reading = shift_left(predicted, 1)
                yield Prediction(1, reading, states[:, :length][reading])
                continue
            # In the order of the anchors, as `MaskedCopies` has them.
            row, column = (masks.exists & (masks.copies == depth - 1)).nonzero(as_tuple=True)
            reading = torch.zeros_like(predicted)
            reading[row, masks.anchors[row, column]] = True
            yield Prediction(depth, reading, states[row, length + column])


@DRAFTERS.register("p_eagle")
class PEagleDrafter(AttendingDrafter):
    """Drafts in any shape, at most K deep, with one pass of the heads' layers.

    Entry i of a row's cache reads the features of token i and the embedding of token i + 1, as in
    EAGLE-3. The stand-ins follow the last entry, and the next pass overwrites them.
    """

    heads: PEagleHeads

    def growth(self, contexts: Contexts, sampling: Sampling, max_depth: int) -> Growth:
        entries = contexts.lengths - 1
        self.skip_unseen(contexts, entries)
        columns, states = self.take_missing(entries)
        # Rows with few entries have theirs first, and stand-ins directly after them.
        counts = np.minimum(entries, columns.shape[1])
        count = columns.shape[1] + max_depth - 1
        columns = columns[:, :1] + np.arange(count)
        states = pad(states, (0, 0, 0, max_depth - 1))
        outputs = self._run(contexts, columns, states, np.arange(count) >= counts[:, None])
        places = np.maximum(counts - 1, 0)[:, None] + np.arange(max_depth)
        rows_B1 = torch.arange(len(places), device=outputs.device)[:, None]
        drafted = outputs[rows_B1, to_device(places, outputs.device)]
        logits = self.heads.output.at(1, drafted)
        return ParallelGrowth(contexts, sampling, self.vocab_size, self.heads.vocabulary, logits)

    def layer(self, contexts: Contexts, columns: np.ndarray, states: Tensor) -> Tensor:
        return self._run(contexts, columns, states, np.zeros(columns.shape, dtype=bool))

    def _run(
        self, contexts: Contexts, columns: np.ndarray, states: Tensor, unknown: np.ndarray
    ) -> Tensor:
        # Past the end of a row's space there are only stand-ins.
        following = np.minimum(columns + 1, contexts.tokens.shape[1] - 1)
        tokens = np.take_along_axis(contexts.tokens, following, axis=1)
        device = states.device
        return self.heads.run(
            states,
            to_device(tokens, device),
            to_device(unknown, device),
            to_device(columns, device),
            self.attentions(columns[:, 0], columns.shape[1]),
        )
