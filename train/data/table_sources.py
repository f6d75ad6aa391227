"""Tables: files of Parquet, Arrow and comma-separated text, and data sets that `datasets` saved or
reads itself.

They are read as they were written, some rows at a time. Each file is a table of its own, so files
of one data set may have other columns and other types.
"""

import glob
import io
import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO

from decode.base.errors import UserError
from train.data.file_sources import PACKED, Raw, RowSource, file_stamp, file_type, opened
from train.data.row_kinds import FIELDS, READ

TABLES = (".parquet", ".csv", ".tsv", ".arrow")
TOGETHER = 1024  # rows that are read together

Row = dict[str, Any]


class TableSource(RowSource):
    """Rows of a table, numbered from 0. A null of an object is no value: a table's objects have the
    fields of all objects in their column, and null for those that they lack."""

    def rows(self) -> Iterator[tuple[int, Raw]]:
        with named(self.name, "cannot be read"):
            yield from enumerate(self._rows())

    @abstractmethod
    def _rows(self) -> Iterator[Row]:
        """The rows, with the columns that are read."""


class LoadedTable(TableSource):
    """A data set that `datasets` has loaded."""

    def __init__(self, name: str, label: str, data: Any) -> None:
        super().__init__(name, label)
        self._loaded = data

    @property
    def stamp(self) -> list[Any]:
        return [self._loaded._fingerprint]

    def _rows(self) -> Iterator[Row]:
        data = self._loaded.select_columns(_used(self._loaded.column_names))
        batches = data.with_format("arrow").iter(batch_size=TOGETHER)
        return _rows_of(batches, data.features)


class TableFile(TableSource):
    """A file. All cells of comma-separated text are text, also NA and 007, and an empty one is
    missing. options: of the builder of its data set."""

    def __init__(
        self, name: str, label: str, path: Path, options: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(name, label)
        self._path, self._type, self._options = path, file_type(path.name), dict(options or {})

    @property
    def stamp(self) -> list[Any]:
        return [*file_stamp(self._path), repr(self._options)]

    def _rows(self) -> Iterator[Row]:
        if not self._path.exists():
            raise UserError(
                f"{self.name}: no such file or directory (looked at {self._path.absolute()})."
            )
        with opened(self._path, self.name) as content:
            if self._type in (".csv", ".tsv"):
                tabs = {"sep": "\t"} if self._type == ".tsv" and "sep" not in self._options else {}
                # A path, and no pattern of paths.
                options = self._options | tabs | {"data_files": glob.escape(str(self._path))}
                yield from _rows_of_text(content, options)
                return
            packed = self._path.suffix.lower() in PACKED
            read = _rows_of_parquet if self._type == ".parquet" else _rows_of_arrow
            yield from read(io.BytesIO(content.read()) if packed else content)


def _rows_of_parquet(content: BinaryIO) -> Iterator[Row]:
    import pyarrow.parquet  # type: ignore[import-untyped]
    from datasets import Features

    with pyarrow.parquet.ParquetFile(content) as file:
        used = _used(file.schema_arrow.names)
        batches = file.iter_batches(batch_size=TOGETHER, columns=used)
        yield from _rows_of(batches, Features.from_arrow_schema(file.schema_arrow))


def _rows_of_arrow(content: BinaryIO) -> Iterator[Row]:
    import pyarrow
    from datasets import Features

    try:
        batches = reader = pyarrow.ipc.open_stream(content)
    except pyarrow.ArrowInvalid:
        content.seek(0)
        reader = pyarrow.ipc.open_file(content)
        batches = map(reader.get_batch, range(reader.num_record_batches))
    used = _used(reader.schema.names)
    parts = (batch.select(used) for batch in batches)
    yield from _rows_of(parts, Features.from_arrow_schema(reader.schema))


def _rows_of_text(content: BinaryIO, options: Mapping[str, Any]) -> Iterator[Row]:
    """options: of the builder of `datasets`, which knows what pandas calls them. All cells are
    text, also words such as NA and None."""
    import pandas  # type: ignore[import-untyped]
    from datasets import load_dataset_builder

    config = load_dataset_builder("csv", **options).config
    text = {"dtype": str, "keep_default_na": False, "na_values": [""], "chunksize": TOGETHER}
    with pandas.read_csv(content, **config.pd_read_csv_kwargs | text) as parts:
        for part in parts:
            cells = part[_used(part.columns)].astype(object)
            yield from cells.where(cells.notna(), None).to_dict("records")


def builder_options(config: Any) -> dict[str, Any]:
    """The options of a builder that are not its defaults, without its files and their types."""
    others = {"name", "version", "data_dir", "data_files", "description", "features", "columns"}
    return {
        field.name: getattr(config, field.name)
        for field in fields(config)
        if field.name not in others and getattr(config, field.name) != field.default
    }


def _used(columns: Iterable[str]) -> list[str]:
    """The columns that are read: others may be large. All of them if none says what a row is, for
    the message that refuses it."""
    known = not set(FIELDS).isdisjoint(columns)
    return [name for name in columns if name in READ or not known]


def _rows_of(batches: Iterable[Any], features: Mapping[str, Any]) -> Iterator[Row]:
    """features: those of `datasets`, by column. Media stay as they are stored."""
    for batch in batches:
        for row in batch.to_pylist():
            yield {name: _value(cell, features[name]) for name, cell in row.items()}


def _is_json(feature: Any) -> bool:
    # By its name: earlier versions of `datasets` have no such type.
    return type(feature).__name__ == "Json"


def _inner(feature: Any) -> Any:
    """The feature of a list's values. None: it is no list."""
    return feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)


def _value(value: Any, feature: Any) -> Any:
    """A stored value: texts of JSON are what they say, with their own nulls. Other objects have the
    fields of all in their column, so their nulls are left out."""
    if isinstance(value, str) and _is_json(feature):
        try:
            return json.loads(value)
        except ValueError:
            return value
    if isinstance(value, dict) and isinstance(feature, dict):
        return {k: _value(v, feature.get(k)) for k, v in value.items() if v is not None}
    if isinstance(value, list) and (inner := _inner(feature)) is not None:
        return [_value(part, inner) for part in value]
    return value


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
