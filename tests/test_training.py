"""Promises 1 to 10 and 12 of the training loop, each with its fault put in, and what the loop does
between them: groups, averages, the learning rate's course, checkpointed layers, the clock.

What the artifact store promises by itself (every kill inside a write, every kind of damage) is
proven in test_artifact; here it is about going on to the same weights.
"""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate.checkpointing
import pytest
import torch
from safetensors.torch import save_file

from decode import artifact
from decode.artifact import verify_directory
from decode.errors import UserError
from tests.training import (
    OPTIMIZER,
    RICH,
    Lines,
    assert_equal,
    figures,
    forked,
    ids_of,
    left_behind,
    scramble,
    state_of,
    status_of,
    steps_kept,
    tiny_samples,
    tiny_trainer,
)
from train.stopping import Stopped

pytestmark = pytest.mark.usefixtures("fresh_accelerate")
ROOT = Path(__file__).parent.parent


class Killed(BaseException):
    """Stands for a kill: no handler of ours may catch it."""


def at_batch(number: int, action: Callable[[], object]) -> Callable[[Any], None]:
    """A hook that acts before the forward of the batch of this number, from 1."""
    seen: list[int] = []

    def hook(batch: Any) -> None:
        seen.append(1)
        if len(seen) == number:
            action()

    return hook


def die() -> None:
    raise Killed


def ask_to_stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def interrupted(directory: Path, batch: int, **settings: Any) -> None:
    """A training that dies before its batch of this number."""
    with pytest.raises(Killed):
        tiny_trainer(directory, hook=at_batch(batch, die), **settings).fit()
    scramble()


# --- exact resume (promises 1 and 2) --------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [OPTIMIZER, RICH], ids=["plain", "rich"])
def test_forty_steps_are_twenty_and_twenty_bit_by_bit(tmp_path, optimizer):
    """Dropout on, two batches a step; three batches an epoch, so that it stops within one."""
    torch.manual_seed(1)
    whole = tiny_trainer(tmp_path / "whole", 40, optimizer=optimizer)
    before = figures(whole.fit())

    torch.manual_seed(1)
    stopped = tiny_trainer(
        tmp_path / "parts", 40, optimizer=optimizer, hook=at_batch(31, ask_to_stop), save_every=100
    )
    with pytest.raises(Stopped, match="after step 21 of 40"):
        stopped.fit()
    scramble()
    second = tiny_trainer(tmp_path / "parts", 40, optimizer=optimizer)
    assert figures(second.fit()) == before
    assert_equal(state_of(second), state_of(whole))


def test_without_the_random_state_the_weights_would_differ(tmp_path):
    """That the test before can fail: dropout does draw on it."""
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        trainer = tiny_trainer(tmp_path / str(seed), 2)
        trainer.fit()
        found.append(trainer.module.state_dict()["student.transformer.wte.weight"])
    assert not torch.equal(*found)


def test_the_trace_of_sample_ids_goes_on_where_it_stopped(tmp_path):
    """A batch is a function of seed, epoch and place: there are no workers to lose their place."""
    whole: list[list[str]] = []
    tiny_trainer(tmp_path / "whole", 10, trace=whole, accumulation=1).fit()
    parts: list[list[str]] = []
    for batch in (5, 4):  # within the second epoch, and again within the third
        hook = at_batch(batch, ask_to_stop)
        with pytest.raises(Stopped):
            tiny_trainer(tmp_path / "parts", 10, trace=parts, hook=hook, accumulation=1).fit()
    tiny_trainer(tmp_path / "parts", 10, trace=parts, accumulation=1).fit()
    assert parts == whole
    names = sorted(sample.id for sample in tiny_samples())
    assert [sorted(ids_of(whole[i : i + 3])) for i in (0, 3, 6)] == [names] * 3
    assert len({tuple(ids_of(whole[i : i + 3])) for i in (0, 3, 6)}) == 3


def test_a_training_that_had_ended_is_not_trained_again(tmp_path):
    """A stage that was killed between its last checkpoint and its drafter comes here."""
    first = tiny_trainer(tmp_path, 4, optimizer=RICH)
    done = first.fit()
    again = tiny_trainer(tmp_path, 4, optimizer=RICH, hook=at_batch(1, die))
    assert vars(again.fit()) == vars(done)
    assert_equal(state_of(again), state_of(first))
    assert again.padding_share() == first.padding_share() > 0


# --- kills (promise 3) ----------------------------------------------------------------------------


def killed_at_change(n: int, action: Callable[[], object]) -> Callable[[], None]:
    """`action`, killed before its n-th change to the disk by way of `os`, or to a file by torch."""

    def run() -> None:
        left = n

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                nonlocal left
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return wrapped

        for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync"):
            setattr(os, name, counted(getattr(os, name)))
        torch.save = counted(torch.save)
        action()

    return run


def check_kills(directory: Path) -> None:
    """In a process that has computed nothing: kill, go on, compare; everything in forks."""

    def train(name: str) -> None:
        tiny_trainer(directory / name, 6, optimizer=RICH).fit()

    assert status_of(forked(lambda: train("whole"))) == 0
    begin = time.perf_counter()
    assert status_of(forked(lambda: train("whole-again"))) == 0
    duration = time.perf_counter() - begin
    whole = left_behind(directory / "whole")
    assert_equal(left_behind(directory / "whole-again"), whole)

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
    # Every third: three trainings' worth of neighbours are near enough, at a third of the time.
    for n in range(1, 1000, 3):
        name = f"boundary-{n}"
        status = status_of(forked(killed_at_change(n, lambda name=name: train(name))))
        if status == 0:
            break
        goes_on(name, status, kept)
        boundaries += 1
    assert kept == {0, 2, 4, 6}, kept

    by_chance = 0
    for trial in range(8):
        name = f"time-{trial}"
        pid = forked(lambda name=name: train(name))
        time.sleep(duration * (trial + 0.5) / 8)
        os.kill(pid, signal.SIGKILL)
        status = status_of(pid)
        if status != 0:
            goes_on(name, status, set())
            by_chance += 1
    print(f"boundaries {boundaries}, random {by_chance}")


@pytest.mark.slow
def test_killed_at_any_time_it_ends_with_the_same_weights(tmp_path):
    done = in_new_process(f"check_kills(Path({str(tmp_path)!r}))")
    boundaries, by_chance = map(int, re.findall(r"\d+", done.stdout))
    # Three saves of some 20 changes each, and the removal of the oldest.
    assert boundaries > 15
    assert by_chance >= 4


def in_new_process(call: str) -> subprocess.CompletedProcess[str]:
    """A call of this module in a process that forks: pytest itself may have threads."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"from pathlib import Path\nfrom tests.test_training import *\n{call}",
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


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
        file.write_bytes(data[: len(data) * int(how[:-1]) // 100])


def test_damage_to_any_file_is_named_and_the_checkpoint_before_is_taken(tmp_path, half_trained):
    """A missing random state included, without which training would go on otherwise."""
    torch.manual_seed(1)
    whole = tiny_trainer(tmp_path / "whole", 8, optimizer=RICH)
    expected = figures(whole.fit())
    newest = half_trained / "checkpoints" / "step-4"
    assert sorted(path.name for path in newest.iterdir()) == sorted(FILES)
    for name in FILES:
        for how in ("0%", "50%", "99%", "flip", "gone"):
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
            assert re.search(f"passing over a checkpoint: .*step-4 .*{name}", str(said)), (
                name,
                how,
            )
        trainer = tiny_trainer(copy, 8, optimizer=RICH)
        shutil.copytree(half_trained / "checkpoints/step-4", copy / "checkpoints/step-4")
        damage(copy / "checkpoints" / "step-4" / name, "flip")
        assert figures(trainer.fit()) == expected
        assert_equal(state_of(trainer), state_of(whole))


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


class FullDisk:
    """Fails from the n-th write on: a full disk stays full."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return function(*args, **kwargs)

        return wrapped


def test_a_full_disk_leaves_the_checkpoints_there_are(tmp_path, half_trained, monkeypatch):
    torch.manual_seed(1)
    whole = tiny_trainer(tmp_path / "whole", 8, optimizer=RICH)
    whole.fit()
    for n in range(1, 20):
        copy = tmp_path / f"full-{n}"
        shutil.copytree(half_trained, copy)
        disk = FullDisk(n)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "save", disk(torch.save))
            for module in ("accelerate.utils.other.safe_save_file", "train.optimizer.save_file"):
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
