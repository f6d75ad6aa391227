"""Batches of samples of similar length, in an order that is a pure function of (seed, epoch).

Shapes: B rows of a batch, T the length of its longest row.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, TypedDict

import torch

from decode.errors import UserError
from train.data.chat import Sample


def fit(
    samples: Sequence[Sample], max_length: int, on_long: Literal["truncate", "drop"] = "truncate"
) -> tuple[list[Sample], dict[str, int]]:
    """The samples that can be trained on, and the counts of kept and dropped samples.

    A sample longer than `max_length` tokens is cut from the right or dropped. A sample without a
    response token (after the cut) is dropped: it would cost a forward pass and teach nothing.

    The counts satisfy read = kept + "too long" + "no response tokens"; `truncated` samples are
    among the kept. Raises UserError if nothing is kept.
    """
    reasons = ("too long", "no response tokens")
    counts = dict.fromkeys(("read", "kept", "truncated", *reasons), 0)
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
    if not kept:
        lost = ", ".join(f"{reason}: {counts[reason]}" for reason in reasons if counts[reason])
        raise UserError(
            f"no sample to train on: {counts['read']} read, 0 kept ({lost or 'no samples'}) at a "
            f"maximum length of {max_length} tokens. Raise the maximum length, or give rows with "
            f"responses."
        )
    return kept, counts


def bucket_batches(
    lengths: Sequence[int], *, tokens_per_batch: int, seed: int, epoch: int
) -> list[list[int]]:
    """Indices into `lengths`, each exactly once, grouped by similar length.

    The longest row times the number of rows is at most `tokens_per_batch`. A sample longer than
    that is the only row of its batch. The contents of the batches and their order are shuffled by
    (seed, epoch).

    >>> bucket_batches([2, 9, 2, 9], tokens_per_batch=20, seed=0, epoch=0)
    [[3, 1], [2, 0]]
    """
    if tokens_per_batch < 1:
        raise UserError(f"tokens_per_batch is {tokens_per_batch}; expected at least 1.")

    def shuffled(what: str, number: int) -> bytes:
        return _hash(f"{seed} {epoch} {what} {number}")

    order = sorted(range(len(lengths)), key=lambda i: (_bucket(lengths[i]), shuffled("row", i)))
    batches: list[list[int]] = []
    longest = 0
    for i in order:
        longest = max(longest, lengths[i])
        if not batches or longest * (len(batches[-1]) + 1) > tokens_per_batch:
            batches.append([])
            longest = lengths[i]
        batches[-1].append(i)
    # The first row identifies a batch, so its shuffle key does not depend on the batch count.
    return sorted(batches, key=lambda batch: shuffled("batch", batch[0]))


def permutation(count: int, key: str) -> list[int]:
    """The numbers below `count` in an order that is a pure function of `key`."""
    return sorted(range(count), key=lambda number: _hash(f"{key} {number}"))


def _hash(key: str) -> bytes:
    # A hash, not a random generator: the order must be the same in all versions of the libraries.
    return hashlib.blake2b(key.encode(), digest_size=8).digest()


def _bucket(length: int) -> int:
    """The length rounded down to one of 16 steps per doubling: at most 1/16 of a row is padding."""
    step = 1 << max(length.bit_length() - 5, 0)
    return length - length % step


def padding_share(batches: Sequence[Sequence[int]], lengths: Sequence[int]) -> float:
    """The share of padding among all tokens of the padded batches, in [0, 1)."""
    rows = [[lengths[i] for i in batch] for batch in batches if batch]
    padded = sum(max(row) * len(row) for row in rows)
    return 1 - sum(map(sum, rows)) / padded if padded else 0.0


class Batches:
    """The batches of one epoch. `batch(i)` is the same at every call and on every machine.

    A run that stopped after batch k resumes with batch k + 1 of the same (seed, epoch). The
    global batches do not depend on the number of ranks: `for_rank` only distributes their rows.
    """

    def __init__(
        self, lengths: Sequence[int], *, tokens_per_batch: int, seed: int, epoch: int
    ) -> None:
        self._batches = bucket_batches(
            lengths, tokens_per_batch=tokens_per_batch, seed=seed, epoch=epoch
        )

    def __len__(self) -> int:
        return len(self._batches)

    def batch(self, i: int) -> list[int]:
        """The indices of the samples of global batch `i`, 0 <= i < len(self)."""
        return list(self._batches[i])

    def for_rank(self, rank: int, world: int) -> "RankBatches":
        """The part of one of `world` ranks."""
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} of {world}; expected 0 <= rank < world")
        return RankBatches(self, rank, world)


class RankBatches:
    """One rank's rows of the same global batches. Every rank has the same number of batches.

    If a global batch has fewer rows than there are ranks, some ranks get no row. `collate` then
    makes a row that takes part in the step but adds nothing to it.
    """

    def __init__(self, batches: Batches, rank: int, world: int) -> None:
        self._batches = batches
        self._rank = rank
        self._world = world

    def __len__(self) -> int:
        return len(self._batches)

    def batch(self, i: int) -> list[int]:
        """Rows rank, rank + world, ... of global batch `i`; may be empty."""
        return self._batches.batch(i)[self._rank :: self._world]


class RankText:
    """One rank's samples of the batches of a round.

    round: its number. `batch(i)` is the same at every call, as in `RankBatches`.
    """

    def __init__(self, number: int, samples: Sequence[Sample], batches: RankBatches) -> None:
        self.round, self._samples, self._batches = number, samples, batches

    def __len__(self) -> int:
        return len(self._batches)

    def batch(self, i: int) -> list[Sample]:
        """The samples of batch `i`; may be empty."""
        return [self._samples[row] for row in self._batches.batch(i)]


class Batch(TypedDict):
    """The input of one step; rows are padded on the right."""

    input_ids: torch.Tensor  # [B, T] int64
    attention_mask: torch.Tensor  # [B, T] int64: 1 on tokens, 0 on padding
    loss_mask: torch.Tensor  # [B, T] bool
    ids: list[str]  # B, of the samples


def collate(samples: Sequence[Sample], pad_id: int) -> Batch:
    """Pad on the right to the longest of B samples.

    Without samples, returns one row of two padding tokens that are attended to but are in no loss
    (B = 1, no ids): a rank without rows must still take part in the collectives of the step, and a
    row that attends to nothing would give NaN.
    """
    if not samples:
        return {
            "input_ids": torch.full((1, 2), pad_id),
            "attention_mask": torch.ones(1, 2, dtype=torch.int64),
            "loss_mask": torch.zeros(1, 2, dtype=torch.bool),
            "ids": [],
        }
    shape = len(samples), max(len(sample.tokens) for sample in samples)
    input_ids = torch.full(shape, pad_id)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    for row, sample in enumerate(samples):
        length = len(sample.tokens)
        input_ids[row, :length] = torch.tensor(sample.tokens)
        attention_mask[row, :length] = 1
        loss_mask[row, :length] = torch.tensor(sample.mask)
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "loss_mask": loss_mask,
        "ids": [sample.id for sample in samples],
    }


class Inputs(TypedDict):
    """The tensors of a `Batch`."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    loss_mask: torch.Tensor


def inputs(batch: Batch, device: torch.device) -> Inputs:
    """A batch's tensors, on a device."""
    return {
        "input_ids": batch["input_ids"].to(device),
        "attention_mask": batch["attention_mask"].to(device),
        "loss_mask": batch["loss_mask"].to(device),
    }
