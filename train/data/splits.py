"""The splits of a run: what is split off from train, and what is left out of it.

A drafter that is evaluated on what it was trained on looks better than it is. So prompts that are
held out are set aside before anything is generated, and a train row that repeats one of them is
left out.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from decode.errors import UserError
from train.data.read import Example

# Words in a row that are compared (GPT-3, 2005.14165, appendix C). A shorter text is compared as a
# whole.
GRAM = 13
# Two prompts are near duplicates if this share of the shorter one's word sequences is in the other.
# GPT-3 removes a text for a single common sequence; prompts of one template often have one.
NEAR = 0.5
# At most this share of the train prompts is split off for one split.
LARGEST_SHARE = 0.1
# A script without spaces between words has one word per character.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\u0e00-\u0e7f]|[^\W\u3040-\u30ff\u3400-\u9fff]+")


def split_off(
    train: Sequence[Example], names: Sequence[str], *, count: int, seed: int
) -> dict[str, list[Example]]:
    """Train without the rows that go to the new splits, and these splits, in the rows' order.

    names: of the new splits. count: the prompts of each, at most a tenth of train. A row belongs
    where the seeded hash of its first user message puts it, so rows with the same message stay
    together, and it does not matter in what order they come. Plain text stays in train. Raises
    UserError if there are too few prompts.
    """
    keys = {
        example.id: hashlib.blake2b(f"{seed} {_first(example)}".encode()).digest()
        for example in train
        if example.messages is not None
    }
    order = sorted(set(keys.values()))
    size = min(count, int(len(order) * LARGEST_SHARE))
    if size < 1:
        raise UserError(
            f"data.{names[0]} is left out, and train has {len(order)} different prompts, too few "
            f"to split some off; expected at least {int(1 / LARGEST_SHARE)}. Set data.{names[0]}"
        )
    place = {
        key: name
        for index, name in enumerate(names)
        for key in order[index * size : (index + 1) * size]
    }
    splits: dict[str, list[Example]] = {name: [] for name in ("train", *names)}
    for example in train:
        splits[place.get(keys.get(example.id, b""), "train")].append(example)
    return splits


def _first(example: Example) -> str:
    return example.user_texts()[0].strip()


@dataclass(frozen=True)
class Duplicates:
    """Rows of train that repeat held-out prompts: those whose word sequences are all the same, and
    those that are nearly so."""

    exact: int
    near: int


def without_duplicates(
    train: Sequence[Example], held_out: Iterable[Example]
) -> tuple[list[Example], Duplicates]:
    """The rows of train that repeat no held-out prompt, and how many rows were left out.

    What users wrote is compared, in words without case and punctuation: by the sequences of 13
    words that two rows have in common. Raises UserError if no row is left.
    """
    others = [_grams(example) for example in held_out]
    if not others:
        return list(train), Duplicates(0, 0)
    grams = np.concatenate(others)
    order = np.argsort(grams, kind="stable")
    grams = grams[order]
    owners = np.repeat(np.arange(len(others)), [len(g) for g in others])[order]
    sizes = np.array([len(g) for g in others])
    kept, exact, near = [], 0, 0
    for example in train:
        mine = _grams(example)
        low, high = np.searchsorted(grams, mine, "left"), np.searchsorted(grams, mine, "right")
        if not (high > low).any():
            kept.append(example)
            continue
        # For each held-out row, how many of this row's sequences it has.
        hits = np.concatenate([owners[a:b] for a, b in zip(low, high, strict=True)])
        common = np.bincount(hits, minlength=len(others))
        if ((common == sizes) & (common == len(mine))).any():
            exact += 1
        elif (common >= NEAR * np.minimum(sizes, len(mine))).any():
            near += 1
        else:
            kept.append(example)
    if not kept:
        raise UserError(
            f"all {len(train)} rows of train repeat prompts of dev or test ({exact} are the same, "
            f"{near} nearly so); give other prompts to evaluate on, or leave data.test and "
            "data.dev out, or keep the rows with data.duplicates: keep"
        )
    return kept, Duplicates(exact, near)


def _grams(example: Example) -> np.ndarray:
    """uint64: the hashes of the different word sequences that the row's users wrote, ascending."""
    hashes = [np.zeros(0, np.uint64)]
    for text in example.user_texts():
        words = WORD.findall(text.lower()) or [text]
        ids = np.array([_hash(word) for word in words], np.uint64)
        length = min(GRAM, len(ids))
        windows = np.lib.stride_tricks.sliding_window_view(ids, length)
        # A polynomial in an odd base, modulo 2⁶⁴. The length sets short texts apart.
        powers = np.uint64(0x9E3779B97F4A7C15) ** np.arange(1, length + 1, dtype=np.uint64)
        hashes.append((windows * powers).sum(1, dtype=np.uint64) + np.uint64(length))
    return np.unique(np.concatenate(hashes))


@lru_cache(maxsize=1 << 20)
def _hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest())
