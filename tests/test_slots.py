"""Slots against lists of tokens: what a row has after rounds of feeding, committing and leaving."""

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from decode.model.cache.slots import Slots

CAPACITY = 30
# Heads and head size of each layer's keys, and of its values.
ALIKE = [((2, 4), (2, 4))] * 3
UNLIKE = [((2, 4), (2, 6)), ((1, 4), (2, 6)), ((2, 4), (2, 5))]


def test_growth_frees_old_keys_before_it_takes_memory_for_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slots = Slots(2, 1, CAPACITY, torch.device("cpu"))
    slots.place(np.zeros(1, dtype=np.int64), 3)
    for layer in slots.layers:
        layer.update(*torch.ones(2, 1, 2, 3, 4))
    keys, values = slots._stores
    old, reserve = weakref.ref(keys._tensors[0]), values.reserve

    def take(rows: int, capacity: int) -> None:
        assert old() is None
        reserve(rows, capacity)

    monkeypatch.setattr(values, "reserve", take)
    slots.add_rows(2, 2 * CAPACITY)
    assert slots.layers[1].keys[0, :, :3].eq(1).all()
    assert slots.layers[1].values.shape[:2] == (3, 2)


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


class _NewBytes(TorchDispatchMode):
    """The largest tensor that an operation made, in bytes of its memory; views make none."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, tuple | list) else [made]:
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, x.untyped_storage().nbytes())
        return made


@pytest.mark.parametrize("rows", [[1, 2, 4], [4, 0, 3], [5], []])
def test_rows_leave_without_a_second_cache(rows: list[int]) -> None:
    layers, heads, size = 8, 2, 4
    slots = Slots(layers, 6, CAPACITY, torch.device("cpu"))
    slots.place(np.zeros(6, dtype=np.int64), CAPACITY)
    generator = torch.Generator().manual_seed(0)
    before = []
    for layer in slots.layers:
        states = torch.randn(2, 6, heads, CAPACITY, size, generator=generator)
        layer.update(*states)
        before.append((states[0], states[1]))
    memory = [
        x.untyped_storage().data_ptr() for x in (slots.layers[0].keys, slots.layers[0].values)
    ]
    with _NewBytes() as made:
        slots.keep_rows(torch.tensor(rows, dtype=torch.int64))
    # One layer's keys or values at a time.
    assert made.largest <= 6 * heads * CAPACITY * size * 4
    for layer, (keys, values) in zip(slots.layers, before, strict=True):
        assert torch.equal(layer.keys, keys[rows])
        assert torch.equal(layer.values, values[rows])
        assert layer.keys.untyped_storage().data_ptr() == memory[0]
        assert layer.values.untyped_storage().data_ptr() == memory[1]
