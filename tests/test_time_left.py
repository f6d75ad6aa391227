"""What is left of a run: by its plan, corrected by what its parts took; and what the log says."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from decode.model.loading import Target
from distill.flops import layers_flops
from draftsmith.cli.main import app
from tests.test_run import make_base
from tests.tiny import tiny_target
from train.base.stage import StagePlan
from train.base.time_left import EVALUATING, RunPart, TimeLeft
from train.run.config_checks import validate_config
from train.run.run_parts import run_parts

PARTS = [
    RunPart("generate", "answers", 100.0),
    RunPart("generate", "more", 300.0),
    RunPart("heads", "heads", 50.0, max_seconds=20.0),
    RunPart(EVALUATING, "before-ngram", 10.0),
    RunPart(EVALUATING, "heads", 10.0),
]


class Clock:
    def __init__(self) -> None:
        self.now = 1e6

    def __call__(self) -> float:
        return self.now


def test_parts_are_as_fast_as_those_of_their_kind_and_else_as_the_stages() -> None:
    clock = Clock()
    left = TimeLeft(PARTS, clock=clock)
    assert left.seconds() is None  # nothing has begun
    left.begin(EVALUATING, "before-ngram")
    clock.now += 30
    assert left.seconds() is None  # evaluations say nothing about stages
    left.begin("generate", "answers")
    clock.now += 5
    assert left.seconds() is None
    # 5 + 5 s for 100 FLOPs: 30 for the next, 5 for the heads, and 30 for what is evaluated.
    assert left.seconds(5.0) == pytest.approx(5 + 30 + 5 + 30)
    clock.now += 15  # it took longer than was said: 20 s for 100 FLOPs
    left.begin("generate", "more")
    assert left.seconds() == pytest.approx(60 + 10 + 30)
    clock.now += 10
    assert left.seconds() == pytest.approx(50 + 10 + 30)
    # 20 + 10 + 170 s for 400 FLOPs: the heads would take 25 s, and stop after 20.
    assert left.seconds(170.0) == pytest.approx(170 + 20 + 30)
    left.begin("heads", "heads")
    clock.now += 15
    assert left.seconds(100.0) == pytest.approx(5 + 30)
    left.begin(EVALUATING, "heads")
    clock.now += 100
    assert left.seconds() == 0  # later than expected


def test_a_later_start_knows_what_the_first_one_took() -> None:
    clock = Clock()
    left = TimeLeft(PARTS, clock=clock)
    left.skip(EVALUATING, "before-ngram", 8.0)
    left.skip("generate", "answers", 10.0)
    left.skip("generate", "unplanned", 10.0)
    left.begin("generate", "more")
    assert left.seconds() == pytest.approx(30 + 5 + 8)
    # This start does a third of it, in 10 s.
    assert left.seconds(10.0, share=1 / 3) == pytest.approx(10 + 5 + 8)
    unknown = TimeLeft(PARTS, clock=clock)
    unknown.skip("generate", "answers", None)
    unknown.begin("generate", "more")
    assert unknown.seconds() is None


def test_a_part_that_an_earlier_start_did_says_nothing_of_the_running_one() -> None:
    clock = Clock()
    parts = [("generate", "answers"), ("heads", "heads"), ("generate", "more")]
    left = TimeLeft([RunPart(kind, name, 100.0) for kind, name in parts], clock=clock)
    left.begin("generate", "answers")
    clock.now += 10
    left.seconds(0.0, share=0.5)  # half of it
    left.skip("heads", "heads", 7.0)
    left.begin("generate", "more")
    assert left.seconds() == pytest.approx(20)


def stage(name: str, kind: str, **settings: object) -> dict[str, object]:
    return {"name": name, "kind": kind, **settings}


def test_the_parts_of_a_run_have_the_flops_of_their_tokens(tmp_path: Path) -> None:
    base = make_base(tmp_path)
    stages = [
        stage("answers", "generate"),
        stage("heads", "heads", text="answers", heads={"type": "medusa"}),
    ]
    values = {
        "name": "flops",
        "target": {"model": str(base / "target")},
        "data": {"train": "train.jsonl", "test": "test.jsonl"},
        "evaluation": {"prompts": 4, "max_new_tokens": 8, "timed_prompts": 0, "generate": False},
        "stages": stages,
    }
    config = validate_config(values, base_dir=base)
    target: Target = tiny_target()
    model = target.model
    weights = model.get_output_embeddings().weight.numel()
    token = layers_flops(model, trained=False).per_token + 2 * weights
    plans = {
        "answers": StagePlan("", tokens=120),
        "heads": StagePlan("", tokens=100, trained_parameters=7, runs_target=False, drafters=1),
    }
    examples = {"test": [object()] * 4}
    parts = {(p.kind, p.name): p.flops for p in run_parts(config, plans, examples, model)}  # type: ignore[arg-type]
    evaluated = [name for kind, name in parts if kind == EVALUATING]
    assert evaluated == ["before-ngram", "heads", "ngram+heads"]
    assert parts["generate", "answers"] == pytest.approx(120 * token)
    assert parts["heads", "heads"] == 100 * 6 * 7
    assert parts[EVALUATING, "heads"] == pytest.approx(4 * 8 * token)
    plans["heads"].runs_target, plans["heads"].training_flops = True, 1000.0
    live = run_parts(config, plans, examples, model)[1]  # type: ignore[arg-type]
    assert live.flops == pytest.approx(100 * (1000 + token))


def lines_of(run: Path) -> list[str]:
    return (run / "logs" / "log.txt").read_text("utf-8").splitlines()


@pytest.mark.usefixtures("fresh_accelerate")
def test_a_run_says_what_is_left_of_it_from_its_first_stage_on_and_when_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.base.console.LOG_EVERY_SECONDS", -1.0)
    config, run = str(make_base(tmp_path) / "config.yaml"), tmp_path / "runs" / "tiny"
    assert CliRunner().invoke(app, ["train", config]).exit_code == 0
    lines = lines_of(run)
    evaluating, generating, training = (
        [line for line in lines if f"  {what}" in line]
        for what in ("evaluating before", "generating", "training")
    )
    assert any("products on cpu: trainings in float32;" in line for line in lines)
    assert not any("left of the run" in line for line in evaluating)
    assert any(line.endswith("about 1 min left of the run") for line in generating)
    assert any(line.endswith("about 1 min left of the run") for line in training)
    ended = json.loads((run / "logs" / "progress.json").read_text("utf-8"))
    assert ended["run_seconds_left"] >= 0

    (run / "stages" / "02-distill" / "done.json").unlink()
    shutil.rmtree(run / "evaluations" / "distill")
    assert CliRunner().invoke(app, ["train", config]).exit_code == 0
    again = [line for line in lines_of(run)[len(lines) :] if "left of the run" in line]
    assert again, lines_of(run)[len(lines) :]
