"""The texts of a run as tokens. Each is written with the target's tokenizer and chat template once,
before the first stage, and kept in Arrow files that all stages, processes and later starts read.

A row that cannot be written would end a stage when it is reached, after hours. So what is wrong
with a row is found here, and kept beside the samples of the others.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any, Literal
from weakref import finalize

import numpy as np

from decode.base.artifact import recover, write_directory
from decode.base.errors import UserError
from train.data.chat_tokens import Sample
from train.data.read import Example, content_keys, select
from train.data.stored_samples import (
    BLOCK,
    COLUMNS,
    FILE,
    LOST,
    StoredSamples,
    sample_part,
    sizes,
)
from train.measure.ranks import ALONE, Ranks

PART_EXAMPLES = 16_384  # rows that one part holds

# Makes the samples of a part, and adds to the meta of its manifest.
MakePart = Callable[[dict[str, Any]], Iterable[Sample]]


@dataclass
class Texts:
    """directory: where the texts are kept. None: in a temporary one. tokenizer: the hash of the one
    that makes them. positions, vocab_size: the target's. on_bad, max_bad_rate: the settings of the
    data; bad rows are left out under "skip". ranks: the processes that share the work; they call
    each method together, and it raises UserError on all of them. say: called with what was left
    out. bar: opens a progress bar, of what and of how many.
    """

    directory: Path | None = None
    tokenizer: str = ""
    positions: int = sys.maxsize
    vocab_size: int = sys.maxsize
    on_bad: Literal["stop", "skip"] = "stop"
    max_bad_rate: float = 0.01
    ranks: Ranks = ALONE
    say: Callable[[str], None] = lambda line: None
    bar: Callable[[str, int], AbstractContextManager[Any]] = lambda what, total: nullcontext()
    _opened: dict[str, StoredSamples] = field(default_factory=dict)
    _usable: dict[str, np.ndarray] = field(default_factory=dict)
    _prompts: list[tuple[np.ndarray, np.ndarray, StoredSamples]] = field(default_factory=list)

    def stored(self, key: str, parts: Sequence[MakePart]) -> StoredSamples:
        """The text with this key. Each rank makes some of the parts that no start has made."""
        if key not in self._opened:
            if self.directory is None:
                self.directory = self.ranks.main_only(self._temporary_directory)
            directory = self.directory / key
            self.ranks.main_only(lambda: recover(directory, alone=True))

            def write() -> None:
                with self.bar("tokenising", len(parts)) as bar:
                    for number in range(self.ranks.rank, len(parts), self.ranks.world):
                        if not sample_part(directory, number).exists():
                            meta: dict[str, Any] = {}
                            write_samples(directory, number, parts[number](meta), meta)
                        if bar is not None:
                            bar.update(min(number + self.ranks.world, len(parts)))

            self.ranks.together(write)
            self._opened[key] = self.ranks.together(lambda: StoredSamples(directory, len(parts)))
        return self._opened[key]

    def _temporary_directory(self) -> Path:
        path = Path(mkdtemp(prefix="draftsmith-"))
        finalize(self, rmtree, path, ignore_errors=True)
        return path

    @property
    def names(self) -> set[str]:
        """The keys of the texts that were asked for."""
        return {*self._opened}

    def rows(
        self,
        key: str,
        what: str,
        examples: Sequence[Example],
        make: Callable[[Example], Iterable[Sample]],
    ) -> tuple[StoredSamples, np.ndarray]:
        """The samples of these rows, and the numbers of the rows that can be used. what: names them
        in messages. make: raises UserError for a row that cannot be used."""
        firsts = range(0, max(1, len(examples)), PART_EXAMPLES)
        parts = [partial(self._part, examples, first, make) for first in firsts]
        samples = self.stored(key, parts)
        if key not in self._usable:
            bad = {int(row): found for meta in samples.meta for row, found in meta["bad"].items()}
            self._require_few(what, len(examples), bad)
            self._usable[key] = np.setdiff1d(np.arange(len(examples)), list(bad))
        return samples, self._usable[key]

    def _part(
        self,
        examples: Sequence[Example],
        first: int,
        make: Callable[[Example], Iterable[Sample]],
        meta: dict[str, Any],
    ) -> Iterator[Sample]:
        bad = meta["bad"] = dict[str, str]()
        for row, example in enumerate(examples[first : first + PART_EXAMPLES], start=first):
            try:
                samples = list(make(example))
                most = max((max(x) for s in samples for x in (s.tokens, s.source) if x), default=0)
                if most >= self.vocab_size:
                    raise UserError(
                        f"has the token id {most}; expected ids from 0 to {self.vocab_size - 1}"
                    )
            except UserError as error:
                found = str(error).rstrip(".")
                bad[str(row)] = found if example.source in found else f"{example.source}: {found}"
            else:
                yield from samples

    def _require_few(self, what: str, count: int, bad: dict[int, str]) -> None:
        if not bad:
            return
        first = bad[min(bad)]
        if self.on_bad == "stop":
            raise UserError(f"{first}. Mend the row, or leave such rows out with data.on_bad: skip")
        if len(bad) > self.max_bad_rate * count or len(bad) == count:
            raise UserError(
                f"{len(bad)} of {count} rows cannot be used for the {what}, more than the "
                f"{self.max_bad_rate:.2%} that data.max_bad_rate allows. The first: {first}"
            )
        self.say(f"left out of the {what}: {len(bad)} of {count} rows. The first: {first}")

    def prompts(
        self, key: str, what: str, examples: Sequence[Example], make: Callable[[Example], list[int]]
    ) -> np.ndarray:
        """The numbers of the rows whose prompts can be answered. Text without a prompt stays: who
        needs a prompt says so."""

        def asked(example: Example) -> Iterator[Sample]:
            tokens = [] if example.messages is None else make(example)
            yield Sample(example.id, tokens, [False] * len(tokens))

        new = key not in self._usable
        samples, usable = self.rows(key, what, examples, asked)
        if new:
            keys = content_keys(select(examples, usable))
            order = np.argsort(keys)
            self._prompts.append((keys[order], order, samples))
        return usable

    def prompt(self, content: np.uint64) -> list[int] | None:
        """The prompt of an example with this `content_key`, if one of `prompts` has it."""
        for keys, order, samples in self._prompts:
            place = np.searchsorted(keys, content)
            if place < len(keys) and keys[place] == content:
                return samples[int(order[place])].tokens or None  # text without a prompt
        return None


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
