"""DFlash (2602.06036): a small bidirectional model fills a block of mask tokens in one pass.

The block is the last token of the text, the anchor, and then mask tokens. All layers read the
target's features of the text before the anchor, as more keys and values. So all places of a draft
are predicted at once, from the text only: the distribution of a place does not depend on the tokens
drawn before it.

Shapes: B rows, n tokens, T tokens of a text, F features of a token, H hidden size, A anchors of a
text, S tokens of a block, D depth, V' draft vocabulary.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from decode.base.device import to_device
from decode.base.errors import UserError
from decode.draft import Contexts
from decode.drafters import DRAFTERS
from decode.drafters.pard import unused_special_tokens
from decode.drafters.trained import ParallelGrowth
from decode.draw.sampling import Sampling
from decode.model.forward.attention_mask import Attend
from decode.model.loading import Target
from decode.shapes import Growth
from distill.choose_vocabulary import rows_of_tokens
from distill.chunked_loss import at_least_float32
from distill.row_numbers import row_numbers
from heads.attending_heads import AttendingHeads
from heads.heads_drafter import AttendingDrafter
from heads.heads_module import HEADS, HeadBatch, Prediction, Replayed, TokenHeads, shift_left
from heads.layers.block_layer import BlockLayer, BlockMask, draw_anchors
from heads.layers.layer_config import layer_config
from heads.layers.llama_layer import Rotary
from heads.layers.target_layers import copy_norm, require_layers
from heads.options import DFlashOptions

# The predictions whose logits exist at once beside those of the stage's loss.
CHUNK = 256


def even_taps(count: int, layers: int) -> list[int]:
    """The taps of the paper for a target with n layers: round(1 + i·(n − 4)/(m − 1)) for i < m, and
    the middle layer for m = 1. Raises UserError if they are not distinct.

    >>> even_taps(5, 36)
    [1, 9, 17, 25, 33]
    """
    if count == 1:
        return [layers // 2]
    taps = [math.floor(1.5 + i * (layers - 4) / (count - 1)) for i in range(count)]
    if len(set(taps)) < count or taps != sorted(taps):
        raise UserError(
            f"{count} layers of a block drafter read {count} of the target's layers, spread over "
            f"its {layers}: {taps}; expected distinct ones. Set fewer `layers`, or set `taps`"
        )
    return taps


def mask_token(options: DFlashOptions, target: Target) -> int:
    """The id of the mask token. Raises UserError if texts may contain it, or if no id is free.

    Free are ids that are no token, and `unused_special_tokens`. An embedding of 0 is refused too.
    """
    tokenizer, embeddings = target.tokenizer, target.model.get_input_embeddings().weight
    rows = len(embeddings)
    used = {*tokenizer.get_vocab().values(), *target.eos_token_ids}
    used -= unused_special_tokens(target).keys()
    chosen = options.mask_token
    if chosen is None:
        free = (id for id in range(rows - 1, -1, -1) if id not in used and embeddings[id].any())
        chosen = next(free, None)
        if chosen is None:
            raise UserError(
                f"heads of type {options.type} need a mask token, an id that texts never contain, "
                f"but the tokenizer of {target.name} uses all {rows} ids; use a target with unused "
                "ids, or train eagle3 heads"
            )
    if chosen >= rows:
        raise UserError(
            f"mask_token is {chosen}, but {target.name} has embeddings of {rows} ids; expected an "
            "id below that"
        )
    if not embeddings[chosen].any():
        raise UserError(
            f"mask_token is {chosen}, whose embedding in {target.name} is 0, so layers could not "
            "tell mask tokens apart; expected another unused id"
        )
    if chosen in used:
        token = tokenizer.convert_ids_to_tokens(chosen)
        raise UserError(
            f"mask_token is {chosen}, which {target.name} uses in texts, for {token!r}; expected "
            "an unused id. Leave mask_token out to use the highest one"
        )
    return chosen


def _layer_count(model: PreTrainedModel) -> int:
    count: int = model.config.get_text_config().num_hidden_layers
    return count


@HEADS.register("dflash")
class DFlashHeads(TokenHeads, AttendingHeads):
    """ "Head" d is the place d tokens after the anchor.

    The context is RMSNorm(fc(taps)), one state per token, which all layers read. Place d is read
    from token d of the block, so token 0, the anchor itself, predicts nothing.

    The paper does not give the init weights. Here fc copies the last tap, the layers change
    nothing, and the final norm is the target's. Tensors have the names that engines use.

    Training draws `anchors` places of each text at each visit. A block is learnt up to the first
    token that is not trained on. The first anchor of an answer is the last token of its prompt:
    the first draft starts there. In the authors' code it is the first token of the answer.

    first_slot: the token of the block from which the first place is read. config: the settings of
    the layers. mask_token: its id. captured_layers: the taps.
    """

    replayed_from: ClassVar[Replayed] = "text"
    first_slot = 1

    @classmethod
    def for_target(cls, options: Any, target: Target) -> Any:
        options.require_window()
        taps = options.taps or even_taps(options.layers, _layer_count(target.model))
        require_layers("taps", taps, _layer_count(target.model))
        return options.model_copy(update={"mask_token": mask_token(options, target), "taps": taps})

    def __init__(
        self, options: DFlashOptions, model: PreTrainedModel, vocabulary: Tensor | None = None
    ) -> None:
        """options: as `DFlashOptions.for_target` returns them."""
        super().__init__(options, options.block - self.first_slot, model, vocabulary)
        assert options.taps is not None
        assert options.mask_token is not None
        self.captured_layers, self.mask_token = tuple(options.taps), options.mask_token
        self.vocab_size = len(model.get_input_embeddings().weight)
        self.reserved_tokens = (self.mask_token,)
        self.config = layer_config(model, options.layer)
        self.config.num_hidden_layers = self.attending_layers = self.batch_parts = options.layers
        self.spare_slots = options.block
        self.tokens_per_part = float(options.block)
        size, eps = self.hidden_size, self.config.rms_norm_eps
        self.fc = nn.Linear(len(self.captured_layers) * size, size, bias=False)
        self.hidden_norm = LlamaRMSNorm(size, eps=eps)
        self.layers = nn.ModuleList(self.make_layer() for _ in range(options.layers))
        self.norm = LlamaRMSNorm(size, eps=eps)
        self._rotary = Rotary(self.config)

    def make_layer(self) -> BlockLayer:
        """A new layer, without weights."""
        return BlockLayer(self.config)

    @torch.no_grad()
    def init_weights(self, model: PreTrainedModel) -> None:
        super().init_weights(model)
        for layer in self.layers:
            assert isinstance(layer, BlockLayer)
            layer.init_weights(self.config.initializer_range)
        self.fc.weight.zero_()
        self.fc.weight[:, -self.hidden_size :] = torch.eye(self.hidden_size)
        self.hidden_norm.weight.fill_(1.0)
        copy_norm(self.norm, model)

    def loss_weights(self, uniform: float) -> dict[int, float]:
        return {d: math.exp(-(d - 1) / self.options.decay) for d in range(1, self.depth + 1)}

    def fuse(self, features: Tensor) -> Tensor:
        context: Tensor = self.hidden_norm(self.fc(features))
        return context

    def context(self, states: Tensor, positions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the keys and values of each layer for the context [B, n, H].

        positions: int64 [B, n] or [1, n].
        """
        turns = self._rotary(positions, states)
        for layer in self.layers:
            assert isinstance(layer, BlockLayer)
            yield layer.self_attn.keys_and_values(states, turns)

    def block_states(self, anchors: Tensor, positions: Tensor, attends: Sequence[Attend]) -> Tensor:
        """[B, A, S, H]: the states of the tokens of blocks.

        anchors, positions: int64 [B, A], the first token of each block and its position. attends:
        the attention of each layer, over the A·S tokens.
        """
        ids = anchors.new_full((*anchors.shape, self.options.block), self.mask_token)
        ids[..., 0] = anchors
        states = self.embeddings(ids.flatten(1)).to(self.dtype)
        offsets = torch.arange(self.options.block, device=positions.device)
        turns = self._rotary((positions[..., None] + offsets).flatten(1), states)
        for layer, attend in zip(self.layers, attends, strict=True):
            states = self.recomputed(layer, states, turns, attend)
        blocks: Tensor = self.norm(states).unflatten(1, (-1, self.options.block))
        return blocks

    def read_places(self, blocks: Tensor, anchors: Tensor, input_ids: Tensor) -> tuple[Tensor, ...]:
        """What the places of blocks are read from, [B, A, D, …] each, their states first.

        blocks: [B, A, S, H], of `block_states`. anchors: int64 [B, A]. input_ids: int64 [B, T].
        """
        return (blocks[:, :, self.first_slot :],)

    def tokens_from(self, anchors: Tensor, input_ids: Tensor, first: int) -> Tensor:
        """int64 [B, A, S]: the text's tokens from `first` places after each anchor on, and its
        last one beyond its end. The arguments are those of `read_places`."""
        steps = torch.arange(first, first + self.options.block, device=anchors.device)
        columns = (anchors[..., None] + steps).clamp(max=input_ids.shape[1] - 1)
        return input_ids.gather(1, columns.flatten(1)).view_as(columns)

    def anchors(self, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
        """The anchors of one visit to texts, as `draw_anchors` returns them.

        Outside of training they are always the same. loss_mask: bool [B, T].
        """
        candidates = shift_left(loss_mask, 1).cpu()
        candidates[:, 0] = False  # no context before it
        scores = row_numbers(*candidates.shape, training=self.training)
        return draw_anchors(candidates, self.options.anchors, scores)

    def predictions(self, batch: HeadBatch, depths: Sequence[int]) -> Iterator[Prediction]:
        length, device = batch.input_ids.shape[1], batch.input_ids.device
        if batch.replayed:
            # Each trained token has the block that it was drafted in.
            candidates = shift_left(batch.loss_mask, depths[0]).cpu()
            on_host, is_drawn = draw_anchors(candidates, length, torch.ones(candidates.shape))
        else:
            on_host, is_drawn = self.anchors(batch.loss_mask)
        anchors = to_device(on_host, device)
        context = self.inputs_of(batch).to(self.dtype)
        mask = BlockMask(on_host, self.options.block, length, device, self.dtype, self.window)
        positions = torch.arange(length, device=device)[None]
        attends = [mask.attention(*layer) for layer in self.context(context, positions)]
        first = batch.input_ids.gather(1, anchors)
        blocks = self.block_states(first, anchors, attends)
        read = self.read_places(blocks, anchors, batch.input_ids)
        trained = to_device(is_drawn, device)
        rows = torch.arange(len(anchors), device=device)[:, None].expand_as(anchors)
        for depth in depths if batch.replayed else range(1, max(depths) + 1):
            trained = trained & shift_left(batch.loss_mask, depth).gather(1, anchors)
            if depth in depths:
                reading = torch.zeros_like(batch.loss_mask)
                # The target reads the token before the anchor for the same features.
                reading[rows[trained], anchors[trained] - 1] = True
                at_place = [x[:, :, depth - 1][trained] for x in read]
                yield self.prediction(depth, reading, batch.input_ids, *at_place)

    def prediction(
        self, depth: int, positions: Tensor, input_ids: Tensor, *read: Tensor
    ) -> Prediction:
        """The prediction of a place. positions: bool [B, T] with n True values, as in
        `Prediction`. input_ids: int64 [B, T], the texts. read: [n, …] of `read_places`."""
        return Prediction(depth, positions, read[0])

    def labels(self, depth: int, positions: Tensor, input_ids: Tensor) -> Tensor:
        """int64 [n]: the output rows of the text's tokens at a place, −100 for a token without one.
        The arguments are those of `prediction`."""
        labels = shift_left(input_ids, depth + 1)[positions]
        if self.vocabulary is None:
            return labels
        return rows_of_tokens(self.vocabulary, self.vocab_size)[labels]

    def place_logits(self, states: Tensor, added: Tensor | None = None) -> Tensor:
        """[n, V']: the logits of places by their states, [n, H]. added: [n, R], of heads that add
        something; None leaves it out."""
        return linear(*self.output.last_product(1, states))

    def losses(self, states: Tensor, added: Tensor | None, labels: Tensor) -> Tensor:
        """float32 [n]: the cross-entropy of `place_logits`, 0 for a label of −100. labels: int64
        [n], output rows."""

        def of_part(states: Tensor, added: Tensor | None, labels: Tensor) -> Tensor:
            logits = self.place_logits(states, added)
            logits = logits.to(at_least_float32(logits.dtype))
            return cross_entropy(logits, labels, reduction="none")

        parts = (
            (states[part], None if added is None else added[part], labels[part])
            for part in torch.arange(len(states), device=states.device).split(CHUNK)
        )
        return torch.cat([self.recomputed(of_part, *part) for part in parts])


@DRAFTERS.register("dflash")
class DFlashDrafter(AttendingDrafter):
    """Drafts in any shape. One pass over the block gives all places, with the same distribution for
    all nodes at a depth.

    Entry i of a row's cache holds all layers' keys and values for the context of token i. The block
    uses the slots after the last entry, and the entries of the next round overwrite them. The block
    is always as long as in training, so a draft does not depend on the rows beside it.
    """

    heads: DFlashHeads

    def layer(self, contexts: Contexts, columns: np.ndarray, states: Tensor) -> Tensor:
        self.place(columns[:, 0], columns.shape[1])
        layers = self.heads.context(states, to_device(columns, states.device))
        for slots, (keys, values) in zip(self.slots.layers, layers, strict=True):
            slots.update(keys, values)
        return states

    def blocks(self, contexts: Contexts) -> tuple[Tensor, Tensor]:
        """The states of the block after each row's text, [B, S, H], and its last token, int64
        [B]."""
        anchors, size = contexts.lengths - 1, self.heads.options.block
        self._fill_cache(contexts, anchors)
        device = self.states.device
        positions = to_device(anchors, device)[:, None]
        last = contexts.last_tokens(device)
        block = torch.ones(1, size, size, dtype=torch.bool, device=device)
        attends = self.attentions(
            anchors, size, ancestors=block, depths=torch.arange(size, device=device)[None]
        )
        return self.heads.block_states(last, positions, attends)[:, 0], last[:, 0]

    def places(self, contexts: Contexts, max_depth: int) -> tuple[Tensor, Tensor]:
        """The states of the places after each row's text, [B, d, H], and its last token, int64 [B].

        max_depth: d.
        """
        states, last = self.blocks(contexts)
        first = self.heads.first_slot
        return states[:, first : first + max_depth], last

    def growth(self, contexts: Contexts, sampling: Sampling, max_depth: int) -> Growth:
        states, _ = self.places(contexts, max_depth)
        logits = self.heads.output.logits(states)
        return ParallelGrowth(contexts, sampling, self.vocab_size, self.heads.vocabulary, logits)
