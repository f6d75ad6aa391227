"""`draftsmith doctor`: what it says about a machine and a target, and that it finds errors."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from decode.model import trials
from decode.model.cache.cached_model import CachedLM
from decode.model.cache_names import given_cache
from decode.model.forward import lean_parts, prepare_model
from decode.model.forward.prepare_model import reason_against_packing
from decode.model.model_names import EMBEDDED, EmbeddedModel
from draftsmith.cli import examination
from draftsmith.cli.doctor import number
from draftsmith.cli.main import app
from tests.tiny import save_tiny, tiny_llama
from train.measure import check_lossless as checks
from train.measure import machine
from train.measure.check_lossless import SHAPE, check_loop, distance, random_llama
from train.measure.time_passes import pass_seconds, weight_bytes

CPU = torch.device("cpu")
MACHINES = Path(__file__).parent.parent / "docs" / "results" / "machines.md"


class WrongForSeveral(LlamaForCausalLM):
    """Says something else after the first of several tokens that follow a past."""

    def forward(self, input_ids: Any = None, **more: Any) -> Any:
        output = super().forward(input_ids=input_ids, **more)
        if given_cache(more) is not None and input_ids.shape[1] > 1 and self.wrong:
            output.logits[:, 1:] = output.logits[:, 1:].roll(1, -1)
        return output

    wrong = True


# What doctor finds of the loop does not depend on the target that it is given.
checked_once = functools.cache(check_loop)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds are measured on less, and the loop is checked once, with fewer texts."""
    monkeypatch.setattr(machine, "READ", 2**22)
    monkeypatch.setattr(machine, "LARGEST", 256)
    monkeypatch.setattr(machine, "TURNS", 1)
    monkeypatch.setattr(examination, "TURNS", 1)
    monkeypatch.setattr(checks, "TEXTS", 512)
    monkeypatch.setattr(examination, "check_loop", checked_once)


def doctor(*options: str) -> Any:
    return CliRunner().invoke(app, ["doctor", "--device", "cpu", *options])


def examined(place: Path, *options: str) -> tuple[Any, dict[str, Any]]:
    """What doctor prints about a tiny target, and the figures that it writes."""
    target, file = save_tiny(place / "target"), place / "doctor.json"
    run = doctor("--target", str(target), "--json", str(file), *options)
    assert run.exit_code == 0, run.output
    return run, json.loads(file.read_text("utf-8"))


def test_doctor_prints_the_figures_that_it_writes(quick: None, tmp_path: Path) -> None:
    run, figures = examined(tmp_path, "--dtype", "float32", "--row")
    assert figures["sound"]
    assert not figures["errors"]
    assert [row["fed"] for row in figures["passes"]] == list(examination.WIDTHS)
    for row in figures["passes"]:
        assert row["cost"] * row["highest_speedup"] == pytest.approx(row["fed"])
        reading = figures["target"]["weight_bytes"] / figures["read_bytes_per_second"]
        assert row["of_limit"] * row["ms"] / 1e3 >= reading * 0.999
        cells = [number(row[key]) for key in ("fed", "ms", "of_limit", "cost")]
        assert any(all(cell in line for cell in cells) for line in run.output.splitlines())
    printed = [
        figures["process"]["versions"]["torch"],
        figures["process"]["machine"]["processor"],
        number(figures["read_bytes_per_second"] / 1e9),
        *(number(x["flops_per_second"] / 1e9) for x in figures["dtypes"].values()),
        *(
            number(speed / 1e9)
            for x in figures["dtypes"].values()
            if (speed := x["register_flops_per_second"])
        ),
        number(figures["target"]["weight_bytes"] / 1e6),
        number(figures["plain"]["ms_per_token"]),
        number(figures["prefill"]["tokens_per_second"]),
        *(number(far) for far in figures["lossless"]["sampled"].values()),
        number(figures["disk_free_gib"]),
    ]
    assert [cell for cell in printed if cell not in run.output] == []
    assert all(line in run.output for line in figures["meaning"])
    assert 3 <= len(figures["meaning"]) <= 6
    # The last line is a row of the table of machines.
    header = MACHINES.read_text("utf-8").partition("| machine |")[2].splitlines()[0]
    row = run.stdout.splitlines()[-1].strip("| ").split(" | ")
    assert len(row) == len(header.split("|"))
    assert row[5:9] == [
        number(figures["plain"]["tokens_per_second"]),
        *(f"{width['cost']:.2f}" for width in figures["passes"][1:]),
    ]
    assert (row[9], row[-1]) == ("yes", figures["process"]["time"][:10])
    assert figures["kernels"]["forward"] == "lean"
    assert figures["kernels"]["layers"] == 2
    assert not figures["kernels"]["exact_bits"]  # float32 promises texts


def test_doctor_times_passes_after_longer_texts(
    quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(examination, "LONG_CONTEXTS", (110, 150, 400))
    run, figures = examined(tmp_path)
    # The model has 256 positions.
    assert "passes_400" not in figures
    assert [row["context"] for row in figures["passes_150"]] == [150] * len(examination.WIDTHS)
    assert "passes of the target after 150 tokens" in run.output


def test_on_a_gpu_doctor_names_the_forward_that_ran() -> None:
    kernels = {"packed": 0, "not_packed_because": "the weights are not on the CPU"}
    figures = {"kernels": kernels, "target": {"device": "cuda:0"}}
    said = examination.conclusions(examination.Examination(figures))
    assert any("on a GPU, through transformers' forward" in x for x in said)


def test_the_check_passes_and_its_greedy_texts_are_far_from_ties() -> None:
    result = check_loop(CPU)
    assert not result.failures
    assert 0.05 < result.accepted < 0.95
    target = random_llama(**SHAPE)
    for prompt in checks.PROMPTS:
        text = checks._greedy_text(target, prompt)
        logits = target(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1]
        first, second = logits.topk(2, -1).values.T
        assert (first - second).min() > 0.01


def test_a_target_that_is_wrong_for_several_tokens_is_found(
    quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def check_wrong(device: torch.device) -> checks.LosslessCheck:
        return checks.check_lossless(random_llama(WrongForSeveral, **SHAPE), random_llama(**SHAPE))

    # The trial before a decode would refuse it.
    monkeypatch.setattr(trials, "trial_fault", lambda *_: None)
    check = check_wrong(CPU)
    assert set(check.failures) == {
        f"{what} text, {how}" for what in ("greedy", "sampled") for how in ("chain", "tree")
    }
    monkeypatch.setattr(WrongForSeveral, "wrong", False)
    assert not check_wrong(CPU).failures
    monkeypatch.setattr(WrongForSeveral, "wrong", True)
    monkeypatch.setattr(examination, "check_loop", check_wrong)
    run = doctor("--target", str(save_tiny(tmp_path)), "--dtype", "float32")
    assert run.exit_code == 1
    assert "NOT LOSSLESS" in run.output
    assert "passes of the target" in run.output


def test_a_cpu_without_bfloat16_is_told_why_nothing_is_packed(
    quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(prepare_model._SUPPORTED, torch.bfloat16, "_no_such_operator")
    monkeypatch.setitem(prepare_model._SUPPORTED, torch.float16, "_no_such_operator")
    _, figures = examined(tmp_path, "--dtype", "bfloat16")
    assert figures["kernels"]["packed"] == 0
    assert [x["fast"] for x in figures["dtypes"].values()] == [True, False, False]
    off = (
        "Packed products are off: this CPU has no matrix products in bfloat16. Use --dtype float32"
    )
    assert any(line.startswith(off) for line in figures["meaning"])


def test_an_item_that_fails_stops_no_other(
    quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no such thing\nmore of it")

    monkeypatch.setattr(examination, "read_speed", fail)
    target = save_tiny(tmp_path / "target")
    run = doctor("--target", str(target), "--dtype", "float32")
    assert run.exit_code == 0, run.output
    assert "read_bytes_per_second failed: RuntimeError: no such thing\n" in run.output
    assert "passes of the target" in run.output
    # The target is what must run.
    file = tmp_path / "doctor.json"
    run = doctor("--target", str(tmp_path / "nothing"), "--json", str(file))
    assert run.exit_code == 1
    assert "target failed: UserError" in run.output
    figures = json.loads(file.read_text("utf-8"))
    assert figures["lossless"]["passed"]
    assert not figures["sound"]
    assert CliRunner().invoke(app, ["doctor", "--device", "tpu"]).exit_code == 2


def test_without_the_embedded_target_a_random_one_is_measured(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert examination.EMBEDDED_TARGET in EMBEDDED
    monkeypatch.setattr(EmbeddedModel, "find", lambda self: None)
    monkeypatch.setattr(examination, "SMALL_LLAMA", SHAPE | {"max_position_embeddings": 64})
    run = doctor()
    assert run.exit_code == 0, run.output
    assert "with random weights" in run.output
    assert "passes of the target after 32 tokens" in run.output  # as many as its context allows


def test_what_several_gpus_and_other_programs_mean() -> None:
    gpu = {"name": "X", "memory_gib": 80.0, "free_gib": 79.0, "capability": "9.0"}
    busy = examination.Examination({"gpus": [gpu] * 4, "others_share": 0.4, "cores": 10**6})
    said = "\n".join(examination.conclusions(busy))
    assert "--num_processes 4" in said
    assert "Other programs used 40%" in said
    assert "of 1000000 cores" in said
    assert not busy.sound


def test_passes_read_what_they_say() -> None:
    tied, untied = (tiny_llama(tie=tie) for tie in (True, False))
    assert weight_bytes(tied) == weight_bytes(untied)
    assert weight_bytes(tied) == sum(p.nbytes for p in tied.parameters())
    lm = CachedLM(tied)
    fed: list[int] = []
    forward = lm.forward
    lm.forward = lambda ids, *a, **k: (fed.append(ids.shape[1]), forward(ids, *a, **k))[1]  # type: ignore[method-assign]
    assert set(pass_seconds(lm, 20, (1, 5), turns=2)) == {1, 5}
    assert fed == [20, *(1, 5) * 3]


def test_the_distance_of_texts_from_their_law() -> None:
    law = np.array([[0.4, 0.1], [0.2, 0.3]])
    drawn = np.random.default_rng(0).choice(4, 4000, p=law.ravel())
    texts = np.stack([drawn // 2, drawn % 2], 1)
    assert abs(distance(texts, law)) < 3
    assert distance(texts, law.T) > checks.FAR


def test_why_a_model_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    assert reason_against_packing(model) is None
    with monkeypatch.context() as patch:
        patch.setattr(lean_parts, "OPERATORS", ("_linear_pointwise", "_renamed"))
        assert "has no torch.ops.mkldnn._renamed" in (reason_against_packing(model) or "")
    assert "float64" in (reason_against_packing(tiny_llama().double()) or "")
    assert "not on the CPU" in (reason_against_packing(tiny_llama().to("meta")) or "")
    model.is_quantized = True
    assert "quantised" in (reason_against_packing(model) or "")
