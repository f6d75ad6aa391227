"""The splits of a run: what is split off from train, and what is left out of it.

A drafter that is evaluated on what it was trained on looks better than it is. So prompts that are
held out are set aside before anything is generated, and a train row that repeats one of them is
left out. Rows are read one after the other; only numbers of rows and hashes are kept.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from transformers import PreTrainedTokenizerBase

from decode.base.errors import UserError
from train.data.read import Example, T, id_key, select
from train.data.template import tool_messages, written

# Words in a row that are compared (GPT-3, 2005.14165, appendix C). A shorter text is compared as a
# whole.
GRAM = 13
# Two prompts are near duplicates if this share of the shorter one's word sequences is in the other.
# GPT-3 removes a text for a single common sequence; prompts of one template often have one.
NEAR = 0.5
# Word sequences that this number of different prompts have are an instruction, such as that of a
# classification. The prompts differ in what comes after it.
SHARED = 5
# At most this share of the train prompts is split off for one split.
LARGEST_SHARE = 0.1
# A hash of words in a row: a polynomial in an odd base, modulo 2⁶⁴.
_POWERS = np.uint64(0x9E3779B97F4A7C15) ** np.arange(1, GRAM + 1, dtype=np.uint64)
# A script without spaces between words has one word per character.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\u0e00-\u0e7f]|[^\W\u3040-\u30ff\u3400-\u9fff]+")


def split_off(train: T, names: Sequence[str], *, count: int, seed: int) -> dict[str, T]:
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
    rows: T, tokenizer: Callable[[], PreTrainedTokenizerBase], split: str, max_bad_rate: float
) -> T:
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


@dataclass(frozen=True)
class Duplicates:
    """Rows of train that repeat held-out prompts: those whose word sequences are all the same, and
    those that are nearly so."""

    exact: int
    near: int


def without_duplicates(train: T, held_out: Iterable[Example]) -> tuple[T, Duplicates]:
    """The rows of train that repeat no held-out prompt, and how many rows were left out.

    What users wrote is compared, in words without case and punctuation: by the sequences of 13
    words that two rows have in common, without those that many prompts share. Raises UserError if
    no row is left.
    """
    others = [np.unique(_grams(example)) for example in held_out]
    if not others:
        return train, Duplicates(0, 0)
    held = _HeldOut(others)
    verdicts = [held.verdict(np.unique(_grams(example))) for example in train]
    # What a row seemed to repeat may be an instruction that many prompts have.
    near = np.array([verdict == "near" for verdict in verdicts])
    if near.any() and held.find_shared():
        of_near = select(train, np.flatnonzero(near))
        near[near] = [held.is_near(np.unique(_grams(example))) for example in of_near]
    same = np.array([verdict == "exact" for verdict in verdicts])
    keep, exact = ~(same | near), int(same.sum())
    if not keep.any():
        raise UserError(
            f"all {len(train)} rows of train repeat prompts of dev or test ({exact} are the same, "
            f"{near.sum()} nearly so); give other prompts to evaluate on, or keep the rows with "
            "data.duplicates: keep"
        )
    return select(train, np.flatnonzero(keep)), Duplicates(exact, int(near.sum()))


class _HeldOut:
    """The word sequences of held-out prompts, and how many different prompts have each."""

    def __init__(self, prompts: Sequence[np.ndarray]) -> None:
        """prompts: uint64, the sorted hashes of each; at least one."""
        grams = np.concatenate(prompts)
        owners = np.repeat(np.arange(len(prompts)), [len(g) for g in prompts])
        order = np.argsort(grams, kind="stable")
        self._grams, self._owners, self._prompts = grams[order], owners[order], prompts
        self._sizes = np.array([len(g) for g in prompts])
        self._distinct = np.unique(grams)
        self._counts = np.zeros(len(self._distinct), np.int64)
        self._seen: set[int] = set()
        self._shared, self._own_sizes = self._grams[:0], self._sizes
        for mine in prompts:
            self._count(mine)

    def verdict(self, mine: np.ndarray) -> str:
        """Whether a row's sequences are the same as those of a held-out prompt ("exact"), nearly so
        ("near"), or others (""). Also counts them."""
        if not self._count(mine):
            return ""
        common = self._common(mine)
        if ((common == self._sizes) & (common == len(mine))).any():
            return "exact"
        return "near" if (common >= NEAR * np.minimum(self._sizes, len(mine))).any() else ""

    def find_shared(self) -> bool:
        """Whether some of the sequences are in many of the prompts that were counted."""
        self._shared = self._distinct[self._counts >= SHARED]
        self._own_sizes = np.array([(~np.isin(g, self._shared)).sum() for g in self._prompts])
        return len(self._shared) > 0

    def is_near(self, mine: np.ndarray) -> bool:
        """Whether a row nearly repeats a held-out prompt in what is not shared."""
        mine = np.setdiff1d(mine, self._shared, assume_unique=True)
        common, least = self._common(mine), NEAR * np.minimum(self._own_sizes, len(mine))
        return bool(((common > 0) & (common >= least)).any())

    def _common(self, mine: np.ndarray) -> np.ndarray:
        """int64: for each held-out prompt, how many of these sequences it has."""
        low, high = (np.searchsorted(self._grams, mine, side) for side in ("left", "right"))
        hits = [self._owners[a:b] for a, b in zip(low, high, strict=True) if a < b]
        return np.bincount(
            np.concatenate(hits) if hits else np.zeros(0, np.int64), minlength=len(self._prompts)
        )

    def _count(self, mine: np.ndarray) -> bool:
        """Count the sequences of a prompt, once for each prompt. Whether it has any."""
        places = np.searchsorted(self._distinct, mine) % len(self._distinct)
        places = places[self._distinct[places] == mine]
        if len(places) and (key := hash(mine.tobytes())) not in self._seen:
            self._seen.add(key)
            self._counts[places] += 1
        return len(places) > 0


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
