"""A target that no process holds completely teaches what a complete one teaches."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from decode.base.errors import UserError
from decode.drafters import DRAFTERS
from decode.loop.decoding import Decoder
from decode.model.loading import load_target
from decode.opening.directory import open_drafter
from tests.tiny import save_tiny
from tests.training import forked, in_new_process, status_of, two_ranks
from train.base.console import Reporter
from train.data.read import spread
from train.measure.calibrate_tree import calibrate_tree
from train.run.config import RunConfig
from train.run.config_checks import load_config, validate_config
from train.run.run import Run

LEARNING = """
    loop: {epochs: 1, tokens_per_batch: 40, log_every: 1}
    optimizer: {lr: 1e-2, warmup_steps: 2}
    dev: {samples: 3, every: 2}
"""
CONFIG = f"""
name: whole
output_dir: runs
trackers: []
threads: 1
target: {{model: '', dtype: float32, device: cpu}}
data: {{train: train.jsonl, dev: test.jsonl, test: test.jsonl, duplicates: keep}}
evaluation: {{stages: [], baselines: []}}
stages:
  - name: small
    kind: distill
    drafter: {{layers: [1]}}
    draft_vocabulary: 120{LEARNING}
  - name: eagle3
    kind: heads
    heads: {{type: eagle3, steps: 2}}
    losses: {{forward_kl: 1.0}}{LEARNING}
  - name: medusa
    kind: heads
    heads: {{type: medusa, heads: 2}}{LEARNING}
"""

# What only a complete target can do.
WHOLE = (
    "evaluation.stages=[small, eagle3]",
    "evaluation.baselines=[ngram]",
    "evaluation.baseline_gammas=[2]",  # several would be timed
    "evaluation.in_turn=[]",
    "evaluation.timed_prompts=0",
    "evaluation.max_new_tokens=9",
    "evaluation.sampling={temperature: 0.7}",
    "stages.medusa.tree={nodes: 3, width: 60, prompts: 5, max_new_tokens: 6}",
)


def write_run(base: Path) -> None:
    save_tiny(base / "target", layers=7)
    rows = [
        {"prompt": f"the fox {i}", "response": f"a dog {i} sells " * (1 + i % 4)} for i in range(9)
    ]
    for split in ("train", "test"):
        (base / f"{split}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows), "utf-8"
        )
    (base / "config.yaml").write_text(CONFIG, "utf-8")


def run(base: Path, *overrides: str) -> Run:
    places = (f"output_dir={base}/runs", f"target.model={base}/target")
    return execute(load_config(base / "config.yaml", (*places, *overrides)))


def execute(config: RunConfig) -> Run:
    run = Run(config, Accelerator(cpu=True), Reporter(silent=True))
    run.execute()
    return run


def check_target(base: Path) -> None:
    """A process holds half of each layer, and the loop refuses such a target."""
    target = load_target(str(base / "target"), device="cpu", sharded=True)
    for name, weight in target.model.named_parameters():
        if ".layers." in name:
            assert 2 * weight.to_local().numel() == weight.numel(), name
    with pytest.raises(UserError, match="is sharded over several processes, so it cannot decode"):
        Decoder(target.model, DRAFTERS["none"]())


def check_runs(base: Path) -> None:
    """In a process that has computed nothing."""

    def sharded(rank: int) -> None:
        run(base, "name=sharded", "target.sharded=true")
        check_target(base)

    assert status_of(forked(lambda: write_run(base))) == 0
    assert two_ranks(lambda rank: run(base, *WHOLE)) == [0, 0]
    assert two_ranks(sharded) == [0, 0]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two processes train with a complete target, and with one of which each holds a half."""
    base = tmp_path_factory.mktemp("sharded")
    in_new_process("tests.test_sharded", f"check_runs(Path({str(base)!r}))")
    return base


@pytest.mark.slow
def test_a_sharded_target_teaches_what_a_complete_one_does(runs: Path) -> None:
    one, two = (runs / "runs" / name / "stages" for name in ("whole", "sharded"))
    for stage in ("00-small", "01-eagle3", "02-medusa"):
        whole, sharded = (
            json.loads((stages / stage / "done.json").read_text("utf-8"))["summary"]["training"]
            for stages in (one, two)
        )
        for kind in ("history", "dev"):
            assert len(whole[kind]) > 1
            for expected, entry in zip(whole[kind], sharded[kind], strict=True):
                assert entry == pytest.approx(expected, rel=1e-5)
        for file in (one / stage / "drafter").glob("*.safetensors"):
            weights = load_file(two / stage / "drafter" / file.name)
            for name, weight in load_file(file).items():
                # Also the sample of the target's weights, by which heads know their target.
                torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-6)


def figures(run: Path) -> list[dict[str, Any]]:
    """The counts of every evaluated drafter."""
    rows = sorted((run / "evaluations").glob("*/evaluation.json"))
    evaluations = [json.loads(file.read_text("utf-8"))["evaluation"] for file in rows]
    names = ("ranks", "steps", "emitted", "reached_by_position", "steps_by_accepted", "repetition")
    return [{name: row[name] for name in names} for row in evaluations]


@pytest.mark.slow
def test_two_processes_measure_what_one_does(runs: Path) -> None:
    """Sampled, so that each row must draw its own numbers wherever it is decoded."""
    shared = figures(runs / "runs/whole")
    shutil.rmtree(runs / "runs/whole/evaluations")
    alone = run(runs, *WHOLE)  # the stages are done, so one process only evaluates
    assert [row.pop("ranks") for row in shared] == [2, 2, 2, 2]
    again = figures(alone.directory)
    assert [row.pop("ranks") for row in again] == [1, 1, 1, 1]
    assert shared == again

    directory = alone.stage_directory("medusa")
    tree = json.loads((directory / "done.json").read_text("utf-8"))["summary"]["tree"]
    prompts = alone.prompts(spread(alone.read_data()["dev"], 5))
    drafter = open_drafter(str(directory / "drafter"), alone.target)
    same = calibrate_tree(
        alone.target, drafter, prompts, nodes=3, depth=2, width=60, max_new_tokens=6
    ).to_dict()
    for name in ("acceptance", "tokens_per_step", "chain_tokens_per_step"):
        assert tree[name] == same[name]


def start(raw: dict[str, Any], base: Path) -> None:
    execute(validate_config(raw, base_dir=base))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluation": {}}, r"set evaluation: \{stages: \[\], baselines: \[\]\}"),
        ({"stage": {"kind": "generate"}}, "generate without a server needs the complete"),
        ({"stage": {"kind": "generate", "server": {"url": "http://a"}}}, "probe_prompts above 0"),
        ({"stage": {"kind": "teacher_cache"}}, "kind: teacher_cache needs the complete target"),
        ({"stage": {"kind": "heads", "heads": {"type": "medusa"}, "tree": {}}}, "tree needs the"),
        (
            {"stage": {"kind": "distill", "drafter": {"layers": [0]}, "tokens_per_pass": 9}},
            "tokens_per_pass needs the complete target in one process",
        ),
        ({}, "a target can be sharded only over several processes"),
    ],
)
def test_what_needs_the_complete_target_is_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    stage = {"kind": "distill", "drafter": {"layers": [0]}} | changes.get("stage", {})
    if stage["kind"] != "distill":
        stage = changes["stage"]
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "response": "b"}\n', "utf-8")
    raw = {
        "name": "sharded",
        "target": {"model": str(save_tiny(tmp_path / "target")), "sharded": True, "device": "cpu"},
        "data": {"train": "a.jsonl", "test": "a.jsonl", "duplicates": "keep"},
        "evaluation": changes.get("evaluation", {"stages": [], "baselines": []}),
        "stages": [{"name": "only"} | stage],
    }
    with pytest.raises(UserError, match=message):
        start(raw, tmp_path)


@pytest.fixture(autouse=True)
def fresh(fresh_accelerate: None) -> None:
    """Each run begins with a fresh accelerator."""
