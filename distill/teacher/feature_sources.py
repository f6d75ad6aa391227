"""The target's hidden states for training: live, or from an offline cache.

Live, one forward per batch serves all heads. From a cache, one forward per text serves any number
of runs.

Shapes: B rows, T tokens of a text, H hidden size.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from decode.base.artifact import verify_directory
from decode.base.errors import UserError
from decode.model.hidden_states import Recorder
from decode.model.identity import describe_target, require_same_target
from decode.model.loading import Target
from distill.teacher.cache_parts import Parts, Text, part_directories, write_part
from distill.teacher.decoder_states import decoder_states, padded_sources
from distill.teacher.read_ahead import ReadAhead

CACHE_NAME = "feature cache"


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
    forward. timed(): a context in which the work is done. sources: for a target with an encoder,
    what it reads for each sample. The hidden states are then those of the decoder.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        captured_layers: Sequence[int],
        *,
        remember: bool = False,
        timed: Callable[[], AbstractContextManager[None]] = nullcontext,
        sources: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self._sources = sources
        self._model, self._captured_layers, self._timed = model, captured_layers, timed
        self._recorder = Recorder(model, captured_layers)
        self._remembered: dict[str, dict[int, Tensor]] | None = {} if remember else None

    @torch.no_grad()
    def features(
        self, input_ids: Tensor, attention_mask: Tensor, ids: Sequence[str]
    ) -> Mapping[int, Tensor]:
        """See `FeatureSource`."""
        with self._timed():
            remembered = self._remembered
            if remembered and ids and all(sample in remembered for sample in ids):
                return join_rows([remembered[sample] for sample in ids], input_ids.device)
            with self._recorder.recording() as features:
                if self._sources is None:
                    self._model.base_model(
                        input_ids=input_ids, attention_mask=attention_mask, use_cache=False
                    )
                else:
                    read = padded_sources(self._sources, ids, input_ids.device)
                    decoder_states(self._model, read, input_ids, attention_mask)
            if remembered is not None:
                lengths = attention_mask.sum(1).tolist()
                for row, (sample, length) in enumerate(zip(ids, lengths, strict=False)):
                    remembered[sample] = {
                        layer: x[row, :length].cpu() for layer, x in features.items()
                    }
            return features


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


def holds_features(directory: Path) -> bool:
    """Whether a cache holds hidden states. Raises UserError for a directory without a cache."""
    first, *_ = part_directories(directory, "cache")
    return "captured_layers" in verify_directory(first, deep=False)


class CachedFeatures:
    """Hidden states from a cache, in place of `LiveFeatures`.

    Raises UserError if the cache was made from another target, other weights, another revision or
    dtype, lacks one of the captured_layers, or is damaged as `Parts` says. `require` raises
    UserError for texts that are not in the cache; `features` then raises KeyError.
    """

    def __init__(self, directory: Path, target: Target, captured_layers: Sequence[int]) -> None:
        self.parts = Parts(directory, CACHE_NAME)
        self._captured_layers = list(captured_layers)
        self._ahead = ReadAhead(self._read_batch)
        for part, meta in self.parts.kinds():
            require_same_target(meta["teacher"], target, f"the {CACHE_NAME} {directory}")
            lacking = [layer for layer in captured_layers if layer not in meta["captured_layers"]]
            if lacking:
                raise UserError(
                    f"feature cache {part} holds the layers {meta['captured_layers']}, but these "
                    f"heads also read {lacking}; make the cache again with "
                    f"captured_layers: {self._captured_layers}"
                )

    def require(self, samples: Iterable[Text]) -> None:
        """Raise UserError unless the cache holds every sample with its text."""
        self.parts.require(samples)

    def features(
        self, input_ids: Tensor, attention_mask: Tensor, ids: Sequence[str]
    ) -> Mapping[int, Tensor]:
        """See `FeatureSource`.

        Without ids it returns features that only have the right shape. Such a batch has no tokens
        to train on.
        """
        if not ids:
            # Take the sizes and the dtype from any sample.
            sample = self._read(next(iter(self.parts.samples)))
            rows = [{k: x[:1].expand(input_ids.shape[1], -1) for k, x in sample.items()}]
            return join_rows(rows, input_ids.device)
        return self._ahead.take(ids, input_ids.device)

    def expect(self, batches: Sequence[Sequence[str]]) -> None:
        """Read these batches of samples in the background (`ReadAhead.expect`)."""
        self._ahead.expect(batches)

    def _read_batch(self, ids: Sequence[str]) -> dict[int, Tensor]:
        return join_rows([self._read(sample) for sample in ids], torch.device("cpu"))

    def _read(self, sample: str) -> dict[int, Tensor]:
        names = [_tensor_name(layer) for layer in self._captured_layers]
        return dict(zip(self._captured_layers, self.parts.read(sample, names), strict=True))


def join_rows(rows: Sequence[Mapping[int, Tensor]], device: torch.device) -> dict[int, Tensor]:
    """Return [B, T, H] by layer, from [T, H] by layer for each row. Padded with 0 on the right."""
    return {
        layer: pad_sequence([row[layer] for row in rows], batch_first=True).to(device)
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
