"""Heads that learn while they draft: which head was wrong at which place, from which hidden states;
what its loss is; and that the output's distribution stays the target's."""

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decode.base.errors import UserError
from decode.draft import Contexts, Draft
from decode.drafters import DRAFTERS, Drafter, NoDrafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.loop.decoding import Decoder
from decode.model.features import Features
from decode.model.hidden_states import FINAL
from decode.shapes.static import Static
from decode.verification import Verification
from distill.losses import WeightedLoss
from distill.replay.rejections import Collector
from distill.replay.replay_buffer import (
    Record,
    ReplayBuffer,
    bytes_per_draft,
    bytes_per_position,
    from_numpy,
)
from distill.teacher.top_k_cache import describe_teacher
from heads.heads_directory import build_heads, make_ready, new_heads
from heads.heads_drafter import HeadsDrafter
from heads.heads_module import HeadBatch, Heads
from heads.online_heads import HeadStudent
from heads.options import HeadOptions
from tests import lossless
from tests.test_online import PROMPTS, SETTINGS, Learning, prompts_of, same, verified
from tests.test_online import VOCAB as FEW
from tests.tiny import tiny_llama, tiny_target
from tests.trained_heads import features_of, logits_of
from train.online.learning import Online
from train.settings.online_config import OnlineConfig

VOCAB = 40
OPTIONS: dict[str, dict[str, Any]] = {
    "medusa": {"type": "medusa", "heads": 3},
    "medusa-target": {"type": "medusa", "heads": 3, "output": "target"},
    "blockwise": {"type": "blockwise", "k": 4, "hidden": 24, "output": "shared"},
}
# Heads that read drafted tokens or attend to the text.
MORE: dict[str, dict[str, Any]] = {
    "hydra": {"type": "hydra", "heads": 3},
    "hydra_plus": {"type": "hydra_plus", "heads": 3, "layers": 1},
    "eagle1": {"type": "eagle1", "depth": 3},
    "eagle3": {"type": "eagle3", "steps": 3},
    "mtp": {"type": "mtp", "depth": 3},
    "p_eagle": {"type": "p_eagle", "tokens": 3, "layers": 2},
    "dflash": {"type": "dflash", "block": 4, "layers": 2},
    "dspark": {"type": "dspark", "block": 3, "layers": 1, "rank": 8},
    "kangaroo": {"type": "kangaroo", "exit_layer": 1, "depth": 3},
}
# The option that names the layers whose states are read.
READ = {
    "eagle3": "captured_layers",
    "p_eagle": "captured_layers",
    "dflash": "taps",
    "dspark": "taps",
}


WITHOUT_TOKENS = SimpleNamespace(
    get_vocab=dict, all_special_ids=[], chat_template=None, added_tokens_decoder={}
)


@functools.cache
def target(vocab: int = VOCAB) -> Any:
    """What heads ask of a target; no tokenizer has so few tokens."""
    model = tiny_llama(vocab=vocab, hidden=32, seed=0).requires_grad_(False)
    return SimpleNamespace(
        name="tiny",
        tokenizer=WITHOUT_TOKENS,
        eos_token_ids=(),
        model=model,
        device=torch.device("cpu"),
        dtype=torch.float32,
        vocab_size=vocab,
        max_positions=256,
        has_encoder=False,
    )


def heads_of(kind: str, on: Any, ids: Tensor | None = None) -> Heads:
    """Moved a little, so that no two heads say the same."""
    torch.manual_seed(0)
    options = dict((OPTIONS | MORE)[kind])
    if kind in READ:
        options[READ[kind]] = list(range(on.model.config.num_hidden_layers))
    made = new_heads(HeadOptions.of(options), on, ids)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            noise = torch.randn(parameter.shape, generator=g)
            parameter += (0.1 if kind in OPTIONS else 0.3 if kind == "dflash" else 0.03) * noise
    return made


def drafter_of(heads: Heads, on: Any, shape: Any = None) -> HeadsDrafter:
    """As it would be loaded."""
    served = copy.deepcopy(heads)
    make_ready(served, on, torch.float32)
    kind: Any = DRAFTERS[heads.options.type]
    drafter: HeadsDrafter = kind(served, on.vocab_size, shape)
    return drafter


def student_of(kind: str, losses: dict[str, Any], on: Any, ids: Tensor | None = None) -> Any:
    return HeadStudent(heads_of(kind, on, ids), WeightedLoss(losses), on, chunk=3)


def states(heads: Any, hidden: Tensor, depth: int) -> Tensor:
    return heads.states(hidden[None], [depth])[:, 0]


# --- collecting -----------------------------------------------------------------------------------


def seen_by_heads(
    texts: Sequence[Sequence[int]], drafts: Sequence[Sequence[int]], *args: Any, seed: int = 0
) -> Verification:
    """`verified`, with random hidden states as those that the drafts were made of; each row has
    read as many tokens as it is long, so that the last of them counts, not the last column."""
    seen = verified(texts, drafts, *args, seed=seed)
    counts = np.array([len(text) for text in texts])
    g = torch.Generator().manual_seed(100 + seed)
    values = torch.randn(len(texts), max(counts), 32, generator=g)
    return replace(seen, previous_features=Features({FINAL: values}, counts))


def test_of_heads_only_what_they_drafted_is_recorded() -> None:
    """With every accepted token too: never the target's own one behind them, which no head guessed;
    a draft's hidden states once; and of rejections only, nothing where all was accepted."""
    collector = Collector(FEW, FEW, captured_layers=(FINAL,), accepted=1.0)
    strict = Collector(FEW, FEW, captured_layers=(FINAL,))
    text = [1, 2]
    for step in range(3):
        for observer in (collector, strict):
            observer(seen_by_heads([text], [[3, 4]], [2], [5], seed=step))
        text = [*text, 3, 4, 5]
    assert strict.take() == ([], [])
    (record,), _ = collector.take()
    assert record.positions.tolist() == [2, 3, 5, 6, 8, 9]
    assert record.head_drafts is not None
    assert record.head_drafts.depths.tolist() == [1, 2] * 3
    assert record.head_drafts.read_positions.tolist() == [0, 3, 6]
    assert record.head_drafts.features.shape == (3, 32)


def first_rejections() -> tuple[dict[tuple[int, int], int], Callable[[Verification], None]]:
    """The first rejected token of each draft by row and place, and the observer that finds them."""
    wrong: dict[tuple[int, int], int] = {}

    def watch(seen: Verification) -> None:
        for at, row in enumerate(seen.rows):
            done = int(seen.accepted[at])
            if int(seen.reached[at]) > done:  # a chain, also where it is called a tree
                place = int(seen.lengths[at]) + done
                wrong[int(row), place] = int(seen.draft.tokens[at, done])

    return wrong, watch


# --- the buffer -----------------------------------------------------------------------------------


def recorded(texts: Any = None) -> list[Record]:
    """A second head rejected after an accepted token, and a first one at once; the accepted one is
    not recorded."""
    if texts is None:
        texts = ([1, 2, 3], [4, 5, 6, 7, 8])
    collector = Collector(FEW, FEW, captured_layers=(FINAL,))
    collector(seen_by_heads(texts, [[9, 2], [3, 8]], [1, 0], [4, 5], seed=3))
    return collector.take()[0]


def test_a_record_of_heads_takes_the_bytes_that_are_stated(tmp_path: Path) -> None:
    """In memory, with bfloat16 kept to the bit, and on disk."""
    collector = Collector(4, FEW, captured_layers=(FINAL,), accepted=1.0)
    seen = seen_by_heads([[1, 2]], [[3, 4, 6]], [2], [5])
    features = seen.previous_features
    assert features is not None
    half = {FINAL: features.values[FINAL].bfloat16()}
    collector(replace(seen, previous_features=Features(half, features.counts)))
    (record,), _ = collector.take()
    each, draft = bytes_per_position(4, FEW) + 1, bytes_per_draft(32, torch.bfloat16)
    assert draft == 2 * 32 + 4
    assert record.nbytes == 3 * each + draft + 4 * len(record.tokens)
    assert record.head_drafts is not None
    assert torch.equal(from_numpy(record.head_drafts.features)[0], half[FINAL][0, 1])
    on = tiny_target()
    made_with = describe_teacher(on, k=4, temperature=1.0, vocabulary=None) | {
        "heads": {"count": 3, "captured_layers": [FINAL]}
    }
    buffer = ReplayBuffer(1 << 20, made_with, tmp_path)
    buffer.add([record, *recorded_twice(record)])
    buffer.commit()
    again = ReplayBuffer(1 << 20, made_with, tmp_path)
    again.restore(on)
    assert len(again) == 3
    assert all(same(a, b) for a, b in zip(again, buffer, strict=True))
    for other in (
        {"count": 2, "captured_layers": [FINAL]},
        {"count": 3, "captured_layers": [0]},
        None,
    ):
        given = made_with | {"heads": other}
        if other is None:
            del given["heads"]
        with pytest.raises(UserError, match="was recorded for 3 heads on the hidden states"):
            ReplayBuffer(1 << 20, given, tmp_path).restore(on)


@pytest.mark.parametrize(
    ("kind", "tree"),
    [("medusa", True), *((kind, bool(i % 2)) for i, kind in enumerate([*OPTIONS, *MORE]))],
)
def test_what_is_recorded_says_again_what_was_drafted(kind: str, tree: bool) -> None:
    """Ragged rows, which leave one after the other: replayed from the record, step d guesses what
    was rejected there, and the target's token where it was accepted. The hidden states of a draft
    are those of a plain forward."""
    on = target()
    shape = Static(paths=[[0], [0, 0], [0, 0, 0]]) if tree else None
    heads = heads_of(kind, on)
    drafter = drafter_of(heads, on, shape)
    online = online_of(drafter, heads, on, accepted=1.0)
    wrong, watch = first_rejections()
    decoder = Decoder(on.model, drafter, gamma=3, observers=[watch, online.observe])
    done = decoder.decode(PROMPTS, 24)
    records, held_out = online.collector.take()
    texts = [prompt + output for prompt, output in zip(PROMPTS, done.outputs, strict=True)]
    judged, depths = 0, set()
    for record in [*records, *held_out]:
        drafted = record.head_drafts
        assert drafted is not None
        assert record.tokens.tolist() == texts[record.request][: len(record.tokens)]
        if not online.student.whole_text:
            ids = torch.as_tensor(record.tokens)[None].long()
            plain = features_of(on.model, heads, ids)[FINAL][0, drafted.read_positions]
            kept = from_numpy(drafted.features)
            torch.testing.assert_close(kept, plain, atol=1e-4, rtol=1e-4)
        if online.student.whole_text:
            for piece in [record, *record.pieces(8)]:
                own, last = piece.head_drafts, piece.positions[-1]
                assert own is not None
                assert own.read_positions is None
                # Also the one that EAGLE-1's regression reads.
                assert len(own.features) == last
            assert np.array_equal(own.features[-1], drafted.features[-1])
        guesses = replayed(online.student, record)
        depths |= set(drafted.depths.tolist())
        for place, was_wrong in zip(record.positions.tolist(), record.rejected, strict=True):
            assert (guesses[place] != record.tokens[place]) == was_wrong
            if was_wrong:
                assert wrong.pop((record.request, place)) == guesses[place]
            judged += 1
    assert not wrong
    assert judged == done.counts.reached.sum()
    assert depths >= {1, 2}


def replayed(student: Any, record: Record) -> dict[int, int]:
    """The likeliest token of the heads at each recorded place."""
    ids, depths, features, inputs = student.drafts.batch([record])
    found = {}
    for depth in sorted(set(depths[depths > 0].tolist())):
        batch = HeadBatch(ids, depths == depth, features, inputs, replayed=True)
        (prediction,) = student.module.predictions(batch, [depth])
        logits = logits_of(student.module, prediction)
        places = (depths == depth)[0].nonzero()[:, 0].tolist()
        found |= dict(zip(places, logits.argmax(-1).tolist(), strict=True))
    return found


def recorded_twice(record: Record) -> list[Record]:
    """The same of other requests, one with a draft less."""
    drafted = record.head_drafts
    assert drafted is not None
    one = np.arange(len(record.positions)) == 0
    less = replace(
        record,
        request=8,
        positions=record.positions[one],
        rejected=record.rejected[one],
        ids=record.ids[one],
        log_p=record.log_p[one],
        log_tail=record.log_tail[one],
        head_drafts=drafted.part(record.positions, one, 0),
    )
    return [less, replace(record, request=9)]


def test_windows_keep_what_each_head_read() -> None:
    collector = Collector(FEW, FEW, captured_layers=(FINAL,), accepted=1.0)
    text = [1, 2]
    for step in range(30):
        collector(seen_by_heads([text], [[3, 4, 6]], [2], [5], seed=step))
        text = [*text, 3, 4, 5]
    (record,), _ = collector.take()
    student = student_of("medusa", {"forward_kl": 1.0}, target(FEW))
    whole = float(student.loss([record])[0].detach())
    pieces = record.pieces(12)
    assert len(pieces) > 5
    assert sum(len(piece.positions) for piece in pieces) == len(record.positions)
    for piece in pieces:
        assert piece.head_drafts is not None
        assert set((piece.positions - piece.head_drafts.depths - 1).tolist()) == set(
            piece.head_drafts.read_positions
        )
    found = float(student.loss(pieces)[0].detach())
    assert found == pytest.approx(whole, rel=1e-5)
    with pytest.raises(UserError, match="3 heads learn from texts of at least 8 tokens"):
        HeadStudent(
            heads_of("medusa", target()), WeightedLoss({"jsd": 1.0}), target(), max_length=7
        )


# --- the loss -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "loss", "reduced"),
    [
        ("medusa", "forward_kl", False),
        ("medusa", "cross_entropy", True),
        ("medusa-target", "forward_kl", True),
        ("blockwise", "cross_entropy", False),
    ],
)
def test_the_loss_is_the_divergence_of_that_head_at_that_place_by_hand(
    kind: str, loss: str, reduced: bool
) -> None:
    """Alone and in a padded batch; and its gradient, so that nothing else is in it: above all no
    other head's."""
    on = target(FEW)
    ids = torch.tensor([0, 2, 3, 4, 5, 6, 9, 11]) if reduced else None
    student = student_of(kind, {loss: 1.0}, on, ids)
    collector = Collector(FEW, FEW, captured_layers=(FINAL,), vocabulary=ids)
    seen = seen_by_heads([[1, 2, 3], [4, 5, 6, 7, 8]], [[9, 2], [3, 8]], [1, 0], [4, 5], seed=3)
    collector(seen)
    records, _ = collector.take()
    assert seen.previous_features is not None
    expected = torch.zeros(())
    for row, depth, text in ((0, 2, 3), (1, 1, 5)):
        hidden = seen.previous_features.values[FINAL][row, text - 1]
        weight, bias = student.module.output.of(depth)
        logits = torch.nn.functional.linear(states(student.module, hidden, depth), weight, bias)
        raw = seen.scores.raw[row, depth - 1]
        log_p = (raw if ids is None else raw[ids]).log_softmax(-1)[None]
        label = int(seen.block[row, depth - 1])
        where = label if ids is None else int(torch.searchsorted(ids, label))
        log_q = logits.log_softmax(-1)
        divergence = (log_p.exp() * (log_p - log_q)).sum()
        expected = expected + (divergence if loss == "forward_kl" else -log_q[0, where])
    expected.backward()
    gradient = {n: copy.deepcopy(p.grad) for n, p in student.trained().items()}
    student.module.zero_grad()
    found, parts = student.loss(records)
    found.backward()
    torch.testing.assert_close(found.float(), expected.detach(), rtol=2e-3, atol=2e-3)  # float16
    torch.testing.assert_close(parts[0], found.detach())
    alone = sum(float(student.loss([record])[0].detach()) for record in records)
    assert float(found.detach()) == pytest.approx(alone, rel=1e-5)
    for name, parameter in student.trained().items():
        own, theirs = parameter.grad, gradient[name]
        if theirs is None or not theirs.any():  # a head that guessed neither
            assert own is None or not own.any()
            continue
        torch.testing.assert_close(own, theirs, rtol=2e-2, atol=2e-3)
    if kind.startswith("medusa"):
        idle = [n for n, g in gradient.items() if n.startswith("blocks.2") and g is not None]
        assert all(not gradient[n].any() for n in idle)


def test_what_is_lost_is_the_total_variation() -> None:
    student = student_of("medusa", {"forward_kl": 1.0}, target(FEW))
    judge = student_of("medusa", {"total_variation": 1.0}, target(FEW))
    records = recorded()
    assert float(student.expected_rejections(records)) == pytest.approx(
        float(judge.loss(records)[0].detach())
    )


# --- learning -------------------------------------------------------------------------------------


def online_of(drafter: HeadsDrafter, heads: Heads, on: Any, **settings: Any) -> Online:
    student = HeadStudent(copy.deepcopy(heads), WeightedLoss({"forward_kl": 1.0}), on)
    config = OnlineConfig.model_validate(SETTINGS | settings)
    return Online(drafter, student, config, {}, vocab_size=on.vocab_size)


def test_swapped_in_at_every_pass_the_drafter_is_the_copy_that_learns() -> None:
    """Greedy: the text stays the target's own, and each draft is that of heads which were made with
    the new weights: the layers that are packed follow them."""
    on = target()
    heads = heads_of("medusa", on)
    drafter = drafter_of(heads, on)
    online = online_of(drafter, heads, on, accepted=1.0, every_requests=1)
    swaps, compared = 0, 0

    def observer(seen: Verification) -> None:
        nonlocal swaps, compared
        online.observe(seen)
        online.learn()
        swaps += online.swap()
        state = drafter.newest_features
        fresh = drafter_of(online.student.module, on)  # type: ignore[arg-type]
        both = [d.heads.output.logits(d.heads.states(state, [1, 2])) for d in (drafter, fresh)]  # type: ignore[operator]
        torch.testing.assert_close(*both)
        compared += 1

    plain = Decoder(on.model, NoDrafter())
    decoder = Decoder(on.model, drafter, gamma=2, observers=[observer])
    prompts = prompts_of(12)
    done = decoder.decode(prompts, 16)
    assert done.outputs == plain.decode(prompts, 16).outputs
    assert swaps >= 3
    assert compared > swaps


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "kangaroo"])
def test_after_a_swap_all_of_the_text_is_read_with_the_new_weights(kind: str) -> None:
    """Keys and values that the layer made with the old ones are gone: each draft begins with what
    the copy says that was handed over last."""
    on = target()
    heads = heads_of(kind, on)
    drafter = drafter_of(heads, on)
    online = online_of(drafter, heads, on, accepted=1.0, every_requests=1)
    newest: Any = copy.deepcopy(online.student.module)
    swaps = compared = 0

    def observer(seen: Verification) -> None:
        nonlocal swaps, compared, newest
        for row, length in enumerate(seen.lengths.tolist()):
            if seen.drafted[row]:
                text = torch.as_tensor(seen.contexts.tokens[row, : length + 1])[None].long()
                states = torch.nn.functional.pad(drafter.text_states(row)[:length], (0, 0, 0, 1))
                fused = online.student.drafts.fused
                features = {} if fused else {newest.captured_layers[0]: states[None]}
                drafted = torch.arange(length + 1)[None] == length
                inputs = states[None] if fused else None
                batch = HeadBatch(text, drafted, features, inputs, replayed=True)
                (first,) = newest.predictions(batch, [1])
                guess = logits_of(newest, first).argmax(-1)
                assert int(guess) == int(seen.draft.tokens[row, 0])
                compared += swaps > 0
        online.observe(seen)
        online.learn()
        if online.swap():
            swaps, newest = swaps + 1, copy.deepcopy(online.student.module)

    prompts = prompts_of(6)
    done = Decoder(on.model, drafter, gamma=2, observers=[observer]).decode(prompts, 12)
    assert done.outputs == Decoder(on.model, NoDrafter()).decode(prompts, 12).outputs
    assert swaps >= 3
    assert compared > swaps


def test_weights_go_to_a_drafter_of_the_same_heads_only() -> None:
    on = target()
    heads = heads_of("medusa", on)
    lm = SmallLMDrafter(tiny_llama(vocab=VOCAB, layers=1))
    with pytest.raises(UserError, match="SmallLMDrafter cannot take the weights of medusa heads"):
        online_of(lm, heads, on)  # type: ignore[arg-type]
    other = drafter_of(heads_of("blockwise", on), on)
    with pytest.raises(UserError, match="BlockwiseDrafter cannot take the weights of medusa"):
        online_of(other, heads, on)
    reduced = drafter_of(heads_of("medusa", on, torch.arange(20)), on)
    with pytest.raises(UserError, match="different draft vocabularies"):
        online_of(reduced, heads, on)
    fewer = build_heads(HeadOptions.of(OPTIONS["medusa"] | {"heads": 2}), on, None)
    with pytest.raises(UserError, match=r"new weights contain .*layers\.2"):
        online_of(drafter_of(fewer, on), heads, on)


# --- the output's distribution --------------------------------------------------------------------


@functools.cache
def small_vocabulary() -> Any:
    """The target of `tests.lossless`, as heads ask for it."""
    fields: dict[str, Any] = {
        "dtype": torch.float32,
        "vocab_size": lossless.VOCAB,
        "max_positions": 256,
    }
    fields |= {"has_encoder": False, "name": "tiny"}
    fields |= {"tokenizer": WITHOUT_TOKENS, "eos_token_ids": ()}
    return SimpleNamespace(model=lossless.model(0.0), device=torch.device("cpu"), **fields)


def declaring_old_q(kind: type[Drafter]) -> type[Drafter]:
    """Drafters of this kind that draw from their new weights and declare, for the first token, the
    q of those before the last swap."""

    class OldQ(kind):  # type: ignore[misc, valid-type]
        before: Any = None

        def start(self, contexts: Contexts) -> None:
            self.before = None
            super().start(contexts)

        def take_weights(self, weights: Any) -> None:
            self.before = None
            self.before = copy.deepcopy(self)
            super().take_weights(weights)

        def observe(self, verification: Verification) -> None:
            for drafter in (super(), self.before):
                if drafter is not None:
                    drafter.observe(verification)

        def keep_rows(self, rows: np.ndarray) -> None:
            for drafter in (super(), self.before):
                if drafter is not None:
                    drafter.keep_rows(rows)

        def draft(self, *of: Any) -> Draft:
            draft: Draft = super().draft(*of)
            if draft.q is not None and self.before is not None:
                draft.q[:, 0] = self.before.draft(*of).q[:, 0]
            return draft

    return OldQ


def learning(name: str, seed: int = 0, kind: Any = None) -> Learning:
    """Far from the target, so that there is much to learn; and every version passes the guard, so
    that each pass is drafted by another. kind: of the drafter; None: that of these heads."""
    on = small_vocabulary()
    heads = heads_of(name, on)
    with torch.no_grad():
        g = torch.Generator().manual_seed(5)
        for parameter in heads.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=g)
    served = copy.deepcopy(heads)
    if kind is None:
        make_ready(served, on, torch.float32)
    else:  # packed heads cannot be copied
        served.borrow(on.model, torch.float32, on.device)
    drafter = (kind or DRAFTERS[name])(served, lossless.VOCAB)
    online = online_of(
        drafter,
        heads,
        on,
        steps=2,
        accepted=1.0,
        seed=seed,
        optimizer={"lr": 0.05, "warmup_steps": 0, "schedule": "constant"},
    )
    online.student.expected_rejections = lambda _: torch.zeros(())  # type: ignore[method-assign]
    return Learning(drafter, online)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["medusa", "eagle1", "dflash"])
def test_learning_and_swapping_after_every_pass_keeps_the_targets_distribution(kind: str) -> None:
    rows = 100_000
    learnt = learning(kind)
    found = learnt.run(rows)
    assert found.passes, found
    assert found.df > 100
    # The first pass had no held-out request to judge by.
    assert learnt.swaps >= learnt.passes - 1 >= rows // 5_000


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["medusa", "eagle1"])
def test_declaring_the_old_q_while_drawing_from_the_new_is_found(kind: str) -> None:
    old = declaring_old_q(DRAFTERS[kind])
    fits = [learning(kind, seed, old).run(100_000, seed) for seed in range(5)]
    # How far two versions differ depends on the seed, so all five are judged together. A sum of χ²
    # is χ² with the sum of their df.
    together = lossless.Fit(sum(f.chi2 for f in fits), sum(f.df for f in fits), 0, 0.0)
    assert not together.passes, fits
