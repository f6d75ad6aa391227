"""Rows that join and leave a running decode: each text is the one that it has alone.

And around it: prompts read in several passes, memory that is refused, slots that are used again.
"""

import functools
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from decode.base.errors import MemoryShortage, UserError
from decode.draft import Contexts
from decode.drafters import DRAFTERS, Drafter
from decode.drafters.lookup.ngram import NgramDrafter
from decode.draw.sampling import Sampling
from decode.lengths import POLICIES
from decode.loop.decoding import Decoder, Decoding
from decode.loop.rows import RowSettings, compacted
from decode.model import memory
from decode.model.cache import pass_size
from decode.model.cache.cached_model import CachedLM
from decode.model.cache.slots import Slots
from decode.model.forward.prepare_model import prepare
from decode.model.hidden_states import FINAL
from decode.model.memory import expanded_bytes, pass_bytes, slot_bytes
from decode.text_stream import StopStrings
from decode.verification import Verification
from heads.heads_drafter import AttendingDrafter
from tests import lossless
from tests.contract import LIMITS, NEW, PROMPTS, alone, decoder, recipe, staggered
from tests.lossless import LONGER, longer_model, small_lm
from tests.mtp_targets import FAMILIES
from tests.tiny import finish, shortened, tiny_model, tiny_tokenizer, tokens_fed

GREEDY, SAMPLED = Sampling(), Sampling(1.0, top_p=0.98)


def test_numbers_depend_on_the_length_of_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: with one length for all rows the texts are others."""

    def at_lengths(self: Any, lengths: np.ndarray) -> None:
        self._lengths = torch.full_like(self._keys, int(lengths.max()))

    which = decoder(small_lm(case=LONGER), sampling=SAMPLED)
    expected = alone(which, LIMITS)
    monkeypatch.setattr("decode.draw.random_numbers.CounterRNG.at_lengths", at_lengths)
    assert staggered(which, LIMITS).result().outputs != expected


@pytest.mark.parametrize(
    "policy",
    shortened(
        [
            "heuristic",
            "entropy:ema=0.5",
            "adaptive_confidence:window=8",
            "draft_exit:threshold=0.6",
            "by_batch",
        ],
        ["adaptive_confidence:window=8", "by_batch"],
    ),
)
def test_policies_count_from_a_rows_own_beginning(policy: str) -> None:
    made: Any = POLICIES["by_batch"]({1: 3, 3: 1, 4: 0}) if policy == "by_batch" else policy
    # `exact` where the draft length depends on the company.
    rule = "exact" if policy == "by_batch" else None
    which = decoder(small_lm(case=LONGER), policy=made, rule=rule, sampling=SAMPLED)
    assert staggered(which, LIMITS).result().outputs == alone(which, LIMITS)


@pytest.mark.parametrize("kind", ["eagle1"])
def test_the_first_token_drafted_too(kind: str) -> None:
    """A prompt of one token then has no hidden states when it joins."""
    which = decoder(recipe(kind), sampling=SAMPLED, first_target=False)
    assert staggered(which, LIMITS).result().outputs == alone(which, LIMITS)


def test_observers_see_the_states_that_drafts_were_made_from() -> None:
    """Of rows that joined too: `previous_features` end with the text's second-to-last token."""
    lm = CachedLM(longer_model(0.0), captured_layers=[FINAL])
    seen = 0

    def observer(done: Verification) -> None:
        nonlocal seen
        assert done.previous_features is not None
        newest = done.previous_features.newest([FINAL])
        assert len(newest) == len(done.rows)
        for row, length in enumerate(done.lengths):
            lm.reset(1, int(length))
            text = torch.as_tensor(done.contexts.tokens[row : row + 1, : length - 1])
            lm.forward(text, np.zeros(1, dtype=np.int64))
            torch.testing.assert_close(newest[row], lm.features[FINAL][0, -1])
            seen += 1

    which = decoder(recipe("medusa"), sampling=SAMPLED, observers=[observer])
    staggered(which, LIMITS)
    assert seen > 20


def test_rows_are_dropped_and_refused_prompts_change_nothing() -> None:
    which = decoder(small_lm(case=LONGER), sampling=SAMPLED, eos_token_ids=())
    expected = alone(which, [NEW] * len(PROMPTS))
    decoding = Decoding(which, PROMPTS[:4], NEW, seed=3)
    decoding.step()
    for bad, problem in (
        ([], "no prompts"),
        ([[1], []], "prompt 1 is empty"),
        ([[9]], "token ids"),
    ):
        with pytest.raises(UserError, match=problem):
            decoding.admit(bad, NEW)
    decoding.drop(1)
    with pytest.raises(
        UserError, match=r"row 1 neither runs nor waits; expected one of \[0, 3, 2\]"
    ):
        decoding.drop(1)
    decoding.admit(PROMPTS[4:5], NEW)
    for row in (0, 2, 3, 4):
        if row == 3:
            decoding.drop(3)
    finish(decoding)
    with pytest.raises(UserError, match="no row runs"):
        decoding.step()
    assert [decoding.outputs[row] for row in (0, 2, 4)] == [expected[row] for row in (0, 2, 4)]
    assert decoding.outputs[1] == expected[1][: len(decoding.outputs[1])]


class Counting(Drafter):
    """Keeps something of each row, and says nothing of rows that join."""

    def start(self, contexts: Contexts) -> None:
        return None

    def keep_rows(self, rows: np.ndarray) -> None:
        return None

    draft = DRAFTERS["none"].draft


def test_a_drafter_that_takes_no_rows_says_so() -> None:
    decoding = Decoding(decoder(Counting()), PROMPTS[:1], NEW)
    with pytest.raises(UserError, match="Counting keeps state of each row and takes no rows"):
        decoding.admit(PROMPTS[1:2], NEW)


def test_rows_that_could_not_join_leave_their_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = StopStrings(tiny_tokenizer(), ["never"])
    which = Decoder(tiny_model("llama"), NgramDrafter(), stop=stop)
    expected = which.decode([[5, 6, 7]], NEW).outputs[0]
    decoding = Decoding(which, [[5, 6, 7]], NEW)
    decoding.step()
    with monkeypatch.context() as patch:
        patch.setattr(which.drafter, "add_rows", Mock(side_effect=RuntimeError("no memory")))
        with pytest.raises(RuntimeError, match="no memory"):
            decoding.admit([[8, 9]], NEW)
    assert set(stop._texts) == {0}
    assert finish(decoding)[0] == expected


def test_holes_are_filled_from_the_end() -> None:
    assert compacted(np.array([True, False, True, True])).tolist() == [0, 3, 2]
    assert compacted(np.array([False, False, True, False])).tolist() == [2]
    assert compacted(np.array([True, True])).tolist() == [0, 1]
    for seed in range(20):
        stays = np.random.default_rng(seed).random(12) < 0.6
        order = compacted(stays)
        assert sorted(order) == np.flatnonzero(stays).tolist()
        assert (order != np.arange(len(order))).sum() <= (~stays).sum()


def test_slots_are_used_again_and_hold_nothing_of_the_row_before() -> None:
    slots = Slots(2, 3, 8, torch.device("cpu"))
    slots.place(np.zeros(3, dtype=np.int64), 8)
    for layer in slots.layers:
        layer.update(*torch.full((2, 3, 1, 8, 4), torch.nan))
    memory = slots.layers[0].keys.untyped_storage().data_ptr()
    slots.keep_rows(np.array([0]))
    slots.add_rows(2, 8)
    for layer in slots.layers:
        assert layer.keys.shape == (3, 1, 8, 4)
        assert layer.keys.untyped_storage().data_ptr() == memory
        assert layer.keys[0].isnan().all()
        assert not layer.keys[1:].any()
    # More rows, longer ones: what is there stays.
    slots.add_rows(1, 20)
    assert slots.layers[1].values.shape[0] == 4
    assert slots.layers[1].values.shape[2] >= 20
    assert slots.layers[1].values[0, :, :8].isnan().all()
    slots.place(np.zeros(1, dtype=np.int64), 1, first=3)
    for layer in slots.layers:
        layer.update(*torch.ones(2, 1, 1, 1, 4))
    assert [bool(row.any()) for row in slots.layers[0].keys[1:]] == [False, False, True]
    # Where memory is short, rows that nobody uses go.
    slots.keep_rows(np.array([3, 1]))
    slots.add_rows(0, 40, least=True)
    assert slots.allocated == (2, 40)
    assert [bool(row.any()) for row in slots.layers[0].keys] == [True, False]
    assert slots.layers[0].keys.shape[2] == 40


# --- prompts read in several passes ---------------------------------------------------------------


@pytest.mark.parametrize("kind", shortened(["tree", "eagle1", "dflash"], ["eagle1"]))
def test_the_size_of_passes_changes_no_text(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_size, "PADDING", 1 << 20)
    texts, widths, widths_of_heads = [], [], []
    by_itself = alone(decoder(recipe(kind), sampling=GREEDY), LIMITS)
    for tokens in (1, 60, 1 << 20):
        which = decoder(recipe(kind), prefill_tokens=tokens, sampling=GREEDY)
        if isinstance(which.drafter, lossless.SmallLMDrafter):
            which.drafter.lm.pass_tokens = tokens
        fed = tokens_fed(which.lm)
        read: list[int] = []
        if isinstance(which.drafter, AttendingDrafter):
            take = which.drafter.take_missing

            def taken(*args: Any, _take: Any = take, _read: Any = read) -> Any:
                columns, states = _take(*args)
                _read.append(columns.shape[1])
                return columns, states

            which.drafter.take_missing = taken  # type: ignore[method-assign]
        texts.append(which.decode(PROMPTS, NEW).outputs)
        widths.append(fed[0])
        widths_of_heads.append(max(read, default=0))
        assert staggered(which, LIMITS).result().outputs == by_itself
    assert texts[0] == texts[1] == texts[2]
    if any(widths_of_heads):
        assert widths_of_heads[0] < widths_of_heads[1] < widths_of_heads[2]
    assert widths[0] < widths[1] <= 60 < widths[2]


@pytest.mark.parametrize(
    "kind", shortened(["chain", "skip tree", "eagle1 tree", "pass"], ["chain", "eagle1 tree"])
)
def test_rows_go_on_while_prompts_are_read_in_parts(kind: str) -> None:
    """Several wait at once; the shorter ones overtake the longest, and one is given up."""
    which = decoder(recipe(kind), sampling=SAMPLED, eos_token_ids=())
    expected = alone(which, LIMITS)
    decoding = Decoding(which, seed=3)
    decoding.admit(PROMPTS[:3], LIMITS[:3])
    decoding.begin(PROMPTS[3:5], LIMITS[3:5])
    for row in range(5, 8):
        decoding.begin([PROMPTS[row]], LIMITS[row])
    assert decoding.waiting == [3, 4, 5, 6, 7]
    assert decoding.unread == {3: 46, 5: 2, 6: 9, 7: 5}
    decoding.drop(6)
    with pytest.raises(UserError, match="row 6 does not wait"):
        decoding.read(6)
    passes, joined = 0, []
    while decoding.waiting:
        for row, tokens in decoding.shares(6).items():
            decoding.read(row, tokens)
        joined.append(len(decoding.waiting))
        if not decoding.finished:
            decoding.step()
            passes += 1
        if len(joined) == 2:
            decoding.drop(3)  # the other prompt of its group is read on
    finish(decoding)
    assert passes > 4
    assert len(set(joined)) > 2
    for row in (0, 1, 2, 4, 5, 7):
        assert decoding.outputs[row] == expected[row], row
    assert decoding.outputs[3] == decoding.outputs[6] == []


@pytest.mark.parametrize("running", [2, 0])
def test_the_others_go_on_if_a_drafter_cannot_take_new_rows(
    running: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = recipe("chain")
    which = decoder(drafter, sampling=SAMPLED, eos_token_ids=())
    expected = alone(which, LIMITS)
    decoding = Decoding(which, seed=3)
    if running:
        decoding.admit(PROMPTS[:2], LIMITS[:2])
        decoding.step()
    decoding.begin(PROMPTS[running : running + 2], LIMITS[running : running + 2])
    before = decoding.rows.numbers.tolist()
    assert bool(before) == bool(running)

    def full(*_: object) -> None:
        raise MemoryShortage("the memory is full")

    with monkeypatch.context() as patch:
        patch.setattr(drafter.lm, "add_rows" if running else "reset", full)
        with pytest.raises(MemoryShortage):
            decoding.admit(PROMPTS[running + 2 : 5], LIMITS[running + 2 : 5])
    assert decoding.rows.numbers.tolist() == before
    decoding.read(running)
    decoding.admit([PROMPTS[5]], LIMITS[5])
    finish(decoding)
    for row in (*range(running + 2), 5):
        assert decoding.outputs[row] == expected[row], row


@pytest.mark.parametrize("kind", ["eagle1"])
def test_a_prompt_of_many_texts_is_read_once(kind: str) -> None:
    which = decoder(recipe(kind), sampling=SAMPLED, eos_token_ids=())
    prompts = [PROMPTS[4], PROMPTS[6], *[PROMPTS[4]] * 6]
    expected = [
        which.decode([prompt], NEW, row_ids=[row], seed=3).outputs[0]
        for row, prompt in enumerate(prompts)
    ]
    decoding = Decoding(which, PROMPTS[:2], 2 * NEW, seed=1)
    decoding.step()
    fed = tokens_fed(which.lm)
    settings = RowSettings(SAMPLED, seed=3)
    rows = decoding.begin(prompts, NEW, row_ids=range(len(prompts)), settings=settings)
    decoding.drop(rows[0])  # the first of the copies
    decoding.read(rows[1])
    assert sum(fed) == len(PROMPTS[4]) + len(PROMPTS[6])
    finish(decoding)
    assert len({tuple(text) for text in expected}) > 4
    assert [decoding.outputs[row] for row in rows[1:]] == expected[1:]


@pytest.mark.parametrize(
    "kind", shortened(["chain", "tree", "ngram", "eagle1"], ["tree", "eagle1"])
)
def test_passes_of_the_running_rows_read_prompts(kind: str) -> None:
    """Each pass reads 7 tokens of those that wait, while the first row runs."""
    which = decoder(recipe(kind), sampling=SAMPLED, eos_token_ids=())
    limits = [2 * NEW, *[NEW] * (len(PROMPTS) - 1)]
    expected = alone(which, limits)
    decoding = Decoding(which, PROMPTS[:1], limits[0], seed=3)
    for row, prompt in enumerate(PROMPTS[1:], 1):
        assert decoding.begin([prompt], NEW, row_ids=[row]) == [row]
    while decoding.waiting:
        for row in list(decoding.unread):
            decoding.read(row, 0)  # those that are complete join
        decoding.step(read=7)
    steps = decoding.steps
    assert decoding.reads_beside
    assert sum(step.fed_beside for step in steps) == sum(map(len, PROMPTS[1:]))
    assert all(step.fed_beside <= 7 for step in steps)
    assert all(step.fed == len(step.rows) + step.drafted.sum() for step in steps)
    assert finish(decoding) == dict(enumerate(expected))


@pytest.mark.parametrize(
    ("tokens", "padding", "lean", "order"),
    [
        (1, 64, True, (0, 1, 2, 3)),
        (7, 64, False, (1, 0, 3, 2)),
        (30, 64, True, (3, 1, 2, 0)),
        (1000, 0, False, (3, 1, 2, 0)),
        (1000, 12, True, (1, 0, 3, 2)),
        (1000, 12, False, (0, 1, 2, 3)),
    ],
)
def test_passes_give_the_logits_and_states_of_one(
    tokens: int, padding: int, lean: bool, order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged rows, which begin at different slots."""
    monkeypatch.setattr(pass_size, "PADDING", padding)
    monkeypatch.setattr(pass_size, "ROW_PADDING", padding // 4)
    model = tiny_model("llama")
    prepare(model, lean=lean)
    one, other = (
        CachedLM(model, captured_layers=(0, FINAL), pass_tokens=size) for size in (1 << 20, tokens)
    )
    g = torch.Generator().manual_seed(0)
    counts = np.array([19, 4, 11, 1])[list(order)]
    found = []
    for lm in (one, other):
        g.manual_seed(0)
        lm.reset(4, 40)
        before = torch.randint(3, 300, (4, 5), generator=g)
        ids = torch.randint(3, 300, (4, 19), generator=g)
        with torch.inference_mode():
            lm.forward(before, np.zeros(4, dtype=np.int64))
            if lm is one:
                last = counts[:, None] - 1
                logits = lm.forward(ids, np.array([5, 3, 0, 5]), columns=last)
            else:
                logits = lm.read(ids, np.array([5, 3, 0, 5]), counts)
        states = [
            lm.features[layer][row, :n] for layer in (0, FINAL) for row, n in enumerate(counts)
        ]
        found.append([logits, *states])
    for mine, yours in zip(*found, strict=True):
        torch.testing.assert_close(mine, yours)


@pytest.mark.parametrize(("place", "lean"), [(0, True), (1, False), (3, True)])
def test_a_short_prompt_is_not_padded_to_a_long_one(place: int, lean: bool) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 300, size).tolist() for size in (5, 9, 6)]
    prompts.insert(place, rng.integers(3, 300, 250).tolist())
    model = tiny_model("llama")
    prepare(model, lean=lean)
    apart = [Decoder(model, DRAFTERS["none"]()).decode([p], 4).outputs[0] for p in prompts]
    which = Decoder(model, DRAFTERS["none"]())
    fed, decoding = tokens_fed(which.lm), Decoding(which)
    decoding.begin(prompts, 4)
    decoding.read(decoding.waiting[0])
    # Transformers' forward would pad, so it reads them one after the other.
    assert fed == ([270] if lean else [250, 9, 6, 5])
    assert list(finish(decoding).values()) == apart


def test_rows_that_read_their_drafts_are_fed_together() -> None:
    """After a step each of 100 rows has 1 to 5 tokens to read. That is one pass, not five, also
    where it is padded."""
    assert pass_size.pads_little(np.arange(100) % 5 + 1, 5)


def test_heads_read_prompts_of_different_lengths_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 5, size).tolist() for size in (5, 40, 7)]
    which = decoder(recipe("eagle1"), sampling=GREEDY)
    assert isinstance(which.drafter, AttendingDrafter)
    expected = [which.decode([prompt], 6).outputs[0] for prompt in prompts]
    read: list[int] = []
    compute = which.drafter._compute

    def counted(contexts: Contexts, entries: np.ndarray, rows: slice) -> Any:
        read.append(int((entries - which.drafter.cached_entries)[rows].max()) * len(entries[rows]))
        return compute(contexts, entries, rows)

    monkeypatch.setattr(which.drafter, "_compute", counted)
    assert which.decode(prompts, 6, batch_size=3).outputs == expected
    # The last token of each prompt is read with the first draft.
    assert read[:4] == [4, 39, 6, 3]


# --- memory ---------------------------------------------------------------------------------------


# The last two layers read the keys and values of earlier ones.
SHARING: dict[str, Any] = {
    "layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {}),
        ("deepseek_v3", FAMILIES["deepseek_v3"]),  # latent attention
        pytest.param("gemma4_text", SHARING, marks=pytest.mark.thorough),
        ("qwen3_next", FAMILIES["qwen3_next"]),  # with running states
    ],
)
def test_the_bytes_of_a_slot_are_those_allocated(family: str, fields: dict[str, Any]) -> None:
    model = tiny_model(family, **fields)
    lm = CachedLM(model)
    lm.reset(2, 16)
    lm.forward(torch.ones(2, 3, dtype=torch.int64), np.zeros(2, dtype=np.int64))
    held = [layer for layer in lm.slots.layers if layer.is_initialized]
    used = sum(x.nbytes for layer in held for x in (layer.keys, layer.values))
    assert used == slot_bytes(model) * 2 * lm.slots.allocated[1]
    with torch.device("meta"):
        assert slot_bytes(type(model)(model.config)) == slot_bytes(model)
    # For each of 4 heads a pass makes 8 + 8 numbers of the latent part, keys of 8 + 8, and values
    # as wide as these.
    assert expanded_bytes(model) == (4 * 4 * (16 + 16 + 16) if family == "deepseek_v3" else 0)


def test_a_context_without_memory_is_refused_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    which = decoder(recipe("none"), gamma=1)
    # Models are tried out here, with enough memory.
    with_drafts = [decoder(recipe(kind), gamma=1) for kind in ("chain", "eagle1")]
    decoding = Decoding(which, PROMPTS[:1], NEW, seed=3)
    expected = which.decode(PROMPTS[:1], NEW, seed=3).outputs[0]
    decoding = Decoding(which, PROMPTS[:1], NEW, seed=3)
    each = slot_bytes(longer_model(0.0))
    monkeypatch.setattr("decode.model.memory.free_bytes", lambda device: 30 * each)
    feed = functools.partial(pytest.fail, "it was read")
    with monkeypatch.context() as patch:
        patch.setattr(which.lm, "_feed", feed)
        with pytest.raises(
            UserError, match=rf"for 2 rows of .*\({each:,} bytes per token, and .*fewer"
        ):
            decoding.admit(PROMPTS[4:5], 2 * NEW)
    assert finish(decoding) == {0: expected}
    with pytest.raises(UserError, match="keys and values of LlamaForCausalLM for 8 rows of"):
        which.decode(PROMPTS, NEW)
    # What the drafter keeps counts too, before the target reads anything.
    for drafted in with_drafts:
        slots = drafted.slots(len(PROMPTS[0]), NEW)
        enough = (slots + 1) * each + pass_bytes(drafted.lm.model, slots, slots)
        monkeypatch.setattr(memory, "free_bytes", lambda device, free=enough: free)
        which.decode(PROMPTS[:1], NEW)
        monkeypatch.setattr(drafted.lm, "_feed", feed)
        with pytest.raises(UserError, match="LlamaForCausalLM and its drafter for 1 rows"):
            drafted.decode(PROMPTS[:1], NEW)


def test_memory_grows_with_the_texts_and_its_lack_ends_the_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A text may be as long as the context, and takes what it uses."""
    which = decoder(recipe("chain"), gamma=1)
    limit, failed = 10**6, dict[int, UserError]()
    decoding = Decoding(which, seed=3, ahead=2, on_error=failed.__setitem__)
    decoding.admit(PROMPTS[:2], limit)
    first = which.lm.slots.allocated[1]
    assert first < 20
    decoding.admit(PROMPTS[2:3], limit)
    for _ in range(8):
        decoding.step()
    assert first < which.lm.slots.allocated[1] < 80
    monkeypatch.setattr("decode.model.memory.free_bytes", lambda device: 0)
    while 2 in decoding.rows.numbers:
        decoding.step()
    assert list(failed) == [2]
    assert isinstance(failed[2], MemoryShortage)
    monkeypatch.undo()
    while len(decoding.outputs[0]) < 40:
        decoding.step()
    expected = which.decode(PROMPTS[:2], 40, seed=3).outputs
    assert [decoding.outputs[row][:40] for row in (0, 1)] == expected


def test_the_limit_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, (_, *version_2), (_, *version_1) = torch.device("cpu"), *memory.CONTAINERS
    for number, (limit, used, droppable) in enumerate((version_2, version_1)):
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / limit).write_text("5000\n", "utf-8")
        (directory / used).write_text("3000\n", "utf-8")
        (directory / "memory.stat").write_text(f"anon 10\n{droppable} 400\n", "utf-8")
        places = [(directory, limit, used, droppable), (tmp_path, limit, used, droppable)]
        monkeypatch.setattr(memory, "CONTAINERS", places)
        assert memory.free_bytes(cpu) == 2400
        (directory / limit).write_text("max\n", "utf-8")
        assert memory.free_bytes(cpu) > 1 << 20
