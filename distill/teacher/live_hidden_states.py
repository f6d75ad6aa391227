"""The target's hidden states for training: one forward per batch for all heads."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from decode.target.hidden_states import Recorder


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

    captured_layers: the layers whose hidden states are captured. remember: keep the hidden states
    of each sample in CPU memory, H numbers per token and layer, so that later epochs need no
    forward. timed(): a context in which the work is done.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        captured_layers: Sequence[int],
        *,
        remember: bool = False,
        timed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._model, self._captured_layers, self._timed = model, captured_layers, timed
        self._recorder = Recorder(model, captured_layers)
        self._kept: dict[str, dict[int, Tensor]] | None = {} if remember else None

    @torch.no_grad()
    def features(
        self, input_ids: Tensor, attention_mask: Tensor, ids: Sequence[str]
    ) -> Mapping[int, Tensor]:
        """See `FeatureSource`."""
        with self._timed():
            kept = self._kept
            if kept and ids and all(sample in kept for sample in ids):
                rows = [kept[sample] for sample in ids]
                return {
                    layer: pad_sequence([row[layer] for row in rows], batch_first=True).to(
                        input_ids.device
                    )
                    for layer in self._captured_layers
                }
            with self._recorder.recording() as found:
                self._model.base_model(
                    input_ids=input_ids, attention_mask=attention_mask, use_cache=False
                )
            if kept is not None:
                lengths = attention_mask.sum(1).tolist()
                for row, (sample, length) in enumerate(zip(ids, lengths, strict=False)):
                    kept[sample] = {layer: x[row, :length].cpu() for layer, x in found.items()}
            return found
