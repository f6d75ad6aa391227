"""Batches of samples of similar length, in an order that is a pure function of (seed, epoch).

Shapes: B rows of a batch, T the length of its longest row.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypedDict

import numpy as np
import torch

from decode.base.device import to_device
from decode.base.errors import UserError
from decode.model.loading import Target
from train.data.chat_tokens import Sample
from train.data.stored_samples import sample_ids, take


def bucket_batches(
    lengths: Sequence[int] | np.ndarray, *, tokens_per_batch: int, seed: int, epoch: int
) -> list[list[int]]:
    """The batches of `Batches` as one list.

    >>> bucket_batches([2, 9, 2, 9], tokens_per_batch=20, seed=0, epoch=0)
    [[3, 1], [2, 0]]
    """
    batches = Batches(lengths, tokens_per_batch=tokens_per_batch, seed=seed, epoch=epoch)
    return [batches.batch(i) for i in range(len(batches))]


class Batches:
    """Indices into `lengths`, each exactly once, grouped by similar length: one epoch.

    The longest row times the number of rows is at most `tokens_per_batch`. A sample longer than
    that is the only row of its batch. The contents of the batches and their order are shuffled by
    (seed, epoch), the same at every call and on every machine: a run that stopped after batch k
    resumes with batch k + 1. They do not depend on the number of ranks.
    """

    def __init__(
        self, lengths: Sequence[int] | np.ndarray, *, tokens_per_batch: int, seed: int, epoch: int
    ) -> None:
        if tokens_per_batch < 1:
            raise UserError(f"tokens_per_batch is {tokens_per_batch}; expected at least 1.")
        sizes = np.asarray(lengths, np.int64)
        rows = _shuffle_keys(range(len(sizes)), lambda i: f"{seed} {epoch} row {i}")
        # All rows, by batch in the order of their lengths.
        self._rows = np.lexsort((rows, _buckets(sizes)))
        starts: list[int] = []
        longest = count = 0
        for place, size in enumerate(sizes[self._rows].tolist()):
            longest = max(longest, size)
            count += 1
            if not starts or longest * count > tokens_per_batch:
                starts.append(place)
                longest, count = size, 1
        self._starts = np.array(starts, np.int64)
        self._ends = np.append(self._starts[1:], len(sizes)) if starts else self._starts
        # The first row identifies a batch, so its shuffle key does not depend on the batch count.
        firsts = self._rows[self._starts]
        order = _shuffle_keys(firsts.tolist(), lambda i: f"{seed} {epoch} batch {i}")
        self._order = np.argsort(order, kind="stable")

    def __len__(self) -> int:
        return len(self._order)

    def idle_ranks(self, world: int) -> float:
        """The mean number of `world` ranks that get no row of a batch, in [0, world)."""
        idle = np.maximum(world - (self._ends - self._starts), 0)
        return float(idle.mean()) if len(idle) else 0.0

    def batch(self, i: int) -> list[int]:
        """The indices of the samples of global batch `i`, 0 <= i < len(self)."""
        place = self._order[i]
        return self._rows[self._starts[place] : self._ends[place]].tolist()


def permutation(count: int, key: str) -> list[int]:
    """The numbers below `count` in an order that is a pure function of `key`."""
    keys = _shuffle_keys(range(count), lambda i: f"{key} {i}")
    return np.argsort(keys, kind="stable").tolist()


def _shuffle_keys(numbers: Sequence[int], key: Callable[[int], str]) -> np.ndarray:
    """uint64: a hash of each number's key."""
    # A hash, not a random generator: the order must be the same in all versions of the libraries.
    hashes = (hashlib.blake2b(key(i).encode(), digest_size=8).digest() for i in numbers)
    return np.fromiter(map(int.from_bytes, hashes), np.uint64, len(numbers))


def _buckets(lengths: np.ndarray) -> np.ndarray:
    """The lengths rounded down to one of 16 steps per doubling: at most 1/16 of a row is
    padding."""
    bits = np.frexp(lengths)[1].astype(np.int64)
    return lengths - lengths % (1 << np.maximum(bits - 5, 0))


def padding_share(batches: Iterable[Sequence[int]], lengths: Sequence[int] | np.ndarray) -> float:
    """The share of padding among all tokens of the padded batches, in [0, 1)."""
    tokens = padded = 0
    for batch in batches:
        row = [int(lengths[i]) for i in batch]
        tokens, padded = tokens + sum(row), padded + max(row, default=0) * len(row)
    return 1 - tokens / padded if padded else 0.0


class RankText:
    """One rank's samples of the global batches of a round. Every rank has as many batches.

    Rows are dealt out in the order of their lengths, so in each batch two ranks differ by at most
    one row, and their longest rows by at most the batch's own spread.

    If a global batch has fewer rows than there are ranks, some ranks get no row. `collate` then
    makes a row that takes part in the step but adds nothing to it.

    round: its number.
    """

    def __init__(
        self, number: int, samples: Sequence[Sample], batches: Batches, rank: int, world: int
    ) -> None:
        self.round, self._samples, self._batches = number, samples, batches
        self._rank, self._world = rank, world

    def __len__(self) -> int:
        return len(self._batches)

    def batch(self, i: int) -> list[Sample]:
        """The samples of batch `i`, the same at every call; may be empty."""
        return take(self._samples, self._rows(i))

    def ids(self, i: int) -> list[str]:
        """The ids of the samples of batch `i`."""
        return sample_ids(self._samples, self._rows(i))

    def _rows(self, i: int) -> list[int]:
        return self._batches.batch(i)[self._rank :: self._world]


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
    shape = max(1, len(samples)), max((len(sample.tokens) for sample in samples), default=2)
    input_ids = torch.full(shape, pad_id)
    attention_mask = torch.full(shape, 0 if samples else 1)
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
    """A batch's tensors, on a device. The host does not wait for the copies."""
    return {
        "input_ids": to_device(batch["input_ids"], device),
        "attention_mask": to_device(batch["attention_mask"], device),
        "loss_mask": to_device(batch["loss_mask"], device),
    }


def batches_for(
    target: Target, samples: Sequence[Sample], tokens_per_batch: int
) -> Iterator[tuple[list[int], Batch, Inputs]]:
    """All samples in batches of similar length: their numbers, the batch, and its tensors on the
    target's device."""
    lengths = [len(sample.tokens) for sample in samples]
    for rows in bucket_batches(lengths, tokens_per_batch=tokens_per_batch, seed=0, epoch=0):
        batch = collate([samples[i] for i in rows], target.tokenizer.pad_token_id or 0)
        yield rows, batch, inputs(batch, target.device)
