"""An offline cache of the target's hidden states: one forward a text for any number of trainings.

Shapes: T tokens of a text, H hidden size.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from decode.errors import UserError
from decode.target.loading import Target
from distill.teacher.parts import Parts, describe_target, require_same_target, write_part

WHAT = "feature cache"


def bytes_per_token(target: Target, taps: Sequence[int]) -> int:
    """What a token takes on disk."""
    hidden: int = target.model.config.get_text_config().hidden_size
    return len(taps) * hidden * target.dtype.itemsize


def write_features(
    directory: Path,
    number: int,
    samples: Sequence[tuple[str, str]],
    features: Mapping[int, Sequence[Tensor]],
    target: Target,
) -> None:
    """Write part `number`: by tap, [T, H] of each sample, in the target's dtype. samples: (id,
    `distill.teacher.parts.text_sha256`) of each."""
    tensors = {_name(tap): x for tap, x in features.items()}
    meta = {"teacher": describe_target(target), "taps": list(features)}
    write_part(directory, number, samples, tensors, meta)


def _name(tap: int) -> str:
    return f"tap{tap}"


def holds_features(directory: Path) -> bool:
    """Whether a cache is of hidden states. Raises UserError for a directory that holds no cache."""
    return all("taps" in meta for meta in Parts(directory, "cache").metas.values())


class CachedFeatures:
    """Hidden states from a cache, in the place of
    `distill.teacher.live_hidden_states.LiveFeatures`.

    Raises UserError when it was made from another target, revision or dtype, lacks one of the taps,
    or is damaged. `require` raises it for texts that it was not made of.
    """

    def __init__(self, directory: Path, target: Target, taps: Sequence[int]) -> None:
        self.parts = Parts(directory, WHAT)
        self._taps = list(taps)
        for part, meta in self.parts.metas.items():
            what = f"the {WHAT} {directory}"
            require_same_target(meta["teacher"], target, what, f"the target of {what}")
            lacking = [tap for tap in taps if tap not in meta["taps"]]
            if lacking:
                raise UserError(
                    f"the feature cache {part} holds the taps {meta['taps']} and these heads read "
                    f"{lacking} as well; make it with taps: {self._taps}"
                )

    def require(self, samples: Sequence[tuple[str, str]]) -> None:
        """Raise UserError unless it holds every (id, text_sha256)."""
        self.parts.require(samples)

    def features(
        self, input_ids: Tensor, attention_mask: Tensor, ids: Sequence[str]
    ) -> Mapping[int, Tensor]:
        """See `distill.teacher.live_hidden_states.FeatureSource`; a batch without samples has
        nothing to learn."""
        device = input_ids.device
        names = [_name(tap) for tap in self._taps]
        rows = [self.parts.read(sample, names) for sample in ids]
        if not rows:
            # The sizes and the dtype are those of any other sample.
            some = self.parts.read(next(iter(self.parts.samples)), names)
            rows = [[x[:1].expand(input_ids.shape[1], -1) for x in some]]
        return {
            tap: pad_sequence([row[i] for row in rows], batch_first=True).to(device)
            for i, tap in enumerate(self._taps)
        }


def split_rows(features: Mapping[int, Tensor], lengths: Sequence[int]) -> list[dict[int, Tensor]]:
    """Each row's own [T, H] by tap, of a padded batch, on the CPU."""
    return [
        {tap: x[row, :length].to("cpu", copy=True) for tap, x in features.items()}
        for row, length in enumerate(lengths)
    ]
