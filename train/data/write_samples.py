"""The samples of a text are written to Arrow files."""

from collections import Counter
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from decode.base.artifact import write_directory
from decode.base.errors import UserError
from train.data.chat_tokens import Sample
from train.data.stored_samples import BLOCK, COLUMNS, FILE, LOST, sample_part, sizes


class NoSamples(UserError):
    """Nothing is left to train on."""


def require_kept(counts: Counter[str], max_length: int) -> None:
    """Raise NoSamples if nothing is kept. counts: those of `StoredSamples`."""
    if not counts["kept"]:
        lost = ", ".join(f"{reason}: {counts[reason]}" for reason in LOST if counts[reason])
        raise NoSamples(
            f"no sample to train on: {counts['read']} read, 0 kept ({lost or 'no samples'}) at a "
            f"maximum length of {max_length} tokens. Raise the maximum length, or give rows with "
            f"responses."
        )


def write_samples(
    directory: Path,
    number: int,
    samples: Iterable[Sample],
    meta: dict[str, Any] | None = None,
) -> None:
    """Write one part. meta: JSON values for the manifest, which is written after the samples."""
    import datasets
    from datasets.arrow_writer import ArrowWriter

    ids, length = datasets.Sequence(datasets.Value("int32")), datasets.Value("int32")
    mask = datasets.Sequence(datasets.Value("bool"))
    features = datasets.Features(
        {"id": datasets.Value("string"), "tokens": ids, "mask": mask, "source": ids}
        | {"length": length, "predicted": length}
    )

    def fill(path: Path) -> None:
        rest = iter(samples)
        with ArrowWriter(path=str(path / FILE), features=features) as writer:
            while block := list(islice(rest, BLOCK)):
                columns: dict[str, list[Any]] = {
                    name: [getattr(sample, name) for sample in block] for name in COLUMNS
                }
                lengths, predicted = sizes(block)
                writer.write_batch(columns | {"length": lengths, "predicted": predicted})
            writer.finalize()

    write_directory(sample_part(directory, number), fill, meta=meta)
