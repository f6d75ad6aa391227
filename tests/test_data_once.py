"""A row is read from its source once in the life of a run."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerate import Accelerator

import train.data.read
import train.data.splits
import train.data.template
from decode.base.errors import UserError
from tests.test_run import make_base, start
from tests.tiny import write_rows
from train.base.console import Reporter
from train.data.read import Examples
from train.run.config_checks import load_config
from train.run.run import DATA, Run
from train.run.run_data import PLACES, open_rows

pytestmark = pytest.mark.usefixtures("fresh_accelerate")
FEW = (
    "data.test=null",
    "evaluation={prompts: 2, max_new_tokens: 2, timed_prompts: 0, baselines: []}",
    "stages=[{name: answers, kind: generate, max_new_tokens: 2, batch_size: 16}]",
)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    base = make_base(tmp_path)
    rows = [{"prompt": f"the {n} of the sea", "response": "a shell"} for n in range(30)]
    write_rows(base / "train.jsonl", [*rows, {"prompt": "sea"}, {"prompt": "Sea!"}])
    write_rows(base / "dev.jsonl", [{"prompt": "sea"}])
    return base


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many rows were understood, decoded from the table, looked at for duplicates and written
    with the template."""
    counts: Counter[str] = Counter()

    def counted(module: Any, name: str) -> None:
        original = getattr(module, name)

        def call(*arguments: Any, **options: Any) -> Any:
            counts[name] += 1
            return original(*arguments, **options)

        monkeypatch.setattr(module, name, call)

    counted(train.data.read, "understand")
    counted(train.data.read, "_example")
    counted(train.data.splits, "_grams")
    counted(train.data.template, "render_jinja_template")
    return counts


def test_a_row_is_parsed_once_and_not_at_a_restart(base: Path, work: Counter[str]) -> None:
    start(base, *FEW)
    assert work["understand"] == 33
    assert work["_grams"]
    assert work["render_jinja_template"]
    [stored] = (base / "runs/tiny" / DATA).iterdir()
    first = open_rows(stored)
    work.clear()
    start(base, *FEW)
    assert not work
    # Nor for work that is still to do, but for the two rows of the evaluation.
    shutil.rmtree(base / "runs/tiny/stages")
    start(base, *FEW)
    assert work.keys() <= {"_example"}
    assert work["_example"] <= 2
    work.clear()
    # A table that was damaged is made again.
    file = stored / "train.arrow"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    start(base, *FEW)
    assert work["understand"] == 33
    assert open_rows(stored)[1] == first[1]


def test_the_table_says_where_each_row_went(base: Path) -> None:
    start(base, *FEW)
    [stored] = (base / "runs/tiny" / DATA).iterdir()
    data, hashes = open_rows(stored)
    places = [PLACES[place] for place in np.load(stored / "train.npy")]
    assert Counter(places) == {"train": 27, "test": 3, "repeated": 2}
    assert places[-2:] == ["repeated"] * 2
    rows = Examples.stored(stored / "train.arrow")
    assert [row.id for row in data.splits["test"]] == [
        row.id for row, place in zip(rows, places, strict=True) if place == "test"
    ]
    assert list(hashes) == ["train", "dev", "test"]
    # In memory, as for a plan, they are the same.
    config = load_config(base / "config.yaml", FEW)
    run = Run(config, Accelerator(cpu=True), Reporter(silent=True))
    assert {split: list(found) for split, found in run.read_data().items()} == {
        split: list(found) for split, found in data.splits.items()
    }


def test_a_refused_start_keeps_the_rows_of_the_run(base: Path, work: Counter[str]) -> None:
    start(base, *FEW)
    before = {path.name for path in (base / "runs/tiny" / DATA).iterdir()}
    write_rows(base / "dev.jsonl", [{"prompt": "another sea"}])
    with pytest.raises(UserError, match="the data of train, dev changed since run"):
        start(base, *FEW)
    assert before < {path.name for path in (base / "runs/tiny" / DATA).iterdir()}
    record = json.loads((base / "runs/tiny/data.json").read_text("utf-8"))
    assert record["dev"] == dict(open_rows(base / "runs/tiny" / DATA / before.pop())[1])["dev"]
