"""Drafters that see a window of the text: one rule in training and in drafts, and fewer slots read.

Shapes: B rows, T tokens of a text, N drafted tokens, V vocabulary.
"""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decode.base.errors import UserError
from decode.draft import Contexts, Draft
from decode.drafters import DRAFTERS
from decode.drafters.small_lm import SmallLMDrafter
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder, Decoding
from decode.model.cache.sliding_window import SlidingWindow
from decode.model.forward.attention_mask import AttentionMask
from decode.model.loading import Target
from decode.opening.directory import open_drafter
from decode.shapes import SHAPES
from heads.heads_directory import make_ready, new_heads, save_heads
from heads.layers import unrolled_attention
from heads.layers.unrolled_attention import merged_attention
from heads.options import HeadOptions
from tests.contract import moved_heads
from tests.dense_attention import dense_attention
from tests.test_long_context import assert_close, drawn, gradients
from tests.tiny import tiny_model, tiny_target
from tests.trained_heads import features_of, trained_logits

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

VOCAB = 304  # the last ids are no tokens, as DFlash needs
DEPTH = 3
KINDS: dict[str, dict[str, Any]] = {
    "eagle1": {"type": "eagle1", "depth": DEPTH},
    "eagle3": {"type": "eagle3", "steps": DEPTH, "fc_norm": True, "norm_output": True},
    "hydra_plus": {"type": "hydra_plus", "heads": DEPTH, "layers": 2},
    "p_eagle": {"type": "p_eagle", "tokens": DEPTH, "layers": 2},
    "dflash": {"type": "dflash", "layers": 2, "block": DEPTH + 1, "taps": [0, 2]},
    "dspark": {"type": "dspark", "layers": 2, "block": DEPTH, "taps": [0, 2], "rank": 4},
    "kangaroo": {"type": "kangaroo", "exit_layer": 2, "depth": DEPTH},
}
kinds = pytest.mark.parametrize("kind", KINDS)
# Texts of very different lengths, around the window and far beyond it.
PROMPTS = [
    np.random.default_rng(length).integers(3, 290, length).tolist() for length in (60, 3, 9, 1, 31)
]
WINDOWS = [SlidingWindow(5), SlidingWindow(4, sinks=2)]
SAMPLED = Sampling(1.0)


@functools.cache
def target() -> Target:
    return tiny_target(vocab=VOCAB, layers=7)


def make(kind: str, window: SlidingWindow | None = None) -> Any:
    """With attention that looks far: every key counts."""
    changes = {} if window is None else {"window": window.size, "sinks": window.sinks}
    heads = moved_heads(KINDS[kind] | changes, target())
    make_ready(heads, target(), torch.float32)
    return heads.eval()


def recorded(drafter: Any, **options: Any) -> list[tuple[Contexts, Draft]]:
    """All drafts of a decode with rows that leave and join, each with its texts."""
    drafts: list[tuple[Contexts, Draft]] = []
    draft = drafter.draft

    def kept(contexts: Contexts, *rest: Any) -> Draft:
        made: Draft = draft(contexts, *rest)
        text = Contexts(contexts.tokens.copy(), contexts.lengths.copy())
        drafts.append((text, made))
        return made

    drafter.draft = kept
    decoding = Decoding(Decoder(target().model, drafter, sampling=SAMPLED, **options), seed=4)
    decoding.admit(PROMPTS[:3], 9)
    while not decoding.finished:
        decoding.step()
        if len(decoding.outputs) == 3:
            decoding.admit(PROMPTS[3:], 14)
    return drafts


def trained_q(heads: Any, text: list[int], length: int) -> dict[int, Tensor]:
    """By depth, [V]: what training predicts for the tokens after the first `length` of a text."""
    ids = torch.tensor([[*text, 5, 5]])
    features = features_of(target().model, heads, ids)
    return {
        depth: logits[length - 2].float().softmax(-1)
        for depth, logits in trained_logits(heads, ids, features).items()
        if depth <= len(text) - length
    }


def distance(q: Tensor, other: Tensor) -> float:
    """The largest difference of the logarithms: that of the likeliest tokens alone says little."""
    logs = (x.clamp(min=1e-20).log() for x in (q, other))
    return float((next(logs) - next(logs)).abs().max())


@kinds
def test_what_is_drafted_is_what_was_trained(kind: str) -> None:
    """Every q of ragged texts, also of rows that join, is the training's. Another window's is not,
    which makes sure that the window counts."""
    window = WINDOWS[1]
    heads = make(kind, window)
    drafter: Any = DRAFTERS[kind](heads, VOCAB)
    checked = beyond = 0
    for contexts, draft in recorded(drafter, gamma=DEPTH)[::3]:
        for row, (length, depth) in enumerate(zip(contexts.lengths, draft.sizes, strict=True)):
            if depth < DEPTH or length < 3:
                continue
            text = contexts.tokens[row, :length].tolist() + draft.tokens[row].tolist()
            expected = trained_q(heads, text, length)
            assert draft.q is not None
            for place, q in expected.items():
                assert distance(draft.q[row, place - 1], q) < 0.01
                checked += 1
            if length > 3 * window.size:
                assert distance(trained_q(make(kind), text, length)[1], expected[1]) > 0.1
                beyond += 1
    assert checked > 20
    assert beyond > 2


@pytest.mark.parametrize("kind", ["eagle3", "hydra_plus", "p_eagle", "dflash", "kangaroo"])
def test_a_long_text_costs_what_its_window_does(kind: str) -> None:
    """Attention gets a few slots of a long text, and few of its entries are ever computed."""
    heads, text, window = make(kind, WINDOWS[1]), [7, 11, 13] * 60, WINDOWS[1]
    drafter: Any = DRAFTERS[kind](heads, VOCAB)
    slots: list[int] = []
    entries: list[int] = []
    attentions, take_missing = drafter.attentions, drafter.take_missing

    def counted(*args: Any, **options: Any) -> Any:
        attends = attentions(*args, **options)
        slots.append(drafter.slots.layers[0].fed.count)
        return attends

    def taken(*args: Any) -> Any:
        columns, states = take_missing(*args)
        entries.append(columns.shape[1])
        return columns, states

    drafter.attentions, drafter.take_missing = counted, taken
    decoder = Decoder(target().model, drafter, gamma=DEPTH)
    expected = Decoder(target().model, DRAFTERS["none"]()).decode([text], 8)
    assert decoder.decode([text], 8).outputs == expected.outputs
    reach = heads.stacked_layers * window.size + DEPTH + 1
    assert sum(entries[:2]) <= reach + window.sinks
    assert slots
    assert all(count <= 2 * (reach + window.size + window.sinks) for count in slots)


def test_every_slot_that_is_seen_is_read_once() -> None:
    generator = np.random.default_rng(0)
    for _ in range(300):
        ranges = ((0, 4), (1, 9), (1, 5), (1, 6))
        sinks, size, step, n = (int(generator.integers(*x)) for x in ranges)
        base = generator.integers(0, 80, generator.integers(1, 4))
        ends = base + n
        capacity = -(-int(ends.max() + generator.integers(0, 3)) // step) * step
        end = -(-int(ends.max()) // step) * step
        read = SlidingWindow(size, sinks).slots(base, ends, end, capacity, step)
        for row, (first, last) in enumerate(zip(base, ends, strict=True)):
            seen = {*range(sinks), *range(max(first - size + 1, 0), last)} & {*range(last)}
            slots = list(range(read.start, read.stop) if isinstance(read, slice) else read[row])
            assert seen <= {*slots}
            assert len({*slots}) == len(slots)
            assert max(slots) < capacity
            assert len(slots) <= 2 * (sinks + size + n + 2 * step)


@pytest.mark.parametrize(("window", "steps"), [(WINDOWS[0], 1), (WINDOWS[1], 3)])
def test_attention_in_a_window_is_that_of_all_scores(
    window: SlidingWindow, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unrolled_attention, "BLOCK", 7)
    queries, keys, values = drawn(6, 2, torch.float64, length=33)
    attends = (functools.partial(x, window=window) for x in (merged_attention, dense_attention))
    ours, theirs = (gradients(x, queries, keys[:steps], values[:steps]) for x in attends)
    assert_close(ours, theirs, 1e-12)
    everything = gradients(dense_attention, queries, keys[:steps], values[:steps])
    assert (everything[0] - ours[0]).abs().max() > 0.01


# --- small language models ------------------------------------------------------------------------


def masked_q(model: Any, text: list[int], window: SlidingWindow) -> Tensor:
    """[V]: of the token after a text, by one pass under a mask."""
    positions = torch.arange(len(text))
    seen = window.sees(positions[:, None], positions) & (positions <= positions[:, None])
    hidden = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        logits = model(torch.tensor([text]), attention_mask=hidden[None, None]).logits
    q: Tensor = logits[0, -1].softmax(-1)
    return q


@pytest.mark.parametrize(
    ("shape", "window"),
    [("chain", WINDOWS[0]), ("static:widths=[2,1],draw=distinct", WINDOWS[1])],
)
def test_a_small_model_sees_a_window(shape: str, window: SlidingWindow) -> None:
    small = tiny_model("llama", vocab=VOCAB, layers=2)
    drafter = SmallLMDrafter(small).with_window(window).with_shape(SHAPES.make(shape))
    checked = 0
    for contexts, draft in recorded(drafter, gamma=DEPTH):
        for row, (length, depth) in enumerate(zip(contexts.lengths, draft.sizes, strict=True)):
            if not depth or draft.q is None:
                continue
            paths = [[*range(place)] for place in range(depth)]
            if not draft.is_chain:
                paths = [[]]
            for place, path in enumerate(paths):
                text = contexts.tokens[row, :length].tolist() + draft.tokens[row, path].tolist()
                expected = masked_q(small, text, window)
                torch.testing.assert_close(draft.q[row, place], expected, atol=1e-5, rtol=1e-3)
                checked += 1
    assert checked > 10


def test_a_small_model_reads_a_long_prompt_in_short_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode.model.cache.cached_model.SHORT_PASS_TOKENS", 8)
    window = SlidingWindow(6, sinks=2)
    small = tiny_model("mistral", vocab=VOCAB, sliding_window=4)
    other = tiny_model("mistral", vocab=VOCAB, sliding_window=4)
    drafter = SmallLMDrafter(small).with_window(window)
    text = PROMPTS[0]
    slots: list[int] = []
    attend = AttentionMask.attend

    def counted(mask: AttentionMask, query: Tensor, key: Tensor, *rest: Any) -> Tensor:
        slots.append(key.shape[2])
        return attend(mask, query, key, *rest)

    contexts = Contexts.of([text], len(text) + 8)
    drafter.start(contexts)
    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setattr(AttentionMask, "attend", counted)
        logits = drafter.feed(contexts, contexts.lengths, np.array([True]))
    assert logits is not None
    # The model's narrower window stays as it is.
    with torch.no_grad():
        expected = other(torch.tensor([text])).logits[0, -1]
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-3)
    assert max(slots) <= 2 * (6 + 2 + 8 + 16)


# --- names and refusals ---------------------------------------------------------------------------


def test_a_stored_drafter_opens_with_a_window(tmp_path: Path) -> None:
    path = tmp_path / "drafter"
    save_heads(path, make("eagle3", SlidingWindow(9)), target=target(), provenance={})
    stored: Any = open_drafter(str(path), target())
    assert stored.heads.window == SlidingWindow(9)
    narrowed: Any = open_drafter(f"{path}:window=5,sinks=2", target())
    assert narrowed.heads.window == SlidingWindow(5, 2)
    assert narrowed.with_shape(SHAPES.make("chain")).heads.window == SlidingWindow(5, 2)
    assert narrowed.heads.options.steps == DEPTH
    in_turn: Any = open_drafter(f"ngram+{path}:window=5", target())
    assert in_turn.drafters[1].heads.window == SlidingWindow(5)
    for options, message in (
        ("window=", "expected a number of tokens"),
        ("window=five", "expected a number of tokens"),
        ("window=5,depth=2", "expected a number of tokens"),
        ("window=0", "expected at least 1 token"),
        (f"window={DEPTH - 1}", f"expected at least {DEPTH}"),
    ):
        with pytest.raises(UserError, match=message):
            open_drafter(f"{path}:{options}", target())


def test_what_has_no_window_is_refused(tmp_path: Path) -> None:
    medusa: Any = new_heads(HeadOptions.of({"type": "medusa"}), target(), None)
    save_heads(tmp_path / "medusa", medusa, target=target(), provenance={})
    with pytest.raises(UserError, match=r"MedusaDrafter has no layers .* leave window out"):
        open_drafter(f"{tmp_path / 'medusa'}:window=9", target())
    for changes, message in (
        ({"sinks": 2}, "there is no window"),
        ({"window": DEPTH - 1}, f"expected at least {DEPTH}"),
    ):
        with pytest.raises(UserError, match=message):
            new_heads(HeadOptions.of(KINDS["eagle1"] | changes), target(), None)
