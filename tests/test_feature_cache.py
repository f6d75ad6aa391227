"""The offline cache of hidden states: what a live target shows, and nothing that does not fit."""

import errno
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from decode.base import artifact
from decode.base.artifact import CorruptArtifact
from decode.base.errors import UserError
from decode.model.hidden_states import FINAL
from decode.model.loading import Target
from distill.teacher import cache_parts
from distill.teacher.cached_features import CachedFeatures
from distill.teacher.feature_sources import LiveFeatures
from distill.teacher.read_ahead import ReadAhead
from draftsmith.cli.main import app
from tests.stages import (
    drafter_weights,
    make_stage,
    plan_stage,
    run_killed,
    run_stage,
    stage_context,
)
from tests.tiny import tiny_target
from tests.training import (
    Killed,
    assert_equal,
    before_call,
    forked,
    in_new_process,
    status_of,
    two_ranks,
)
from train.data.batches import collate
from train.data.chat_tokens import Sample
from train.loop.live_window import LiveWindow
from train.loop.open_caches import check_cache_directory, open_features

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

HEADS = {
    "heads": {"type": "medusa", "heads": 2},
    "losses": {"forward_kl": 1.0, "cross_entropy": 0.1},
    "loop": {"epochs": 2, "tokens_per_batch": 150, "log_every": 1},
    "optimizer": {"lr": 1e-2, "warmup_steps": 2},
}
CAPTURED_LAYERS = [FINAL, 0]


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
    # Time is planned as it is measured: by all tokens, prompts included.
    assert plan_stage(context, cache_stage()).tokens == outcome.summary["tokens"]
    said = next(line for line in context.reporter.lines if "bytes a token" in line)
    assert said.startswith("  256 bytes a token, ")
    cache = CachedFeatures(directory, target, CAPTURED_LAYERS)
    cache.require([(s.id, s.tokens, s.mask) for s in samples])
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


def test_states_of_a_window_train_as_those_of_a_cache_do(
    context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of three batches, filled by passes of other sizes than the batches."""
    stage = HEADS | {"loop": HEADS["loop"] | {"epochs": 1, "save_every": 1}}
    run_stage(context, cache_stage(captured_layers=[FINAL]))
    cached = run_stage(context, make_stage("heads", "c", cache_stage(), features="cache", **stage))
    passes: list[tuple[int, tuple[str, ...]]] = []
    held: list[int] = []
    forward, fill = LiveFeatures.features, LiveWindow._fill

    def counted(self: LiveFeatures, tokens: torch.Tensor, mask: Any, ids: Any) -> Any:
        passes.append((tokens.numel(), tuple(ids)))
        return forward(self, tokens, mask, ids)

    def filled(self: LiveWindow, text: Any, number: int) -> None:
        fill(self, text, number)
        rows = [row for batch in self._held.values() for row in batch]
        held.append(sum(len(row[FINAL]) for row in rows))

    monkeypatch.setattr(LiveFeatures, "features", counted)
    monkeypatch.setattr(LiveWindow, "_fill", filled)
    window = run_stage(context, make_stage("heads", "w", tokens_per_pass=140, **stage))
    steps = window.summary["training"]["steps"]
    assert steps == cached.summary["training"]["steps"]
    assert 2 <= len(held) < steps
    sizes = [size for size, _ in passes]
    assert max(sizes) <= 140 < sum(sizes) / len(held)
    assert max(held) <= 4 * 140
    ours, theirs = drafter_weights(window), drafter_weights(cached)
    for name, weights in theirs.items():
        torch.testing.assert_close(ours[name], weights, rtol=1e-3, atol=1e-4)
    # A kill in the middle of a window changes no bit, as each sample's pass stays the same.
    whole = set(passes)
    passes.clear()
    again = make_stage("heads", "killed", tokens_per_pass=140, **stage)
    assert_equal(drafter_weights(run_killed(context, again, monkeypatch, 3)), ours)
    assert set(passes) == whole


def test_a_small_lm_distilled_from_it_is_one_distilled_beside_the_target(context: Any) -> None:
    def distilled(name: str, **settings: Any) -> Any:
        settings |= {"drafter": {"layers": [0]}, "draft_vocabulary": 100, "loop": HEADS["loop"]}
        return run_stage(context, make_stage("distill", name, cache_stage(), **settings))

    run_stage(context, cache_stage(captured_layers=[0, FINAL]))
    live = distilled("live-lm", teacher_temperature=0.9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.stages.text_stages.lost_mass", lambda *args: 0.0)
        patch.setattr("train.stages.text_stages.LiveFeatures", None)
        cached = distilled("cached-lm", teacher_temperature=0.9, teacher="cache")
    fills: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        fill = LiveWindow._fill
        patch.setattr(LiveWindow, "_fill", lambda *args: fills.append(args[-1]) or fill(*args))
        window = distilled("window-lm", teacher_temperature=0.9, tokens_per_pass=140)
    assert fills
    theirs = drafter_weights(live)
    assert cached.summary["training"]["history"][0]["loss"] > 0.1
    for other in (cached, window):
        ours = drafter_weights(other)
        for name, weights in theirs.items():
            torch.testing.assert_close(ours[name], weights, rtol=1e-3, atol=1e-4)
    for settings in (
        {"teacher": "cache"},
        {"losses": {"cross_entropy": 1.0}},
    ):
        with pytest.raises(UserError, match="tokens_per_pass cannot be set here"):
            distilled("both", tokens_per_pass=9, **settings)


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


def test_a_full_disk_costs_only_the_part_under_way(
    context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, save = context.directory / "cache", cache_parts.save_file

    def filling(tensors: Any, path: Path) -> None:
        if "part-1" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        save(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(cache_parts, "save_file", filling)
        with pytest.raises(UserError, match=r"stage cache: .*part-1: the disk is full.*are kept"):
            run_stage(context, cache_stage())
    assert [path.name for path in directory.glob("part-*")] == ["part-0"]
    sizes = [256 * len(sample.tokens) for sample in context.corpus.samples("data")]
    missing = sum(sizes[4:])
    with monkeypatch.context() as patch:
        patch.setattr("decode.base.artifact.free_space", lambda _: missing - 1)
        with pytest.raises(UserError, match=r"2 missing parts of this cache .* need [1-9].* KiB"):
            run_stage(context, cache_stage())
        patch.setattr("decode.base.artifact.free_space", lambda _: missing)
        run_stage(context, cache_stage())
    assert len(list(directory.glob("part-*"))) == 3


def test_each_part_is_hashed_once_and_again_after_a_change(
    context: Any, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_stage(context, cache_stage())
    directory, samples = context.earlier["cache"], context.corpus.samples("data")
    hashed = before_call(monkeypatch, artifact, "file_sha256")

    def tensors_hashed() -> list[str]:
        hashed.clear()
        open_features(directory, target, samples, CAPTURED_LAYERS, context.accelerator)
        tensors = [file for (file,) in hashed if file.name == "cache.safetensors"]
        return [f"{file.parent.name}/{file.name}" for file in tensors]

    assert tensors_hashed() == []
    assert len(hashed) == 3  # the lists of samples
    os.utime(directory / "part-2" / "cache.safetensors", ns=(1, 1))
    assert tensors_hashed() == ["part-2/cache.safetensors"]
    assert tensors_hashed() == []
    counts = directory.with_suffix(".json")
    said = CliRunner().invoke(app, ["verify-cache", str(directory), "--json", str(counts)])
    assert json.loads(counts.read_text("utf-8"))["parts"] == 3
    assert (said.exit_code, said.stdout) == (0, f"{directory}: 3 parts, all sound\n")
    file = directory / "part-1" / "cache.safetensors"
    stamp = file.stat().st_mtime_ns
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    os.utime(file, ns=(stamp, stamp))
    assert tensors_hashed() == []  # nothing shows that it changed
    said = CliRunner().invoke(app, ["verify-cache", str(directory)])
    assert said.exit_code == 2
    assert "part-1" in said.stderr
    with pytest.raises(CorruptArtifact, match=r"part-1.*cache.safetensors"):
        check_cache_directory(directory, "feature cache", again=True)


def test_batches_are_read_before_their_use_and_only_so_many() -> None:
    seen: list[tuple[str, ...]] = []

    def read(ids: Sequence[str]) -> dict[int, torch.Tensor]:
        seen.append(tuple(ids))
        if "bad" in ids:
            raise UserError("cannot be read")
        return {0: torch.tensor([ord(name) for name in ids])}

    ahead, cpu = ReadAhead(read), torch.device("cpu")
    ahead.threaded = True
    ahead.expect([["a", "b"], ["c"], []])
    assert ahead.take(["a", "b"], cpu)[0].tolist() == [97, 98]
    ahead.expect([["c"], ["d"]])
    assert ahead.take(["c"], cpu)[0].tolist() == [99]
    assert ahead.take(["e"], cpu)[0].tolist() == [101]
    ahead.expect([["bad"]])
    assert ahead._reading.keys() == {("bad",)}
    with pytest.raises(UserError, match="cannot be read"):
        ahead.take(["bad"], cpu)
    assert seen.count(("a", "b")) == seen.count(("c",)) == seen.count(("e",)) == 1
    later = ReadAhead(read)
    later.threaded = False
    later.expect([["f"]])
    assert ("f",) not in seen
    assert later.take(["f"], cpu)[0].tolist() == [102]


def test_what_a_cache_lacks_is_refused(context: Any, target: Target) -> None:
    run_stage(context, cache_stage(captured_layers=[0]))
    directory = context.earlier["cache"]
    with pytest.raises(UserError, match=r"the layers \[0\], but these heads also read \[-1\]"):
        run_stage(context, make_stage("heads", "heads", cache_stage(), features="cache", **HEADS))
    cache = CachedFeatures(directory, target, [0])
    sample = context.corpus.samples("data")[0]
    with pytest.raises(UserError, match=f"sample '{sample.id}' is not the text"):
        cache.require([(sample.id, sample.tokens, [True] * len(sample.mask))])
    with pytest.raises(UserError, match=r"the feature cache .* has no sample 'new'"):
        cache.require([("new", [], [])])
    file = directory / "part-1" / "cache.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(bytes(damaged))
    with pytest.raises(CorruptArtifact, match=r"part-1.*cache.safetensors"):
        open_features(directory, target, context.corpus.samples("data"), [0], context.accelerator)
    with pytest.raises(UserError, match="holds no feature cache; expected directories part-N"):
        CachedFeatures(context.directory / "nowhere", target, [0])


def test_bad_settings_are_refused(context: Any) -> None:
    with pytest.raises(UserError, match="with a layer twice"):
        cache_stage(captured_layers=[0, 0])
    with pytest.raises(UserError, match=r"layer 2 were requested, but .* has 2 layers"):
        plan_stage(context, cache_stage(captured_layers=[2]))
    with pytest.raises(UserError, match="no earlier stage 'cache' of kind feature_cache"):
        make_stage("heads", "heads", features="cache", **HEADS)
    for settings in ({"features": "cache"}, {"backbone": {}}):
        with pytest.raises(UserError, match="tokens_per_pass cannot be set here"):
            make_stage("heads", "heads", cache_stage(), tokens_per_pass=9, **settings, **HEADS)
    plan = plan_stage(context, cache_stage())
    assert "256 bytes a token" in plan.what
    stage = make_stage("heads", "heads", cache_stage(), features="cache", **HEADS)
    with pytest.raises(
        UserError, match=r"read .* layers \[-1\], and stage cache stores those of \[0"
    ):
        plan_stage(context, stage, cache=replace(plan, captured_layers=[0]))
    plan_stage(context, stage, cache=plan)
    assert plan.tokens > 0


# --- two ranks ------------------------------------------------------------------------------------


def train_heads(directory: Path, name: str, **settings: Any) -> None:
    """The work of one rank, or of a process alone."""
    context = stage_context(directory, tiny_target())
    run_stage(context, cache_stage(captured_layers=[FINAL]))
    run_stage(context, make_stage("heads", name, cache_stage(), **(HEADS | settings)))


def open_for_rank(directory: Path, rank: int) -> None:
    """Rank 1 has a copy without the last part, which none of the samples needs."""
    context = stage_context(directory, tiny_target())
    cache = directory / ("cache" if rank == 0 else "copy")
    samples = context.corpus.samples("data")[:8]
    open_features(cache, context.target, samples, [FINAL], context.accelerator)


def check_ranks(directory: Path, url: str) -> None:
    """In a process that has computed nothing yet, as its forks compute. url: of a server that hands
    out states."""
    server = {"features": {"server": {"url": url, "directory": str(directory / "files")}}}
    noisy = {"heads": {"type": "eagle1", "noise": 0.5}}
    alone = forked(lambda: train_heads(directory / "one", "cached", features="cache", **noisy))
    assert status_of(alone) == 0
    sources = {"cached": {"features": "cache"}, "served": server}
    for name, settings in sources.items():
        done = two_ranks(
            lambda _: train_heads(directory / "two", name, **settings, **noisy)  # noqa: B023
        )
        assert done == [0, 0]
    shutil.copytree(directory / "two" / "cache", directory / "two" / "copy")
    shutil.rmtree(directory / "two" / "copy" / "part-2")
    assert two_ranks(lambda rank: open_for_rank(directory / "two", rank)) == [2, 2]


@pytest.mark.slow
def test_two_ranks_train_as_one_and_must_see_the_same_files(tmp_path: Path) -> None:
    pytest.importorskip("httpx2", reason="the extra serve is not installed")
    from tests.state_server import StatesEngine
    from tests.upstream import served

    (tmp_path / "files").mkdir()
    engine = StatesEngine(tmp_path / "files", [2])
    with served(engine.app()) as url:
        done = in_new_process(__name__, f"check_ranks(Path({str(tmp_path)!r}), {url!r})")
    assert done.stderr.count("UserError: rank 1 sees other files in") == 2
    one, *others = (
        load_file(tmp_path / name / "drafter" / "heads.safetensors")
        for name in ("one/cached", "two/cached", "two/served")
    )
    for name, weights in one.items():
        for other in others:
            torch.testing.assert_close(other[name], weights, rtol=1e-3, atol=1e-4)
    # Each rank asked for its own samples: ten in two epochs, and two to check the server.
    assert engine.asked.total() == 2 * 10 + 2
    assert engine.left() == []
