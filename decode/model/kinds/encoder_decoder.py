"""Targets with an encoder (T5, BART, Marian): the encoder reads a prompt once, and the loop decodes
the text of the decoder.

A prompt is the source. The encoder's output goes through the keys and values of each layer's cross
attention once, and these stay in slots until the row leaves. The text of a row begins with the
decoder's start token. All else is as for a model without an encoder.

Shapes: B rows, n tokens fed per row, T tokens of the longest source, V vocabulary.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from decode.base.device import to_device
from decode.base.errors import UserError
from decode.model.cache.slots import SlotLayer, Slots
from decode.model.cache_names import with_cache
from decode.model.forward.attention_mask import AttentionMask
from decode.model.forward.transformers_forward import TransformersForward
from decode.model.memory import require_memory
from decode.model.pretrained import decoder_start, input_device, longest_text, replaced

# The cross attention of a decoder layer, by the name of the module: its projections of keys and
# values, and the attribute with the size of a head.
_CROSS_ATTENTION = {
    "EncDecAttention": ("k", "v", "key_value_proj_dim"),
    "encoder_attn": ("k_proj", "v_proj", "head_dim"),
}


class DecoderForward(TransformersForward):
    """The forward of a decoder under an encoder. The model reads the positions of the loop
    (`decode.model.kinds.decoder_positions.read_positions`)."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        modules = model.get_decoder().named_modules()
        named = ((name.rpartition(".")[2], module) for name, module in modules)
        self._cross: list[tuple[nn.Module, nn.Module, int]] = [
            (getattr(module, key), getattr(module, value), getattr(module, size))
            for name, module in named
            for key, value, size in [_CROSS_ATTENTION.get(name, ("", "", ""))]
            if key
        ]
        self._sources: tuple[list[CacheLayerMixin], AttentionMask] | None = None

    @property
    def cross_layers(self) -> int:
        """The number of layers whose cross attention is known."""
        return len(self._cross)

    def encode(self, ids: Tensor, mask: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The keys and values of every layer's cross attention, [B, N, T, D] each. ids, mask: int64
        [B, T], padded on the right."""
        states = self.model.get_encoder()(input_ids=ids, attention_mask=mask).last_hidden_state
        layers = []
        for key, value, size in self._cross:
            keys, values = (
                projection(states).unflatten(2, (-1, size)).transpose(1, 2)
                for projection in (key, value)
            )
            layers.append((keys, values))
        return layers

    def reading(
        self, layers: list[CacheLayerMixin], mask: AttentionMask
    ) -> AbstractContextManager[None]:
        """Inside this context, the fed rows attend to these sources."""
        return replaced(self, "_sources", (layers, mask))

    def _logits(
        self,
        ids: Tensor,
        positions: Tensor,
        masks: Sequence[AttentionMask],
        slots: Sequence[SlotLayer],
    ) -> Tensor:
        assert self._sources is not None, "the sources are read first"
        layers, source_mask = self._sources
        cache = EncoderDecoderCache(Cache(layers=list(slots)), Cache(layers=list(layers)))
        cache.is_updated = dict.fromkeys(range(len(layers)), True)
        form = self._form(source_mask, ids)
        assert form is not None
        # The states of the encoder are not read again. Only their length matters.
        states = form.new_zeros(1, dtype=self.model.dtype).expand(len(ids), form.shape[3], 1)
        decoder_mask = self._form(masks[0], ids)
        logits: Tensor = self.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=states),
            attention_mask=form.expand(-1, -1, ids.shape[1], -1),
            decoder_input_ids=ids,
            decoder_attention_mask=decoder_mask,
            use_cache=True,
            **with_cache(self.model, cache),
        ).logits
        return logits


class _SourceLayer(CacheLayerMixin):
    """The keys and values of the sources in one layer, which no forward changes."""

    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise NotImplementedError

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def get_seq_length(self) -> int:
        return self.keys.shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_max_length(self) -> int:
        return self.keys.shape[2]


class CrossAttentionCache:
    """What the encoder read for each row that is decoding: keys and values of the cross attention.

    max_prompt: sources must be shorter. Raises UserError if the decoder's start token is not known,
    or if a layer's cross attention has other projections than those of T5 and BART.
    """

    def __init__(self, model: PreTrainedModel, forward_pass: DecoderForward, layers: int) -> None:
        self.start_id = decoder_start(model)
        self.model, self._forward, self._layers = model, forward_pass, layers
        self.device = input_device(model)
        self.max_prompt = longest_text(model.get_encoder().config) + 1
        if forward_pass.cross_layers != layers:
            raise UserError(
                f"{type(model).__name__} has {layers} decoder layers, but cross attention that is "
                f"known in {forward_pass.cross_layers}; expected one in each, as in T5 and BART"
            )
        self.reset(0)

    def reset(self, rows: int) -> None:
        """Start `rows` rows without sources."""
        self._slots = Slots(self._layers, rows, 1, self.device)
        self._lengths = np.zeros(rows, dtype=np.int64)

    def add_rows(self, count: int) -> None:
        """Append rows without sources."""
        self._slots.add_rows(count, 1)
        self._lengths = np.pad(self._lengths, (0, count))

    def keep_rows(self, rows: np.ndarray) -> None:
        """Keep only these rows, int [B'], in this order."""
        self._slots.keep_rows(rows)
        self._lengths = self._lengths[rows]

    def read(self, sources: Sequence[Sequence[int]], first: int, pass_tokens: int) -> None:
        """Let the encoder read the sources of the rows from `first` on, at most `pass_tokens`
        tokens in a pass, or one source. Raises UserError as `require_memory` does."""
        longest, slots = max(map(len, sources)), self._slots
        require_memory(self.model, *slots.grown(slots.rows, longest), slots.allocated)
        slots.add_rows(0, longest)
        size = max(pass_tokens // longest, 1)
        for begin in range(0, len(sources), size):
            group = sources[begin : begin + size]
            lengths = np.array([len(source) for source in group])
            ids = np.zeros((len(group), int(lengths.max())), dtype=np.int64)
            for row, source in enumerate(group):
                ids[row, : len(source)] = source
            mask = np.arange(ids.shape[1]) < lengths[:, None]
            keys = self._forward.encode(
                to_device(ids, self.device), to_device(mask.astype(np.int64), self.device)
            )
            at = first + begin
            slots.place(np.zeros(len(group), dtype=np.int64), ids.shape[1], first=at)
            for layer, (key, value) in zip(slots.layers, keys, strict=True):
                layer.update(key, value)
            self._lengths[at : at + len(group)] = lengths

    def reading(self, first: int, count: int) -> AbstractContextManager[None]:
        """Inside this context, `count` rows from `first` on are decoded from their sources."""
        rows = slice(first, first + count)
        lengths = self._lengths[rows]
        longest = int(lengths.max())
        layers: list[CacheLayerMixin] = [
            _SourceLayer(layer.keys[rows, :, :longest], layer.values[rows, :, :longest])
            for layer in self._slots.layers
        ]
        visible = np.arange(longest) < lengths[:, None]
        mask = AttentionMask(to_device(visible, self.device)[:, None, None], self.model.dtype)
        return self._forward.reading(layers, mask)
