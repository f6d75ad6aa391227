"""Counts of a reasoning model's answers, inside and outside of the thinking part.

A step belongs to the part in which its draft begins.
"""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from decode.stats import Counts, Tally
from decode.verification import Verification
from train.measure.thinking_marks import MARKS


def thinking_tokens(tokenizer: Any) -> tuple[int, int] | None:
    """The ids of the tokens that begin and end the thinking part. None if the vocabulary has no
    such pair: then the model does not think, or its marks are several tokens long."""
    vocabulary = tokenizer.get_vocab()
    for begin, end in MARKS:
        if begin in vocabulary and end in vocabulary:
            return vocabulary[begin], vocabulary[end]
    return None


def counts_by_part(
    steps: Sequence[Verification],
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    marks: tuple[int, int],
) -> dict[str, Counts] | None:
    """Counts of the steps whose draft begins inside of the thinking part (`thinking`) and outside
    of it (`answer`). None if all are in one part.

    steps: with the indices of prompts as `rows`. outputs: the answers. marks: the ids of the tokens
    that begin and end the thinking part. A prompt may begin it, as many chat templates do.
    """
    inside = [_inside(*texts, marks) for texts in zip(prompts, outputs, strict=True)]
    count, tally = len(prompts), Tally(2 * len(prompts))
    for step in steps:
        begins = [
            inside[row][length - len(prompts[row])]
            for row, length in zip(step.rows, step.lengths, strict=True)
        ]
        part = copy.copy(step)
        part.rows = step.rows + count * np.array(begins, dtype=np.int64)
        tally.add(part)
    parts = {
        name: sum((tally.row(row) for row in rows), Counts.zero())
        for name, rows in (("thinking", range(count, 2 * count)), ("answer", range(count)))
    }
    return parts if all(counts.steps for counts in parts.values()) else None


def _inside(prompt: Sequence[int], output: Sequence[int], marks: tuple[int, int]) -> list[bool]:
    """Whether the text thinks after the prompt and 0, 1, … tokens of the answer."""
    last = next((token for token in reversed(prompt) if token in marks), None)
    states = [last == marks[0]]
    for token in output:
        states.append(token == marks[0] if token in marks else states[-1])
    return states
