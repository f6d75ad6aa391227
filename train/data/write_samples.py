"""The samples of a text that can be trained on are written to Arrow files."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from decode.base.artifact import write_directory
from decode.base.errors import UserError
from train.data.chat_tokens import Sample
from train.data.stored_samples import BLOCK, COLUMNS, COUNTS, FILE, LOST, sample_part, sizes


def fit(
    samples: Iterable[Sample], max_length: int, on_long: Literal["truncate", "drop"] = "truncate"
) -> tuple[list[Sample], Counter[str]]:
    """The samples that can be trained on, and the counts of kept and dropped samples.

    A sample longer than `max_length` tokens is cut from the right or dropped. A sample without a
    response token (after the cut) is dropped: it would cost a forward pass and teach nothing.

    The counts satisfy read = kept + "too long" + "no response tokens"; `truncated` samples are
    among the kept.
    """
    counts = Counter(dict.fromkeys(COUNTS, 0))
    kept = []
    for sample in samples:
        counts["read"] += 1
        long = len(sample.tokens) > max_length
        if long and on_long == "drop":
            counts["too long"] += 1
            continue
        if long:
            sample = replace(
                sample, tokens=sample.tokens[:max_length], mask=sample.mask[:max_length]
            )
        if not any(sample.mask):
            counts["no response tokens"] += 1
            continue
        counts["truncated"] += long
        counts["kept"] += 1
        kept.append(sample)
    return kept, counts


class NoSamples(UserError):
    """Nothing is left to train on."""


def require_kept(counts: Counter[str], max_length: int) -> None:
    """Raise NoSamples if nothing is kept. counts: the counts of `fit`."""
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
    max_length: int,
    on_long: Literal["truncate", "drop"] = "truncate",
) -> None:
    """Write one part: the samples that `fit` keeps, and their counts."""
    import datasets
    from datasets.arrow_writer import ArrowWriter

    ids, length = datasets.Sequence(datasets.Value("int32")), datasets.Value("int32")
    mask = datasets.Sequence(datasets.Value("bool"))
    features = datasets.Features(
        {"id": datasets.Value("string"), "tokens": ids, "mask": mask, "source": ids}
        | {"length": length, "predicted": length}
    )
    meta: dict[str, Any] = {}

    def fill(path: Path) -> None:
        counts: Counter[str] = Counter()
        rest = iter(samples)
        with ArrowWriter(path=str(path / FILE), features=features) as writer:
            while block := list(islice(rest, BLOCK)):
                kept, more = fit(block, max_length, on_long)
                counts.update(more)
                columns: dict[str, list[Any]] = {
                    name: [getattr(sample, name) for sample in kept] for name in COLUMNS
                }
                lengths, predicted = sizes(kept)
                writer.write_batch(columns | {"length": lengths, "predicted": predicted})
            writer.finalize()
        meta["counts"] = counts

    write_directory(sample_part(directory, number), fill, meta=meta)
