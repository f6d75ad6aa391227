"""Data: rows to examples (`read`), examples to masked tokens (`chat`), samples to `batches`."""

from train.data.batches import (
    Batch,
    Batches,
    RankBatches,
    bucket_batches,
    collate,
    fit,
    padding_share,
)
from train.data.chat import Sample, has_template, prompt_tokens, to_sample
from train.data.read import Example, ReadReport, data_fingerprint, read_examples, spread

__all__ = [
    "Batch",
    "Batches",
    "Example",
    "RankBatches",
    "ReadReport",
    "Sample",
    "bucket_batches",
    "collate",
    "data_fingerprint",
    "fit",
    "has_template",
    "padding_share",
    "prompt_tokens",
    "read_examples",
    "spread",
    "to_sample",
]
