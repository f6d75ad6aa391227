"""Targets with an encoder (T5, BART, Marian): the encoder reads a prompt once, and the loop decodes
the text of the decoder.

A prompt is the source. The encoder's output goes through the keys and values of each layer's cross
attention once, and these stay in slots until the row leaves. The text of a row begins with the
decoder's start token. All else is as for a model without an encoder.

Shapes: B rows, n tokens fed per row, T tokens of the longest source, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from decode.device import to_device
from decode.errors import UserError
from decode.target.cache.slots import SlotLayer, Slots
from decode.target.forward.lean_forward import AttentionMask
from decode.target.forward.transformers_forward import TransformersForward
from decode.target.kinds.decoder_positions import Positions, at_positions
from decode.target.memory import require_memory
from decode.target.pretrained import decoder_start, input_device, longest_text

if TYPE_CHECKING:
    from decode.target.cache.cached_model import CachedLM

# The cross attention of a decoder layer, by the name of the module: its projections of keys and
# values, and the attribute with the size of a head.
_CROSS_ATTENTION = {
    "EncDecAttention": ("k", "v", "key_value_proj_dim"),
    "encoder_attn": ("k_proj", "v_proj", "head_dim"),
}
# The largest difference of logits in the trial, as a share of the largest logit.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}


class DecoderForward(TransformersForward):
    """The forward of a decoder under an encoder. The model reads the positions of the loop
    (`decode.target.kinds.decoder_positions.read_positions`)."""

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

    @contextmanager
    def reading(self, layers: list[CacheLayerMixin], mask: AttentionMask) -> Iterator[None]:
        """Inside this context, the fed rows attend to these sources."""
        self._sources = layers, mask
        try:
            yield
        finally:
            self._sources = None

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
            past_key_values=cache,
            use_cache=True,
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


class Sources:
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

    def keep_rows(self, rows: Tensor) -> None:
        """Keep only these rows (int64 [B']), in this order."""
        self._slots.keep_rows(rows)
        self._lengths = self._lengths[rows.cpu().numpy()]

    @contextmanager
    def only(self, first: int, end: int) -> Iterator[None]:
        """See `Slots.only`."""
        every = self._lengths
        self._lengths = every[first:end]
        try:
            with self._slots.only(first, end):
                yield
        finally:
            self._lengths = every

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
            with slots.only(at, at + len(group)):
                slots.place(np.zeros(len(group), dtype=np.int64), ids.shape[1])
                for layer, (key, value) in zip(slots.layers, keys, strict=True):
                    layer.update(key, value)
            self._lengths[at : at + len(group)] = lengths

    @contextmanager
    def reading(self, positions: Positions) -> Iterator[None]:
        """Inside this context, the fed rows are decoded from their sources, with tokens at these
        positions."""
        longest = int(self._lengths.max())
        layers: list[CacheLayerMixin] = [
            _SourceLayer(layer.keys[:, :, :longest], layer.values[:, :, :longest])
            for layer in self._slots.layers
        ]
        visible = np.arange(longest) < self._lengths[:, None]
        mask = AttentionMask(to_device(visible, self.device)[:, None, None], self.model.dtype)
        with ExitStack() as contexts:
            contexts.enter_context(at_positions(positions))
            contexts.enter_context(self._forward.reading(layers, mask))
            yield


def difference(logits: Tensor, expected: Tensor) -> str | None:
    """Why the logits of a trial are not the expected ones, or None. Both have the model's dtype."""
    largest = (logits.float() - expected.float()).abs().max()
    if largest <= TOLERANCE[expected.dtype] * expected.float().abs().max():
        return None
    return f"differs from its forward by {float(largest):.3g} in a logit"  # also if it is NaN


@torch.no_grad()
def reason_against_decoding(lm: "CachedLM", vocab_size: int) -> str | None:
    """Why a decoder over slots is not the model, or None: a trial. Two texts of different lengths
    after two sources must get the logits of transformers' forward of one row.

    lm: used for the trial only.
    """
    assert lm.sources is not None
    start = lm.sources.start_id
    several = (np.arange(1, 16) * vocab_size // 16).tolist()
    sources = [several[:7], several[7:10]]
    texts = [[start, *several[3:7]], [start, *several[8:10]]]
    fed = np.array([len(text) - 2 for text in texts])
    lm.reset(2, max(map(len, texts)))
    lm.encode(sources, 0)
    ids = torch.tensor([texts[0][:3], [start] * 3])
    lm.forward(ids.to(lm.device), np.zeros(2, dtype=np.int64))
    logits = lm.forward(torch.tensor([text[-2:] for text in texts], device=lm.device), fed)
    for row, (source, text) in enumerate(zip(sources, texts, strict=True)):
        expected = lm.model(
            input_ids=torch.tensor([source], device=lm.device),
            decoder_input_ids=torch.tensor([text], device=lm.device),
            use_cache=False,
        ).logits[0, -2:]
        if reason := difference(logits[row], expected):
            return reason
    return None
