"""The splits of a run: what is split off from train, and what is left out of it.

A drafter that is evaluated on what it was trained on looks better than it is. So prompts that are
held out are set aside before anything is generated, and a train row that repeats one of them is
left out. Rows are read one after the other; only numbers of rows and hashes are kept.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from transformers import PreTrainedTokenizerBase

from decode.base.errors import UserError
from train.data.read import Example, id_key, select
from train.data.template import tool_messages, written

# Words in a row that are compared (GPT-3, 2005.14165, appendix C). A shorter text is compared as a
# whole.
GRAM = 13
# Two prompts are near duplicates if this share of the shorter one's word sequences is in the other.
# GPT-3 removes a text for a single common sequence; prompts of one template often have one.
NEAR = 0.5
# At most this share of the train prompts is split off for one split.
LARGEST_SHARE = 0.1
# A hash of words in a row: a polynomial in an odd base, modulo 2⁶⁴.
_POWERS = np.uint64(0x9E3779B97F4A7C15) ** np.arange(1, GRAM + 1, dtype=np.uint64)
# A script without spaces between words has one word per character.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\u0e00-\u0e7f]|[^\W\u3040-\u30ff\u3400-\u9fff]+")


def split_off(
    train: Sequence[Example], names: Sequence[str], *, count: int, seed: int
) -> dict[str, Sequence[Example]]:
    """Train without the rows that go to the new splits, and these splits, in the rows' order.

    names: the names of the new splits. count: the prompts of each, at most a tenth of train. A row
    belongs where the seeded hash of its first user message puts it, so rows with the same message
    stay together, and it does not matter in what order they come. Plain text stays in train. Raises
    UserError if there are too few prompts.
    """
    keys = np.zeros(len(train), np.uint64)
    asks = np.zeros(len(train), bool)
    for row, example in enumerate(train):
        if example.messages is not None:
            digest = hashlib.blake2b(f"{seed} {_first(example)}".encode()).digest()
            keys[row], asks[row] = int.from_bytes(digest[:8]), True
    order = np.unique(keys[asks])
    size = min(count, int(len(order) * LARGEST_SHARE))
    if size < 1:
        raise UserError(
            f"data.{names[0]} is left out, and train has {len(order)} different prompts, too few "
            f"to split some off; expected at least {int(1 / LARGEST_SHARE)}. Set data.{names[0]}"
        )
    # The number of each row's split; those from len(names) on stay in train.
    places = np.where(asks, np.searchsorted(order, keys) // size, len(names))
    parts = {name: np.flatnonzero(places == place) for place, name in enumerate(names)}
    parts = {"train": np.flatnonzero(places >= len(names))} | parts
    return {name: select(train, rows) for name, rows in parts.items()}


def _first(example: Example) -> str:
    return example.user_texts()[0].strip()


def without_refused(
    rows: Sequence[Example],
    tokenizer: Callable[[], PreTrainedTokenizerBase],
    split: str,
    max_bad_rate: float,
) -> Sequence[Example]:
    """The rows without those whose tool messages the chat template does not write. Many templates
    leave such messages out without an error, or refuse them.

    tokenizer: asked for at the first tool message. split: the rows' name, for messages. Raises
    UserError if they are more than the share `max_bad_rate` of the rows, or all.
    """
    kept = [
        row
        for row, example in enumerate(rows)
        if not tool_messages(example) or written(example, tokenizer()) is not None
    ]
    left_out = len(rows) - len(kept)
    if not kept or left_out > max_bad_rate * len(rows):
        most = f"at most {max_bad_rate:.2%} (data.max_bad_rate)" if kept else "some without them"
        raise UserError(
            f"{left_out} of {len(rows)} rows of {split} have tool messages that the target's chat "
            f"template does not write; expected {most}. Give conversations of system, user and "
            "assistant, or raise data.max_bad_rate to leave such rows out"
        )
    return select(rows, kept)


def require_same(fingerprints: Sequence[Mapping[str, str]]) -> None:
    """Raise UserError unless all ranks read the same rows. fingerprints: by split, of each rank."""
    first = fingerprints[0]
    for rank, seen in enumerate(fingerprints):
        other = [split for split in {**first, **seen} if seen.get(split) != first.get(split)]
        if other:
            raise UserError(
                f"rank {rank} reads other data than rank 0 for {', '.join(other)}; expected the "
                "same rows in the same order. Put the files on a disk that all machines share, or "
                "copy the same ones to each of them"
            )


@dataclass(frozen=True)
class Duplicates:
    """Rows of train that repeat held-out prompts: those whose word sequences are all the same, and
    those that are nearly so."""

    exact: int
    near: int


def without_duplicates(
    train: Sequence[Example], held_out: Iterable[Example]
) -> tuple[Sequence[Example], Duplicates]:
    """The rows of train that repeat no held-out prompt, and how many rows were left out.

    What users wrote is compared, in words without case and punctuation: by the sequences of 13
    words that two rows have in common. Raises UserError if no row is left.
    """
    others = [np.unique(_grams(example)) for example in held_out]
    if not others:
        return train, Duplicates(0, 0)
    grams = np.concatenate(others)  # every row has at least one
    order = np.argsort(grams, kind="stable")
    grams = grams[order]
    owners = np.repeat(np.arange(len(others)), [len(g) for g in others])[order]
    sizes = np.array([len(g) for g in others])
    keep = np.zeros(len(train), bool)
    exact = near = 0
    for row, example in enumerate(train):
        mine = _grams(example)
        if not (grams[np.searchsorted(grams, mine) % len(grams)] == mine).any():
            keep[row] = True
            continue
        mine = np.unique(mine)
        low, high = np.searchsorted(grams, mine, "left"), np.searchsorted(grams, mine, "right")
        # For each held-out row, how many of this row's sequences it has.
        hits = np.concatenate([owners[a:b] for a, b in zip(low, high, strict=True)])
        common = np.bincount(hits, minlength=len(others))
        if ((common == sizes) & (common == len(mine))).any():
            exact += 1
        elif (common >= NEAR * np.minimum(sizes, len(mine))).any():
            near += 1
        else:
            keep[row] = True
    if not keep.any():
        raise UserError(
            f"all {len(train)} rows of train repeat prompts of dev or test ({exact} are the same, "
            f"{near} nearly so); give other prompts to evaluate on, or leave data.test and "
            "data.dev out, or keep the rows with data.duplicates: keep"
        )
    return select(train, np.flatnonzero(keep)), Duplicates(exact, near)


def _grams(example: Example) -> np.ndarray:
    """uint64: the hashes of the word sequences that the row's users wrote."""
    hashes = [np.zeros(0, np.uint64)]
    for text in example.user_texts():
        words = WORD.findall(text.lower()) or [text]
        ids = np.array([_hash(word) for word in words], np.uint64)
        length = min(GRAM, len(ids))
        # The length sets short texts apart.
        hashes.append(np.correlate(ids, _POWERS[:length]) + np.uint64(length))
    return np.concatenate(hashes)


# Of a word.
_hash = lru_cache(maxsize=1 << 16)(id_key)
