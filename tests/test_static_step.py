"""The lean forward of other devices than a CPU: a pass over static slots is one graph of tensors.

It is traced on the CPU by the frontend of `torch.compile`. The graph is the same for all texts that
need the same number of slots, and the logits are those of transformers' forward.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from decode.base.errors import UserError
from decode.drafters import Drafter
from decode.drafters.pard import ParallelLMDrafter, mark_parallel
from decode.drafters.skip import SkipDrafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder
from decode.model.cache.cached_model import CachedLM
from decode.model.forward.lean_forward import STATIC_SLOT_STEP, LeanForward
from decode.model.forward.lean_parts import PackedLinear
from decode.model.forward.prepare_model import has_products, prepare
from decode.model.forward.recognition import lean_forward
from decode.model.hidden_states import FINAL
from decode.shapes import Growth, chain_of
from tests.test_device import LAYERS, headed
from tests.test_packed import LEAN
from tests.tiny import VOCAB, forbid_packing, tiny_model

ROWS, GAMMA = 3, 4
# The text of row 0 grows past the first STATIC_SLOT_STEP slots.
STARTS = np.array([STATIC_SLOT_STEP - 16, 130, 7])
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {"head_dim": 8, "sliding_window": 5, "layers": 3},
}
# The nodes' parents; −1: the root, which is fed before all nodes.
PARENTS = (-1, -1, 0, 1, 2, 2)


@pytest.fixture(autouse=True)
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device where products cannot be packed."""
    forbid_packing(monkeypatch)
    torch._dynamo.reset()


def both(family: str, **fields: Any) -> tuple[CachedLM, CachedLM]:
    """A tiny model through the lean forward, and through transformers'."""
    model = tiny_model(family, max_positions=2 * STATIC_SLOT_STEP, **fields)
    expected = CachedLM(model, captured_layers=(0, FINAL))
    prepare(model, lean=True)
    lean = CachedLM(model, captured_layers=(0, FINAL))
    assert isinstance(lean.forward_pass, LeanForward)
    assert not isinstance(expected.forward_pass, LeanForward)
    return lean, expected


def read(lms: tuple[CachedLM, ...], count: int) -> None:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (ROWS, count), generator=generator)
    for lm in lms:
        lm.reset(ROWS, 2 * STATIC_SLOT_STEP)
        lm.forward(ids, np.zeros(ROWS, dtype=np.int64))


def traced(function: Callable[..., Any]) -> tuple[Any, Any]:
    """A function that is one graph for each set of shapes, and its counter of graphs."""
    counter = CompileCounterWithBackend("eager")  # type: ignore[no-untyped-call]
    return torch.compile(function, fullgraph=True, dynamic=False, backend=counter), counter


def require_close(results: tuple[Tensor, Any], expected: Tensor, features: Any) -> None:
    logits, states = results
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    for layer, values in features.items():
        torch.testing.assert_close(states[layer], values, rtol=0, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("family", MODELS)
def test_passes_over_a_growing_text_are_one_graph(family: str) -> None:
    """Chains of rows of different lengths."""
    lean, expected = both(family, **MODELS[family])
    read((lean, expected), int(STARTS.max()))
    run, counter = traced(lean.run)
    generator = torch.Generator().manual_seed(2)
    slots = set()
    start = STARTS
    for step in range(8):
        ids = torch.randint(3, VOCAB, (ROWS, GAMMA + 1), generator=generator)
        columns = torch.randint(0, GAMMA + 1, (ROWS, 1), generator=generator)
        lean.slots.place(start, GAMMA + 1)
        slots.add(lean.slots.layers[0].window.end)
        results = run(ids, torch.as_tensor(start)[:, None], columns)
        logits = expected.forward(ids, start, columns=columns.numpy())
        require_close(results, logits, expected.features)
        start = start + np.array([4, 1, 1 + step % 5])
    assert slots == {STATIC_SLOT_STEP, 2 * STATIC_SLOT_STEP}
    assert counter.frame_count == len(slots)


@torch.inference_mode()
@pytest.mark.parametrize("family", MODELS)
def test_passes_over_trees_are_one_graph(family: str) -> None:
    """Verified at once, and drafted level by level. The accepted path is kept by `commit`."""
    lean, expected = both(family, **MODELS[family])
    read((lean, expected), 40)
    run, counter = traced(lean.run)
    nodes = len(PARENTS) + 1
    seen = torch.eye(nodes, dtype=torch.bool)
    for node, parent in enumerate(PARENTS, 1):
        seen[node] |= seen[parent + 1]
    generator = torch.Generator().manual_seed(3)
    start = np.array([40, 21, 7])
    for _ in range(3):
        ids = torch.randint(3, VOCAB, (ROWS, nodes), generator=generator)
        for first, end in ((0, nodes), (3, 5)):  # all nodes, then a level of them again
            ancestors = seen[None, first:end, :end].expand(ROWS, -1, -1)
            depths = ancestors.sum(2) - 1
            fed, at = ids[:, first:end], start + first
            lean.slots.place(at, end - first)
            results = run(fed, torch.as_tensor(at)[:, None], None, depths, ancestors)
            logits = expected.forward(fed, at, depth_BN=depths, ancestors_BNM=ancestors)
            require_close(results, logits, expected.features)
        path = np.array([[0, 1, 3, 5]] * ROWS)
        counts = np.array([4, 2, 3])
        for lm in (lean, expected):
            lm.commit(start, path, counts)
        start = start + counts
    assert counter.frame_count == 2


def drafter_of(kind: str, target: Any) -> Drafter:
    if kind == "small_lm":
        small = tiny_model("llama", seed=7, layers=1)
        prepare(small, lean=True)
        return SmallLMDrafter(small)
    if kind == "pard":
        small = tiny_model("llama", seed=7, layers=1)
        mark_parallel(small.config, 3)
        prepare(small, lean=True)
        return ParallelLMDrafter(small)
    if kind == "skip":
        return SkipDrafter(exit=2)
    return headed(kind)(target, lambda module: module)


@torch.inference_mode()
@pytest.mark.parametrize(
    "kind",
    [
        "dflash",
        "eagle1",
        "small_lm",
        *(
            pytest.param(kind, marks=pytest.mark.thorough)
            for kind in ("dspark", "hydra_plus", "kangaroo", "medusa", "p_eagle", "pard", "skip")
        ),
    ],
)
def test_a_chain_is_drafted_as_one_graph(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every step the same graph, from the growth on: what a draft reads of new text comes before
    it. The prompts' lengths differ, one of them is a single token."""
    prompts, new, sampling = [[5, 17, 250, 9, 42], [7, 8, 9], [11]], 14, Sampling(temperature=1.0)

    def texts() -> list[list[int]]:
        target = tiny_model("llama", layers=LAYERS)
        prepare(target, lean=True)
        decoder = Decoder(target, drafter_of(kind, target), gamma=3, sampling=sampling)
        return decoder.decode(prompts, new).outputs

    expected, chain, steps = texts(), chain_of, 0
    draft_once, counter = traced(chain)

    def draft(growth: Growth, depth: int, *rest: Any) -> Any:
        nonlocal steps
        if growth.rows < ROWS or depth < 3:  # near the end
            return chain(growth, depth, *rest)
        steps += 1
        return draft_once(growth, depth, *rest)

    monkeypatch.setattr("decode.shapes.chain_of", draft)
    assert texts() == expected
    assert steps >= 3
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", torch.bfloat16), ("gemma2", torch.float32), ("olmo2", torch.bfloat16)],
)
def test_standard_decoders_are_lean_without_packing(family: str, dtype: torch.dtype) -> None:
    """With the model's weights and no others."""
    model = tiny_model(family, **LEAN[family]).to(dtype)
    lean = lean_forward(model, packed=False)
    assert not any(isinstance(module, PackedLinear) for module in lean.modules())
    parameters = {id(parameter) for parameter in model.parameters()}
    assert {id(parameter) for parameter in lean.parameters()} <= parameters
    if has_products(dtype):  # some CPUs have none in bfloat16
        lean_forward(model, packed=True)


def test_the_choice_stays_with_the_model() -> None:
    model = tiny_model("llama")
    assert not isinstance(prepare(model), LeanForward)  # nothing was measured on other devices
    lean = prepare(model, lean=True)
    assert isinstance(lean, LeanForward)
    assert CachedLM(model).forward_pass is lean
    assert not isinstance(prepare(model, lean=False), LeanForward)
    assert not isinstance(CachedLM(model).forward_pass, LeanForward)
    with pytest.raises(UserError, match="cannot run through the lean forward"):
        prepare(tiny_model("gpt2"), lean=True)
