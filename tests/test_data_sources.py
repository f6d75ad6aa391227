"""A row has the same text however its file is named, packed and placed."""

import gzip
import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from decode.base.errors import UserError
from train.data.read import Example, read_examples

pytestmark = pytest.mark.usefixtures("data_sets")
with_json = pytest.mark.skipif(
    not hasattr(datasets, "Json"), reason="this version of datasets has no columns of JSON"
)
TEXTS = (
    "2024-01-02",
    "2024-01-02T03:04:05Z",
    "03/04/2024",
    "007",
    "1.50",
    "1e3",
    "NaN",
    "null",
    "true",
    "[1, 2]",
    '{"a": 1}',
    '"quoted"',
    "ünï 😀 \u2028 line",
    "two\nlines",
)
VALUES: tuple[Any, ...] = (
    None,
    0,
    7,
    1.5,
    True,
    "7",
    "2024-01-02",
    [],
    [1, "a", None],
    {"b": None},
    {"c": {"d": 1}},
)


CARD = """---
configs:
- config_name: a
  data_files: {a}
- config_name: b
  data_files: {b}
---
"""


def random_row(draw: random.Random, number: int) -> dict[str, Any]:
    """A row of any kind. Later rows have columns and types that earlier ones do not have."""
    text = draw.choice(TEXTS)
    other = draw.choice(TEXTS)
    parts = [{"type": "text", "text": text}, {"type": "text", "text": other}]
    said = parts if number > 5 and draw.random() < 0.5 else text
    arguments = {f"k{draw.randrange(9)}": draw.choice(VALUES) for _ in range(draw.randrange(3))}
    call = {
        "function": {"name": "look", "arguments": draw.choice((arguments, json.dumps(arguments)))}
    }
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": said},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": other, "name": draw.choice((None, "look"))},
        {"role": "assistant", "content": text, "weight": draw.choice((None, 1, 0.5, "high"))},
    ]
    row: dict[str, Any] = draw.choice(
        (
            {"prompt": text, "response": other},
            {"instruction": text, "input": draw.choice((None, "", other)), "output": other},
            {"messages": turns, "tools": draw.choice((None, [arguments], json.dumps([arguments])))},
            {"conversations": [{"from": "human", "value": said}, {"from": "gpt", "value": other}]},
            {"text": other},
        )
    )
    if number > 8:
        row["late"] = draw.choice(VALUES)
        row["kind"] = draw.choice((None, text))
    return row | {"id": draw.choice((None, number, f"2024-01-{number:02}", f"00{number}"))}


def without_place(examples: Iterator[Example] | Any) -> list[tuple[Any, ...]]:
    return [(e.messages, e.prompt, e.text, e.kind, e.tools) for e in examples]


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.mark.parametrize("seed", range(6))
def test_rows_are_the_same_in_every_file(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    rows = [random_row(draw, number) for number in range(24)]
    (tmp_path / "rows.jsonl").write_bytes(lines(rows))
    (tmp_path / "rows.json").write_text(json.dumps(rows), "utf-8")
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(lines(rows)))
    parts = [lines(rows[:9]), lines(rows[9:])]
    for name, suffix in (("folder", ".jsonl"), ("packed", ".jsonl.gz"), ("mixed [v2]", ".jsonl")):
        (tmp_path / name / "data").mkdir(parents=True)
        for number, part in enumerate(parts):
            content = gzip.compress(part) if suffix.endswith(".gz") else part
            (tmp_path / name / "data" / f"train-{number}{suffix}").write_bytes(content)
    (tmp_path / "subsets").mkdir()
    for number, part in enumerate(parts):
        (tmp_path / "subsets" / f"{number}.jsonl").write_bytes(part)
    card = CARD.format(a="'*.jsonl'", b="0.jsonl")
    (tmp_path / "subsets" / "README.md").write_text(card, "utf-8")
    written = without_place(read_examples(str(tmp_path / "rows.jsonl"))[0])
    assert len(written) == len(rows)
    for names in (
        ["rows.json"],
        ["rows.jsonl.gz"],
        ["folder/data/train-0.jsonl", "folder/data/train-1.jsonl"],
        ["folder"],
        ["packed"],
        ["mixed [v2]"],
        ["subsets:a"],
        ["folder@train[:10]", "folder@train[10:]"],
    ):
        examples, report = read_examples(names, base_dir=tmp_path)
        assert without_place(examples) == written, names
        assert report.kept == len(rows)


def json_table(rows: list[dict[str, Any]]) -> Any:
    """The rows in columns of JSON, each with its own type."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = {
        name: [None if row.get(name) is None else json.dumps(row[name]) for row in rows]
        for name in columns
    }
    json_array = partial(pa.ExtensionArray.from_storage, pa.json_())
    table = pa.table({name: json_array(pa.array(texts)) for name, texts in cells.items()})
    features = {name: {"_type": "Json"} for name in columns}
    return table.replace_schema_metadata(
        {"huggingface": json.dumps({"info": {"features": features}})}
    )


def plain_table(rows: list[dict[str, Any]]) -> Any | None:
    """The rows in columns of one type. None: they have several."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    try:
        return pa.table({name: pa.array([row.get(name) for row in rows]) for name in columns})
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return None


def without_nulls(value: Any) -> Any:
    """A table has null for a field that an object lacks."""
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list | tuple) else value


@with_json
@pytest.mark.parametrize("seed", range(4))
def test_tables_hold_the_rows_that_they_can(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    rows = [random_row(draw, number) for number in range(24)]
    (tmp_path / "rows.jsonl").write_bytes(lines(rows))
    written = without_place(read_examples(str(tmp_path / "rows.jsonl"))[0])
    pq.write_table(json_table(rows), tmp_path / "json.parquet", row_group_size=7)
    assert without_place(read_examples(str(tmp_path / "json.parquet"))[0]) == written
    # Shards of one kind of rows each, with other columns and types.
    (tmp_path / "shards").mkdir()
    held = []
    for number, (row, read) in enumerate(zip(rows, written, strict=True)):
        table = plain_table([row | {"id": None}] * 2)
        if table is None:
            continue
        try:
            pq.write_table(table, tmp_path / "shards" / f"{number:02}.parquet")
        except pa.ArrowNotImplementedError:  # an object without fields
            (tmp_path / "shards" / f"{number:02}.parquet").unlink(missing_ok=True)
            continue
        held += [without_nulls(list(read))] * 2
    assert len(held) > 24
    examples, _ = read_examples("shards", base_dir=tmp_path)
    assert [without_nulls(list(row)) for row in without_place(examples)] == held


def table_of(path: Path, *rows: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path)


def prompts(*names: str, base_dir: Path) -> list[str | None]:
    return [example.prompt for example in read_examples(list(names), base_dir=base_dir)[0]]


@pytest.mark.parametrize("folder", ["run[12]", "run?", "run*", "{run}", "a:b@c"])
def test_a_path_is_no_pattern(tmp_path: Path, folder: str) -> None:
    for place, text in ((folder, "right"), ("run1", "wrong"), ("run12", "wrong")):
        table_of(tmp_path / place / "train.parquet", {"prompt": text})
        (tmp_path / place / "[a]*.csv").write_text(f"prompt\n{text}\n", "utf-8")
    (tmp_path / folder / "train[2].parquet").symlink_to(tmp_path / folder / "train.parquet")
    for name in (folder, f"{folder}/train.parquet", f"{folder}/[a]*.csv"):
        assert set(prompts(name, base_dir=tmp_path)) == {"right"}
    assert prompts(f"{folder}/train[2].parquet", base_dir=tmp_path) == ["right"]


def test_a_data_set_with_subsets(tmp_path: Path) -> None:
    for subset in "ab":
        table_of(tmp_path / "set" / subset / "train.parquet", {"prompt": subset})
    card = CARD.format(a="a/train.parquet", b="b/train.parquet")
    (tmp_path / "set" / "README.md").write_text(card, "utf-8")
    assert prompts("set:a", "set:b@train", base_dir=tmp_path) == ["a", "b"]
    for name, found in (
        ("set", "no subset is named; expected one of a, b. Write set:SUBSET."),
        ("set:c@train", 'no subset "c"; expected one of a, b. Write set:SUBSET@train.'),
        ("set:a@test", 'no split "test"; expected one of train. Write set:a@SPLIT.'),
    ):
        with pytest.raises(UserError) as error:
            prompts(name, base_dir=tmp_path)
        assert f"set: {found}" in str(error.value)


def test_files_of_a_directory_may_differ(tmp_path: Path) -> None:
    """A null in all of one file, a column of one file only, and a column of two types."""
    said = {"role": "user", "content": "q"}
    answer = {"role": "assistant", "content": "a"}
    shards: list[dict[str, Any]] = [
        {"messages": [said, answer | {"name": None}], "extra": 1, "id": None},
        {"messages": [said, answer | {"name": "n"}], "extra": "x", "id": "r"},
        {"messages": [said | {"weight": 0.5}], "id": "s", "json_schema": {"type": "object"}},
        {"prompt": "p", "id": "t"},
    ]
    for number, row in enumerate(shards):
        table_of(tmp_path / "set" / f"{number}.parquet", row)
    examples = list(read_examples("set", base_dir=tmp_path)[0])
    assert [e.id for e in examples] == ["set/0.parquet:0", "r", "s", "t"]
    assert examples[0].messages == (said, answer)
    assert examples[1].messages == (said, answer | {"name": "n"})
    assert examples[2].schema == '{"type": "object"}'


@with_json
@pytest.mark.parametrize("saved", [True, False])
def test_a_value_is_read_as_it_was_written(tmp_path: Path, saved: bool) -> None:
    """`datasets` writes the text 002 as JSON without quotes, and would read 2."""
    rows = [{"prompt": "a", "id": 1}, {"prompt": "a", "id": "002"}]
    table = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    if saved:
        table.save_to_disk(tmp_path / "table")
    else:
        table.to_parquet(tmp_path / "table")
        (tmp_path / "table").rename(tmp_path / "table.parquet")
    name = "table" if saved else "table.parquet"
    assert [e.id for e in read_examples(name, base_dir=tmp_path)[0]] == ["1", "002"]


def test_tables_of_text_are_text_under_every_name(tmp_path: Path) -> None:
    rows = [("007", "2024-01-02"), ("NA", "1.50"), ("true", "x, y"), ("null", "None"), ("nan", "")]
    (tmp_path / "set").mkdir()
    (tmp_path / "folder").mkdir()
    for name in ("rows.csv", "rows.tsv", "set/train.tsv", "folder/train.csv"):
        mark = "," if name.endswith("csv") else "\t"
        lines = [("id", "prompt", "response"), *((f"0{i}", *row) for i, row in enumerate(rows))]
        text = "".join(mark.join(f'"{cell}"' for cell in line) + "\n" for line in lines)
        (tmp_path / name).write_text(text, "utf-8")
    (tmp_path / "rows.csv.gz").write_bytes(gzip.compress((tmp_path / "rows.csv").read_bytes()))
    said = [[cell for cell in row if cell] for row in rows]
    for name in ("rows.csv", "rows.tsv", "set", "folder", "rows.csv.gz"):
        examples, _ = read_examples(name, base_dir=tmp_path)
        assert [e.id for e in examples] == [f"0{i}" for i in range(5)]
        assert [[m["content"] for m in e.messages or ()] for e in examples] == said


def test_a_table_of_other_columns_names_all_of_them(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("query,response,note\nhi,ho,x\n", "utf-8")
    with pytest.raises(UserError, match='found "query", "response", "note"\n  rename "query" to'):
        prompts("rows.csv", base_dir=tmp_path)


def test_a_packed_file_that_changes_or_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    for text in ("first", "the second"):
        path.write_bytes(gzip.compress(json.dumps({"prompt": text}).encode()))
        assert prompts("rows.jsonl.gz", base_dir=tmp_path) == [text]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"rows\.jsonl\.gz: cannot be unpacked: "):
        prompts("rows.jsonl.gz", base_dir=tmp_path)
    with pytest.raises(UserError, match=r"other\.jsonl\.gz: no such file.*Did you mean"):
        prompts("other.jsonl.gz", base_dir=tmp_path)


def test_a_data_set_of_the_hub_without_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files that were fetched are read, not what `datasets` once made of them."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    stored = tmp_path / "hub" / "datasets--org--set"
    (stored / "refs").mkdir(parents=True)
    (stored / "refs" / "main").write_text("abc", "utf-8")
    (stored / "snapshots" / "abc").mkdir(parents=True)
    (stored / "snapshots" / "abc" / "train.jsonl").write_bytes(lines([{"prompt": "2024-01-02"}]))
    [example] = read_examples("org/set@train")[0]
    assert (example.id, example.prompt) == ("org/set/train.jsonl:1", "2024-01-02")
