"""Promises 1 to 10 and 12 of the training loop, each with its fault put in, and what the loop does
between them: groups, averages, the learning rate's course, checkpointed layers, the clock.

What the artifact store promises by itself (every kill inside a write, every kind of damage) is
proven in test_artifact; here it is about going on to the same weights.
"""

import errno
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate.checkpointing
import pytest
import torch
from accelerate import Accelerator
from click.testing import Result
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

from decode.base import artifact
from decode.base.artifact import verify_directory
from decode.base.errors import UserError
from distill.distillation_loss import Distillation
from distill.losses import LossRows, WeightedLoss
from distill.losses.cross_entropy import CrossEntropy
from distill.students.student_start import checkpoint_layers
from draftsmith.cli.main import app
from tests.kills import FullDisk, kill_at_change
from tests.tiny import save_tiny
from tests.training import (
    OPTIMIZER,
    RICH,
    Killed,
    Lines,
    ask_to_stop,
    assert_equal,
    at_batch,
    before_call,
    begin_anew,
    die,
    figures,
    forked,
    ids_of,
    in_new_process,
    left_behind,
    scramble,
    state_of,
    status_of,
    steps_kept,
    tiny_samples,
    tiny_student,
    tiny_trainer,
    two_ranks,
)
from train.base.exit_status import ExitStatus
from train.data.batches import collate, inputs
from train.loop.checkpoint import Stopped, StopRequest, _require_sound
from train.loop.compiling import compiling
from train.loop.optimizer import make_optimizer
from train.loop.optimizer_step import learning_rate_factor
from train.loop.trainer import Trainer, TrainingClock
from train.loop.training_task import steps_in
from train.loop.weight_average import EMA
from train.settings.optimizer_config import GroupConfig, OptimizerConfig
from train.settings.training import LoopConfig

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def interrupted(directory: Path, batch: int, **settings: Any) -> None:
    """A training that dies before its batch of this number."""
    with pytest.raises(Killed):
        tiny_trainer(directory, hook=at_batch(batch, die), **settings).fit()
    scramble()


# --- exact resume (promises 1 and 2) --------------------------------------------------------------


# Each is one of the two batches of a step.
@pytest.mark.parametrize(
    ("optimizer", "batch"), [(OPTIMIZER, 10), (RICH, 11)], ids=["plain", "rich"]
)
def test_twelve_steps_are_seven_and_five_bit_by_bit(tmp_path, optimizer, batch):
    """Dropout on, two batches a step; three batches an epoch, so that it stops within one. SIGTERM
    within a step lets the step end, which is saved."""
    torch.manual_seed(1)
    whole = tiny_trainer(tmp_path / "whole", 12, optimizer=optimizer)
    before = figures(whole.fit())

    torch.manual_seed(1)
    hook = at_batch(batch, ask_to_stop)
    with pytest.raises(Stopped, match="after step 7 of 12"):
        tiny_trainer(tmp_path / "parts", 12, optimizer=optimizer, hook=hook, save_every=100).fit()
    assert steps_kept(tmp_path / "parts") == [7]
    scramble()
    second = tiny_trainer(tmp_path / "parts", 12, optimizer=optimizer)
    assert figures(second.fit()) == before
    assert_equal(state_of(second), state_of(whole))


# --- kills (promise 3) ----------------------------------------------------------------------------


def killed_at_change(n: int, action: Callable[[], object]) -> Callable[[], None]:
    """`action`, killed before its n-th change to the disk by way of `os`, or to a file by torch."""

    def run() -> None:
        kill_at_change(n, (torch, "save"))
        action()

    return run


def check_kills(directory: Path) -> None:
    """In a process that has computed nothing: kill before every fifth change to the disk, go on,
    compare; everything in forks."""

    def train(name: str) -> None:
        tiny_trainer(directory / name, 6, optimizer=RICH).fit()

    assert status_of(forked(lambda: train("whole"))) == 0
    whole = left_behind(directory / "whole")

    def goes_on(name: str, killed: int, kept: set[int]) -> None:
        assert killed == -signal.SIGKILL
        kept.add(max(steps_kept(directory / name), default=0))
        assert status_of(forked(lambda: train(name))) == 0
        assert_equal(left_behind(directory / name), whole)
        # Killed before the removal of the oldest, which nothing was left to repeat.
        found = sorted(path.name for path in (directory / name / "checkpoints").iterdir())
        assert found in (["step-4", "step-6"], ["step-2", "step-4", "step-6"])

    kept: set[int] = set()
    boundaries = 0
    for n in range(1, 1000, 5):
        name = f"boundary-{n}"
        status = status_of(forked(killed_at_change(n, lambda name=name: train(name))))
        if status == 0:
            break
        goes_on(name, status, kept)
        boundaries += 1
    assert kept == {0, 2, 4, 6}, kept
    # Three saves of some 20 changes each, and the removal of the oldest.
    assert boundaries > 9


@pytest.mark.slow
def test_killed_at_any_time_it_ends_with_the_same_weights(tmp_path):
    in_new_process(__name__, f"check_kills(Path({str(tmp_path)!r}))")


# --- damage, full disks, lost random states (promises 4, 5 and 6) ---------------------------------


@pytest.fixture
def half_trained(tmp_path) -> Path:
    """A training of 8 steps that died in its fifth, with the checkpoints 2 and 4."""
    torch.manual_seed(1)
    interrupted(tmp_path / "half", 9, steps=8, optimizer=RICH)
    assert steps_kept(tmp_path / "half") == [2, 4]
    return tmp_path / "half"


FILES = [
    "model.safetensors",
    "optimizer.bin",
    "random_states_0.pkl",
    "average-0.safetensors",
    "trainer.json",
    "manifest.json",
]


def damage(file: Path, how: str) -> None:
    data = file.read_bytes()
    if how == "gone":
        file.unlink()
    elif how == "flip":
        middle = len(data) // 2
        file.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    else:
        file.write_bytes(data[: len(data) // 2])


def test_damage_to_any_file_is_named_and_the_checkpoint_before_is_taken(tmp_path, half_trained):
    """A missing random state included, without which training would go on otherwise."""
    torch.manual_seed(1)
    whole = tiny_trainer(tmp_path / "whole", 8, optimizer=RICH)
    expected = figures(whole.fit())
    newest = half_trained / "checkpoints" / "step-4"
    assert sorted(path.name for path in newest.iterdir()) == sorted(FILES)
    for name in FILES:
        for how in ("cut", "gone"):
            copy = tmp_path / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(half_trained, copy)
            damage(copy / "checkpoints" / "step-4" / name, how)
            said = Lines()
            trainer = tiny_trainer(copy, 8, optimizer=RICH, reporter=said)
            progress = trainer.checkpoints.load(trainer._load_average)
            assert progress is not None
            assert progress["step"] == 2, (name, how)
            assert progress["history"] == expected[:2]
            assert re.search(f"skipping a damaged checkpoint: .*step-4 .*{name}", str(said)), (
                name,
                how,
            )
        assert (copy / "checkpoints/damaged-step-4").is_dir()
        trainer = tiny_trainer(copy, 8, optimizer=RICH)
        shutil.copytree(half_trained / "checkpoints/step-4", copy / "checkpoints/step-4")
        damage(copy / "checkpoints" / "step-4" / name, "flip")
        assert figures(trainer.fit()) == expected
        assert_equal(state_of(trainer), state_of(whole))


def fail_once(monkeypatch: pytest.MonkeyPatch, fails: Callable[[Path], bool]) -> None:
    """The first read of a file for which `fails` says so ends with an input/output error."""
    sound, seen = artifact.file_sha256, []

    def sha256(file: Path) -> str:
        if not seen and fails(file):
            seen.append(file)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return sound(file)

    monkeypatch.setattr(artifact, "file_sha256", sha256)


def test_a_read_error_is_no_damage(half_trained, monkeypatch):
    """Neither is an older checkpoint taken, nor anything deleted; the next start goes on."""
    fail_once(monkeypatch, lambda file: file.parent.name == "step-4")
    before = sorted(half_trained.rglob("*"))
    trainer = tiny_trainer(half_trained, 8, optimizer=RICH)
    with pytest.raises(UserError, match=r"step-4/\S+ cannot be read \(Input/output error\)"):
        trainer.checkpoints.load(trainer._load_average)
    assert sorted(half_trained.rglob("*")) == before
    progress = trainer.checkpoints.load(trainer._load_average)
    assert progress is not None
    assert progress["step"] == 4


def test_another_rank_takes_the_first_ones_checkpoint_or_ends(half_trained):
    newest = half_trained / "checkpoints/step-4"
    _require_sound(newest, artifact.manifest_sha256(newest))
    with pytest.raises(UserError, match="other files here than for the first rank"):
        _require_sound(newest, artifact.manifest_sha256(newest.with_name("step-2")))


def test_with_no_checkpoint_left_it_stops_and_does_not_begin_again(half_trained):
    for step in (2, 4):
        damage(half_trained / "checkpoints" / f"step-{step}" / "random_states_0.pkl", "gone")
    said = Lines()
    trainer = tiny_trainer(half_trained, 8, reporter=said, hook=at_batch(1, die), optimizer=RICH)
    with pytest.raises(UserError, match=r"no checkpoint in .*checkpoints is complete; delete"):
        trainer.fit()
    assert str(said).count("random_states_0.pkl") == 2
    assert steps_kept(half_trained) == [2, 4]  # nothing is thrown away


def test_a_random_state_that_cannot_be_read_is_an_error(half_trained, monkeypatch):
    """accelerate goes on without a word."""
    sound = accelerate.checkpointing.load

    def load(file: Any, **kwargs: Any) -> Any:
        if "random_states" in str(file):
            raise RuntimeError("written by another version of numpy")
        return sound(file, **kwargs)

    monkeypatch.setattr(accelerate.checkpointing, "load", load)
    with pytest.raises(UserError, match=r"step-4.*random state"):
        tiny_trainer(half_trained, 8, optimizer=RICH).fit()


def test_a_full_disk_leaves_the_checkpoints_there_are(tmp_path, half_trained, monkeypatch):
    torch.manual_seed(1)
    whole = tiny_trainer(tmp_path / "whole", 8, optimizer=RICH)
    whole.fit()
    for n in range(1, 20, 2):
        copy = tmp_path / f"full-{n}"
        shutil.copytree(half_trained, copy)
        disk = FullDisk(n)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "save", disk(torch.save))
            for module in (
                "accelerate.utils.other.safe_save_file",
                "train.loop.rank_weights.save_file",
            ):
                patch.setattr(module, disk(save_file))
            patch.setattr(Path, "write_text", disk(Path.write_text))
            patch.setattr(artifact, "_write_and_sync", disk(artifact._write_and_sync))
            try:
                tiny_trainer(copy, 8, optimizer=RICH).fit()
            except UserError as error:
                assert re.search("checkpoints/step-[68]: the disk is full", str(error))  # noqa: PT017
            else:
                break
        for step in steps_kept(copy):
            verify_directory(copy / "checkpoints" / f"step-{step}")
        scramble()
        assert len(steps_kept(copy)) == 2
        freed = tiny_trainer(copy, 8, optimizer=RICH)
        freed.fit()
        assert_equal(state_of(freed), state_of(whole))
    assert n > 10  # six files each of the checkpoints 6 and 8


def test_a_disk_that_is_too_small_is_refused_before_the_first_step(tmp_path, monkeypatch):
    trainer = tiny_trainer(tmp_path, 4)
    weights = sum(p.nbytes for p in trainer.module.parameters())
    # Three checkpoints of weights and two moments, and the drafter.
    needed = (3 * 3 + 1) * weights
    free = [needed - 1]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[0]))
    with pytest.raises(UserError, match=r"checkpoints and its drafter .* [1-9].* KiB free"):
        trainer.fit()
    assert trainer.progress.step == 0
    assert not steps_kept(tmp_path)
    free[0] = needed
    assert trainer.fit().step == 4
    # One that has nothing left to train needs no more space.
    free[0] = 0
    assert tiny_trainer(tmp_path, 4).fit().step == 4


# --- signals (promise 7) --------------------------------------------------------------------------


def test_sigterm_during_a_save_lets_it_be_completed(tmp_path, monkeypatch):
    torch.manual_seed(1)
    whole = tiny_trainer(tmp_path / "whole", 8)
    whole.fit()
    torch.manual_seed(1)
    before_call(monkeypatch, Accelerator, "save_state", 2, ask_to_stop)
    with pytest.raises(Stopped, match="after step 5 of 8"):
        tiny_trainer(tmp_path / "parts", 8).fit()
    assert steps_kept(tmp_path / "parts") == [4, 5]
    for step in (4, 5):
        verify_directory(tmp_path / "parts" / "checkpoints" / f"step-{step}")
    scramble()
    goes_on = tiny_trainer(tmp_path / "parts", 8)
    goes_on.fit()
    assert_equal(state_of(goes_on), state_of(whole))


def test_signals_are_taken_only_while_training(tmp_path):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    request = StopRequest()
    with request.listening():
        assert not request.received
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.received
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


# --- several ranks (promises 7 to 10) -------------------------------------------------------------


def check_ranks(directory: Path) -> None:
    """Two ranks: whole, then with one of them stopped, killed, and with a loss that is NaN."""

    def train(
        name: str, batch: int = 0, action: Callable[[], object] = die, **loop: Any
    ) -> list[int]:
        def rank_part(rank: int) -> None:
            hook = at_batch(batch if rank == 1 else 0, action)
            tiny_trainer(directory / name, 6, optimizer=RICH, hook=hook, **loop).fit()

        return two_ranks(rank_part)

    assert train("whole") == [0, 0]
    whole = left_behind(directory / "whole")
    assert len(whole["history"]) == 6

    assert train("stopped", 4, ask_to_stop) == [ExitStatus.STOPPED] * 2
    assert steps_kept(directory / "stopped") == [2, 3]
    assert train("stopped") == [0, 0]
    assert_equal(left_behind(directory / "stopped"), whole)

    # Rank 1 fails to read the newest checkpoint: both end, and neither goes on with an older one.
    def unreadable(rank: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            fail_once(patch, lambda file: rank == 1 and "step-6" in file.parts)
            tiny_trainer(directory / "whole", 8, optimizer=RICH).fit()

    assert two_ranks(unreadable) == [2, 2]
    assert steps_kept(directory / "whole") == [4, 6]

    kill = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    left, killed = train("killed", 8, kill)
    assert killed == -signal.SIGKILL
    assert left != 0
    assert steps_kept(directory / "killed") == [2, 4]
    assert train("killed") == [0, 0]
    assert_equal(left_behind(directory / "killed"), whole)

    def lose() -> None:
        sound = CrossEntropy.fused
        CrossEntropy.fused = lambda self, rows: (
            sound(self, rows)[0] * float("nan"),
            sound(self, rows)[1],
        )

    assert train("poisoned", 4, lose, max_skipped_steps=0) == [2, 2]
    assert steps_kept(directory / "poisoned") == [2]
    # Steps 3 to 6 change nothing on any rank.
    assert train("skipped", 4, lose, keep_checkpoints=3) == [0, 0]
    begun, ended = (
        directory / "skipped" / "checkpoints" / f"step-{step}" / "model.safetensors"
        for step in (2, 6)
    )
    assert_equal(load_file(ended), load_file(begun))


@pytest.mark.slow
def test_two_ranks_stop_together_and_go_on_to_the_same_weights(tmp_path):
    done = in_new_process(__name__, f"check_ranks(Path({str(tmp_path)!r}))")
    # Of the loss that was NaN on one rank both say what and where it was.
    assert len(re.findall(r"UserError: step 3: loss, cross_entropy is not.*s\d", done.stderr)) == 2


# --- figures that are not finite (promise 10) -----------------------------------------------------


def poison(patch: pytest.MonkeyPatch, fault: str, value: float, trainer: Trainer) -> None:
    """From now on the loss has this value, with a sound gradient, or the gradient has it."""
    if fault == "gradient":
        parameter = trainer.task.module.student.transformer.h[0].mlp.c_fc.weight
        parameter.register_hook(lambda gradient: gradient * value)
        return
    sound = CrossEntropy.fused

    def fused(self: CrossEntropy, rows: LossRows) -> tuple[torch.Tensor, torch.Tensor]:
        values, gradient = sound(self, rows)
        return values * value, gradient

    patch.setattr(CrossEntropy, "fused", fused)


@pytest.mark.parametrize(("fault", "value"), [("loss", float("nan")), ("gradient", float("inf"))])
def test_what_is_not_finite_is_not_stepped_with(tmp_path, monkeypatch, fault, value):
    """Step 3 is of the first two batches of the second epoch; it names term and samples."""
    trace: list[list[str]] = []
    weights: list[Any] = []

    def action() -> None:
        weights.append(state_of(trainer))
        poison(monkeypatch, fault, value, trainer)

    rich = {"optimizer": RICH, "dropout": 0.0, "max_skipped_steps": 0}
    trainer = tiny_trainer(tmp_path, 8, **rich, hook=at_batch(4, action), trace=trace)
    what = "loss, cross_entropy" if fault == "loss" else "gradient_norm"
    with pytest.raises(UserError, match=f"^step 3: {what} is not finite") as caught:
        trainer.fit()
    named = re.findall(r"\bs\d+\b", str(caught.value))
    assert sorted(named) == sorted(ids_of(trace[3:5]))
    assert_equal(state_of(trainer), weights[0])
    assert steps_kept(tmp_path) == [2]


def test_a_few_steps_that_are_not_finite_are_left_out(tmp_path, monkeypatch):
    """Step 3 is. The log names it, and so does the checkpoint, from which the training goes on
    exactly, also if it stops at once."""
    trace: list[list[str]] = []
    settings: dict[str, Any] = {"optimizer": RICH, "max_skipped_steps": 1}

    def trained(name: str, stop: int = 0) -> tuple[Trainer, Lines]:
        """stop: the batch at which the training is asked to stop."""
        lines, batch = Lines(), 0
        with pytest.MonkeyPatch.context() as patch:

            def hook(_: Any) -> None:
                nonlocal batch
                batch += 1
                patch.undo()
                if batch == 4:
                    poison(patch, "loss", float("nan"), trainer)
                if batch == stop:
                    ask_to_stop()

            trainer = tiny_trainer(
                tmp_path / name, 6, **settings, hook=hook, trace=trace, reporter=lines
            )
            with pytest.raises(Stopped) if stop else nullcontext():
                trainer.fit()
        return trainer, lines

    torch.manual_seed(1)
    whole, lines = trained("whole")
    named = {"step": 3, "figures": ["loss", "cross_entropy"], "samples": ids_of(trace[3:5])}
    found = whole.progress.last_skipped
    assert found is not None
    assert found | {"samples": sorted(found["samples"])} == named | {
        "samples": sorted(named["samples"])
    }
    assert "step 3: loss, cross_entropy is not finite" in str(lines)
    assert [row["step"] for row in whole.progress.history] == [1, 2, 4, 5, 6]

    torch.manual_seed(1)
    trained("parts", stop=4)
    assert steps_kept(tmp_path / "parts") == [2, 3]
    scramble()
    rest = tiny_trainer(tmp_path / "parts", 6, **settings)
    assert figures(rest.fit()) == figures(whole.progress)
    assert (rest.progress.skipped, rest.progress.last_skipped) == (1, found)
    assert_equal(state_of(rest), state_of(whole))

    # One more is one too many, also after a restart.
    more = tiny_trainer(tmp_path / "parts", 9, **settings)
    poison(monkeypatch, "loss", float("inf"), more)
    with pytest.raises(UserError, match="max_skipped_steps is 1, and 1 were skipped before"):
        more.fit()


def test_a_training_without_a_finite_step_gives_no_drafter(tmp_path, monkeypatch):
    """Also if it had ended before: it is the start, for all that is known."""
    trainer = tiny_trainer(tmp_path, 2)
    poison(monkeypatch, "loss", float("nan"), trainer)
    assert trainer.fit().history == []
    for ended in (trainer, tiny_trainer(tmp_path, 2)):
        ended.fit()
        with pytest.raises(UserError, match="no weight changed in 2 steps: the loss or the gradie"):
            ended.drafter_weights()


# --- the optimizer --------------------------------------------------------------------------------


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


def test_a_training_of_limited_time_ends_its_schedule_and_is_not_continued(tmp_path):
    """The time is over in the first step: that step has the last learning rate, is stored and
    measured, and the training does not go on after it."""
    schedule = {"lr": 1e-3, "warmup_steps": 0, "schedule": "linear", "min_lr_ratio": 0.25}
    settings = {"optimizer": schedule, "max_minutes": 1e-9, "save_every": 100, "log_every": 100}
    trainer = tiny_trainer(tmp_path, 7, measure=lambda *_: {"accuracy": 0.5}, **settings)
    progress = trainer.fit()
    assert (progress.step, len(progress.dev)) == (1, 1)
    assert progress.history[-1]["lr"] == pytest.approx(0.25e-3)
    again = tiny_trainer(tmp_path, 7, **settings).fit()
    assert (again.step, again.tokens) == (1, progress.tokens)
    assert tiny_trainer(tmp_path / "long", 7, max_minutes=60).fit().step == 7


def test_new_settings_of_the_optimizer_hold_after_a_restart(tmp_path):
    """Those that a checkpoint has too. The rate is so small that no weight moves."""
    tiny_trainer(tmp_path, 4, optimizer=RICH).fit()
    now = RICH | {"lr": 1e-30, "weight_decay": 0.3, "beta1": 0.5, "beta2": 0.6, "ema": 0.5}
    now["groups"] = {name: GroupConfig(lr=1e-30, weight_decay=0.2) for name in RICH["groups"]}
    trainer = tiny_trainer(tmp_path, 8, optimizer=now)
    expected = make_optimizer(trainer.task.module, OptimizerConfig(**now)).param_groups
    trainer.fit()
    for group, wanted in zip(trainer.optimizer.param_groups, expected, strict=True):
        for name in ("base_lr", "weight_decay", "betas", "eps"):
            assert group[name] == wanted[name], name
    begun, ended = (
        load_file(tmp_path / "checkpoints" / f"step-{step}" / "model.safetensors")
        for step in (6, 8)
    )
    assert trainer.progress.step == 8
    assert_equal(ended, begun)


def test_moments_of_other_weights_are_refused(tmp_path):
    """They have no names: with other groups they would be those of other weights."""
    tiny_trainer(tmp_path, 2, optimizer=RICH).fit()
    swapped = RICH | {"groups": dict(reversed(RICH["groups"].items()))}
    with pytest.raises(UserError, match=r"other groups of them: .* optimizer\.groups, changed"):
        tiny_trainer(tmp_path, 4, optimizer=swapped, allow_changes=True).fit()


def test_groups_have_the_rate_and_the_decay_of_the_first_pattern_that_matches():
    module = Two()
    config = OptimizerConfig(
        lr=1e-2,
        weight_decay=0.5,
        groups={
            "embed*": GroupConfig(lr=1e-3),
            "*.bias": GroupConfig(weight_decay=0.0),
            "head.*": GroupConfig(lr=2e-2, weight_decay=0.1),
        },
    )
    optimizer = make_optimizer(module, config)
    found = {
        id(p): (group["lr"], group["base_lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for p in group["params"]
    }
    assert found == {
        id(module.embed.weight): (1e-3, 1e-3, 0.5),
        id(module.head.bias): (1e-2, 1e-2, 0.0),
        id(module.head.weight): (2e-2, 2e-2, 0.1),
    }


def test_accumulated_batches_weigh_every_token_alike(tmp_path):
    """Three batches of unequal numbers of response tokens step as one batch of all."""

    def step_with(**loop: Any) -> dict[str, torch.Tensor]:
        directory = tmp_path / str(loop["accumulation"])
        trainer = tiny_trainer(directory, 1, dropout=0.0, epochs=1, **loop)
        progress = trainer.fit()
        assert progress.step == 1
        assert progress.tokens == sum(sum(sample.mask) for sample in tiny_samples())
        return trainer.module.state_dict()

    together, apart = step_with(tokens_per_batch=1000, accumulation=1), step_with(accumulation=3)
    # The bias of keys changes no attention: its gradient is rounding alone.
    del together["student.transformer.h.0.attn.c_attn.bias"]
    for name, tensor in together.items():
        # AdamW's first step is ±lr per weight whatever the gradient's size, so where the two sums
        # differ in their last bits around 0 the sign may turn; nowhere else.
        close = torch.isclose(tensor, apart[name], rtol=1e-4, atol=1e-6)
        assert close.float().mean() > 0.99, name


def test_more_accumulation_than_data_is_refused(tmp_path):
    with pytest.raises(UserError, match="accumulation is 1000, but an epoch has only 3"):
        tiny_trainer(tmp_path, 4, accumulation=1000).fit()


def test_a_pattern_that_matches_nothing_and_a_module_without_weights_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"'\*embed_tokens\*' matches no trained parameter.*wte"):
        tiny_trainer(tmp_path, 1, optimizer={"groups": {"*embed_tokens*": GroupConfig()}})
    with pytest.raises(UserError, match=r"'frozen\.\*' matches no trained"):
        make_optimizer(Two(), OptimizerConfig(groups={"frozen.*": GroupConfig(lr=1.0)}))
    with pytest.raises(UserError, match=r"'head\.weight' matches no"):  # an earlier one took it
        make_optimizer(
            Two(), OptimizerConfig(groups={"head*": GroupConfig(), "head.weight": GroupConfig()})
        )
    with pytest.raises(UserError, match="no parameter is trained"):
        make_optimizer(Two().requires_grad_(False), OptimizerConfig())


def test_an_average_over_three_steps_is_the_sum_by_hand():
    average = EMA([torch.tensor([1.0, 0.0])], decay=0.15)
    value = [1.0, 0.0]
    for step, weights in enumerate(([2.0, 1.0], [4.0, 0.0], [8.0, -1.0]), start=1):
        decay = (1 / 11, 0.15, 0.15)[step - 1]  # min(0.15, step / (step + 10)): 1/11, 2/12, 3/13
        value = [decay * a + (1 - decay) * w for a, w in zip(value, weights, strict=True)]
        average.update([torch.tensor(weights)], step)
    assert average.shards[0].tolist() == pytest.approx(value, rel=1e-6)


def test_the_average_is_measured_and_given_and_training_goes_on_without_it(tmp_path):
    name = "student.transformer.wte.weight"
    expected: list[torch.Tensor] = []
    measured: list[torch.Tensor] = []

    def measure(module: Any, weights: Any) -> dict[str, float]:
        measured.append(weights("student.")[name.removeprefix("student.")])
        assert torch.equal(module.state_dict()[name], measured[-1])
        return {"norm": measured[-1].norm().item()}

    def note(batch: Any) -> None:
        expected.append(trainer.module.state_dict()[name].clone())

    trainer = tiny_trainer(
        tmp_path, 3, optimizer=RICH, accumulation=1, hook=note, measure=measure, dropout=0.0
    )
    progress = trainer.fit()
    last = trainer.module.state_dict()[name]
    average = expected[0]
    for step, weights in enumerate([*expected[1:], last], start=1):
        decay = min(RICH["ema"], step / (step + 10))
        average = decay * average + (1 - decay) * weights
        # The same sums in another order of operations.
        torch.testing.assert_close(measured[step - 1], average, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(average, last, atol=1e-4)
    with trainer.final_weights():
        assert torch.equal(trainer.weights()[name], measured[-1])
    assert torch.equal(trainer.weights()[name], last)
    assert [row["norm"] for row in progress.dev] == [x.norm().item() for x in measured]

    plain = tiny_trainer(
        tmp_path / "plain", 3, optimizer=RICH | {"ema": None}, accumulation=1, dropout=0.0
    )
    plain.fit()
    assert torch.equal(plain.weights()[name], last)


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("constant", [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.25, 0.5, 0.75, 1, 1, 0.8, 0.6, 0.4, 0.2]),
        # cos of 0, 45, 90 and 135 degrees
        ("cosine", [0.25, 0.5, 0.75, 1, 1, 0.8828427, 0.6, 0.3171573, 0.2]),
    ],
)
def test_the_learning_rate_has_its_shape(schedule, factors):
    for warm_up in ({"warmup_steps": 4}, {"warmup_ratio": 0.5}):
        config = OptimizerConfig(**warm_up, schedule=schedule, min_lr_ratio=0.2)
        found = [learning_rate_factor(step, 8, config) for step in range(9)]
        assert found == pytest.approx(factors)


def test_the_learning_rate_is_logged_and_applied_as_the_schedule_has_it(tmp_path):
    trainer = tiny_trainer(tmp_path, 5, optimizer=RICH)
    progress = trainer.fit()
    config = OptimizerConfig(**RICH)
    expected = [config.lr * learning_rate_factor(step, 5, config) for step in range(5)]
    assert [row["lr"] for row in progress.history] == pytest.approx(expected)
    last = learning_rate_factor(4, 5, config)
    rates = sorted({group["lr"] for group in trainer.optimizer.param_groups})
    assert rates == pytest.approx([3e-3 * last, 1e-2 * last])


def test_steps_are_counted_with_the_rest_of_an_epoch_and_cut_by_the_most():
    assert steps_in(LoopConfig(epochs=3, accumulation=2), 5) == 9
    assert steps_in(LoopConfig(epochs=3, accumulation=2, max_steps=4), 5) == 4
    assert steps_in(LoopConfig(epochs=3, accumulation=2, max_steps=40), 5) == 9


def test_layers_that_are_computed_twice_give_the_same_loss_and_gradients():
    found = []
    for checkpointed in (False, True):
        torch.manual_seed(3)
        model = tiny_student(dropout=0.1).train()
        model.get_input_embeddings().requires_grad_(False)
        if checkpointed:  # as `train.stages.distill` does it
            checkpoint_layers(model)
        module = Distillation(model, WeightedLoss({"cross_entropy": 1.0}))
        passes: list[int] = []
        model.transformer.h[0].attn.register_forward_pre_hook(lambda *args, p=passes: p.append(1))
        batch = inputs(collate(tiny_samples(), 0), torch.device("cpu"))
        torch.manual_seed(4)  # dropout: the second pass must draw what the first did
        loss, _ = module(**batch)
        loss.backward()
        gradients = {n: p.grad for n, p in module.named_parameters() if p.requires_grad}
        found.append({"loss": loss.detach(), **gradients})
        assert len(passes) == 1 + checkpointed
    assert_equal(found[1], found[0])


# --- where time goes ------------------------------------------------------------------------------


def test_a_clock_counts_an_activity_inside_another_once(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("train.loop.trainer.time.perf_counter", lambda: now[0])

    def pass_time(seconds: float) -> None:
        now[0] += seconds

    clock = TrainingClock(torch.device("cpu"))
    assert clock.shares() == {}
    pass_time(100)  # outside of everything
    with clock("drafter"):
        pass_time(1)
        with clock("teacher"):
            pass_time(4)
            with suppress(KeyError), clock("text"):
                pass_time(2)
                raise KeyError
        pass_time(1)
    pass_time(100)
    with clock("teacher"):
        pass_time(8)
    clock.weight = 0  # steps that are not measured
    with clock("text"):
        pass_time(50)
    clock.weight = 5  # and the fifth, which counts for all of them
    with clock("data"):
        pass_time(0.25)
    clock.weight = 1
    assert clock.seconds == {"drafter": 2, "teacher": 12, "text": 2, "data": 1.25}
    assert sum(clock.shares().values()) == pytest.approx(1)
    assert clock.shares()["teacher"] == 12 / 17.25


def test_a_trainings_clock_goes_on_after_a_stop_and_fits_into_its_seconds(tmp_path):
    interrupted(tmp_path, 4, steps=4, save_every=1)
    stored = json.loads((tmp_path / "checkpoints/step-2/trainer.json").read_text("utf-8"))[
        "progress"
    ]
    progress = tiny_trainer(tmp_path, 4, measure=lambda module, weights: {}).fit()
    assert progress.clock.keys() == {"text", "data", "drafter", "dev"}
    for name, seconds in stored["clock"].items():
        assert progress.clock[name] > seconds or name == "text"
    assert progress.seconds > stored["seconds"]
    assert sum(progress.clock.values()) <= progress.seconds
    assert progress.tokens == sum(sum(s.mask[1:]) for s in tiny_samples()) * 2


# --- whole runs (promises 1, 7 and 12) ------------------------------------------------------------

CONFIG = """
name: tiny
output_dir: {base}/runs
seed: 5
threads: 1
trackers: []
target: {{model: {base}/target, dtype: float32, device: cpu}}
data: {{train: train.jsonl, test: train.jsonl, duplicates: keep}}
stages:
  - {{name: first, drafter: {{layers: [0]}}, {stage}}}
  - {{name: second, drafter: {{stage: first}}, {stage}}}
"""
STAGE = """
    kind: distill, lora: {r: 2, dropout: 0.1}, losses: {cross_entropy: 1.0},
    loop: {epochs: 2, tokens_per_batch: 150, save_every: 2}
"""


@pytest.fixture
def base(tmp_path, monkeypatch, unjudged) -> Path:
    """Two stages with dropout."""
    monkeypatch.setattr("draftsmith.cli.train.print_report", lambda run, report: None)
    save_tiny(tmp_path / "target", layers=2)
    rows = [
        {"id": f"r{i}", "prompt": "a dog " * (i % 3 + 1), "response": "it " * 9} for i in range(9)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    (tmp_path / "config.yaml").write_text(CONFIG.format(base=tmp_path, stage=STAGE), "utf-8")
    return tmp_path


def command(base: Path, *arguments: str) -> Result:
    """The command line, as in a process that has just begun."""
    begin_anew()
    scramble()
    return CliRunner().invoke(app, ["train", str(base / "config.yaml"), *arguments])


def drafter_of(base: Path, run: str, stage: str = "01-second") -> dict[str, Any]:
    return load_file(base / "runs" / run / "stages" / stage / "drafter" / "model.safetensors")


quiet = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing:FutureWarning"
)  # peft's affair


def interrupted_command(base: Path, name: str, stage: str, step: int, action: Any) -> Result:
    """A command with this action in a step of a stage, from 1."""
    original = Trainer._optimizer_step

    def acting(self: Any, at: Any, *arguments: Any) -> Any:
        if self.task.label == stage and at.step + 1 == step:
            action()
        return original(self, at, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_optimizer_step", acting)
        return command(base, f"name={name}")


@quiet
def test_an_interrupted_run_goes_on_to_the_same_weights(base):
    """Adapters begin at random and dropout goes on so, whatever the process did before, also where
    it was killed before the first checkpoint. SIGTERM ends the command with 143."""
    whole = command(base, "name=whole")
    assert whole.exit_code == 0, whole.output
    stopped = interrupted_command(base, "parts", "first", 2, ask_to_stop)
    assert stopped.exit_code == ExitStatus.STOPPED == 143
    assert "run the same command again to continue" in stopped.output
    assert not (base / "runs/parts/stages/01-second").exists()
    with pytest.raises(Killed):
        interrupted_command(base, "parts", "second", 2, die)
    assert command(base, "name=parts").exit_code == 0
    assert_equal(drafter_of(base, "parts"), drafter_of(base, "whole"))
    first = drafter_of(base, "whole", "00-first")
    assert any(not torch.equal(first[k], v) for k, v in drafter_of(base, "whole").items())


@quiet
def test_changed_settings_are_printed_and_refused_unless_they_are_allowed(base, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "fit", lambda self: die())
        with pytest.raises(Killed):
            command(base)
    changes = {
        "stages.second.optimizer.lr=0.5": "stages.second.optimizer.lr: 0.0003 → 0.5",
        "stages.second.loop.tokens_per_batch=99": "stages.second.loop.tokens_per_batch: 150 → 99",
        "evaluation.gamma=7": "evaluation.gamma: 4 → 7",
        "stages.first.lora.r=3": "stages.first.lora.r: 2 → 3",
    }
    refused = command(base, *changes)
    assert refused.exit_code == 2
    for line in changes.values():
        assert line in refused.output
    assert "--allow-changes" in refused.output
    allowed = command(base, *changes, "--allow-changes")
    assert allowed.exit_code == 0, allowed.output
    for line in changes.values():
        assert f"changed since the run began: {line}" in allowed.output
    assert command(base).exit_code == 2  # what was allowed is what the run is now


def test_a_compiler_that_fails_is_said_in_one_line() -> None:
    def broken(*_: Any) -> Any:
        raise AssertionError("Node mul_3 was invalid")

    model = torch.compile(nn.Linear(2, 2), backend=broken)
    with (
        pytest.raises(UserError, match=r"cannot compile this training .*mul_3.* dynamo_backend"),
        compiling(),
    ):
        model(torch.ones(1, 2))
