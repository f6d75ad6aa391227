"""Slots against lists of tokens: what a row has after rounds of feeding, committing and leaving."""

import re
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from decode.model.cache import slots as slots_module
from decode.model.cache.slots import Slots
from decode.tree_structure import ancestors_of

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

    def take(*args: Any) -> None:
        assert old() is None
        reserve(*args)

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
        slots.commit(lengths, columns, counts)
        lengths = lengths + counts
        if round_ == 2:
            slots.keep_rows(np.array([2, 0]))
            lengths, expected = lengths[[2, 0]], [expected[2], expected[0]]
        for number, (layer, kinds) in enumerate(zip(slots.layers, shapes, strict=True)):
            for sign, (h, d), found in zip((1, -1), kinds, (layer.keys, layer.values), strict=True):
                assert found.shape == (len(lengths), h, CAPACITY, d)
                for row, kept in enumerate(expected):
                    wanted = sign * (torch.tensor(kept).float() + 1000 * number)
                    there = found[row, :, : len(kept)]
                    assert torch.equal(there, wanted[None, :, None].expand(h, -1, d))


def test_hidden_states_of_plain_steps_are_as_if_each_was_written_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the plain steps: a wide pass, a copy of a row, a row that joins, one that leaves."""
    monkeypatch.setattr(slots_module, "WAITING", 3)
    slots = Slots(0, 2, CAPACITY, torch.device("cpu"), states=2)
    texts: list[list[float]] = [[], []]

    def feed(*starts: int, count: int = 1, first: int = 0) -> None:
        slots.place(np.array(starts), count, first=first)
        values = torch.rand(len(starts), count)
        for row, start in enumerate(starts, first):
            texts[row][start:] = values[row - first].tolist()
        states = [sign * values[..., None].expand(-1, -1, 4) for sign in (1, -1)]
        slots.keep_states(states, waits=True)

    def check() -> None:
        for row, text in enumerate(texts):
            kept = slots.kept_states(slice(row, row + 1), len(text))
            for sign, found in zip((1, -1), kept, strict=True):
                assert torch.equal(found[0], sign * torch.tensor(text)[:, None].expand(-1, 4))

    feed(0, 0, count=5)
    texts[1] = texts[1][:3]
    for step in range(5):
        feed(5 + step, 3 + step)
    assert slots._waiting
    feed(10, 8, count=3)
    feed(11, 9)
    check()
    feed(12, 10)
    assert slots._waiting
    taken = slots.take(0, 13)
    feed(13, 11)
    slots.add_rows(1, CAPACITY)
    texts.append([])
    feed(14, 12, 0)
    slots.keep_rows(np.array([2, 0]))
    texts = [texts[2], texts[0]]
    feed(1, 15)
    check()
    slots.put(0, taken)
    texts[0] = texts[1][:13]
    check()


class NewBytes(TorchDispatchMode):
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
    with NewBytes() as made:
        slots.keep_rows(np.array(rows, dtype=np.int64))
    # One layer's keys or values at a time.
    assert made.largest <= 6 * heads * CAPACITY * size * 4
    for layer, (keys, values) in zip(slots.layers, before, strict=True):
        assert torch.equal(layer.keys, keys[rows])
        assert torch.equal(layer.values, values[rows])
        assert layer.keys.untyped_storage().data_ptr() == memory[0]
        assert layer.values.untyped_storage().data_ptr() == memory[1]


def resident(tensors: list[torch.Tensor]) -> int:
    """The bytes that are in memory of the mappings that these tensors are in."""
    places = [(x.data_ptr(), x.data_ptr() + x.nbytes) for x in tensors]
    found, counts = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        words = line.split()
        if mapping := re.fullmatch(r"([0-9a-f]+)-([0-9a-f]+)", words[0]):
            first, end = (int(x, 16) for x in mapping.groups())
            counts = any(first < last and begin < end for begin, last in places)
        elif counts and words[0] == "Rss:":
            found += int(words[1]) * 1024
    return found


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
def test_a_row_takes_memory_for_what_it_has_written() -> None:
    """Also after rows have moved and more slots were allocated: 384 MiB are, and one long text and
    six short ones take 27."""
    layers, heads, size, long, short = 6, 4, 32, 4096, 96
    slots = Slots(layers, 8, long, torch.device("cpu"))
    lengths = np.array([long] + [short] * 7)
    for row, length in enumerate(lengths):
        slots.place(np.zeros(1, dtype=np.int64), int(length), first=row)
        for layer in slots.layers:
            layer.update(*torch.full((2, 1, heads, int(length), size), float(row + 1)))
    held = sum(lengths[:-1]) * layers * heads * size * 4 * 2
    slots.keep_rows(np.array([0, 7, 2, 3, 4, 5, 6]))
    slots.add_rows(1, 2 * long)
    for layer in slots.layers:
        for row, value in enumerate((1, 8, 3, 4, 5, 6, 7)):
            end = lengths[row]
            assert layer.keys[row, :, :end].eq(value).all()
            assert not layer.keys[row, :, end:].any()
        assert not layer.keys[7].any()
    memory = [x for store in slots._stores for x in store._tensors]
    assert sum(x.nbytes for x in memory) == 8 * 2 * long * layers * heads * size * 4 * 2
    assert 0.5 * held < resident(memory) < 1.1 * held


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("chains", [False, True])
def test_the_mask_on_a_cpu_is_that_of_an_accelerator(
    before: int, listed: bool, chains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees of 7 nodes, of which the first ones were fed before; texts end in different slots."""
    rng = np.random.default_rng(before)
    rows, nodes = 3, 7
    parents = np.stack([[rng.integers(-1, i) for i in range(nodes)] for _ in range(rows)])
    seen, root = torch.as_tensor(ancestors_of(parents)[:, before:]), np.array([4, 21, 9])
    fed = nodes - before
    slots = Slots(1, rows, CAPACITY, torch.device("cpu"), step=4)
    counts = np.array([fed, 1, 0]) if listed else None
    slots.place(root + before, fed, counts=counts)
    base, trees = torch.as_tensor(root + before * chains)[:, None], None if chains else seen
    found = slots.mask(base, fed, trees)
    monkeypatch.setattr(slots_module, "reads_are_free", lambda device: False)
    expected = slots.mask(base, fed, trees)
    assert found is not None
    assert expected is not None
    assert torch.equal(found, expected)
    assert found.any()
