"""The shipped prompts: enough, varied, and no near-duplicate within or across the sets."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from train.data.self_prompts import phrases

PROMPTS = Path(__file__).parent.parent / "configs" / "prompts"
SPLITS = ("train", "dev", "test")
OTHER = "other_kinds"
SETS = (*SPLITS, OTHER)
# Two prompts that share a third of their 5-letter pieces are variations of one.
BOUND = 1 / 3


@pytest.fixture(scope="module")
def rows() -> dict[str, list[dict[str, str]]]:
    return {
        name: [
            json.loads(line) for line in (PROMPTS / f"{name}.jsonl").read_text("utf-8").splitlines()
        ]
        for name in SETS
    }


def pieces(text: str) -> frozenset[str]:
    flat = " ".join(text.lower().split())
    return frozenset(flat[i : i + 5] for i in range(len(flat) - 4))


def test_there_are_enough_of_enough_kinds(rows):
    assert sum(len(rows[split]) for split in SPLITS) >= 400
    kinds = {split: {row["kind"] for row in rows[split]} for split in SPLITS}
    assert len(kinds["train"]) >= 8
    assert kinds["dev"] <= kinds["train"]
    assert len(kinds["test"] - kinds["train"]) == 1  # one kind is met in the test only


def test_no_two_prompts_are_near_duplicates(rows):
    found = [(row["id"], pieces(row["prompt"])) for name in SETS for row in rows[name]]
    assert len({name for name, _ in found}) == len(found)
    for i, (name, a) in enumerate(found):
        for other, b in found[:i]:
            shared = len(a & b) / len(a | b)
            assert shared < BOUND, f"{name} and {other} share {shared:.0%}"


def test_no_opening_is_used_over_and_over(rows):
    every = [row["prompt"] for name in SETS for row in rows[name]]
    openings = Counter(" ".join(text.lower().split()[:4]) for text in every)
    assert openings.most_common(1)[0][1] <= 0.02 * len(every)


def test_the_other_kinds_are_apart_from_all_that_is_trained_on_chosen_by_or_measured_on(rows):
    """No kind in common, and no eight words in a row, which a long prompt could share with a short
    one without being like it."""
    kinds = Counter(row["kind"] for row in rows[OTHER])
    assert set(kinds.values()) == {12}
    assert sum(kinds.values()) == 60
    used = [row for split in SPLITS for row in rows[split]]
    assert not set(kinds) & {row["kind"] for row in used}
    common = set().union(*(phrases(row["prompt"]) for row in used))
    for row in rows[OTHER]:
        assert not phrases(row["prompt"]) & common, row["id"]
    lengths = [len(row["prompt"].split()) for row in rows[OTHER] if row["kind"] == "passage_qa"]
    assert min(lengths) > max(len(row["prompt"].split()) for row in used)


def test_the_readme_has_the_number_of_prompts_of_every_kind(rows):
    counts = {
        kind: tuple(int(count) for count in cells.split("|"))
        for kind, cells in re.findall(
            r"^\| `(\w+)` +\|([ 0-9|]+)\|$",
            (PROMPTS / "README.md").read_text("utf-8"),
            re.MULTILINE,
        )
    }
    every = {row["kind"] for name in SETS for row in rows[name]}
    assert counts == {
        kind: tuple(sum(row["kind"] == kind for row in rows[name]) for name in SETS)
        for kind in every
    }
