"""The benchmarks' settings and helpers; what they measure is not a test's business."""

import json

import pytest

from benchmarks import online
from benchmarks.common import in_fresh_process, require
from benchmarks.objectives import ARMS, BASE, PROMPTS, run_config
from decode.errors import UserError
from train.config import validate_config


def double(number: int) -> int:
    if number < 0:
        raise UserError("negative")
    return 2 * number


def test_a_fresh_process_returns_what_the_function_does():
    assert in_fresh_process("tests.test_benchmarks:double", number=21) == 42
    with pytest.raises(UserError, match="negative"):
        in_fresh_process("tests.test_benchmarks:double", number=-1)


def test_a_missing_contestant_is_named_with_what_installs_it():
    with pytest.raises(UserError, match="pip install"):
        require("no-such-package", "no-such-package>=1", "this benchmark")


@pytest.mark.parametrize("quick", [True, False])
def test_the_objectives_are_one_sound_run(quick: bool, tmp_path):
    arms = [(loss, text, seed) for seed in range(2) for loss, text in ARMS]
    config = validate_config(run_config(arms, quick=quick, runs=tmp_path), base_dir=PROMPTS)
    assert len({stage.name for stage in config.stages}) == len(config.stages)
    assert BASE in ARMS


@pytest.mark.parametrize("quick", [True, False])
def test_the_online_benchmark_is_two_sound_runs(quick: bool, tmp_path):
    settings = {"quick": quick, "runs": tmp_path, "data": tmp_path, "temperature": 0.0}
    first = validate_config(online.first_config(**settings), base_dir=tmp_path)
    second = validate_config(online.second_config(24, **settings), base_dir=tmp_path)
    start = {stage.name: stage for stage in first.stages}["start"].loop.max_steps
    longer = {stage.name: stage for stage in second.stages}["start"].loop.max_steps
    assert longer == start + 24
    served = {s.name: s for run in (first, second) for s in run.stages if s.kind == "online"}
    assert set(served) == {online._name(arm) for arm in online.ARMS}
    # Nothing but what is learnt tells the arms apart.
    alike = [s.model_dump(exclude={"name", "learning"}) for s in served.values()]
    assert all(other == alike[0] for other in alike)
    learnt = [served[online._name(arm)].learning for arm in online.ONLINE]
    plain = [x.model_dump(exclude={"accepted"}) for x in learnt]
    assert all(other == plain[0] for other in plain)
    assert [x.accepted for x in learnt] == list(online.ONLINE.values())


def test_prompts_to_serve_are_not_those_to_learn_from(tmp_path):
    files = {}
    for domain in online.DOMAINS:
        files[domain] = tmp_path / f"{domain}.jsonl"
        rows = [{"prompt": f"{domain} {i}", "reference": "known"} for i in range(10)]
        files[domain].write_text("".join(json.dumps(row) + "\n" for row in rows))
    online.prepare(files, tmp_path / "data", {"train": 4, "stream": 6})
    lines = {
        split: (tmp_path / "data" / f"code-{split}.jsonl").read_text().splitlines()
        for split in ("train", "stream")
    }
    assert [len(lines[split]) for split in ("train", "stream")] == [4, 6]
    assert not {json.loads(x)["id"] for x in lines["train"]} & {
        json.loads(x)["id"] for x in lines["stream"]
    }
    assert "known" not in "".join(lines["stream"])
    with pytest.raises(UserError, match="expected all to be prompts, and 11 of them"):
        online.prepare(files, tmp_path / "more", {"train": 5, "stream": 6})
