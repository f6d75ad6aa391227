"""The target's hidden states for training: live, or from an offline cache.

Live, one forward per batch serves all heads. From a cache, one forward per text serves any number
of runs.

Shapes: B rows, T tokens of a text, H hidden size.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from decode.base.device import to_device
from decode.model.hidden_states import Recorder
from distill.float32_products import float32_products
from distill.teacher.decoder_states import decoder_states, padded_sources


class FeatureSource(Protocol):
    """A source of the target's hidden states for a batch."""

    def features(
        self, input_ids: Tensor, attention_mask: Tensor, ids: Sequence[str]
    ) -> Mapping[int, Tensor]:
        """Return [B, T, H] by captured layer, in the target's dtype, for a batch [B, T] of samples
        `ids`."""
        ...


class LiveFeatures:
    """Runs the frozen target over each batch, once, without gradients and without logits.

    captured_layers: the layers whose hidden states are captured. timed(): a context in which the
    work is done. sources: for a target with an encoder, what it reads for each sample. The hidden
    states are then those of the decoder.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        captured_layers: Sequence[int],
        *,
        timed: Callable[[], AbstractContextManager[None]] = nullcontext,
        sources: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self._model, self._timed, self._sources = model, timed, sources
        self._recorder = Recorder(model, captured_layers)

    @torch.no_grad()
    def features(
        self, input_ids: Tensor, attention_mask: Tensor, ids: Sequence[str]
    ) -> Mapping[int, Tensor]:
        """See `FeatureSource`."""
        with self._timed():
            with self._recorder.recording() as features, float32_products(self._model):
                if self._sources is None:
                    self._model.base_model(
                        input_ids=input_ids, attention_mask=attention_mask, use_cache=False
                    )
                else:
                    read = padded_sources(self._sources, ids, input_ids.device)
                    decoder_states(self._model, read, input_ids, attention_mask)
            return features


def join_rows(rows: Sequence[Mapping[int, Tensor]], device: torch.device) -> dict[int, Tensor]:
    """Return [B, T, H] by layer, from [T, H] by layer for each row. Padded with 0 on the right."""
    return {
        layer: to_device(pad_sequence([row[layer] for row in rows], batch_first=True), device)
        for layer in rows[0]
    }


def split_rows(
    features: Mapping[int, Tensor], lengths: Sequence[int], device: torch.device
) -> list[dict[int, Tensor]]:
    """Split a padded batch into rows without padding: [T, H] by layer, row by row. The rows are
    copies, so they do not keep the batch in memory."""
    return [
        {layer: x[row, :length].to(device, copy=True) for layer, x in features.items()}
        for row, length in enumerate(lengths)
    ]
