"""A model that runs through transformers' own forward, for models that the lean forward does not
know. Models that call attention by name get ours.

Shapes: B rows, n tokens fed per row, N query heads, K key heads, S slots, D head size, H hidden
size, V vocabulary.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from decode.model.cache.slots import SlotLayer
from decode.model.cache_names import with_cache
from decode.model.forward.attention_mask import SLOT_STEP, AttentionMask, equally_wide
from decode.model.forward.lean_forward import columns_of
from decode.model.hidden_states import Recorder
from decode.model.kinds.decoder_positions import reads_positions
from decode.model.kinds.layer_kinds import RECURRENT
from decode.model.pretrained import decoder_config

ATTENTION = "draftsmith"

# Arguments that some models pass in addition to the mask; `attention_forward` does not take them.
LEFT_TO_TRANSFORMERS = ("position_bias", "softcap", "s_aux", "cache")

# The mask of each layer in the pass that runs.
_masks: ContextVar[Sequence[AttentionMask]] = ContextVar("masks", default=())


@contextmanager
def attention_under(masks: Sequence[AttentionMask]) -> Iterator[None]:
    """Inside this context, `attention_forward` calls the watches of these masks, one per layer."""
    token = _masks.set(masks)
    try:
        yield
    finally:
        _masks.reset(token)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`AttentionMask.attend` for transformers' models. Same interface as transformers' attention
    functions: query [B, N, n, D], key and value [B, K, S, D], an additive mask [B, 1, n, S] or
    None; returns [B, n, N, D]. Cases that it does not support (no mask, a mask per head, a position
    bias) go to the function of transformers."""
    masks, scale = _masks.get(), query.shape[3] ** -0.5 if scaling is None else scaling
    if masks and masks[0].watch is not None:
        number: Any = module.layer_idx
        watch = masks[number].watch
        assert watch is not None  # all layers have one
        watch(query, key, value, scale)
    unsupported = any(kwargs.get(name) is not None for name in LEFT_TO_TRANSFORMERS)
    if attention_mask is None or attention_mask.shape[1] != 1 or unsupported:
        wide = equally_wide(query, key, value)
        output, _ = sdpa_attention_forward(module, *wide, attention_mask, dropout, scale, **kwargs)
        return output[..., : value.shape[3]], None
    mask = AttentionMask(attention_mask, query.dtype)
    # Some models call `view` on the result.
    return mask.attend(query, key, value, scale).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, attention_forward)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


class TransformersForward(nn.Module):
    """The same interface as `LeanForward`. The model may have our attention and packed layers."""

    pads, keeps_bits = True, False

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.has_our_attention = model.config._attn_implementation == ATTENTION
        self.slot_step = SLOT_STEP if self.has_our_attention else 1
        # Whether its positions come from the loop in a way of their own.
        self.reads_positions = reads_positions(model)
        self._recorder = functools.cache(functools.partial(Recorder, model))

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        masks: Sequence[AttentionMask],
        slots: Sequence[SlotLayer],
        columns: Tensor | None = None,
        captured_layers: Sequence[int] = (),
    ) -> tuple[Tensor, Mapping[int, Tensor]]:
        """See `LeanForward.forward`."""
        attention = attention_under(masks)
        recording: AbstractContextManager[Mapping[int, Tensor]] = nullcontext({})
        if captured_layers:
            recording = self._recorder(tuple(captured_layers)).recording()
        with attention, recording as features, self._restricted_output(columns, ids.shape[1]):
            logits = self._logits(ids, positions, masks, slots)
        # `_restricted_output` does nothing for a model without an accessible output layer.
        if columns is not None and logits.shape[1] != columns.shape[1]:
            logits = columns_of(logits, columns)
        return logits, features

    def _logits(
        self,
        ids: Tensor,
        positions: Tensor,
        masks: Sequence[AttentionMask],
        slots: Sequence[SlotLayer],
    ) -> Tensor:
        """The model's logits for the fed tokens."""
        logits: Tensor = self.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=self._mask(masks, ids),
            use_cache=True,
            **with_cache(self.model, Cache(layers=list(slots))),
        ).logits
        return logits

    def _mask(self, masks: Sequence[AttentionMask], ids: Tensor) -> Any:
        """One mask, or one for each layer type if these have different windows or running states.
        Layers with such a state get none: no padding reaches it."""
        kinds = getattr(decoder_config(self.model), "layer_types", None) or ()
        recurrent = RECURRENT.intersection(kinds)
        if recurrent:
            # Without a mask, transformers' eager attention is not causal.
            eager = self.model.config._attn_implementation not in (ATTENTION, "sdpa")
            by_kind = {
                kind: self._form(mask, ids) if eager or mask.visible is not None else None
                for kind, mask in zip(kinds, masks, strict=True)
                if kind not in recurrent
            }
            return by_kind | dict.fromkeys(recurrent)
        if all(mask.visible is None for mask in masks):
            return None
        different = {id(mask.visible): self._form(mask, ids) for mask in masks}
        if len(different) == 1:
            return different[id(masks[0].visible)]
        forms = [different[id(mask.visible)] for mask in masks]
        return dict(zip(kinds, forms, strict=True))

    def _form(self, mask: AttentionMask, ids: Tensor) -> Tensor | None:
        """The mask as the model's attention takes it."""
        if mask.visible is None:
            tokens = ids.shape[1]
            causal = torch.ones(tokens, tokens, dtype=torch.bool, device=ids.device).tril()
            mask = AttentionMask(causal[None, None], self.model.dtype)
        boolean = self.model.config._attn_implementation == "sdpa"
        return mask.visible if boolean else mask.additive

    @contextmanager
    def _restricted_output(self, columns: Tensor | None, n: int) -> Iterator[None]:
        """Inside this context, the output layer gets the hidden states of only these columns of n.
        Logits of all columns would be by far the largest tensor of a prefill. Later operations
        of the model on its logits (scaling, soft caps) are not affected."""
        get_layer = getattr(self.model, "get_output_embeddings", None)
        few = columns is not None and n > columns.shape[1]
        layer = get_layer() if get_layer and few else None
        if layer is None:
            yield
            return
        assert columns is not None

        def pick(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            hidden, *others = inputs
            if hidden.shape[:2] != (len(columns), n):
                return None
            return columns_of(hidden, columns), *others

        # A hook that stays would affect other users of the model.
        with layer.register_forward_pre_hook(pick):
            yield
