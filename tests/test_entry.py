"""`draftsmith.train`: a run from Python, with what it returns and what it refuses."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.state import is_initialized

import draftsmith
from decode.model.loading import resolve_dtype
from tests.first_run import STAGE, make_first_run, settings
from train.base.launcher import environment_of_one
from train.base.tracking.trackers import PACKAGES, chosen_trackers
from train.loop.accelerator import precision_in_words
from train.measure.time_passes import trains_in_bfloat16
from train.run.config_checks import load_config, validate_config
from train.run.entry import begun_run


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_accelerate: None) -> Path:
    return make_first_run(tmp_path, monkeypatch)


def test_a_run_from_a_mapping_gives_its_report_and_a_drafter_that_decodes(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = draftsmith.train(settings(base), overrides=["stages.heads.loop.max_steps=3"], quiet=True)
    assert capsys.readouterr().out == ""
    assert run.directory == Path("runs/first")
    assert [row["stage"] for row in run.report["rows"]] == ["heads"]
    assert run.drafters == {"heads": run.directory / "stages" / "00-heads" / "drafter"}
    assert run.config.stages[0].loop.max_steps == 3
    target = run.target
    prompt = target.tokenizer("the dog")["input_ids"]
    texts = [
        draftsmith.Decoder(target.model, draftsmith.open_drafter(spec, target)).decode(
            [prompt], max_new_tokens=8
        )
        for spec in (str(run.drafters["heads"]), "none")
    ]
    assert texts[0].outputs == texts[1].outputs

    # The same run, finished, from a file; then another one in bfloat16, in the same process.
    path = Path("config.yaml")
    path.write_text(yaml.safe_dump(run.config.model_dump(mode="json")), encoding="utf-8")
    begun = (run.directory / "stages" / "00-heads" / "done.json").stat().st_mtime_ns
    again = draftsmith.train(path)
    assert "stage heads: done" in capsys.readouterr().out
    assert (run.directory / "stages" / "00-heads" / "done.json").stat().st_mtime_ns == begun
    assert again.loaded is None
    assert again.target.vocab_size == target.vocab_size
    assert not is_initialized()
    other = draftsmith.train(
        load_config(path), overrides=["name=other", "precision=bf16"], quiet=True
    )
    assert other.drafters["heads"] == Path("runs/other/stages/00-heads/drafter")
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (["a.yaml"], "the config is a list; expected a path, a mapping or a RunConfig"),
        ("none.yaml", "cannot read the config none.yaml"),
        ({"nme": "x"}, "config key 'nme' is unknown."),
        ({"trackers": ["swanlab"]}, "trackers names swanlab, which is not installed"),
        ({"trackers": ["tensorboard"]}, "trackers names tensorboard, which is not installed"),
    ],
)
def test_bad_input_is_one_error_before_any_work(
    base: Path, config: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PACKAGES, "tensorboard", ("no_such_package",))
    assert chosen_trackers(None) == []
    if isinstance(config, dict):
        config = settings(base, **config)
    with pytest.raises(draftsmith.UserError) as raised:
        draftsmith.train(config)
    assert message in str(raised.value)
    assert not (base / "runs").exists()


def test_an_unfinished_run_has_no_report_and_no_drafters(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[draftsmith.Run] = []

    def stop(run: draftsmith.Run) -> None:
        kept.append(run)
        raise draftsmith.Stopped("stopped after step 1 of 4")

    monkeypatch.setattr("train.run.run.Run.execute", stop)
    with pytest.raises(draftsmith.Stopped):
        draftsmith.train(settings(base))
    assert not is_initialized()
    assert kept[0].drafters == {}
    with pytest.raises(draftsmith.UserError, match="has no report"):
        _ = kept[0].report


@pytest.mark.parametrize(("computes", "seconds"), [(True, (1, 2)), (True, (2, 1)), (False, (1, 2))])
def test_the_fastest_dtypes_are_what_the_device_multiplies_in(
    base: Path, monkeypatch: pytest.MonkeyPatch, computes: bool, seconds: tuple[int, int]
) -> None:
    """seconds: of a wide product in bfloat16 and in float32."""
    flags = base / "cpuinfo"
    flags.write_text("flags : avx512f avx512_bf16" if computes else "flags : avx2", "utf-8")
    monkeypatch.setattr("decode.base.processor.CPU_FLAGS", flags)
    clock = [0]

    def multiply(x: torch.Tensor, weight: torch.Tensor) -> None:
        clock[0] += seconds[x.dtype == torch.float32]

    trains_in_bfloat16.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr("train.measure.time_passes.product", multiply)
        patched.setattr("train.measure.time_passes.time.perf_counter", lambda: clock[0])
        faster = trains_in_bfloat16(torch.device("cpu"))
    assert faster == (computes and seconds[0] < seconds[1])
    target = {"model": str(base / "target"), "dtype": "fastest", "device": "cpu"}
    values = {"name": "fast", "precision": "fastest", "target": target, "stages": [STAGE]}
    config = validate_config(values | {"data": {"train": "rows.jsonl"}}, base_dir=base)
    with begun_run(config, quiet=True) as run:
        assert run.accelerator.mixed_precision == ("bf16" if faster else "no")
    trains_in_bfloat16.cache_clear()
    assert resolve_dtype("fastest", torch.device("cuda")) == torch.bfloat16
    assert trains_in_bfloat16(torch.device("cuda"))
    expected = torch.bfloat16 if computes else torch.float32
    assert resolve_dtype("fastest", torch.device("cpu")) == expected


def test_a_plan_says_in_what_products_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch computes float32 products without TF32 unless it is told otherwise."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert precision_in_words(cpu, "no", torch.bfloat16) == (
        "products on cpu: trainings in float32; the target's passes in bfloat16"
    )
    assert "bfloat16 (autocast; the weights stay float32)" in precision_in_words(
        cuda, "bf16", torch.float16
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "float32 without TF32 (precision: bf16 takes" in precision_in_words(
        cuda, "no", torch.bfloat16
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    before = torch.get_float32_matmul_precision()
    try:
        torch.backends.cuda.matmul.allow_tf32 = True  # as accelerate does
        assert "in float32 with TF32; the" in precision_in_words(cuda, "no", torch.bfloat16)
    finally:
        torch.set_float32_matmul_precision(before)


def test_another_precision_is_refused_if_the_caller_has_an_accelerator(base: Path) -> None:
    Accelerator(mixed_precision="no", cpu=True)
    with pytest.raises(draftsmith.UserError, match="train in a process of its own"):
        draftsmith.train(settings(base, precision="bf16"))
    assert is_initialized()


def test_a_launch_in_fp16_is_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(draftsmith.UserError, match="launch with --mixed_precision bf16 or no"):
        draftsmith.train(settings(base))
    assert not (base / "runs").exists()


# As `accelerate launch` does it: a process that starts ranks and waits for them.
LAUNCHER = """
import os, subprocess, sys
rank = "import time; from train.base.launcher import *; end_with_launcher(); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", rank], env=os.environ | {"LOCAL_RANK": "0"},
                         start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


def test_a_rank_ends_when_its_launcher_is_killed() -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER],
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        encoding="utf-8",
    )
    with launcher:
        assert launcher.stdout is not None
        rank = psutil.Process(int(launcher.stdout.readline()))
        time.sleep(1.0)
        assert rank.is_running()
        launcher.kill()
    _, alive = psutil.wait_procs([rank], timeout=50)
    for process in alive:
        process.send_signal(signal.SIGKILL)
    assert not alive


def test_a_program_beside_the_ranks_gets_their_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "4")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    env = environment_of_one(cores=6)
    assert env["OMP_NUM_THREADS"] == "6"  # 4 × 2, but there are only 6 cores
    assert not {"RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"} & env.keys()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert environment_of_one(cores=6)["OMP_NUM_THREADS"] == "2"
    assert os.environ["OMP_NUM_THREADS"] == "2"
