"""Tables that `datasets` maps into memory: files of Parquet, Arrow and comma-separated text, and
data sets that it saved or that it reads itself.

Each file is a table of its own, so files of one data set may have other columns and other types.
Some rows of each are compared with what is written there, and a value that `datasets` changed is an
error.
"""

import glob
import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

from decode.base.errors import UserError
from decode.model.pretrained import no_progress_bars
from train.data.file_sources import Raw, Source, file_stamp, file_type, unpacked
from train.data.row_kinds import FIELDS, READ, short

# The builder of `datasets` for each type of file.
BUILDERS = {".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".arrow": "arrow"}
COMPARED = 64  # rows at the beginning of a file, and of its last part


class TableSource(Source):
    """Rows of a table, numbered from 0. A null of an object is no value: a table's objects have the
    fields of all objects in their column, and null for those that they lack."""

    def rows(self) -> Iterator[tuple[int, Raw]]:
        with named(self.name, "cannot be read"):
            self._data = _read_columns(self._load())
            self._require_same()
        with named(self.name, "has a row that cannot be read"):
            features = self._data.features
            for number, row in enumerate(self._data):
                yield number, {name: _present(row[name], features[name]) for name in row}

    def _require_same(self) -> None:
        """Raise UserError if one of the compared rows is not as it was written."""
        features = self._data.features
        for number, written in self._written(list(features)):
            read = self._data[number]
            for column in features:
                before = _decoded(written[column], features[column])
                if not _same(before, read[column]):
                    raise UserError(
                        f"{self.name}:{number}: the column {column} is {short(before)} in the "
                        f"file, but {short(read[column])} as `datasets` reads it; expected the "
                        "same value. Write the rows as .jsonl"
                    )

    @abstractmethod
    def _load(self) -> Any:
        """The `datasets.Dataset`."""

    @abstractmethod
    def _written(self, columns: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Numbers of rows, and what was written there."""


class LoadedTable(TableSource):
    """A data set that `datasets` has loaded."""

    def __init__(self, name: str, label: str, data: Any) -> None:
        super().__init__(name, label)
        self._loaded = data

    @property
    def stamp(self) -> list[Any]:
        return [self._loaded._fingerprint]

    def _load(self) -> Any:
        return self._loaded

    def _written(self, columns: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
        count = len(self._data)
        for first in {0, max(count - COMPARED, 0)} if count else ():
            rows = self._data.with_format("arrow")[first : first + COMPARED]
            yield from enumerate(rows.to_pylist(), first)


class TableFile(TableSource):
    """A file. All cells of comma-separated text are text, also NA and 007, and an empty one is
    missing. options: of the builder."""

    def __init__(
        self, name: str, label: str, path: Path, options: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(name, label)
        self._path, self._type, self._options = path, file_type(path.name), dict(options or {})

    @property
    def stamp(self) -> list[Any]:
        return [*file_stamp(self._path), repr(self._options)]

    def _load(self) -> Any:
        from datasets import load_dataset_builder

        if not self._path.exists():
            raise UserError(
                f"{self.name}: no such file or directory (looked at {self._path.absolute()})."
            )
        self._content = unpacked(self._path, self.name)
        # A path, and no pattern of paths.
        options = self._options | {"data_files": glob.escape(str(self._content))}
        if BUILDERS[self._type] == "csv":
            options |= {"sep": "\t"} if self._type == ".tsv" and "sep" not in options else {}
            options = _as_text(options)
        with no_progress_bars():
            builder = load_dataset_builder(BUILDERS[self._type], **options)
            builder.download_and_prepare()
        return builder.as_dataset(split="train")

    def _written(self, columns: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
        return _rows_of_file(self._content, self._type, columns)


def _as_text(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with which the builder reads cells as text, also words such as NA and None."""
    import pandas  # type: ignore[import-untyped]
    from datasets import Features, Value, load_dataset_builder

    builder = load_dataset_builder("csv", **options)
    [file] = builder.config.data_files["train"]
    read = {k: v for k, v in builder.config.pd_read_csv_kwargs.items() if k != "chunksize"}
    columns = pandas.read_csv(file, **read | {"nrows": 0}).columns
    text = Features(dict.fromkeys(columns, Value("string")))
    return {**options, "features": text, "keep_default_na": False, "na_values": [""]}


def builder_options(config: Any) -> dict[str, Any]:
    """The options of a builder that are not its defaults, without its files and their types."""
    others = {"name", "version", "data_dir", "data_files", "description", "features", "columns"}
    return {
        field.name: getattr(config, field.name)
        for field in fields(config)
        if field.name not in others and getattr(config, field.name) != field.default
    }


def _read_columns(data: Any) -> Any:
    """The columns that are read: others may be large, or media that take long to decode. All of
    them if none says what a row is, for the message that refuses it."""
    known = not set(FIELDS).isdisjoint(data.column_names)
    used = [name for name in data.column_names if name in READ] if known else data.column_names
    data = data.with_format(None).select_columns(used)
    for name in used:
        feature = data.features[name]
        # Objects of JSON are kept as text, which is decoded; media stay as they are.
        if getattr(feature, "decode", False) and not _is_json(feature):
            data = data.cast_column(name, replace(feature, decode=False))
    return data


def _is_json(feature: Any) -> bool:
    # By its name: earlier versions of `datasets` have no such type.
    return type(feature).__name__ == "Json"


def _inner(feature: Any) -> Any:
    """The feature of a list's values. None: it is no list."""
    return feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)


def _present(value: Any, feature: Any) -> Any:
    """A value without the nulls of objects that have the fields of others. Objects that are kept as
    JSON have their own."""
    if isinstance(value, dict) and isinstance(feature, dict):
        return {k: _present(v, feature[k]) for k, v in value.items() if v is not None}
    if isinstance(value, list) and (inner := _inner(feature)) is not None:
        return [_present(part, inner) for part in value]
    return value


def _decoded(value: Any, feature: Any) -> Any:
    """A value of a file as `datasets` decodes it: texts of JSON are what they say."""
    if isinstance(value, str) and _is_json(feature):
        try:
            return json.loads(value)
        except ValueError:
            return value
    if isinstance(value, dict) and isinstance(feature, dict):
        return {k: _decoded(v, feature.get(k)) for k, v in value.items()}
    if isinstance(value, list) and (inner := _inner(feature)) is not None:
        return [_decoded(part, inner) for part in value]
    return value


def _same(before: Any, after: Any) -> bool:
    """Whether two values have the same types and content."""
    if isinstance(before, dict) and isinstance(after, dict):
        return before.keys() == after.keys() and all(_same(before[k], after[k]) for k in before)
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after) and all(map(_same, before, after))
    return type(before) is type(after) and (before == after or before != before)


def _rows_of_file(
    path: Path, kind: str, columns: list[str]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Some rows as the file has them, with their numbers. None of a file of text."""
    import pyarrow.parquet  # type: ignore[import-untyped]

    def of(first: int, batches: Iterator[Any]) -> Iterator[tuple[int, dict[str, Any]]]:
        for batch in islice(batches, 1):
            yield from enumerate(batch.slice(0, COMPARED).select(columns).to_pylist(), first)

    if kind == ".parquet":
        with pyarrow.parquet.ParquetFile(path) as file:
            groups = [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)]
            for number in {0, len(groups) - 1} if groups else ():
                some = {"batch_size": COMPARED, "row_groups": [number], "columns": columns}
                yield from of(sum(groups[:number]), file.iter_batches(**some))
    elif kind == ".arrow":
        with pyarrow.memory_map(str(path)) as content:
            try:
                reader = pyarrow.ipc.open_stream(content)
                yield from of(0, iter(reader))
            except pyarrow.ArrowInvalid:
                reader = pyarrow.ipc.open_file(content)
                first = 0
                for number in range(reader.num_record_batches):
                    batch = reader.get_batch(number)
                    if number in (0, reader.num_record_batches - 1):
                        yield from of(first, iter([batch]))
                    first += len(batch)


@contextmanager
def named(source: str, what: str) -> Iterator[None]:
    """Turns an error of `datasets` into a UserError. what: is wrong with the source.

    Its errors have no common base class, and differ by version. The user must mend any of them.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        # "An error occurred while generating the dataset" hides the reason one level down.
        reason = error.__cause__ or error
        detail = " ".join(str(reason).split())
        raise UserError(f"{source}: {what}: {type(reason).__name__}: {detail}") from error
