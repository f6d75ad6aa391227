"""Runs through samples in parts, to write the target's results for them to disk."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from decode.artifact import verify_directory
from distill.teacher.cache_parts import PART, text_sha256
from train.data.batches import Batch, Inputs, bucket_batches, collate, inputs
from train.data.chat import Sample
from train.stage import StageContext

# (number of the part, its samples, (id, text_sha256) of each) → the number of scored tokens
Write = Callable[[int, Sequence[Sample], list[tuple[str, str]]], int]


def write_parts(
    context: StageContext, samples: Sequence[Sample], part_samples: int, write: Write
) -> float | None:
    """Write every missing part, with all ranks together. Returns the tokens per second that this
    rank scored, or None if it scored none. Raises UserError for a damaged part."""
    rank, world = context.accelerator.process_index, context.accelerator.num_processes
    begin, scored = time.perf_counter(), 0
    with context.reporter.bar("scoring", len(samples)) as bar:
        for number, first in enumerate(range(0, len(samples), part_samples)):
            part = samples[first : first + part_samples]
            directory: Path = context.directory / f"{PART}{number}"
            if directory.exists():
                verify_directory(directory)
            elif number % world == rank:
                # Each rank writes complete parts without communication, so no rank waits.
                names = [(s.id, text_sha256(s.tokens, s.mask)) for s in part]
                scored += write(number, part, names)
            bar.update(first + len(part))
    context.accelerator.wait_for_everyone()
    return scored / (time.perf_counter() - begin) if scored else None


def batches_of(
    context: StageContext, part: Sequence[Sample], tokens_per_batch: int
) -> Iterator[tuple[list[int], Batch, Inputs]]:
    """A part in batches of similar length: the samples' indices in the part, the batch, and its
    tensors on the target's device."""
    pad_id = context.target.tokenizer.pad_token_id or 0
    lengths = [len(sample.tokens) for sample in part]
    for rows in bucket_batches(lengths, tokens_per_batch=tokens_per_batch, seed=0, epoch=0):
        batch = collate([part[i] for i in rows], pad_id)
        yield rows, batch, inputs(batch, context.target.device)


def size(count: float) -> str:
    """A number of bytes in readable units."""
    return f"{count / 2**20:.1f} MiB" if count < 2**30 else f"{count / 2**30:.1f} GiB"
