"""An offline cache of the target's hidden states: one forward per text for any number of runs.

Shapes: T tokens of a text, H hidden size.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from decode.errors import UserError
from decode.target.identity import describe_target, require_same_target
from decode.target.loading import Target
from distill.teacher.parts import Parts, write_part

WHAT = "feature cache"


def bytes_per_token(target: Target, captured_layers: Sequence[int]) -> int:
    """Bytes of a token on disk."""
    hidden: int = target.model.config.get_text_config().hidden_size
    return len(captured_layers) * hidden * target.dtype.itemsize


def write_features(
    directory: Path,
    number: int,
    samples: Sequence[tuple[str, str]],
    features: Mapping[int, Sequence[Tensor]],
    target: Target,
) -> None:
    """Write part `number` of the cache.

    samples: (id, `distill.teacher.parts.text_sha256`) of each sample. features: by captured layer,
    [T, H] of each sample, in the target's dtype.
    """
    tensors = {_name(layer): x for layer, x in features.items()}
    teacher = {"target": target.name, **describe_target(target, weights=True)}
    meta = {"teacher": teacher, "captured_layers": list(features)}
    write_part(directory, number, samples, tensors, meta)


def _name(layer: int) -> str:
    return f"layer{layer}"


def holds_features(directory: Path) -> bool:
    """Whether a cache holds hidden states. Raises UserError for a directory without a cache."""
    return all("captured_layers" in meta for meta in Parts(directory, "cache").metas.values())


class CachedFeatures:
    """Hidden states from a cache. Replaces `distill.teacher.live_hidden_states.LiveFeatures`.

    Raises UserError if the cache was made from another target, revision or dtype, lacks one of the
    captured_layers, or is damaged. `require` raises UserError for texts that are not in the cache.
    """

    def __init__(self, directory: Path, target: Target, captured_layers: Sequence[int]) -> None:
        self.parts = Parts(directory, WHAT)
        self._captured_layers = list(captured_layers)
        for part, meta in self.parts.metas.items():
            require_same_target(meta["teacher"], target, f"the {WHAT} {directory}")
            lacking = [layer for layer in captured_layers if layer not in meta["captured_layers"]]
            if lacking:
                raise UserError(
                    f"feature cache {part} holds the layers {meta['captured_layers']} and these "
                    f"heads read {lacking} as well; make it with "
                    f"captured_layers: {self._captured_layers}"
                )

    def require(self, samples: Sequence[tuple[str, str]]) -> None:
        """Raise UserError unless the cache holds every (id, text_sha256)."""
        self.parts.require(samples)

    def features(
        self, input_ids: Tensor, attention_mask: Tensor, ids: Sequence[str]
    ) -> Mapping[int, Tensor]:
        """See `distill.teacher.live_hidden_states.FeatureSource`.

        Without ids it returns features that only have the right shape. Such a batch has no tokens
        to train on.
        """
        device = input_ids.device
        names = [_name(layer) for layer in self._captured_layers]
        rows = [self.parts.read(sample, names) for sample in ids]
        if not rows:
            # Take the sizes and the dtype from any sample.
            some = self.parts.read(next(iter(self.parts.samples)), names)
            rows = [[x[:1].expand(input_ids.shape[1], -1) for x in some]]
        return {
            layer: pad_sequence([row[i] for row in rows], batch_first=True).to(device)
            for i, layer in enumerate(self._captured_layers)
        }


def split_rows(features: Mapping[int, Tensor], lengths: Sequence[int]) -> list[dict[int, Tensor]]:
    """Split a padded batch into rows without padding, on the CPU: [T, H] by layer, row by row."""
    return [
        {layer: x[row, :length].to("cpu", copy=True) for layer, x in features.items()}
        for row, length in enumerate(lengths)
    ]
