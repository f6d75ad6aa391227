"""Kangaroo: the target's first layers and an adapter draft what was trained.

Shapes: T tokens, H hidden size, V vocabulary.
"""

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from decode.base.errors import UserError
from decode.drafters import DRAFTERS
from decode.loop.decoding import Decoder
from decode.model.hidden_states import Recorder
from decode.model.loading import Target
from decode.shapes import SHAPES
from heads import kangaroo_heads
from heads.heads_directory import make_ready, new_heads
from heads.heads_module import HeadBatch
from heads.kangaroo_heads import KangarooDrafter
from heads.options import HeadOptions
from tests.contract import moved_heads
from tests.test_eagle import llama_layer
from tests.tiny import VOCAB, shortened, tiny_target
from tests.trained_heads import features_of, logits_of

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

LAYERS, EXIT, DEPTH, NEW = 4, 2, 3, 8
OPTIONS = {"type": "kangaroo", "exit_layer": EXIT, "depth": DEPTH}
PROMPTS = [[5, 17, 250, 9, 42], [7], [30] * 9, [11, 12]]
# Lean, transformers' own forward, and windows that differ between layers.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {},
    "gemma3_text": {"head_dim": 8, "sliding_window": 5, "layers": 6},
}
SHAPE_NAMES = ["chain", "static:widths=[3,2,1]", "dynamic:width=3,nodes=8"]


@functools.cache
def target(family: str = "llama") -> Target:
    return tiny_target(family, **({"layers": LAYERS} | FAMILIES[family]))


def moved(family: str = "llama", ids: torch.Tensor | None = None) -> Any:
    return moved_heads(OPTIONS, target(family), ids)


def last_logits(heads: Any, model: Any, text: Sequence[int]) -> torch.Tensor:
    """[V']: what training makes of the last token of a text, in one pass over all of it."""
    ids = torch.tensor([[*text, 0]])
    batch = HeadBatch(ids, torch.ones_like(ids, dtype=torch.bool), features_of(model, heads, ids))
    with torch.no_grad():
        (prediction,) = heads.predictions(batch, [1])
        return logits_of(heads, prediction)[-1]


def plain_texts(family: str) -> list[list[int]]:
    return Decoder(target(family).model, DRAFTERS["none"]()).decode(PROMPTS, NEW).outputs


def test_the_adapter_is_attention_over_exit_states_between_two_norms() -> None:
    """By transformers' llama layer without its feed-forward network. It starts as the target
    without its later layers."""
    model, heads = target().model, moved()
    heads.borrow(model)
    text = [5, 17, 250, 9, 42, 8]
    with torch.no_grad(), Recorder(model, [EXIT - 1]).recording() as features:
        model(torch.tensor([text]))
        exits = features[EXIT - 1][0]

        class Nothing(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.zeros_like(x)

        made = llama_layer(heads, ("adapter.",), exits, mlp=Nothing(), norm=heads.adapter.norm)[-1]
        states = heads.adapter.norm.weight * made * (made.square().mean() + 1e-6).rsqrt()
        expected = model.lm_head(states)
        torch.testing.assert_close(last_logits(heads, model, text), expected)
        fresh: Any = new_heads(HeadOptions.of(OPTIONS), target(), None)
        fresh.borrow(model)
        early = model.lm_head(model.model.norm(exits[-1]))
        torch.testing.assert_close(last_logits(fresh, model, text), early)


@pytest.mark.parametrize(
    ("family", "shape"),
    shortened(
        zip(FAMILIES, SHAPE_NAMES, strict=True),
        [("llama", SHAPE_NAMES[0]), ("gpt2", SHAPE_NAMES[1])],
    ),
)
def test_what_is_drafted_is_what_was_trained(
    family: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every logit of every node, in ragged rows, with texts of one token and beyond a window. The
    text is that of plain decoding."""
    model, checked = target(family).model, 0
    reduced = torch.arange(0, VOCAB, 2) if shape == "chain" else None
    heads, ready = moved(family, reduced), moved(family, reduced)
    heads.borrow(model)
    make_ready(ready, target(family), torch.float32)
    trained = functools.cache(lambda text: last_logits(heads, model, text))

    def check(growth: Any, logits: torch.Tensor, count: int) -> None:
        nonlocal checked
        contexts = growth.contexts
        needed = growth.needed(count) if count else None
        for row, length in enumerate(contexts.lengths):
            if needed is not None and not needed[row]:
                continue  # its draft has ended
            text = contexts.tokens[row, :length].tolist()
            paths = [text]
            if count:
                fed = growth.fed[row]
                paths = [[*text, *fed[path].tolist()] for path in growth.on_path(count)[row]]
            for node, path in enumerate(paths):
                if len(path) > 1:
                    expected = trained(tuple(path))
                    torch.testing.assert_close(logits[row, node], expected, rtol=2e-3, atol=2e-3)
                    checked += 1

    growing: Any = kangaroo_heads._Growth
    first, extend = growing._first, growing._extend

    def checked_first(growth: Any) -> torch.Tensor:
        logits: torch.Tensor = first(growth)
        check(growth, logits[:, None], 0)
        return logits

    def checked_extend(growth: Any, count: int) -> torch.Tensor:
        logits: torch.Tensor = extend(growth, count)
        check(growth, logits, count)
        return logits

    monkeypatch.setattr(growing, "_first", checked_first)
    monkeypatch.setattr(growing, "_extend", checked_extend)
    drafter = KangarooDrafter(ready, VOCAB, SHAPES.make(shape))
    plain = plain_texts(family)
    for first_target in (True, False):
        decoder = Decoder(model, drafter, gamma=DEPTH, first_target=first_target)
        assert decoder.decode(PROMPTS, NEW).outputs == plain
    assert checked > 100


def test_an_exit_that_leaves_no_later_layer_is_refused() -> None:
    with pytest.raises(UserError, match="runs the first 4 layers, but the target has 4"):
        new_heads(HeadOptions.of(OPTIONS | {"exit_layer": LAYERS}), target(), None)
    with pytest.raises(UserError, match=r"output is .own."):
        HeadOptions.of(OPTIONS | {"output": "own"})
