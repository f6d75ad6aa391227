"""The target's hidden states for a slice that is measured again and again, read once.

Shapes: B rows, T tokens of a text, H hidden size.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.model.pretrained import is_sharded
from distill.teacher.feature_sources import FeatureSource, LiveFeatures, join_rows, split_rows


class DevFeatures:
    """Keeps what a source gives for each sample in CPU memory, H numbers per token and layer: a
    slice that is measured again and again is read once."""

    def __init__(self, source: FeatureSource) -> None:
        self._source = source
        self._read: dict[str, dict[int, Tensor]] = {}

    def features(
        self, input_ids: Tensor, attention_mask: Tensor, ids: Sequence[str]
    ) -> Mapping[int, Tensor]:
        """See `FeatureSource`."""
        if not all(sample in self._read for sample in ids):
            features = self._source.features(input_ids, attention_mask, ids)
            lengths = attention_mask.sum(1).tolist()
            rows = split_rows(features, lengths[: len(ids)], torch.device("cpu"))
            self._read.update(zip(ids, rows, strict=True))
            return features
        return join_rows([self._read[sample] for sample in ids], input_ids.device)


def dev_features(
    model: PreTrainedModel,
    captured_layers: Sequence[int],
    sources: Mapping[str, Sequence[int]] | None = None,
) -> FeatureSource:
    """A source for a dev slice. It is one of its own: samples of two splits may have the same id.
    All ranks must run a sharded target together, so none may skip it there."""
    live = LiveFeatures(model, captured_layers, sources=sources)
    return live if is_sharded(model) else DevFeatures(live)
