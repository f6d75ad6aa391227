"""What a training measures of itself: its profile, its speed, and its FLOPs against those that are
counted while it runs."""

import json
from copy import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from distill import float32_products
from distill.flops import TextFlops, layers_flops
from draftsmith.cli.main import app
from tests.stages import DRAFTER, LOOP, make_stage, plan_stage, run_stage, stage_context
from tests.tiny import tiny_llama, tiny_target
from tests.training import Killed, Lines, at_batch, die, tiny_trainer
from train.base.stage import StageWork
from train.loop.estimates import idle_in_words
from train.loop.meters.peak_flops import peak_of
from train.loop.meters.peak_memory import peak_memory, restart_peak
from train.loop.meters.profiler import WARM_UP
from train.loop.meters.throughput import Throughput, flops_of, in_words
from train.loop.trainer import Trainer
from train.measure.ranks import Ranks
from train.run.run import Run
from train.settings.training import LoopConfig

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


@pytest.fixture
def known_products(monkeypatch):
    """Products that PyTorch's counter of FLOPs knows: it knows none of oneDNN's."""
    monkeypatch.setattr(float32_products, "is_faster", lambda: False)


# --- the profile ----------------------------------------------------------------------------------


def test_a_profile_has_the_steps_after_the_first_ones(tmp_path):
    said = Lines()
    tiny_trainer(tmp_path, WARM_UP + 4, profile_steps=2, reporter=said).fit()
    files = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert files == ["from-step-4.pt.trace.json", "from-step-4.txt"]
    trace = json.loads((tmp_path / "profile" / files[0]).read_text("utf-8"))
    steps = {e["name"] for e in trace["traceEvents"] if e["name"].startswith("ProfilerStep#")}
    assert len(steps) == 2
    title, *rows = (tmp_path / "profile" / files[1]).read_text("utf-8").splitlines()
    assert title == "CPU time of 2 steps by operation, without what it calls"
    shares = [float(row.split("%")[0]) for row in rows]
    assert shares == sorted(shares, reverse=True)
    assert 50 < sum(shares) <= 100.5
    (adam,) = (row for row in rows if "AdamW.step" in row)
    assert "1.0 calls" in adam
    assert rows[0] in str(said)


def test_a_training_that_ends_within_a_profile_has_its_part_and_a_shorter_one_none(tmp_path):
    tiny_trainer(tmp_path / "short", WARM_UP + 1, profile_steps=9).fit()
    table = (tmp_path / "short/profile/from-step-4.txt").read_text("utf-8")
    assert table.startswith("CPU time of 1 steps")
    said = Lines()
    tiny_trainer(tmp_path / "none", WARM_UP, profile_steps=9, reporter=said).fit()
    assert "no profile: only 3 steps were left" in str(said)
    assert not (tmp_path / "none/profile").exists()
    tiny_trainer(tmp_path / "plain", 5).fit()
    assert not (tmp_path / "plain/profile").exists()


def test_a_stage_has_its_profile_in_its_directory(tmp_path):
    context = replace(stage_context(tmp_path, tiny_target()), profile_steps=1)
    loop = LOOP | {"epochs": 10, "max_steps": WARM_UP + 1}
    run_stage(context, make_stage("distill", "one", **(DRAFTER | {"loop": loop})))
    assert (tmp_path / "one/profile/from-step-4.txt").exists()


def test_a_plan_has_nothing_to_profile():
    config = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
    refused = CliRunner().invoke(app, ["train", str(config), "--profile", "2", "--dry-run"])
    assert refused.exit_code == 2
    assert "--profile measures a training" in refused.output


# --- the speed ------------------------------------------------------------------------------------


def test_the_speed_is_that_of_the_steps_since_the_last_figures():
    meter = Throughput(peak=8e12)
    assert meter.figures() == {}
    meter.add(0.5, 100, 1e12)
    meter.add(1.5, 300, 2e12)
    figures = meter.figures()
    expected = {"tokens_per_second": 200, "model_tflops_per_second": 1.5, "mfu": 1.5 / 8}
    assert figures == pytest.approx(expected)
    assert in_words(figures) == "200 tokens/s, MFU 18.8%"
    meter.add(2.0, 3000, 0.0)  # FLOPs that are not known
    assert in_words(meter.figures()) == "1,500 tokens/s"
    meter = Throughput(peak=None)
    meter.add(2.0, 3000, 1e10)
    assert in_words(meter.figures()) == "1,500 tokens/s, 0.005 model TFLOP/s"


def test_the_figures_of_a_training_are_logged(tmp_path, monkeypatch):
    logged: list[dict[str, float]] = []
    monkeypatch.setattr(Trainer, "_log", lambda self, figures: logged.append(figures))
    rule = TextFlops(per_token=1e9, per_pair=1.0, per_prediction=1e6)
    trainer = tiny_trainer(tmp_path, 6, accumulation=3, log_every=2, flops=rule)
    speeds: list[tuple[int, float]] = []
    add = trainer.throughput.add

    def noted(seconds: float, tokens: int, flops: float) -> None:
        speeds.append((tokens, flops))
        add(seconds, tokens, flops)

    monkeypatch.setattr(trainer.throughput, "add", noted)
    trainer.fit()
    samples = trainer.task.text.round(0, trainer.weights)
    lengths = [len(sample.tokens) for sample in samples]
    predicted = sum(sum(sample.mask[1:]) for sample in samples)
    # Three batches are an epoch: each step has all samples.
    flops = 1e9 * sum(lengths) + sum(n * n for n in lengths) + 1e6 * predicted
    assert speeds == [(predicted, pytest.approx(flops))] * 6
    rows = [row for row in logged if "tokens_per_second" in row]
    assert len(rows) == 3
    for row in rows:
        ratio = row["model_tflops_per_second"] * 1e12 / row["tokens_per_second"]
        assert ratio == pytest.approx(flops / predicted)
        assert "mfu" not in row  # of a CPU no peak is known


def test_what_a_training_computed_is_that_of_all_its_starts(tmp_path):
    rule = TextFlops(per_token=1e9, per_prediction=1e6)
    whole = tiny_trainer(tmp_path / "whole", 5, flops=rule).fit()
    with pytest.raises(Killed):
        tiny_trainer(tmp_path / "killed", 5, flops=rule, hook=at_batch(7, die)).fit()
    checkpoint = tmp_path / "killed/checkpoints/step-2/trainer.json"
    first = json.loads(checkpoint.read_text("utf-8"))["progress"]
    trainer = tiny_trainer(tmp_path / "killed", 5, flops=rule)
    trainer.fit()
    assert 0 < first["flops"] < trainer.work.flops == pytest.approx(whole.flops)
    assert 0 < first["step_seconds"] < trainer.work.seconds < trainer.progress.seconds


def test_the_time_of_a_training_is_shared_by_the_processes_of_now(tmp_path, monkeypatch):
    seconds: list[float] = []
    trainer = tiny_trainer(tmp_path, 2)
    monkeypatch.setattr(trainer.throughput, "add", lambda step, *_: seconds.append(step))
    several = type("Several", (Accelerator,), {"num_processes": 3})
    trainer.accelerator = copy(trainer.accelerator)  # that of the trainer alone
    trainer.accelerator.__class__ = several
    trainer.fit()
    assert trainer.work.seconds == pytest.approx(sum(seconds))
    several.num_processes = 6
    assert trainer.work.seconds == pytest.approx(sum(seconds) / 2)


@pytest.mark.parametrize(
    ("speed", "other", "others_speed", "reached"),
    [
        (4e12, (6e12, 3.0), 2e12, (3.0, 0.5)),
        (4e12, (0.0, 0.0), 4e12, (2.0, 0.25)),
        (0.0, (0.0, 0.0), 4e12, None),  # one of them could not measure it
        (4e12, (0.0, 0.0), 0.0, None),
    ],
)
def test_the_speed_is_that_of_all_ranks_until_the_last_is_done(
    monkeypatch, speed, other, others_speed, reached
):
    others = iter([other, others_speed])
    ranks = SimpleNamespace(gather=lambda mine: [mine, next(others)])
    monkeypatch.setattr(Ranks, "of", lambda accelerator: ranks)
    run: Any = SimpleNamespace(accelerator=None, reporter=Lines(), _matrix_speed=lambda _: speed)
    figures = Run._speed_reached(run, StageWork(torch.float32, 12e12, 6.0))
    assert tuple(figures.values()) == (reached or ())
    assert ("matrix speed" in str(run.reporter)) == (reached is not None)


def test_a_matrix_speed_that_cannot_be_measured_is_not_known():
    run: Any = SimpleNamespace(_rank_device=torch.device("cpu"))
    assert Run._matrix_speed(run, torch.bits8) == 0  # there are no products in it


def test_devices_are_known_by_the_words_of_their_names():
    assert peak_of("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_of("NVIDIA H100 PCIe") == 756e12
    assert peak_of("NVIDIA L40S") == 362e12
    assert peak_of("NVIDIA L4") == 121e12
    assert peak_of("NVIDIA GeForce RTX 4090") == 165.2e12
    assert peak_of("NVIDIA GeForce GTX 1080") is None


# --- FLOPs ----------------------------------------------------------------------------------------


def counted_step(patch: pytest.MonkeyPatch, directory: Path, stage: Any) -> tuple[float, float]:
    """(counted, by the rule): the FLOPs of a stage's first step without AdamW, which has no
    products."""
    found: list[tuple[float, float]] = []
    original = Trainer._optimizer_step

    def step(self: Any, progress: Any, current: Any, request: Any) -> Any:
        first = progress.batch
        with FlopCounterMode(display=False) as counter:
            result = original(self, progress, current, request)
        rule = current.flops(self.task.flops, range(first, progress.batch))
        found.append((counter.get_total_flops(), rule))
        return result

    patch.setattr(Trainer, "_optimizer_step", step)
    with sdpa_kernel(SDPBackend.MATH):  # the counter knows no fused attention of CPUs
        run_stage(stage_context(directory, tiny_target(layers=7)), stage)
    return found[0]


def test_the_rule_of_a_model_is_what_its_forward_needs():
    model = tiny_llama(layers=2)
    ids = torch.randint(3, 300, (3, 24))
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter, torch.no_grad():
        model.base_model(ids)
    rule = flops_of(layers_flops(model, trained=False), [24] * 3, 0)
    # The rotary embedding is a product too.
    assert counter.get_total_flops() == pytest.approx(rule, rel=0.01)


STAGES = {
    "distill": ("distill", DRAFTER),
    "frozen embeddings": ("distill", DRAFTER | {"train_embeddings": False}),
    "medusa": ("heads", {"heads": {"type": "medusa", "heads": 2}}),
    "blockwise": ("heads", {"heads": {"type": "blockwise", "k": 3}}),
    "hydra_plus": ("heads", {"heads": {"type": "hydra_plus", "heads": 2, "layers": 2}}),
    "eagle1": ("heads", {"heads": {"type": "eagle1", "depth": 2}, "losses": {"forward_kl": 1.0}}),
    "eagle3": ("heads", {"heads": {"type": "eagle3", "steps": 3}, "losses": {"forward_kl": 1.0}}),
    "kangaroo": ("heads", {"heads": {"type": "kangaroo", "exit_layer": 2}}),
    "mtp": ("heads", {"heads": {"type": "mtp", "depth": 2}, "losses": {"forward_kl": 1.0}}),
}


@pytest.mark.usefixtures("known_products")
@pytest.mark.parametrize("name", STAGES)
def test_the_rule_of_a_stage_is_near_what_its_step_needs(tmp_path, monkeypatch, name):
    """Off by padding, by heads that have fewer tokens to learn from at the end of a text, and by
    gradients of inputs that nobody needs. A pass left out or counted twice is more than that."""
    kind, settings = STAGES[name]
    loop = {"loop": LOOP | {"max_steps": 1}}
    stage = make_stage(kind, "one", **(settings | loop))
    counted, rule = counted_step(monkeypatch, tmp_path, stage)
    assert rule == pytest.approx(counted, rel=0.1)


@pytest.mark.usefixtures("known_products")
@pytest.mark.parametrize("kind", ["feature_cache", "teacher_cache"])
def test_the_work_of_a_cache_is_what_its_passes_need(tmp_path, kind):
    """One row a batch, so there is no padding."""
    options = {"k": 8} if kind == "teacher_cache" else {}
    stage = make_stage(kind, "one", tokens_per_batch=1, **options)
    context = stage_context(tmp_path, tiny_target(layers=7))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        work = run_stage(context, stage).work
    assert work.flops == pytest.approx(counter.get_total_flops(), rel=0.02)
    assert work.seconds > 0
    assert run_stage(context, stage).work.flops == 0  # its parts are there


def test_the_work_of_answers_is_what_passes_over_their_whole_texts_need(context):
    target = context.target
    settings = {"samples": 2, "sampling": {"temperature": 1.5}, "max_new_tokens": 6}
    work = run_stage(context, make_stage("generate", "answers", **settings)).work
    counter, texts = FlopCounterMode(display=False), [*context.corpus.samples("answers")]
    with sdpa_kernel(SDPBackend.MATH), counter, torch.no_grad():
        for text in texts:
            # All tokens but those of the prompt have logits.
            target.model(torch.tensor([text.tokens]), logits_to_keep=sum(text.mask))
    assert len(texts) == 20
    assert work.flops == pytest.approx(counter.get_total_flops(), rel=0.02)


# --- memory ---------------------------------------------------------------------------------------


def test_the_peak_of_a_stage_is_not_that_of_the_one_before():
    if not restart_peak():
        pytest.skip("this system keeps the peak of the process")
    large = torch.ones(64 << 20)  # 256 MiB
    before = peak_memory()
    del large
    assert restart_peak()
    assert peak_memory() < before - (128 << 20)


def test_where_the_peak_cannot_begin_anew_a_stage_has_none(tmp_path, monkeypatch):
    monkeypatch.setattr("train.loop.meters.peak_memory.PROCESS", tmp_path / "none")
    assert not restart_peak()
    assert peak_memory() > 0


# --- ranks without a row --------------------------------------------------------------------------


def test_ranks_without_a_row_are_said_with_what_to_set(tmp_path):
    """Batches of 36 tokens have three or four of these rows."""
    lines = Lines()
    trainer = tiny_trainer(tmp_path, 1, reporter=lines)
    trainer._text(0)
    assert "get no row" not in str(lines)
    batches = trainer._text(0).batches
    rows = [len(batches.batch(i)) for i in range(len(batches))]
    idle = sum(8 - n for n in rows) / len(rows)
    assert batches.idle_ranks(8) == pytest.approx(idle)
    trainer.accelerator = SimpleNamespace(num_processes=8)
    trainer._say_idle(trainer._text(0))
    assert f"{idle:.1f} of 8 ranks get no row" in str(lines)
    assert "loop.tokens_per_batch=80" in str(lines)


@pytest.mark.parametrize(("processes", "said"), [(1, False), (8, True)])
def test_a_plan_says_how_many_processes_get_no_row(tmp_path, processes, said):
    context = replace(stage_context(tmp_path, tiny_target()), processes=processes)
    settings = DRAFTER | {"losses": {"forward_kl": 1.0}, "loop": LOOP | {"tokens_per_batch": 64}}
    stage = make_stage("distill", "one", **settings)
    what = plan_stage(context, stage).what
    assert ("of 8 processes get no row of a batch of 64 tokens" in what) == said
    assert idle_in_words([100], LoopConfig(tokens_per_batch=300), 3) == ""
    assert "about 5.0 of 8" in idle_in_words([600], LoopConfig(tokens_per_batch=2048), 8)
