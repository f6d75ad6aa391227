"""How many calls of the interpreter a decode step has. They are the same on any machine, so a step
that got longer is seen without a clock."""

import functools

import pytest
import torch

from benchmarks.shared.step_costs import step_cost
from decode.drafters import DRAFTERS, Drafter
from decode.loop.decoding import Decoder, Decoding
from decode.model.forward import few_rows
from decode.model.loading import Target
from decode.shapes.static import Static
from heads.heads_directory import make_ready
from tests.contract import moved_heads
from tests.export import require_environment
from tests.tiny import as_target, tiny_model

SIZES = {"hidden": 64, "heads": 2, "kv_heads": 1, "vocab": 320}
PROMPT = list(range(5, 25))
# That of the EAGLE-1 that comes with draftsmith.
TREE = [[0], [1], [2], [3], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
# The most calls of a step, with some room for other versions of Python, PyTorch and NumPy.
MOST = {("none", 1): 290, ("none", 8): 310, ("eagle1", 1): 890}


@pytest.fixture(autouse=True)
def layers_in_cpp() -> None:
    missing = few_rows.library(torch.float32) is None
    require_environment("C++ layers in float32" if missing else None, "apt-get install g++")


@functools.cache
def target(layers: int) -> Target:
    return as_target(tiny_model("llama", layers=layers, seed=3, **SIZES))


def drafter(kind: str, layers: int) -> Drafter:
    if kind == "none":
        return DRAFTERS["none"]()
    heads = moved_heads({"type": "eagle1", "depth": 3}, target(layers))
    make_ready(heads, target(layers), torch.float32)
    return DRAFTERS["eagle1"](heads, target(layers).vocab_size, Static(paths=TREE))


def calls(kind: str, rows: int, layers: int) -> int:
    decoder = Decoder(target(layers).model, drafter(kind, layers), eos_token_ids=[])
    prompts = [PROMPT[row:] for row in range(rows)]
    return step_cost(Decoding(decoder, prompts, 80), 3).calls


@pytest.mark.parametrize(("kind", "rows"), MOST)
def test_a_step_has_few_calls(kind: str, rows: int) -> None:
    assert 0 < calls(kind, rows, 4) < MOST[kind, rows]


@pytest.mark.parametrize("kind", ["none", "eagle1"])
def test_layers_add_no_calls(kind: str) -> None:
    assert calls(kind, 1, 2) == calls(kind, 1, 6)
