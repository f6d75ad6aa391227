"""The teacher's cache: what is kept, that it teaches what the live target does, and what is not
mistaken for it."""

import hashlib
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from decode.base.artifact import CorruptArtifact
from decode.base.errors import UserError
from decode.model.loading import Target
from distill.losses import WeightedLoss
from distill.teacher.cache_parts import text_sha256
from distill.teacher.live_teacher import LiveTeacher
from distill.teacher.teacher_signal import TeacherLogits, TopK
from distill.teacher.top_k_cache import (
    CachedTeacher,
    bytes_per_token,
    describe_teacher,
    top_k,
    write_top_k_part,
    write_vocabulary,
)
from tests.stages import (
    DRAFTER,
    drafter_weights,
    make_stage,
    plan_stage,
    run_stage,
    stage_context,
    with_examples,
)
from tests.tiny import padded, save_tiny, shortened, tiny_model, tiny_target, tiny_tokenizer
from tests.training import Killed, before_call
from train.base.stage import StageInputs
from train.data.batches import collate
from train.loop.open_caches import open_cache
from train.stages.teacher_cache import TeacherCacheStage

pytestmark = pytest.mark.usefixtures("fresh_accelerate")
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")
OF_ACCEPTANCE = ("total_variation", "negative_log_acceptance", "lk_hybrid")


def cache_stage(**settings: Any) -> Any:
    return make_stage("teacher_cache", "cache", **({"k": 8, "part_samples": 4} | settings))


def make_cache(context: StageInputs, **settings: Any) -> CachedTeacher:
    run_stage(context, cache_stage(**settings))
    return CachedTeacher(context.earlier["cache"], context.target)


# --- what is kept ---------------------------------------------------------------------------------


def test_top_k_is_the_likeliest_tokens_and_the_mass_of_all_others():
    logits = torch.randn(7, 31, generator=torch.Generator().manual_seed(0)) * 3
    for temperature in (1.0, 0.5):
        p = (logits.double() / temperature).softmax(-1)
        found = top_k(logits, 5, temperature)
        for row in range(7):
            order = p[row].argsort(descending=True)
            assert found.ids[row].tolist() == order[:5].tolist()
            # float32 against float64
            torch.testing.assert_close(
                found.log_p[row].double(), p[row, order[:5]].log(), rtol=1e-5, atol=1e-5
            )
            tail = p[row, order[5:]].sum().item()
            assert found.log_tail[row].exp().item() == pytest.approx(tail, rel=1e-4)
    whole = top_k(logits, 31)
    assert whole.log_tail.isfinite().all()
    assert whole.log_tail.exp().max() < 1e-30


def test_what_was_written_comes_back_within_half_precision(tmp_path, target):
    g = torch.Generator().manual_seed(0)
    signals = [top_k(4 * torch.randn(n, 300, generator=g), 6) for n in (3, 1, 5)]
    texts = [(f"s{i}", [i, 2], [False, True]) for i in range(3)]
    # The last part is one of an earlier version, with a hash of JSON.
    names = [(name, text_sha256(tokens, mask)) for name, tokens, mask in texts[:2]]
    names.append(("s2", hashlib.sha256(b"[[2, 2], [0, 1]]").hexdigest()[:32]))
    about = describe_teacher(target, k=6, temperature=1.0, vocabulary=None)
    write_top_k_part(tmp_path, 0, names[:2], signals[:2], 300, about)
    write_top_k_part(tmp_path, 10, names[2:], signals[2:], 300, about)
    cache = CachedTeacher(tmp_path, target)
    assert (cache.k, cache.temperature, cache.vocabulary) == (6, 1.0, None)
    cache.require(texts)
    with pytest.raises(UserError, match="sample 's2' is not the text"):
        cache.require([("s2", [2, 2], [True, True])])
    nothing = torch.zeros(1, 2)
    found = cache.signal(nothing, nothing, nothing, ["s2", "s0"])(slice(0, 8))
    assert isinstance(found, TopK)
    expected = [torch.cat([getattr(signals[i], key) for i in (2, 0)]) for key in vars(found)]
    assert torch.equal(found.ids, expected[0])
    # float16 has 11 bits.
    torch.testing.assert_close(found.log_p, expected[1], rtol=2**-11, atol=0)
    assert torch.equal(found.log_tail, expected[2])
    none = cache.signal(nothing, nothing, nothing, [])(slice(0, 8))
    assert none.log_p.shape == (0, 6)


@pytest.mark.parametrize(
    ("vocab", "k", "expected"), [(300, 8, 36), (65536, 64, 260), (65537, 64, 388)]
)
def test_bytes_per_token_are_those_of_the_tensors(vocab: int, k: int, expected: int):
    """2 + 2 bytes a kept token, 4 + 2 where its id does not fit into 16 bits; 4 for the tail."""
    assert bytes_per_token(k, vocab) == expected


def test_bytes_per_token_is_what_is_on_disk(context):
    cache = make_cache(context, k=32, part_samples=100)
    tokens = sum(sum(s.mask[1:]) for s in context.corpus.samples("data"))
    file = cache.directory / "part-0" / "cache.safetensors"
    header = int.from_bytes(file.read_bytes()[:8], "little") + 8
    assert file.stat().st_size - header == tokens * bytes_per_token(32, 300)
    assert header < 400


# --- the stage ------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"draft_vocabulary": 60}, {"temperature": 1.5}])
def test_the_cache_says_of_every_sample_what_the_target_does(context, settings):
    cache = make_cache(context, tokens_per_batch=60, chunk_tokens=7, **settings)
    vocabulary = cache.vocabulary
    live = LiveTeacher(context.target.model, vocabulary=vocabulary)
    for sample in context.corpus.samples("data"):
        batch = collate([sample], 0)
        arguments = [batch[name] for name in ("input_ids", "attention_mask", "loss_mask", "ids")]
        count = slice(0, sum(sample.mask[1:]))
        found = cache.signal(*arguments)(count)
        expected = top_k(live.signal(*arguments)(count).logits, 8, settings.get("temperature", 1.0))
        assert len(found.ids) == sum(sample.mask[1:])
        # float16, and rows in batches of another shape; of two tokens that tie within that either
        # may come first, so it is the sorted values that are compared.
        torch.testing.assert_close(found.log_p, expected.log_p, rtol=2**-10, atol=1e-4)
        torch.testing.assert_close(found.log_tail, expected.log_tail, rtol=1e-3, atol=1e-4)
        assert (found.ids == expected.ids).float().mean() > 0.95


def test_it_teaches_what_its_outcomes_do_and_with_all_tokens_what_the_target_does(context):
    """The tolerance is float16's: 2⁻¹¹ of a log-probability of at most about 20."""
    samples = context.corpus.samples("data")[:3]
    batch = collate(samples, 0)
    arguments = [batch[name] for name in ("input_ids", "attention_mask", "loss_mask", "ids")]
    n = sum(sum(s.mask[1:]) for s in samples)
    whole = slice(0, n)
    live = LiveTeacher(context.target.model).signal(*arguments)(whole).logits
    student = live + torch.randn(live.shape, generator=torch.Generator().manual_seed(0))
    labels = torch.zeros(n, dtype=torch.int64)
    for k, exact in ((8, top_k(live, 8)), (300, TeacherLogits(live))):
        context.earlier.clear()
        cached = make_cache(replace(context, directory=context.directory / str(k)), k=k)
        signal = cached.signal(*arguments)(whole)
        for name in DIVERGENCES + OF_ACCEPTANCE:
            terms = WeightedLoss({name: 1.0})
            found, slope = terms.fused(student, signal, labels)
            expected, expected_slope = terms.fused(student, exact, labels)
            torch.testing.assert_close(found, expected, rtol=0, atol=0.01, msg=name)
            if name in DIVERGENCES:  # the gradients of the others jump where p = q
                torch.testing.assert_close(slope, expected_slope, rtol=0, atol=0.01, msg=name)
            assert expected.mean() > 0.03, name


# --- what is refused ------------------------------------------------------------------------------


def other_target(target: Target, what: str) -> Target:
    if what == "weights":
        return replace(tiny_target(seed=1), name=target.name, revision=target.revision)
    if what == "dtype":
        model = tiny_target().model.bfloat16()
        return replace(target, model=model)
    return replace(target, revision="another")


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("weights", "a target with other weights"),
        ("dtype", "the target in another dtype: found 'float32'.*expected 'bfloat16'"),
        ("revision", "another revision of the target: found None .*expected 'another'"),
    ],
)
def test_a_cache_of_another_target_is_refused(context, target, what, said):
    make_cache(context)
    with pytest.raises(UserError, match=f"was made from {said}.*Make it again"):
        CachedTeacher(context.earlier["cache"], other_target(target, what))


def test_another_draft_vocabulary_than_the_parts_are_over_is_refused(context, target):
    cache = make_cache(context, draft_vocabulary=60)
    write_vocabulary(cache.directory, torch.arange(60))
    with pytest.raises(UserError, match="was made from another draft vocabulary"):
        CachedTeacher(cache.directory, target)


@pytest.mark.parametrize("settings", [{"k": 16}, {"temperature": 2.0}])
def test_parts_made_with_other_settings_are_not_mixed(context, monkeypatch, settings):
    """A killed stage that goes on with --allow-changes would."""
    before_call(monkeypatch, TeacherCacheStage, "_score", 2)
    with pytest.raises(Killed):
        run_stage(context, cache_stage())
    with pytest.raises(UserError, match=r"part-1 was made with k and temperature .*part-0 with"):
        run_stage(context, cache_stage(**settings))


@pytest.mark.parametrize("file", ["cache.safetensors", "samples.json"])
def test_a_damaged_part_is_named(context, target, file):
    cache = make_cache(context)
    path = cache.directory / "part-1" / file
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    samples = context.corpus.samples("data")
    for use in (
        lambda: open_cache(cache.directory, target, samples, context.accelerator),
        lambda: run_stage(context, cache_stage()),
    ):
        with pytest.raises(CorruptArtifact, match=rf"part-1.*{re.escape(file)}"):
            use()


def test_more_tokens_than_there_are_are_refused(context):
    with pytest.raises(UserError, match="k is 8, but draft_vocabulary is only 7"):
        cache_stage(draft_vocabulary=7)
    with pytest.raises(UserError, match="k is 301, but the vocabulary has only 300 tokens"):
        plan_stage(context, cache_stage(k=301))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"teacher_temperature": 2.0}, "the cache has a fixed temperature"),
        ({"draft_vocabulary": 50}, "draft_vocabulary cannot be set here: the cache already sets"),
        ({"teacher": "cash"}, "no earlier stage 'cash'.*Did you mean \"cache\""),
    ],
)
def test_settings_that_do_not_go_with_a_cache_are_refused(settings, said):
    with pytest.raises(UserError, match=said):
        make_stage(
            "distill", "distill", cache_stage(), **(DRAFTER | {"teacher": "cache"} | settings)
        )


# --- training from it -----------------------------------------------------------------------------


def distill(context: StageInputs, name: str = "distill", **settings: Any) -> Any:
    return run_stage(
        context,
        make_stage(
            "distill",
            name,
            *(s for s in [cache_stage()] if "teacher" in settings),
            **(DRAFTER | settings),
        ),
    )


@pytest.mark.parametrize("size", shortened([None, 60], [60]))
def test_a_drafter_learns_from_the_cache_what_it_does_from_the_target(context, monkeypatch, size):
    """k is the whole (draft) vocabulary, so that nothing but float16 is between the two."""
    cache = make_cache(context, k=size or 300, draft_vocabulary=size)
    live = distill(context, "live", draft_vocabulary=size)
    forwards = []
    monkeypatch.setattr(LiveTeacher, "signal", lambda *args, **kwargs: forwards.append(1))
    # Also one of another run, by its directory.
    cached = distill(context, "cached", teacher="cache" if size else str(cache.directory))
    assert not forwards
    assert cached.summary["draft_vocabulary"] == size
    curves = [
        [row["loss"] for row in outcome.summary["training"]["history"]]
        for outcome in (live, cached)
    ]
    assert curves[1] == pytest.approx(curves[0], rel=0.01)
    assert curves[0][-1] < curves[0][0]
    if size:
        ids = drafter_weights(cached)["draft_vocabulary.safetensors ids"]
        assert torch.equal(ids, drafter_weights(live)["draft_vocabulary.safetensors ids"])


@pytest.mark.parametrize("rows", shortened([307, 330], [307]))
def test_a_drafter_padded_to_another_size_learns_the_same(tmp_path, rows):
    """A drafter of 300 tokens learns from a target of 320 rows, live and from its cache. Its
    padding has large logits, which neither change the loss nor learn."""
    context = stage_context(tmp_path, tiny_target(vocab=320))
    model = tiny_model("llama", layers=1, seed=3, tie=False)
    curves, weights = [], []
    make_cache(context, k=300)
    for size in (300, rows):
        path = tmp_path / f"rows-{size}"
        padded(model, size).save_pretrained(path)
        tiny_tokenizer().save_pretrained(path)
        for teacher in ("live", "cache") if size != 300 else ("live",):
            name = f"{teacher}-{size}"
            start = {"drafter": {"model": str(path)}, "teacher": teacher}
            stage = make_stage("distill", name, cache_stage(), **(DRAFTER | start))
            found = run_stage(context, stage)
            curves.append([row["loss"] for row in found.summary["training"]["history"]])
            weights.append(drafter_weights(found)["model.safetensors lm_head.weight"])
            begun = load_file(path / "model.safetensors")["lm_head.weight"]
            torch.testing.assert_close(weights[-1][300:], begun[300:])
            assert not torch.equal(weights[-1][:300], begun[:300])
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)
    assert curves[2] == pytest.approx(curves[0], rel=0.01)
    torch.testing.assert_close(weights[1][:300], weights[0], rtol=1e-3, atol=1e-4)


def test_a_drafter_with_too_few_rows_is_refused_before_training(tmp_path):
    context = stage_context(tmp_path, tiny_target(vocab=320))
    path = str(save_tiny(tmp_path / "few", vocab=299))
    with pytest.raises(UserError, match="299 output rows, but its tokenizer knows 300 tokens"):
        distill(context, drafter={"model": path})


def test_a_drafter_of_another_vocabulary_than_the_caches_is_refused(context):
    make_cache(context, draft_vocabulary=60)
    first = make_stage("distill", "first", **(DRAFTER | {"draft_vocabulary": 50}))
    run_stage(context, first)
    more = DRAFTER | {"drafter": {"stage": "first"}, "teacher": "cache"}
    second = make_stage("distill", "second", cache_stage(), first, **more)
    with pytest.raises(UserError, match="vocabulary of 50 tokens, but the teacher cache"):
        run_stage(context, second)


def test_a_cache_of_other_text_is_refused_before_training(context):
    make_cache(context)
    changed = with_examples(context, train=context.corpus.examples["dev"])
    with pytest.raises(UserError, match="has no sample 'dev-0'"):
        distill(changed, teacher="cache")
    with pytest.raises(UserError, match=r"sample 'train-.*' is not the text"):
        distill(context, "short", teacher="cache", max_length=30)
