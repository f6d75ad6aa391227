"""Hidden states of the target that a `feature_cache` stage stored."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decode.base.errors import UserError
from decode.model.loading import Target
from decode.model.same_target import describe_target, require_same_target
from distill.teacher.cache_parts import CachedOutputs, write_part
from distill.teacher.feature_sources import join_rows

CACHE_NAME = "feature cache"


def bytes_per_token(target: Target, captured_layers: Sequence[int]) -> int:
    """Bytes of a token on disk."""
    hidden: int = target.model.config.get_text_config().hidden_size
    return len(captured_layers) * hidden * target.dtype.itemsize


def write_features(
    directory: Path,
    number: int,
    samples: Sequence[tuple[str, str]],
    features: Mapping[int, Sequence[Tensor]],
    made_with: Mapping[str, Any],
) -> None:
    """Write part `number` of the cache.

    samples: (id, `distill.teacher.cache_parts.text_sha256`) of each sample. features: by captured
    layer, [T, H] of each sample, in the target's dtype. made_with: the result of `describe_source`.
    """
    tensors = {_tensor_name(layer): x for layer, x in features.items()}
    meta = {"teacher": made_with, "captured_layers": list(features)}
    write_part(directory, number, samples, tensors, meta)


def describe_source(target: Target) -> dict[str, Any]:
    """The description of the target that a cache of its hidden states stores."""
    return {"target": target.name, **describe_target(target, weights=True)}


def _tensor_name(layer: int) -> str:
    return f"layer{layer}"


class CachedFeatures(CachedOutputs):
    """Hidden states from a cache, in place of `LiveFeatures`.

    Raises UserError if the cache was made from another target, other weights, another revision or
    dtype, lacks one of the captured_layers, or is damaged as `CachedOutputs` says. `require` raises
    UserError for texts that are not in the cache; `features` then raises KeyError.
    """

    def __init__(self, directory: Path, target: Target, captured_layers: Sequence[int]) -> None:
        super().__init__(directory, CACHE_NAME)
        self._captured_layers = list(captured_layers)
        for part, meta in self.kinds():
            require_same_target(meta["teacher"], target, f"the {CACHE_NAME} {directory}")
            lacking = [layer for layer in captured_layers if layer not in meta["captured_layers"]]
            if lacking:
                raise UserError(
                    f"feature cache {part} holds the layers {meta['captured_layers']}, but these "
                    f"heads also read {lacking}; make the cache again with "
                    f"captured_layers: {self._captured_layers}"
                )

    def features(
        self, input_ids: Tensor, attention_mask: Tensor, ids: Sequence[str]
    ) -> Mapping[int, Tensor]:
        """See `FeatureSource`.

        Without ids it returns features that only have the right shape. Such a batch has no tokens
        to train on.
        """
        if not ids:
            # Take the sizes and the dtype from any sample.
            sample = self._read(next(iter(self.samples)))
            rows = [{k: x[:1].expand(input_ids.shape[1], -1) for k, x in sample.items()}]
            return join_rows(rows, input_ids.device)
        return self._ahead.take(ids, input_ids.device)

    def read_batch(self, ids: Sequence[str]) -> dict[int, Tensor]:
        return join_rows([self._read(sample) for sample in ids], torch.device("cpu"))

    def _read(self, sample: str) -> dict[int, Tensor]:
        names = [_tensor_name(layer) for layer in self._captured_layers]
        return dict(zip(self._captured_layers, self.read(sample, names), strict=True))
