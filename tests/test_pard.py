"""PARD: a small language model that drafts in one pass, and its training."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from decode.base.errors import UserError
from decode.drafters.pard import ParallelLMDrafter, mark_parallel, unused_token
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder
from decode.opening.directory import describe_drafter, open_drafter
from distill.distillation_loss import Distillation
from distill.losses import WeightedLoss
from distill.masked_copies import MaskedCopies
from distill.row_numbers import row_numbers
from distill.student_settings import ParallelConfig
from distill.students.parallel_student import ParallelDistillation
from distill.teacher.live_teacher import LiveTeacher
from distill.teacher.teacher_signal import TeacherLogits
from distill.teacher.top_k_cache import top_k
from tests.stages import (
    DRAFTER,
    examples,
    make_stage,
    plan_stage,
    run_stage,
    stage_context,
    with_examples,
)
from tests.test_distill import ALL_TERMS, batch_of
from tests.test_drafters import Recording as SmallRecording
from tests.tiny import VOCAB, padded, tiny_llama, tiny_model, tiny_target

MASK = VOCAB + 3


def masked(model: Any, mask_token: int = MASK) -> Any:
    """The model with rows of padding, one of them the mask token's."""
    wider = padded(model, VOCAB + 8, std=0.5)
    mark_parallel(wider.config, mask_token)
    return wider


class Recording(ParallelLMDrafter, SmallRecording):
    """With mask tokens behind the text."""

    def read_behind(self, tokens: list[int]) -> list[int]:
        return [MASK] * (len(tokens) - 1)


@pytest.mark.parametrize(("family", "temperature"), [("llama", 1.0), ("gpt2", 0.0)])
def test_each_place_has_the_q_of_a_plain_forward(family: str, temperature: float) -> None:
    """In ragged batches, after any verdict, with few and with many tokens missing."""
    target = tiny_model(family, seed=3)
    recording = Recording(masked(target), vocab_size=VOCAB)
    recording.lm.pass_tokens = 12  # so that some texts take several passes
    decoder = Decoder(target, recording, gamma=4, sampling=Sampling(temperature))
    run = decoder.decode([[5, 17, 250, 9, 42], [7], [30] * 9], 24)
    assert recording.drafts >= 15
    assert run.counts.by_accepted[1:].sum() > 0
    assert run.counts.by_accepted[:4].sum() > 0


def test_new_weights_are_used_at_once() -> None:
    recording = Recording(masked(tiny_model("llama", seed=3)), vocab_size=VOCAB)
    weights = {
        name: tensor + 0.05
        for name, tensor in recording.lm.model.state_dict().items()
        if "mlp" in name
    }
    steps = []

    def observer(_: Any) -> None:
        steps.append(1)
        if len(steps) == 3:
            recording.take_weights(weights)

    decoder = Decoder(tiny_model("llama"), recording, gamma=3, observers=[observer])
    decoder.decode([[5, 17, 250, 9, 42], [7]], 12)
    assert len(steps) > 4
    assert recording.drafts > 8


# --- the mask token -------------------------------------------------------------------------------


def test_a_mask_token_in_use_is_refused_by_name() -> None:
    target = tiny_target()
    word = target.tokenizer.convert_ids_to_tokens(70)
    for wanted, name in ((70, word), (word, word), (2, "<|im_end|>"), (0, "<|endoftext|>")):
        with pytest.raises(UserError, match="in use") as error:
            unused_token(wanted, target, VOCAB + 8)
        assert repr(name) in str(error.value)
        assert "ids from 300 to 307 are free" in str(error.value)
    with pytest.raises(UserError, match="not a token of the tokenizer"):
        unused_token("<|mask|>", target, VOCAB + 8)
    with pytest.raises(UserError, match="expected an id from 0 to 307"):
        unused_token(308, target, VOCAB + 8)
    with pytest.raises(UserError, match="must be named"):
        unused_token(None, target, VOCAB)
    assert unused_token(None, target, VOCAB + 8) == VOCAB
    assert unused_token(305, target, VOCAB + 8) == 305
    # A special token without a role is free. That of the chat template is not.
    target.tokenizer.add_tokens(["<|reserved|>"], special_tokens=True)
    with pytest.raises(UserError, match=r"unused special tokens of the tokenizer: 300 '<\|reserv"):
        unused_token(1, target, VOCAB + 8)
    assert unused_token("<|reserved|>", target, VOCAB + 8) == 300


@pytest.mark.parametrize("token", [VOCAB + 8, -1, "x", True])
def test_a_bad_mask_token_in_a_config_is_refused(token: Any) -> None:
    model = masked(tiny_model("llama"), token)
    with pytest.raises(UserError, match="expected the id of a mask token, from 0 to 307"):
        ParallelLMDrafter(model)


def test_a_model_without_a_mask_token_does_not_draft_in_parallel() -> None:
    with pytest.raises(UserError, match="expected pard_token"):
        ParallelLMDrafter(tiny_model("llama"))


# --- training -------------------------------------------------------------------------------------


def drawn(lengths: list[tuple[int, int]], seed: int = 0, **options: Any) -> tuple[Any, Any]:
    batch = batch_of(lengths)
    g = torch.Generator().manual_seed(seed)
    scores = torch.rand(batch["loss_mask"].shape, generator=g)
    return batch, MaskedCopies.drawn(batch["loss_mask"], ParallelConfig(**options), scores)


def test_what_is_kept_makes_complete_chains() -> None:
    batch, masks = drawn([(4, 40), (9, 2), (3, 31)], tokens=5, keep=0.7, keep_min=0.3)
    for row, count in enumerate((40, 2, 31)):
        predicted = batch["loss_mask"][row]
        kept = {
            (int(i), int(a))
            for i, a, real in zip(
                masks.copies[row], masks.anchors[row], masks.exists[row], strict=True
            )
            if real
        }
        for copy in range(1, 5):
            anchors = [a for i, a in kept if i == copy]
            share = max(0.7**copy, 0.3)
            assert len(anchors) == max(min(int(count * share + 1e-6), count - copy), 0)
            for a in anchors:
                assert copy == 1 or (copy - 1, a) in kept
                assert predicted[a + 1 : a + copy + 2].all()
                assert a + copy + 1 < len(predicted)
    _, others = drawn([(4, 40), (9, 2), (3, 31)], seed=1, tokens=5, keep=0.7, keep_min=0.3)
    assert not torch.equal(others.anchors, masks.anchors)


def test_what_a_mask_token_sees() -> None:
    """Its anchor's text, and the mask tokens before it of the same anchor, by their definition."""
    lengths = [(4, 9), (2, 3)]
    batch, masks = drawn(lengths, tokens=4, keep=0.8, keep_min=0.1)
    visible = masks.visible(batch["attention_mask"])[:, 0]
    positions, width = masks.positions(13), 13
    for row, (prompt, response) in enumerate(lengths):
        tokens = [(0, p, p) for p in range(prompt + response)]
        columns = list(range(prompt + response))
        for m in np.flatnonzero(masks.exists[row].numpy()):
            copy, anchor = int(masks.copies[row, m]), int(masks.anchors[row, m])
            tokens.append((copy, anchor, anchor + copy))
            columns.append(width + int(m))
        for (i, a, p), line in zip(tokens, columns, strict=True):
            seen = {
                column
                for (j, b, at), column in zip(tokens, columns, strict=True)
                if (j == 0 and at <= p - i) or (1 <= j <= i and at == a + j and b == a)
            }
            assert set(np.flatnonzero(visible[row, line].numpy())) == seen
            assert positions[row, line] == p


@pytest.mark.parametrize(
    ("family", "attention"), [("llama", "eager"), ("qwen3", "sdpa"), ("gpt2", "sdpa")]
)
def test_the_loss_is_that_of_plain_forwards(family: str, attention: str) -> None:
    """One forward per anchor, over the text and the mask tokens that decoding would feed."""
    target, student = tiny_model(family, seed=0), masked(tiny_model(family, seed=1, layers=1))
    student.set_attn_implementation(attention)
    lengths = [(4, 6), (9, 2), (3, 8)]
    batch = batch_of(lengths)
    parallel = ParallelConfig(tokens=3, keep=0.6, keep_min=0.2)
    module = ParallelDistillation(student, ALL_TERMS, parallel, MASK, chunk=5, tokens=VOCAB)
    teacher = LiveTeacher(target).signal(**batch, ids=["a", "b", "c"])
    module.eval()  # what is dropped is then the same again
    loss, parts = module(**batch, teacher=teacher)
    scores = row_numbers(*batch["loss_mask"].shape, training=False)
    masks = MaskedCopies.drawn(batch["loss_mask"], parallel, scores)
    expected = plain = 0.0
    count = 0
    for row, (prompt, response) in enumerate(lengths):
        text = batch["input_ids"][row, : prompt + response]
        p = target(text[None]).logits[0].double()
        kept = [(0, a) for a in range(prompt - 1, prompt + response - 1)]
        columns = zip(masks.copies[row], masks.anchors[row], masks.exists[row], strict=True)
        kept += [(int(i), int(a)) for i, a, real in columns if real]
        for i, a in kept:
            ids = torch.cat([text[: a + 1], torch.full((i,), MASK)])
            q = student(ids[None]).logits[0, -1:, :VOCAB].double()
            place = slice(a + i, a + i + 1)
            label = text[a + i + 1 : a + i + 2]
            values = ALL_TERMS.weigh(ALL_TERMS.values(q, TeacherLogits(p[place]), label)).item()
            expected += values * response / len(kept)
            plain += values
            count += 1
    assert count > 16
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    # What is logged is the mean over all predictions.
    assert ALL_TERMS.weigh(parts).item() == pytest.approx(plain * 16 / count, rel=1e-4)
    loss.backward()
    assert student.get_input_embeddings().weight.grad[MASK].abs().max() > 0


def test_places_are_weighed_by_how_likely_a_draft_gets_there() -> None:
    """D-PACE's weights by hand: each kept draft is a chain of its own."""
    student, a = masked(tiny_llama(seed=1, layers=1)), 0.3
    lengths = [(4, 6), (3, 8)]
    batch = batch_of(lengths)
    parallel = ParallelConfig(tokens=3, keep=0.6, keep_min=0.2, place_smoothing=a)
    text = WeightedLoss({"cross_entropy": 1.0})
    module = ParallelDistillation(student, text, parallel, MASK, chunk=5, tokens=VOCAB).train()
    torch.manual_seed(3)
    loss, parts = module(**batch)
    torch.manual_seed(3)
    scores = row_numbers(*batch["loss_mask"].shape)
    masks = MaskedCopies.drawn(batch["loss_mask"], parallel, scores)
    expected, plain, count = 0.0, 0.0, 0
    for row, (prompt, response) in enumerate(lengths):
        ids = batch["input_ids"][row, : prompt + response]
        anchors = masks.anchors[row][masks.exists[row]]
        share = response / (response + len(anchors))
        for anchor in range(prompt - 1, prompt + response - 1):
            reached, q = 1.0, []
            for depth in range(1 + int((anchors == anchor).sum())):
                read = torch.cat([ids[: anchor + 1], torch.full((depth,), MASK)])
                logits = student(read[None]).logits[0, -1, :VOCAB].double()
                q.append(float(logits.softmax(-1)[ids[anchor + depth + 1]].detach()))
            chances = [reached := reached * ((1 - a) * x + a) for x in q]
            for depth, x in enumerate(q):
                expected -= share * sum(chances[depth:]) * math.log(x)
                plain -= math.log(x)
            count += len(q)
    assert count > 20
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    assert parts.item() == pytest.approx(plain * 14 / count, rel=1e-4)  # the logged loss is plain
    evaluated = module.eval()(**batch)[0].item()
    same = ParallelConfig(tokens=3, keep=0.6, keep_min=0.2)
    module = ParallelDistillation(student, text, same, MASK, tokens=VOCAB).eval()
    assert evaluated == pytest.approx(module(**batch)[0].item(), rel=1e-6)


@pytest.mark.parametrize("k", [None, VOCAB - 1, 2])
def test_drafts_that_the_target_would_not_reach_count_less(k: int | None) -> None:
    """PARD-2's weights by hand: of a token after masked ones, the product of their p. k: of a
    cache, in which all other tokens are one outcome."""
    target, student = tiny_llama(seed=0), masked(tiny_llama(seed=1, layers=1))
    lengths = [(4, 6), (3, 8)]
    batch = batch_of(lengths)
    parallel = ParallelConfig(tokens=3, keep=0.6, keep_min=0.2, confidence=True)
    text = WeightedLoss({"cross_entropy": 1.0})
    module = ParallelDistillation(student, text, parallel, MASK, chunk=5, tokens=VOCAB).train()
    teacher: Any = LiveTeacher(target).signal(**batch, ids=["a", "b"])
    if k is not None:
        teacher = top_k(teacher(slice(0, 14)).logits, k).__getitem__
    torch.manual_seed(3)
    loss, _ = module(**batch, teacher=teacher)
    torch.manual_seed(3)
    masks = MaskedCopies.drawn(batch["loss_mask"], parallel, row_numbers(*batch["loss_mask"].shape))
    expected = 0.0
    for row, (prompt, response) in enumerate(lengths):
        ids = batch["input_ids"][row, : prompt + response]
        p = target(ids[None]).logits[0].double().softmax(-1).detach()
        if k is not None:
            tail = p.scatter(1, p.topk(k).indices, 0.0)
            p = torch.where(tail > 0, tail.sum(-1, keepdim=True), p)
        kept = [(0, a) for a in range(prompt - 1, prompt + response - 1)]
        columns = zip(masks.copies[row], masks.anchors[row], masks.exists[row], strict=True)
        kept += [(int(i), int(a)) for i, a, real in columns if real]
        losses, weights = [], []
        for i, a in kept:
            read = torch.cat([ids[: a + 1], torch.full((i,), MASK)])
            q = student(read[None]).logits[0, -1, :VOCAB].double().softmax(-1)
            losses.append(-float(q[ids[a + i + 1]].detach().log()))
            weights.append(math.prod(float(p[t, ids[t + 1]]) for t in range(a, a + i)))
        assert max(i for i, _ in kept) == 2
        expected += response * float(np.average(losses, weights=weights))
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    equal = ParallelConfig(tokens=3, keep=0.6, keep_min=0.2)
    module = ParallelDistillation(student, text, equal, MASK, chunk=5, tokens=VOCAB).train()
    torch.manual_seed(3)
    assert module(**batch)[0].item() != pytest.approx(expected, rel=1e-3)


def test_copy_0_alone_has_the_ordinary_loss() -> None:
    target, student = tiny_llama(seed=0), masked(tiny_llama(seed=1, layers=1))
    # One response token each: nothing is left for the other copies.
    batch = batch_of([(4, 1), (9, 1), (3, 1)])
    signal = LiveTeacher(target).signal(**batch, ids=["a", "b", "c"])
    plain = Distillation(student, ALL_TERMS, tokens=VOCAB)(**batch, teacher=signal)
    module = ParallelDistillation(student, ALL_TERMS, ParallelConfig(), MASK, tokens=VOCAB)
    for ours, ordinary in zip(module(**batch, teacher=signal), plain, strict=True):
        torch.testing.assert_close(ours, ordinary)
    # Of a longer text, copy 0 has the ordinary agreement too.
    batch = batch_of([(4, 6), (9, 2)])
    signal = LiveTeacher(target).signal(**batch, ids=["a", "b"])
    sums = module.eval()(**batch, agreement_with=signal)[1]
    plain = Distillation(student, ALL_TERMS, tokens=VOCAB)(**batch, agreement_with=signal)
    torch.testing.assert_close(sums[:4], plain[1])
    figures = module.figures(sums)
    assert figures["expected_acceptance"] == pytest.approx(float(plain[1][0] / 8))
    assert 0 < figures["place2/acceptance"] < 1
    assert "place7/acceptance" not in figures  # no text is that long


def test_other_teachers_serve_all_copies() -> None:
    """The signal of stored top-k outcomes, and none at all."""
    target, student = tiny_llama(seed=0), masked(tiny_llama(seed=1, layers=1))
    batch = batch_of([(4, 6), (9, 5)])
    live = LiveTeacher(target).signal(**batch, ids=["a", "b"])
    all_of_it = top_k(live(slice(0, 11)).logits, VOCAB - 1)
    kl = WeightedLoss({"forward_kl": 1.0})
    module = ParallelDistillation(student, kl, ParallelConfig(), MASK, tokens=VOCAB).eval()
    from_live, from_cache = (module(**batch, teacher=x)[0] for x in (live, all_of_it.__getitem__))
    torch.testing.assert_close(from_cache, from_live, rtol=1e-4, atol=1e-4)
    text = WeightedLoss({"cross_entropy": 1.0})
    module = ParallelDistillation(student, text, ParallelConfig(), MASK, tokens=VOCAB)
    assert torch.isfinite(module(**batch)[0])


def test_a_sliding_window_is_refused() -> None:
    model = masked(tiny_model("mistral", sliding_window=8))
    with pytest.raises(UserError, match="sliding window of 8 tokens"):
        ParallelDistillation(model, ALL_TERMS, ParallelConfig(), MASK)


# --- the stage ------------------------------------------------------------------------------------

PARALLEL = {"tokens": 4, "keep": 0.7}


def wide_context(directory: Path) -> Any:
    """Of a target with rows of padding."""
    return stage_context(directory, tiny_target(vocab=VOCAB + 8))


def test_the_stage_trains_a_drafter(tmp_path: Path) -> None:
    context = wide_context(tmp_path / "one")
    stage = make_stage(
        "distill",
        "tiny",
        **DRAFTER,
        parallel=PARALLEL,
        dev={"samples": 4, "every": 2, "decode_prompts": 2, "gamma": 3},
    )
    assert plan_stage(context, stage).trained_parameters > 0
    outcome = run_stage(context, stage)
    assert outcome.drafter is not None
    assert describe_drafter(outcome.drafter)["kind"] == "pard"
    drafter = open_drafter(str(outcome.drafter), context.target)
    assert isinstance(drafter, ParallelLMDrafter)
    assert drafter.mask_token == VOCAB
    last = outcome.summary["training"]["dev"][-1]
    assert {"expected_acceptance", "place2/acceptance", "acceptance_rate"} <= set(last)

    further = make_stage(
        "distill", "more", stage, drafter={"stage": "tiny"}, parallel=PARALLEL, loop={"epochs": 1}
    )
    more = open_drafter(str(run_stage(context, further).drafter), context.target)
    assert isinstance(more, ParallelLMDrafter)
    assert more.mask_token == VOCAB


def test_stages_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    first = make_stage("distill", "one", **DRAFTER, parallel=PARALLEL)
    with pytest.raises(UserError, match="drafts in parallel; set parallel"):
        make_stage("distill", "two", first, drafter={"stage": "one"})
    with pytest.raises(UserError, match="keeps its mask token"):
        make_stage("distill", "two", first, drafter={"stage": "one"}, parallel={"mask_token": 301})
    weighed: dict[str, Any] = {"parallel": PARALLEL | {"confidence": True}}
    with pytest.raises(UserError, match=r"parallel.confidence weighs by the target's"):
        make_stage("distill", "two", **DRAFTER | weighed, losses={"cross_entropy": 1.0})
    with pytest.raises(ValidationError, match="both set the weights of the places; choose one"):
        ParallelConfig(confidence=True, place_smoothing=0.5)
    with pytest.raises(UserError, match="without `parallel`"):
        make_stage("online", "two", first, drafter={"stage": "one"})
    context = stage_context(tmp_path, tiny_target())
    with pytest.raises(UserError, match="stage one: parallel: the tokenizer has a token for each"):
        plan_stage(context, first)
    # A special token without a role, which the text contains all the same.
    context = wide_context(tmp_path)
    context.target.tokenizer.add_tokens(["<|reserved|>"], special_tokens=True)
    spoken = replace(
        examples("train", 1)[0],
        messages=(
            {"role": "user", "content": "the dog"},
            {"role": "assistant", "content": "a <|reserved|> fox"},
        ),
    )
    context = with_examples(context, train=[*examples("train", 3), spoken])
    named = make_stage(
        "distill", "one", **DRAFTER, parallel=PARALLEL | {"mask_token": "<|reserved|>"}
    )
    with pytest.raises(UserError, match=r"300 \('<\|reserved\|>'\) is in use: the sample train-0"):
        run_stage(context, named)
