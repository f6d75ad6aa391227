"""The rows of a run: read once from their sources, then kept in the run's directory.

data/KEY/SPLIT.arrow    the rows that the sources of a split have (`train.data.read.Examples`)
         SPLIT.npy      int8: where each of these rows went, a number of `PLACES`
         manifest.json  the hashes of the splits, and what is said of them

KEY is a hash of the sources' sizes and times, and of the settings that decide the rows. A start
that finds it parses and compares no row.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from decode.base.artifact import CorruptArtifact, verify_directory, write_directory
from train.data.file_sources import RowSource
from train.data.read import Examples, ReadSettings, data_fingerprint, read_sources
from train.data.read_back import say_changes
from train.data.sources import sources_of
from train.data.splits import split_off, without_duplicates, without_refused
from train.run.config import SPLITS, DataConfig

# A split, or why a row is in none: the template does not write its tool messages, or it repeats a
# prompt that is held out.
PLACES = (*SPLITS, "refused", "repeated")
FORMAT = 1


@dataclass
class RunData:
    """splits: the rows by split. read: what was read, in a line for each split of the config, and
    what the template changes in the first rows.
    notes: what was changed in the splits, in sentences."""

    splits: dict[str, Examples] = field(default_factory=dict)
    read: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class RunReader:
    """Reads the rows of a run."""

    def __init__(
        self, data: DataConfig, seed: int, tokenizer: Callable[[], PreTrainedTokenizerBase]
    ) -> None:
        """seed: of what is split off. tokenizer: asked for at the first tool message. Raises
        UserError for sources that are missing."""
        self._data, self._seed, self._tokenizer = data, seed, tokenizer
        self._sources: dict[str, tuple[list[str], list[RowSource]]] = {}
        for split in SPLITS:
            if (written := getattr(data, split)) is not None:
                names = [written] if isinstance(written, str) else list(written)
                self._sources[split] = names, list(sources_of(names, Path()))

    def stored(self, parent: Path) -> Path:
        """The directory in `parent` with the rows. They are read unless it is there. Raises
        UserError as `read`."""
        directory = parent / self._key()
        try:
            if verify_directory(directory)["template"] == self._template_hash():
                return directory
        except CorruptArtifact:
            pass
        meta: dict[str, Any] = {}

        def fill(path: Path) -> None:
            data = self.read(path)
            # A list: their order stays.
            hashes = [(split, data_fingerprint(rows)) for split, rows in data.splits.items()]
            say_changes(data.splits, self._tokenizer(), self._data.system, data.read.append)
            meta.update(
                read=data.read, notes=data.notes, hashes=hashes, template=self._template_hash()
            )

        write_directory(directory, fill, meta=meta)
        return directory

    def read(self, directory: Path | None = None) -> RunData:
        """Read all splits, split off those that are missing, and leave duplicates of held-out
        prompts out of train. directory: for the tables and where their rows went. None: they are
        in memory. Raises UserError for missing, broken or empty data (file:line)."""
        settings, data = self._data, RunData()
        places: dict[str, np.ndarray] = {}
        for split, (names, sources) in self._sources.items():
            limit = settings.limit if split == "train" else None
            how = ReadSettings(limit, settings.on_bad, settings.max_bad_rate, settings.reasoning)
            file = directory / f"{split}.arrow" if directory else None
            rows, report = read_sources(names, sources, how, file)
            data.read.append(f"{split}: {report}")
            kept = without_refused(rows, self._tokenizer, split, settings.max_bad_rate)
            if left_out := len(rows) - len(kept):
                data.notes.append(
                    f"left out of {split}, as the chat template does not write their tool "
                    f"messages: {left_out} rows"
                )
            data.splits[split] = kept
            places[split] = np.full(len(rows), PLACES.index("refused"), np.int8)
            places[split][kept.rows] = PLACES.index(split)
        if new := settings.split_off:
            count, train = settings.held_out, data.splits["train"]
            data.splits |= split_off(train, new, count=count, seed=self._seed)
            for split in new:
                places["train"][data.splits[split].rows] = PLACES.index(split)
            sizes = ", ".join(f"{len(data.splits[split])} rows for {split}" for split in new)
            data.notes.append(
                f"split off from train by a hash of the first user message (seed {self._seed}): "
                f"{sizes}; {len(data.splits['train'])} rows are left"
            )
        if settings.duplicates == "leave_out":
            train = data.splits["train"]
            held_out = [e for split in ("dev", "test") for e in data.splits.get(split, ())]
            data.splits["train"], lost = without_duplicates(train, held_out)
            repeated = np.setdiff1d(train.rows, data.splits["train"].rows)
            places["train"][repeated] = PLACES.index("repeated")
            if lost.exact or lost.near:
                data.notes.append(
                    f"left out of train, as they repeat prompts of dev or test: {lost.exact} rows, "
                    f"and {lost.near} that nearly do; {len(data.splits['train'])} rows are left"
                )
        if directory is not None:
            for split, numbers in places.items():
                np.save(directory / f"{split}.npy", numbers)
        return data

    def _key(self) -> str:
        stamps = [
            [split, source.name, source.label, source.stamp]
            for split, (_, sources) in self._sources.items()
            for source in sources
        ]
        settings = self._data.model_dump(mode="json")
        made_by = json.dumps([FORMAT, settings, self._seed, stamps])
        return hashlib.sha256(made_by.encode()).hexdigest()[:12]

    def _template_hash(self) -> str:
        tokenizer = self._tokenizer()
        made_by = f"{tokenizer.chat_template} {tokenizer.special_tokens_map}"
        return hashlib.sha256(made_by.encode()).hexdigest()


def open_rows(directory: Path) -> tuple[RunData, dict[str, str]]:
    """The rows in a directory of `RunReader.stored`, and the hashes of the splits."""
    meta = verify_directory(directory, deep=False)
    data = RunData(read=meta["read"], notes=meta["notes"])
    hashes = dict(meta["hashes"])
    for split in hashes:
        table = split if (directory / f"{split}.arrow").exists() else "train"
        places = np.load(directory / f"{table}.npy")
        chosen = np.flatnonzero(places == PLACES.index(split))
        data.splits[split] = Examples.stored(directory / f"{table}.arrow").select(chosen)
    return data, hashes
