"""The offline cache of hidden states: what a live target shows, and nothing that does not fit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.artifact import CorruptArtifact
from decode.errors import UserError
from decode.target.hidden_states import FINAL
from decode.target.loading import Target
from distill.teacher.cache_parts import text_sha256
from distill.teacher.feature_sources import CachedFeatures, LiveFeatures
from tests.stages import drafter_weights, make_stage, plan_stage, run_stage, stage_context
from tests.tiny import tiny_target
from tests.training import Killed, assert_equal
from train.data.batches import collate
from train.data.chat import Sample
from train.stage import StageInputs

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

HEADS = {
    "heads": {"type": "medusa", "heads": 2},
    "losses": {"forward_kl": 1.0, "cross_entropy": 0.1},
    "loop": {"epochs": 2, "tokens_per_batch": 150, "log_every": 1},
    "optimizer": {"lr": 1e-2, "warmup_steps": 2},
}
CAPTURED_LAYERS = [FINAL, 0]


@pytest.fixture
def target() -> Target:
    return tiny_target()


@pytest.fixture
def context(tmp_path: Path, target: Target) -> StageInputs:
    return stage_context(tmp_path, target)


def cache_stage(**settings: Any) -> Any:
    return make_stage(
        "feature_cache",
        "cache",
        **({"captured_layers": CAPTURED_LAYERS, "part_samples": 4} | settings),
    )


def in_one_batch(samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    batch = collate(samples, 0)
    return batch["input_ids"], batch["attention_mask"], batch["ids"]


def test_a_cache_holds_what_the_target_shows(context: Any, target: Target) -> None:
    outcome = run_stage(context, cache_stage())
    samples = context.corpus.samples("data")
    directory = context.earlier["cache"]
    assert len(list(directory.glob("part-*"))) == 3
    # Two captured_layers of 32 float32 numbers.
    assert outcome.summary["bytes_per_token"] == 256
    assert outcome.summary["tokens"] == sum(len(sample.tokens) for sample in samples)
    said = next(line for line in context.reporter.lines if "bytes a token" in line)
    assert said.startswith("  256 bytes a token, ")
    cache = CachedFeatures(directory, target, CAPTURED_LAYERS)
    cache.require([(s.id, text_sha256(s.tokens, s.mask)) for s in samples])
    chosen = [samples[i] for i in (7, 0, 3)]
    given = in_one_batch(chosen)
    live = LiveFeatures(target.model, CAPTURED_LAYERS).features(*given)
    stored = cache.features(*given)
    for layer in CAPTURED_LAYERS:
        assert stored[layer].shape == live[layer].shape
        for row, sample in enumerate(chosen):
            length = len(sample.tokens)
            # Scored in batches of other shapes.
            torch.testing.assert_close(
                stored[layer][row, :length], live[layer][row, :length], rtol=1e-4, atol=1e-5
            )
    empty = collate([], 0)
    nothing = cache.features(empty["input_ids"], empty["attention_mask"], [])
    assert nothing[FINAL].shape == (1, 2, 32)


def test_training_from_it_is_training_beside_the_target(context: Any) -> None:
    run_stage(context, cache_stage(captured_layers=[FINAL]))
    live = run_stage(context, make_stage("heads", "live", **HEADS))
    stage = make_stage("heads", "cached", cache_stage(), features="cache", **HEADS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.training.backbone.LiveFeatures", None)
        cached = run_stage(context, stage)
    ours, theirs = drafter_weights(cached), drafter_weights(live)
    for name, weights in theirs.items():
        torch.testing.assert_close(ours[name], weights, rtol=1e-3, atol=1e-4)
    by_path = make_stage("heads", "path", features=str(context.earlier["cache"]), **HEADS)
    assert_equal(drafter_weights(run_stage(context, by_path)), ours)


def test_a_small_lm_distilled_from_it_is_one_distilled_beside_the_target(context: Any) -> None:
    def distilled(name: str, **settings: Any) -> Any:
        settings |= {"drafter": {"layers": [0]}, "draft_vocabulary": 100, "loop": HEADS["loop"]}
        return run_stage(context, make_stage("distill", name, cache_stage(), **settings))

    run_stage(context, cache_stage(captured_layers=[0, FINAL]))
    live = distilled("live-lm", teacher_temperature=0.9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.training.student_and_teacher.lost_mass", lambda *args: 0.0)
        patch.setattr("train.training.student_and_teacher.LiveTeacher", None)
        cached = distilled("cached-lm", teacher_temperature=0.9, teacher="cache")
    ours, theirs = drafter_weights(cached), drafter_weights(live)
    assert cached.summary["training"]["history"][0]["loss"] > 0.1
    for name, weights in theirs.items():
        torch.testing.assert_close(ours[name], weights, rtol=1e-3, atol=1e-4)
    with pytest.raises(UserError, match="remember_teacher cannot be set here: a cache"):
        distilled("both", teacher="cache", remember_teacher=True)


def test_a_killed_cache_goes_on_with_the_next_part(
    context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = context.directory / "cache"
    with monkeypatch.context() as patch:

        def dying(path: Path, number: int, *_: Any) -> None:
            raise Killed

        run_stage(context, cache_stage())
        whole = {p.name: (p / "cache.safetensors").read_bytes() for p in directory.glob("part-*")}
        for part in directory.glob("part-[12]"):
            part.rename(directory.parent / part.name)
        patch.setattr("train.stages.feature_cache.write_features", dying)
        with pytest.raises(Killed):
            run_stage(context, cache_stage())
    stamp = (directory / "part-0" / "cache.safetensors").stat().st_mtime_ns
    run_stage(context, cache_stage())
    again = {p.name: (p / "cache.safetensors").read_bytes() for p in directory.glob("part-*")}
    assert again == whole
    assert (directory / "part-0" / "cache.safetensors").stat().st_mtime_ns == stamp


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"revision": "abc"}, "another revision of the target"),
        ({"model": "bfloat16"}, "the target in another dtype"),
        ({"model": "other"}, "a target with other weights"),
    ],
)
def test_a_cache_of_another_target_is_refused(
    context: Any, target: Target, change: dict[str, Any], said: str
) -> None:
    run_stage(context, cache_stage())
    if change.get("model") == "bfloat16":
        change = {"model": tiny_target().model.bfloat16()}
    elif change.get("model") == "other":
        change = {"model": tiny_target(seed=3).model}
    with pytest.raises(UserError, match=f"the feature cache .* was made from {said}"):
        CachedFeatures(context.earlier["cache"], replace(target, **change), CAPTURED_LAYERS)


def test_what_a_cache_lacks_is_refused(context: Any, target: Target) -> None:
    run_stage(context, cache_stage(captured_layers=[0]))
    directory = context.earlier["cache"]
    with pytest.raises(UserError, match=r"the layers \[0\], but these heads also read \[-1\]"):
        run_stage(context, make_stage("heads", "heads", cache_stage(), features="cache", **HEADS))
    cache = CachedFeatures(directory, target, [0])
    sample = context.corpus.samples("data")[0]
    with pytest.raises(UserError, match=f"sample '{sample.id}' is not the text"):
        cache.require([(sample.id, text_sha256(sample.tokens, [True] * len(sample.mask)))])
    with pytest.raises(UserError, match=r"the feature cache .* has no sample 'new'"):
        cache.require([("new", "")])
    file = directory / "part-1" / "cache.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(bytes(damaged))
    with pytest.raises(CorruptArtifact, match=r"part-1.*cache.safetensors"):
        CachedFeatures(directory, target, [0])
    with pytest.raises(UserError, match="holds no feature cache; expected directories part-N"):
        CachedFeatures(context.directory / "nowhere", target, [0])


def test_bad_settings_are_refused(context: Any) -> None:
    with pytest.raises(UserError, match="with a layer twice"):
        cache_stage(captured_layers=[0, 0])
    with pytest.raises(UserError, match=r"layer 2 were requested, but .* has 2 layers"):
        plan_stage(context, cache_stage(captured_layers=[2]))
    with pytest.raises(UserError, match="no earlier stage 'cache' of kind feature_cache"):
        make_stage("heads", "heads", features="cache", **HEADS)
    with pytest.raises(UserError, match="remember_features cannot be set here"):
        make_stage(
            "heads", "heads", cache_stage(), features="cache", remember_features=True, **HEADS
        )
    plan = plan_stage(context, cache_stage())
    assert "256 bytes a token" in plan.what
    assert plan.tokens > 0
