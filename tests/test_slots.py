"""Slots against lists of tokens: what a row has after rounds of feeding, committing and leaving."""

import numpy as np
import pytest
import torch

from decode.slots import Slots

CAPACITY = 30
# Heads and head size of each layer's keys, and of its values.
ALIKE = [((2, 4), (2, 4))] * 3
UNLIKE = [((2, 4), (2, 6)), ((1, 4), (2, 6)), ((2, 4), (2, 5))]


@pytest.mark.parametrize("shapes", [ALIKE, UNLIKE], ids=["alike", "unlike"])
def test_every_layer_keeps_the_paths_that_were_committed(shapes: list) -> None:
    """Each fed token is a number, which all its keys and values are; layer i adds 1000·i, and
    values are negative."""
    slots = Slots(len(shapes), 3, CAPACITY, torch.device("cpu"))
    rng = np.random.default_rng(0)
    expected: list[list[int]] = [[], [], []]
    lengths = np.zeros(3, dtype=np.int64)
    token = 0
    for round_ in range(5):
        rows = len(lengths)
        tokens = 1 + token + np.arange(rows * 4).reshape(rows, 4)
        token = int(tokens.max())
        slots.place(lengths, 4)
        for number, (layer, kinds) in enumerate(zip(slots.layers, shapes, strict=True)):
            own = torch.as_tensor(tokens + 1000.0 * number).float()[:, None, :, None]
            keys, values = (
                sign * own.expand(-1, h, -1, d) for sign, (h, d) in zip((1, -1), kinds, strict=True)
            )
            layer.update(keys, values)
        counts = rng.integers(1, 5, rows)
        columns = np.tile(np.arange(4), (rows, 1))
        for row in range(rows):
            columns[row, : counts[row]] = np.sort(rng.choice(4, counts[row], replace=False))
            expected[row] += tokens[row, columns[row, : counts[row]]].tolist()
        slots.commit(lengths, torch.as_tensor(columns), counts)
        lengths = lengths + counts
        if round_ == 2:
            slots.keep_rows(torch.tensor([2, 0]))
            lengths, expected = lengths[[2, 0]], [expected[2], expected[0]]
        for number, (layer, kinds) in enumerate(zip(slots.layers, shapes, strict=True)):
            for sign, (h, d), found in zip((1, -1), kinds, (layer.keys, layer.values), strict=True):
                assert found.shape == (len(lengths), h, CAPACITY, d)
                for row, kept in enumerate(expected):
                    wanted = sign * (torch.tensor(kept).float() + 1000 * number)
                    there = found[row, :, : len(kept)]
                    assert torch.equal(there, wanted[None, :, None].expand(h, -1, d))
