"""The quickstart's prompts: enough, varied, and no near-duplicate within or across splits."""

import json
from collections import Counter
from pathlib import Path

import pytest

PROMPTS = Path(__file__).parent.parent / "configs" / "prompts"
SPLITS = ("train", "dev", "test")
# Two prompts that share a third of their 5-letter pieces are variations of one.
BOUND = 1 / 3


@pytest.fixture(scope="module")
def rows() -> dict[str, list[dict[str, str]]]:
    return {
        split: [json.loads(line) for line in (PROMPTS / f"{split}.jsonl").read_text().splitlines()]
        for split in SPLITS
    }


def pieces(text: str) -> frozenset[str]:
    flat = " ".join(text.lower().split())
    return frozenset(flat[i : i + 5] for i in range(len(flat) - 4))


def test_there_are_enough_of_enough_kinds(rows):
    assert sum(map(len, rows.values())) >= 400
    kinds = {split: {row["kind"] for row in rows[split]} for split in SPLITS}
    assert len(kinds["train"]) >= 8
    assert kinds["dev"] <= kinds["train"]
    assert len(kinds["test"] - kinds["train"]) == 1  # one kind is met in the test only


def test_no_two_prompts_are_near_duplicates(rows):
    found = [(row["id"], pieces(row["prompt"])) for split in SPLITS for row in rows[split]]
    assert len({name for name, _ in found}) == len(found)
    for i, (name, a) in enumerate(found):
        for other, b in found[:i]:
            shared = len(a & b) / len(a | b)
            assert shared < BOUND, f"{name} and {other} share {shared:.0%}"


def test_no_opening_is_used_over_and_over(rows):
    every = [row["prompt"] for split in SPLITS for row in rows[split]]
    openings = Counter(" ".join(text.lower().split()[:4]) for text in every)
    assert openings.most_common(1)[0][1] <= 0.02 * len(every)
