"""A pass feeds the tokens of its rows and no padding, and a row gets what it gets alone."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from decode.draft import Contexts, Draft, Limits
from decode.drafters import DRAFTERS
from decode.drafters.small_lm import SmallLMDrafter
from decode.draw.mixed_sampling import combined
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder, Decoding
from decode.model.cache.cached_model import CachedLM
from decode.model.cache.long_read import LongRead
from decode.model.cache.real_tokens import Listed, RealTokens
from decode.model.forward.lean_forward import LeanForward
from decode.model.forward.prepare_model import prepare
from decode.model.hidden_states import FINAL
from decode.rules.exact import ExactMatch
from decode.shapes import SHAPES
from decode.verdict import Scores
from tests.contract import heads_on
from tests.tiny import VOCAB, tiny_model

STARTS, COUNTS = np.array([7, 30, 3, 12]), np.array([5, 0, 1, 9])
SEES = torch.tensor(
    [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]
).bool()
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 6},
    "gemma2": {"head_dim": 32, "sliding_window": 6},
}


def test_a_list_of_tokens_and_its_padding() -> None:
    real = RealTokens(np.array([0, 2, 3, 0]), 3)
    x = torch.arange(12).view(4, 3)
    assert len(real) == 5
    assert real.flat(x).tolist() == [[3, 4, 6, 7, 8]]
    padded = real.padded(real.flat(x))
    assert padded[1:3].tolist() == [[3, 4, 4], [6, 7, 8]]
    places = real.places(torch.tensor([[0], [1], [2], [0]]))[1:3]
    assert real.flat(x)[0, places].tolist() == [[4], [8]]


def seen(lm: CachedLM, tree: bool, rows: slice, **more: Any) -> tuple[Tensor, Tensor]:
    """The logits and the last states of a pass behind texts of different lengths."""
    generator = torch.Generator().manual_seed(0)
    lm.reset(4, 48)
    before = torch.randint(3, VOCAB, (4, 30), generator=generator)
    ids = torch.randint(3, VOCAB, (4, 9), generator=generator)
    with torch.inference_mode():
        lm.read(before, np.zeros(4, dtype=np.int64), STARTS)
        if tree:
            more["ancestors_BNM"] = torch.eye(9, dtype=torch.bool)[None].repeat(4, 1, 1)
            more["ancestors_BNM"][:, :, 0] = True
            more["ancestors_BNM"][:, :5, :5] = SEES
            more["ancestors_BNM"] = more["ancestors_BNM"][rows, : ids.shape[1]]
            more["depth_BN"] = more["ancestors_BNM"].sum(2) - 1
        logits = lm.forward(ids[rows], STARTS[rows], first=rows.start, **more)
    return logits, lm.features[FINAL]


def lean(model: Any, in_cpp: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[CachedLM, LeanForward]:
    """A model with its lean forward, whose layers run in C++ or do not."""
    lm = CachedLM(model, captured_layers=(FINAL,))
    forward = lm.forward_pass
    assert isinstance(forward, LeanForward)
    if not in_cpp:
        for layer in forward.layers:
            monkeypatch.setattr(layer, "few_rows", None)
        forward.refresh()
    return lm, forward


@pytest.mark.parametrize(
    ("family", "tree", "in_cpp"),
    [
        ("llama", False, True),
        ("llama", True, False),
        ("mistral", True, True),
        ("mistral", False, False),
        ("gemma2", True, False),
    ],
)
def test_a_row_gets_what_it_gets_alone(
    family: str, tree: bool, in_cpp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what a pass writes into the slots is the same too: a second pass reads them."""
    shape: dict[str, Any] = {"hidden": 64, "heads": 2, "kv_heads": 1, "layers": 3, "seed": 3}
    model = tiny_model(family, **shape, **FAMILIES[family])
    lm, forward = lean(model, in_cpp, monkeypatch)
    try:
        last = np.maximum(COUNTS - 1, 0)[:, None]
        together, states = seen(lm, tree, slice(0, 4), counts=COUNTS)
        assert lm.fed == COUNTS.sum()
        with torch.inference_mode():
            after = lm.forward(torch.full((4, 1), 5), STARTS + COUNTS)
        picked, _ = seen(lm, tree, slice(0, 4), counts=COUNTS, columns=last)
        for row in np.flatnonzero(COUNTS).tolist():
            part, count = slice(row, row + 1), int(COUNTS[row])
            alone, its_states = seen(lm, tree, part)
            assert lm.fed == 9
            for mine, yours in ((together, alone), (states, its_states)):
                torch.testing.assert_close(mine[row, :count], yours[0, :count])
            torch.testing.assert_close(picked[row, 0], alone[0, count - 1])
            with torch.inference_mode():
                its_after = lm.forward(torch.full((1, 1), 5), (STARTS + COUNTS)[part], first=row)
            torch.testing.assert_close(after[row], its_after[0])
            if in_cpp and forward._few_rows:
                assert torch.equal(together[row, :count], alone[0, :count])
    finally:
        forward.refresh()


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("in_cpp", [False, True])
def test_a_pass_with_parts_of_prompts_gives_what_each_gets_alone(
    tree: bool, in_cpp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows with drafts; a prompt of 40 tokens is read behind them, and then one of 3."""
    model = tiny_model("llama", hidden=64, heads=2, kv_heads=1, layers=3, seed=3)
    lm, forward = lean(model, in_cpp, monkeypatch)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (4, 40), generator=generator)
    contexts = Contexts.of(ids[:2, :9].tolist(), 48)
    parents = torch.tensor([[-1, -1, 0, 1]] * 2) if tree else None
    draft = Draft(ids[:2, 10:14], np.array([4, 2]), parents=parents)

    def verified(*sizes: int) -> list[Tensor]:
        """Logits and states of the drafts, and of two prompts, if parts of these sizes are read."""
        lm.reset(4, 64)
        counts = np.array([40, 3])
        read = LongRead(ids[2:], np.zeros(2, dtype=np.int64), counts, pads=False)
        with torch.inference_mode():
            lm.read(ids[:2, :8], np.zeros(2, dtype=np.int64), np.array([8, 8]))
            for size in sizes or (0,):
                parts = [read.part(size, 2)] if size else []
                found = lm.verify(contexts, draft, beside=parts)
                assert lm.fed == 8 + sum(int(part.counts.sum()) for part in parts)
            drafts = [found.values[0], lm.features[FINAL][0], lm.features[FINAL][1, :3]]
            while read.left:
                lm.read_on(read, 1 << 20, 2)
        return [*drafts, read.logits, read.features()[FINAL][0], read.features()[FINAL][1, :3]]

    try:
        expected = verified()
        for sizes in ((80,), (7, 20), (2, 2, 2)):
            every = zip(verified(*sizes), expected, strict=True)
            for number, (mine, yours) in enumerate(every):
                torch.testing.assert_close(mine, yours, atol=1e-4, rtol=1e-4)
                if in_cpp and forward._few_rows and number < 3:
                    assert torch.equal(mine, yours)
    finally:
        forward.refresh()


PROMPTS = [[5, 6, 7, 8, 5, 6, 7], [9, 3, 9, 3, 9], [11, 12, 13, 14], *([n, 40, n] for n in (4, 8))]


@pytest.mark.parametrize("lean", [True, False])
def test_a_batch_feeds_what_its_rows_need(lean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of a lookup have different lengths. Transformers' forward is the control: it pads to
    the longest."""
    model = tiny_model("llama", seed=1)
    prepare(model, lean=lean)
    decoder = Decoder(model, DRAFTERS["ngram"](), gamma=6)
    computed: list[int] = []
    embed = nn.Embedding.forward

    def counted(module: nn.Embedding, ids: Tensor) -> Tensor:
        computed.append(ids.numel())
        return embed(module, ids)

    monkeypatch.setattr(nn.Embedding, "forward", counted)
    steps = decoder.decode(PROMPTS, 24).steps
    fed = [step.fed for step in steps]
    needed = [len(step.rows) + int(step.drafted.sum()) for step in steps]
    assert computed[-len(steps) :] == fed
    assert any(len(set(step.drafted.tolist())) > 1 for step in steps)
    if lean:
        assert fed == needed
    else:
        longest = [len(step.rows) * (1 + int(step.drafted.max())) for step in steps]
        assert all(x >= y for x, y in zip(fed, longest, strict=True))
        assert sum(fed) > sum(needed)


@pytest.mark.parametrize("lean", [True, False])
def test_a_row_that_sits_out_is_not_fed(lean: bool) -> None:
    model = tiny_model("llama", seed=1)
    prepare(model, lean=lean)
    alone = [Decoder(model, DRAFTERS["none"]()).decode([p], 6).outputs[0] for p in PROMPTS[:3]]
    decoding = Decoding(Decoder(model, DRAFTERS["none"]()), PROMPTS[:3], 6)
    for most in ([0, -1, -1], [-1, 0, 0], [-1, -1, -1]):
        decoding.step(np.array(most))
    assert [step.fed for step in decoding.steps] == ([1, 2, 1] if lean else [3, 3, 3])
    while not decoding.finished:
        decoding.step()
    assert [decoding.outputs[row] for row in range(3)] == alone


@pytest.mark.parametrize("temperatures", [(0.0, 0.0, 0.0), (1.0, 1.0, 1.0), (0.0, 0.7, 1.0)])
def test_what_a_list_of_logits_emits_is_what_they_emit_with_padding(temperatures: Any) -> None:
    """At the places of its tokens. What a rule asks for beside that is padded then."""
    generator = torch.Generator().manual_seed(1)
    counts = np.array([3, 1, 2])
    real = RealTokens(counts, 3)
    listed = Listed(torch.randn(1, 6, 40, generator=generator), real)
    sampling = combined([Sampling(one) for one in temperatures], np.arange(3))
    rng = CounterRNG(5, torch.arange(3))
    numbers = None if sampling.greedy else rng.of_text(torch.arange(3).expand(3, -1))
    few, all_ = Scores(listed, sampling), Scores(listed.padded(), sampling)
    inside = torch.arange(3) < torch.as_tensor(counts)[:, None]
    emitted = [x.emitted(ExactMatch().draw, numbers)[inside].tolist() for x in (few, all_)]
    assert emitted[0] == emitted[1]
    places = torch.tensor([[0, 2], [0, 0], [1, 0]])
    assert torch.equal(few.peaks_at(places), all_.peaks_at(places))
    assert torch.equal(few.logits[inside], all_.logits[inside])
    assert torch.equal(few.raw, all_.raw)


def drafted(kind: str, shape: str, depths: list[int]) -> tuple[Draft, list[int]]:
    """The drafts of four rows behind a step without drafts, and the tokens that each of the
    drafter's passes computed."""
    lm = tiny_model("llama", seed=1)
    prepare(lm)
    chosen = SHAPES.make(shape)
    torch.manual_seed(0)
    drafter: Any = heads_on(lm, "eagle1", VOCAB, chosen)
    if kind == "small_lm":
        small = tiny_model("llama", seed=7, layers=1)
        prepare(small)
        drafter = SmallLMDrafter(small, shape=chosen)
    decoding = Decoding(Decoder(lm, drafter, gamma=3, sampling=Sampling(1.0)), PROMPTS[:4], 20)
    decoding.step(0)
    rows, passes = decoding.rows, []
    with torch.inference_mode():
        drafter.prefill(rows.contexts)
    slots = drafter.slots if kind == "eagle1" else drafter.lm.slots
    place = slots.place

    def counted(start: np.ndarray, n: int, *args: Any, **more: Any) -> None:
        place(start, n, *args, **more)
        passes.append(len(start) * n if slots.real is None else len(slots.real))

    slots.place = counted
    with torch.inference_mode():
        limits = Limits(np.array(depths))
        return drafter.draft(rows.contexts, limits, rows.draft_sampling, rows.rng), passes


@pytest.mark.parametrize("kind", ["small_lm", "eagle1"])
@pytest.mark.parametrize(("shape", "nodes"), [("chain", 1), ("dynamic:width=2,nodes=9", 2)])
def test_rows_whose_drafts_have_ended_are_not_computed(kind: str, shape: str, nodes: int) -> None:
    """The others have the drafts that they have beside rows whose drafts go on."""
    every, passes = drafted(kind, shape, [3, 3, 3, 3])
    assert passes[1:] == [4 * nodes] * 2
    few, passes = drafted(kind, shape, [0, 3, 1, 2])
    assert passes[1:] == [2 * nodes, nodes]
    every.limit_depth(np.array([0, 3, 1, 2]))
    deepest = few.sizes[1]
    assert few.tokens[1, :deepest].tolist() == every.tokens[1, :deepest].tolist()
    if shape == "chain":
        assert few.sizes.tolist() == every.sizes.tolist() == [0, 3, 1, 2]
        assert few.q is not None
        assert every.q is not None
        for row, size in enumerate(few.sizes):
            assert few.tokens[row, :size].tolist() == every.tokens[row, :size].tolist()
            torch.testing.assert_close(few.q[row, :size], every.q[row, :size])


def test_a_small_model_that_judges_drafts_is_fed_what_each_row_lacks() -> None:
    """Rows lack 4, 1 and 6 tokens and have drafts of 2, 3 and none; the last is not asked."""
    small = tiny_model("llama", seed=7, layers=1)
    prepare(small)
    drafter = SmallLMDrafter(small)
    contexts = Contexts.of([[5, 8, 4, 6, 7, 9, 3, 5], [6] * 12, [7] * 9], 32)
    drafting, lack = np.array([True, True, False]), np.array([4, 1, 6])
    draft = Draft.chosen([[3, 4], [5, 6, 7], []])
    with torch.inference_mode():
        drafter.start(contexts)
        drafter.feed(contexts, contexts.lengths - lack, np.ones(3, dtype=bool))
        found = drafter.verify(contexts, draft, drafting)
        assert drafter.lm.fed == (4 + 2) + (1 + 3)
        for row in (0, 1):
            size = int(draft.sizes[row])
            alone, length = SmallLMDrafter(small), int(contexts.lengths[row])
            text = Contexts.of([contexts.tokens[row, :length].tolist()], 32)
            alone.start(text)
            chain = Draft.chosen([draft.tokens[row, :size].tolist()])
            judged = alone.verify(text, chain, np.ones(1, dtype=bool))
            torch.testing.assert_close(found[row, : size + 1], judged[0])
        # What the cache holds of the chains is used: the same texts with them need one token.
        contexts.tokens[0, 8:11], contexts.tokens[1, 12:16] = [3, 4, 9], [5, 6, 7, 9]
        contexts.lengths += [3, 4, 0]
        drafter.verify(contexts, Draft.chosen([[3], [4], []]), drafting)
        assert drafter.lm.fed == 2 * (1 + 1)
