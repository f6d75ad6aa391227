"""The best version of a training: which one it is, that the drafter is made of it, and that kills
and damaged checkpoints change neither it nor the end of a training without gain."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.base.errors import UserError
from tests.stages import DRAFTER, LOOP, drafter_weights, make_stage, run_stage, stage_context
from tests.tiny import tiny_target
from tests.training import (
    OPTIMIZER,
    RICH,
    Killed,
    Lines,
    assert_equal,
    at_batch,
    die,
    scramble,
    steps_kept,
    tiny_trainer,
)

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

SCORES = [0.1, 0.5, float("nan"), 0.3, 0.6, 0.6, 0.2, 0.5, 0.9]
BEST = {"keep_best": True, "accumulation": 1}


def scored(at: dict[int, dict[str, torch.Tensor]]) -> Callable[..., dict[str, float]]:
    """Gives each step its score, and notes the weights that it was given for."""

    def measure(module: Any, weights: Any) -> dict[str, float]:
        step = measure.trainer.progress.step  # type: ignore[attr-defined]
        at[step] = weights()
        return {"score": SCORES[step - 1]}

    return measure


def best_trainer(directory: Path, steps: int, at: dict[int, Any], **settings: Any) -> Any:
    measure = scored(at)
    trainer = tiny_trainer(directory, steps, measure=measure, **(BEST | settings))
    measure.trainer = trainer  # type: ignore[attr-defined]
    return trainer


def best_kept(directory: Path) -> set[int]:
    names = (path.name for path in (directory / "checkpoints").glob("best-*"))
    return {int(name.removeprefix("best-")) for name in names}


@pytest.mark.parametrize("optimizer", [OPTIMIZER, RICH], ids=["last", "averaged"])
def test_the_first_version_with_the_highest_figure_is_the_drafter(tmp_path, optimizer):
    at: dict[int, Any] = {}
    said = Lines()
    trainer = best_trainer(tmp_path, 8, at, optimizer=optimizer, reporter=said)
    progress = trainer.fit()
    assert progress.best == {"step": 5, "figure": "score", "value": 0.6}
    assert_equal(trainer.drafter_weights(), at[5])
    assert "version after step 5 of 8, with the best score on dev text: 0.600" in str(said)
    name = "student.transformer.wte.weight"
    assert not torch.equal(trainer.drafter_weights()[name], at[8][name])
    part = trainer.drafter_weights("student.transformer.")
    assert torch.equal(part["wte.weight"], at[5][name])
    # Without the setting it is the last version.
    plain = best_trainer(tmp_path / "plain", 8, at, optimizer=optimizer, keep_best=False)
    assert plain.fit().best is None
    assert_equal(plain.drafter_weights(), at[8])


def test_a_training_without_gain_ends_also_after_a_kill_at_any_step(tmp_path):
    """0.9 at step 9 is never reached: 3 measurements after step 5 are no better than its 0.6."""
    torch.manual_seed(1)
    expected: dict[int, Any] = {}
    unbroken = best_trainer(tmp_path / "unbroken", 9, expected, patience=3, log_every=100)
    progress = unbroken.fit()
    assert (progress.step, progress.history[-1]["step"]) == (8, 8)
    assert progress.best is not None
    assert progress.best["step"] == 5
    for batch in range(3, 9):  # the first checkpoint is of step 2
        torch.manual_seed(1)
        directory, settings = tmp_path / str(batch), {"patience": 3, "log_every": 100}
        with pytest.raises(Killed):
            best_trainer(directory, 9, {}, hook=at_batch(batch, die), **settings).fit()
        scramble()
        again = best_trainer(directory, 9, {}, **settings)
        assert again.fit().best == progress.best
        assert again.progress.dev[-1]["step"] == 8
        assert_equal(again.drafter_weights(), expected[5])
        assert steps_kept(directory)[-1] == 8
    # One that had ended is not trained again, unless it may wait longer.
    assert best_trainer(directory, 9, {}, patience=3, hook=at_batch(1, die)).fit().step == 8
    longer = best_trainer(directory, 9, {}, patience=4)
    assert longer.fit().best == {"step": 9, "figure": "score", "value": 0.9}


def test_a_version_is_kept_while_a_checkpoint_names_it(tmp_path):
    """Checkpoints 3 and 6 name the versions 2 and 5; the newest is damaged, and step 4 was best by
    chance in between."""
    at: dict[int, Any] = {}
    trainer = best_trainer(tmp_path, 6, at, save_every=3, keep_checkpoints=2)
    trainer.fit()
    assert steps_kept(tmp_path) == [3, 6]
    assert best_kept(tmp_path) == {2, 5}
    (tmp_path / "checkpoints/step-6/optimizer.bin").unlink()
    again = best_trainer(tmp_path, 3, {}, save_every=3)
    assert again.fit().best == {"step": 2, "figure": "score", "value": 0.5}
    assert_equal(again.drafter_weights(), at[2])


def test_the_number_of_kept_checkpoints_is_that_of_the_settings(tmp_path):
    for keep, expected in ((1, [6]), (3, [4, 5, 6])):
        directory = tmp_path / str(keep)
        tiny_trainer(directory, 6, accumulation=1, save_every=1, keep_checkpoints=keep).fit()
        assert steps_kept(directory) == expected


@pytest.mark.parametrize("kind", ["distill", "heads"])
def test_a_stages_drafter_is_that_of_a_training_that_stops_at_the_best_step(tmp_path, kind):
    """With a constant learning rate so high that the drafter gets worse."""
    context = stage_context(tmp_path, tiny_target())
    optimizer = {"lr": 0.3, "warmup_steps": 0, "schedule": "constant"}
    settings = DRAFTER if kind == "distill" else {"heads": {"type": "medusa", "heads": 2}}
    settings = settings | {"optimizer": optimizer, "dev": {"every": 2, "samples": 4}}
    loop = LOOP | {"epochs": 40, "max_steps": 40, "keep_best": True, "patience": 2}
    first = run_stage(context, make_stage(kind, "first", **(settings | {"loop": loop})))
    training = first.summary["training"]
    figure = "expected_acceptance" if kind == "distill" else "tokens_per_step"
    rows = {row["step"]: row[figure] for row in training["dev"]}
    best = training["best"]
    assert best == {"step": best["step"], "figure": figure, "value": max(rows.values())}
    assert best["step"] < training["steps"] < 40
    assert training["steps"] == best["step"] + 4
    loop = LOOP | {"epochs": 40, "max_steps": best["step"]}
    second = run_stage(context, make_stage(kind, "second", **(settings | {"loop": loop})))
    assert_equal(drafter_weights(first), drafter_weights(second))
    assert first.drafter is not None
    described = json.loads((first.drafter / "drafter.json").read_text("utf-8"))
    assert described["provenance"]["best"] == best


def test_settings_that_would_do_nothing_are_refused():
    with pytest.raises(UserError, match=r"stage one: loop.keep_best .* set dev"):
        make_stage("distill", "one", **(DRAFTER | {"loop": {"keep_best": True}}))
    with pytest.raises(UserError, match=r"stage one: loop.patience .* set loop.keep_best"):
        make_stage("heads", "one", heads={"type": "medusa"}, dev={}, loop={"patience": 2})
    with pytest.raises(UserError, match=r"stage one: loop.keep_best"):
        make_stage("layer_skip", "one", loop={"keep_best": True})
