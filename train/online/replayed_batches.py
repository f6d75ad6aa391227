"""The batches of recorded drafts that a drafter learns from."""

from collections.abc import Iterator, Sequence

from distill.replay.replay_buffer import Record
from train.data.batches import permutation


def replayed_batches(
    records: Sequence[Record],
    new: int,
    *,
    steps: int,
    tokens_per_batch: int,
    longest_text: int,
    key: str,
) -> list[list[Record]]:
    """At most `steps` batches: the records from number `new` on, then those before. If there are
    few, they are repeated. Texts of similar length are batched together.

    longest_text: the max length of a text in tokens. key: decides the order.
    """
    batches: list[list[Record]] = []
    while records and len(batches) < steps:
        own_key = f"{key} {len(batches)}"
        room = (steps - len(batches)) * tokens_per_batch
        chosen: list[Record] = []
        for record in _in_turn(records, new, own_key):
            pieces = record.pieces(longest_text)
            room -= sum(len(piece.tokens) for piece in pieces)
            if room < 0 and chosen:
                break
            chosen += pieces
        dealt = by_length(chosen, tokens_per_batch)
        batches += [dealt[i] for i in permutation(len(dealt), own_key)]
    return batches[:steps]


def by_length(records: Sequence[Record], tokens_per_batch: int) -> list[list[Record]]:
    """Batches of at most `tokens_per_batch` tokens, padding included, or of one longer text."""
    batches: list[list[Record]] = []
    for record in sorted(records, key=lambda r: len(r.tokens)):
        # Records are sorted, so this one is the longest and sets the batch's length.
        if not batches or (len(batches[-1]) + 1) * len(record.tokens) > tokens_per_batch:
            batches.append([])
        batches[-1].append(record)
    return batches


def _in_turn(records: Sequence[Record], new: int, key: str) -> Iterator[Record]:
    for part in (records[new:], records[:new]):
        for i in permutation(len(part), key):
            yield part[i]
