"""Where rows are read from, by name: files, directories, and data sets of the hub.

    FILE                   .jsonl, .ndjson, .json, .txt, .csv, .tsv, .parquet or .arrow; behind it
                           may stand .gz, .bz2, .xz or .zst
    DIRECTORY              of such files, or saved by `datasets`
    ORG/NAME               a data set of the hub
    NAME:SUBSET@SPLIT      a subset and a split of a data set, such as smoltalk:everyday@train[:10%]

`datasets` says which files a data set has. Each file is read as one that is named itself, so a row
has the same text however its file is named.
"""

import glob
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from decode.base.errors import UserError, nearest
from decode.base.paths import from_home
from train.data.file_sources import (
    PACKED,
    Array,
    Lines,
    Paragraphs,
    Raw,
    RowSource,
    file_type,
    first_words,
    no_such_file,
)
from train.data.row_kinds import EXPECTED
from train.data.table_sources import (
    TABLES,
    LoadedTable,
    TableFile,
    builder_options,
    named,
)

OWN_TYPES = {".jsonl": Lines, ".ndjson": Lines, ".json": Array, ".txt": Paragraphs}
TYPES = (*OWN_TYPES, *TABLES)
SAVED = ("state.json", "dataset_dict.json")  # in a directory that `datasets` saved
CARDS = ("README.md", ".huggingface.yaml")  # say which files a data set's subsets have


class SourceName(NamedTuple):
    """The name of a source. path: of the file or directory, or the name on the hub. subset, split:
    None if none is named."""

    path: str
    subset: str | None = None
    split: str | None = None

    @classmethod
    def parse(cls, written: str, base_dir: Path = Path()) -> "SourceName":
        """From PATH, PATH@SPLIT, PATH:SUBSET or PATH:SUBSET@SPLIT. A path that exists has neither,
        and neither has a slash: directories may have an @ or a colon."""

        def parted(name: str, mark: str) -> tuple[str, str | None]:
            path, _, part = name.rpartition(mark)
            if not path or not part or "/" in part or (base_dir / from_home(name)).exists():
                return name, None
            return path, part

        rest, split = parted(written, "@")
        path, subset = parted(rest, ":")
        return cls(path, subset, split)

    def of(self, path: str) -> str:
        """The name with another path."""
        subset = f":{self.subset}" if self.subset is not None else ""
        return path + subset + (f"@{self.split}" if self.split is not None else "")


def sources_of(names: list[str], base_dir: Path) -> Iterator[RowSource]:
    """The sources with these names, one for each file. Relative paths start at `base_dir`. Raises
    UserError for a source that is named twice, for a subset or split of a file that has none, and
    for a type of files that is not read."""
    places = require_sources(names, base_dir)
    files = Counter(path.name for _, path in places)
    for name, path in places:
        # With the bare file name, ids stay the same when the data moves. Files with equal names
        # need their paths as well.
        label = path.name if path.exists() and files[path.name] == 1 else name.path
        yield from _sources(name, label, path)


def require_sources(names: list[str], base_dir: Path) -> list[tuple[SourceName, Path]]:
    """The name of each source, and the path that may be meant. Raises UserError as `sources_of` and
    for a file that is missing, as far as paths tell. Nothing is opened."""
    places = []
    seen: set[tuple[str, str | None, str | None]] = set()
    for written in names:
        name = SourceName.parse(written, base_dir)
        path = base_dir / from_home(name.path)
        key = (os.path.realpath(path), name.subset, name.split)
        if key in seen:
            raise UserError(
                f"{written} is named twice; expected each source once. To train on its rows more "
                "often, raise loop.epochs"
            )
        seen.add(key)
        _require_source(written, name, path)
        places.append((name, path))
    return places


def _require_source(written: str, name: SourceName, path: Path) -> None:
    kind = file_type(path.name)
    if path.is_dir() or kind not in TYPES:
        if path.is_file():
            raise UserError(
                f'{name.path}: cannot read files ending in "{path.suffix}" (this one begins with '
                f"{first_words(path)}); expected {', '.join(TYPES)}, also with "
                f"{', '.join(PACKED)} behind them, or a directory. Make it a .csv with a header, "
                f"or a .jsonl file with a line such as {EXPECTED}"
            )
        if not path.exists() and name.path.startswith((".", "/", "~")):
            raise UserError(
                f"{name.path}: no such file or directory (looked at {path.absolute()})."
            )
        return
    if not path.exists():
        raise no_such_file(name.path, path)
    what, part = ("split", name.split) if name.subset is None else ("subset", name.subset)
    # A table may be cut, as a data set's split "train".
    if name.subset is not None or (name.split is not None and kind in OWN_TYPES):
        raise UserError(
            f'{written}: names the {what} "{part}", but a {kind} file has no {what}s. Leave '
            f"{written.removeprefix(name.path)} out, or name the file of that {what}."
        )


def _sources(name: SourceName, label: str, path: Path) -> Iterator[RowSource]:
    kind = file_type(path.name)
    if path.is_dir() or kind not in TYPES:
        yield from _data_set(name, label, path)
        return
    source = _file(name.path, label, path, kind, {})
    if name.split is None:
        yield source
    else:
        yield from _Splits(name, {"train": [source]}).chosen()


def _file(name: str, label: str, path: Path, kind: str, options: Mapping[str, Any]) -> RowSource:
    """The source of one file. options: of the builder of its data set."""
    if kind in TABLES:
        return TableFile(name, label, path, options)
    if kind == ".json":
        return Array(name, label, path, options.get("field"))
    return OWN_TYPES[kind](name, label, path)


class _Splits:
    """The sources of a data set by split."""

    def __init__(self, name: SourceName, sources: Mapping[str, list[RowSource]]) -> None:
        self._name, self._sources = name, sources

    def chosen(self) -> Iterator[RowSource]:
        """The sources of the split that is named, or of the only one. A split may be a part of one,
        or several: train[:10%]+test."""
        written, name = self._name.split, self._name.path
        split = written
        if split is None and len(self._sources) == 1:
            [split] = self._sources
        if split is not None and split in self._sources:
            yield from self._sources[split]
            return
        if written is None or not any(mark in written for mark in "[+"):
            found = f'no split "{written}"' if written else "no split is named"
            whole = self._name._replace(split="SPLIT").of(name)
            raise UserError(
                f"{name}: {found}; expected one of {', '.join(self._sources)}. Write {whole}."
                f"{nearest(written or '', self._sources)}"
            )
        from datasets import ReadInstruction

        counts = {
            split: [sum(1 for _ in source.rows()) for source in sources]
            for split, sources in self._sources.items()
            if split in written
        }
        with named(name, f'has no split "{written}"'):
            sizes = {split: sum(rows) for split, rows in counts.items()}
            parts = ReadInstruction.from_spec(written).to_absolute(sizes)
        for part in parts:
            first = 0
            of_split = zip(self._sources[part.splitname], counts[part.splitname], strict=True)
            for source, rows in of_split:
                begin, end = max(part.from_ - first, 0), min(part.to - first, rows)
                if begin < end:
                    yield _Part(source, begin, end)
                first += rows


class _Part(RowSource):
    """The rows begin … end−1 of a source."""

    def __init__(self, source: RowSource, begin: int, end: int) -> None:
        super().__init__(source.name, source.label)
        self._source, self._begin, self._end = source, begin, end

    def rows(self) -> Iterator[tuple[int, Raw]]:
        yield from islice(self._source.rows(), self._begin, self._end)

    @property
    def stamp(self) -> list[Any]:
        return [*self._source.stamp, self._begin, self._end]


def _data_set(name: SourceName, label: str, path: Path) -> Iterator[RowSource]:
    """The sources of a directory, or of a data set of the hub."""
    # Imported here because the import takes a second, which other files do not need.
    import datasets

    if any((path / marker).is_file() for marker in SAVED):
        with named(name.path, "cannot be read"):
            data = datasets.load_from_disk(str(path))
        if name.subset is not None:
            raise UserError(
                f'{name.path}: names the subset "{name.subset}", but a saved data set has none; '
                f"leave :{name.subset} out"
            )
        if not isinstance(data, datasets.DatasetDict):
            if name.split is not None:
                raise UserError(
                    f'{name.path}: names the split "{name.split}", but this saved data set has no '
                    f"splits; leave @{name.split} out"
                )
            yield LoadedTable(name.path, label, data)
            return
        tables: dict[str, list[RowSource]] = {
            split: [LoadedTable(f"{name.path}[{split}]", f"{label}[{split}]", table)]
            for split, table in data.items()
        }
        yield from _Splits(name, tables).chosen()
        return
    if datasets.config.HF_HUB_OFFLINE and not path.is_dir():
        # Without the network, `datasets` gives rows that it rewrote, if it has any.
        from huggingface_hub import snapshot_download

        with suppress(Exception):
            path = Path(snapshot_download(name.path, repo_type="dataset", local_files_only=True))
    builder = _builder(name, path)
    files = {
        str(split): list(map(str, of)) for split, of in (builder.config.data_files or {}).items()
    }
    if all(file_type(Path(file).name) in TYPES for of_split in files.values() for file in of_split):
        base = path.resolve().as_posix() if path.is_dir() else str(builder.base_path)
        options = builder_options(builder.config)
        sources: dict[str, list[RowSource]] = {}
        chosen = [split for split in files if name.split is None or split in name.split]
        for split, of_split in files.items():
            places = of_split
            if split in chosen:
                with named(name.path, "cannot be fetched"):
                    places = datasets.DownloadManager().download(of_split)
            sources[split] = [
                _file(f"{name.path}/{rest}", f"{label}/{rest}", Path(place), kind, options)
                for file, place in zip(of_split, places, strict=True)
                for rest in [file.removeprefix(base.rstrip("/") + "/")]
                for kind in [file_type(Path(file).name)]
            ]
        if files:
            yield from _Splits(name, sources).chosen()
            return
    with named(name.path, "cannot be read"):
        builder.download_and_prepare()
        data = builder.as_dataset()
    tables = {
        split: [LoadedTable(f"{name.path}[{split}]", f"{label}[{split}]", table)]
        for split, table in data.items()
    }
    yield from _Splits(name, tables).chosen()


def _builder(name: SourceName, path: Path) -> Any:
    """What knows the files of a data set."""
    from datasets import get_dataset_config_names, load_dataset_builder

    options: dict[str, Any] = {}
    place = str(path) if path.is_dir() else name.path
    if path.is_dir() and glob.escape(str(path.resolve())) != str(path.resolve()):
        options["data_files"] = _files_of_pattern_name(name, path)
    what = f"neither a file ({path.absolute()}) nor a data set that could be loaded"
    with named(name.path, "cannot be read" if path.is_dir() else what):
        try:
            return load_dataset_builder(place, name.subset, **options)
        except ValueError as error:
            try:
                subsets = get_dataset_config_names(place)
            except Exception:
                raise error from None
            if len(subsets) < 2 or name.subset in subsets:
                raise
            found = f'no subset "{name.subset}"' if name.subset else "no subset is named"
            whole = name._replace(subset="SUBSET").of(name.path)
            raise UserError(
                f"{name.path}: {found}; expected one of {', '.join(subsets)}. Write {whole}."
                f"{nearest(name.subset or '', subsets)}"
            ) from error


def _files_of_pattern_name(name: SourceName, path: Path) -> dict[str, list[str]]:
    """The files by split of a directory whose name `datasets` would take for a pattern."""
    from datasets.data_files import DataFilesDict, get_data_patterns

    if any((path / card).exists() for card in CARDS):
        raise UserError(
            f"{name.path}: has [, ], * or ? in the name of a directory, and {' or '.join(CARDS)}, "
            "whose lists of files cannot be read there; rename the directory, or name its files"
        )
    place = glob.escape(path.resolve().as_posix())
    with named(name.path, "cannot be read"):
        found = DataFilesDict.from_patterns(get_data_patterns(place), base_path=place)
    return {split: [glob.escape(str(file)) for file in files] for split, files in found.items()}
