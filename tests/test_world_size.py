"""A training that goes on with another number of ranks, and ranks that do not share a disk.

Without dropout all numbers of ranks train the same, up to the order of sums.
"""

import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from decode.errors import UserError
from decode.measure.ranks import Ranks
from tests.training import (
    RICH,
    Lines,
    at_batch,
    die,
    forked,
    in_new_process,
    status_of,
    tiny_trainer,
    two_ranks,
)
from train.shared_disk import require_shared
from train.training import parallel
from train.training.checkpoint import Checkpoints

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}
# Total steps, and the step in which a broken training dies; its newest checkpoint is of step 2.
STEPS, DIE_IN = 6, 3
KEY_BIAS = "student.transformer.h.0.attn.c_attn.bias"


def alone_under_a_launcher() -> dict[str, str]:
    """The environment of the only rank of a launch."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return names | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def train(directory: Path, engine: str, rank: int, *, breaks: bool, **settings: Any) -> None:
    """A rank's part of a training. The first one leaves the figures, the weights that a drafter is
    made of, and a number that each batch drew (as heads draw which of them to train)."""
    os.environ |= FSDP if engine == "fsdp2" else {}
    accelerator = Accelerator(cpu=True) if engine == "ddp" else parallel.start(cpu=False)
    torch.manual_seed(1)
    drawn: list[float] = []
    dies = at_batch(DIE_IN if breaks else 0, die)

    def hook(batch: Any) -> None:
        drawn.append(float(torch.rand(())))
        dies(batch)

    trainer = tiny_trainer(
        directory,
        STEPS,
        dropout=0.0,
        optimizer=RICH,
        accumulation=1,
        hook=hook,
        accelerator=accelerator,
        **settings,
    )
    progress = trainer.fit()
    weights = trainer.drafter_weights()
    (directory / f"drawn-{rank}.json").write_text(json.dumps(drawn))
    if rank == 0:
        save_file(weights, directory / "weights.safetensors")
        (directory / "history.json").write_text(json.dumps(progress.history))


def ranks(count: int, directory: Path, engine: str, **settings: Any) -> list[int]:
    """What the ranks end with."""
    if count == 2:
        return two_ranks(lambda rank: train(directory, engine, rank, **settings))

    def alone() -> None:
        if engine == "fsdp2":
            os.environ |= alone_under_a_launcher()
        train(directory, engine, 0, **settings)

    return [status_of(forked(alone))]


def check_world_sizes(base: Path) -> None:
    assert ranks(1, base / "unbroken", "ddp", breaks=False) == [0]
    expected = load_file(base / "unbroken/weights.safetensors")
    history = json.loads((base / "unbroken/history.json").read_text())
    drawn = json.loads((base / "unbroken/drawn-0.json").read_text())
    for engine in ("ddp", "fsdp2"):
        for first, second in ((2, 1), (1, 2)):
            directory = base / f"{engine}-{first}-{second}"
            assert ranks(first, directory, engine, breaks=True) == [1] * first
            if second == 2:
                refused = ranks(second, directory, engine, breaks=False)
                assert refused == [2, 2]
            settings = {"breaks": False, "allow_changes": True}
            assert ranks(second, directory, engine, **settings) == [0] * second
            found = json.loads((directory / "history.json").read_text())
            assert len(found) == STEPS
            for entry, wanted in zip(found, history, strict=True):
                assert entry == pytest.approx(wanted, rel=1e-4), (engine, first)
            weights = load_file(directory / "weights.safetensors")
            assert weights.keys() == expected.keys()
            # The bias of keys changes no attention: its gradient is rounding alone, which Adam
            # takes for a direction.
            del weights[KEY_BIAS]
            for name, tensor in weights.items():
                torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)
            # All ranks draw what one that was never broken draws.
            for rank in range(second):
                numbers = json.loads((directory / f"drawn-{rank}.json").read_text())
                assert numbers == drawn[DIE_IN - 1 :]


@pytest.mark.slow
def test_ddp_and_fsdp2_go_on_with_another_number_of_ranks(tmp_path):
    done = in_new_process(__name__, f"check_world_sizes(Path({str(tmp_path)!r}))")
    refusal = (
        r"UserError: .*step-2 was made by 1 ranks under (NO|FSDP), not 2 ranks.*--allow-changes"
    )
    assert len(re.findall(refusal, done.stderr)) == 4


@pytest.mark.parametrize(
    ("before", "now", "advice"),
    [
        (("DEEPSPEED", 2), ("DEEPSPEED", 4), "one of DeepSpeed by the same number only"),
        (("FSDP", 2), ("FSDP", 4), "fsdp_state_dict_type to SHARDED_STATE_DICT"),
        (("FSDP", 2), ("NO", 1), "another number of ranks of that engine"),
    ],
)
def test_shards_that_others_cannot_read_are_refused_by_name(tmp_path, before, now, advice):
    """Also with --allow-changes."""
    checkpoints = Checkpoints(Accelerator(cpu=True), tmp_path, Lines(), keep=2, allow_changes=True)
    (engine, count), (stored_engine, stored_count) = now, before
    checkpoints._made_with = lambda: {"ranks": count, "engine": engine}  # type: ignore[method-assign]
    with pytest.raises(UserError, match=advice) as caught:
        checkpoints._require_same({"ranks": stored_count, "engine": stored_engine}, tmp_path)
    assert f"Launch {stored_count} ranks under {stored_engine} again" in str(caught.value)


# --- disks ----------------------------------------------------------------------------------------


def check_disks(base: Path) -> None:
    """Two ranks on one disk, then each on its own."""

    def part(rank: int) -> None:
        accelerator = Accelerator(cpu=True)
        both = Ranks.of(accelerator)
        require_shared(base / "shared", both)
        apart = base / f"disk-{rank}"
        with pytest.raises(UserError, match="output_dir") as caught:
            require_shared(apart, both, patience=0.2)
        (base / f"said-{rank}").write_text(str(caught.value))

    for name in ("shared", "disk-0", "disk-1"):
        (base / name).mkdir()
    assert two_ranks(part) == [0, 0]


@pytest.mark.slow
def test_ranks_that_do_not_share_the_runs_directory_are_told_so(tmp_path):
    in_new_process(__name__, f"check_disks(Path({str(tmp_path)!r}))")
    said = [(tmp_path / f"said-{rank}").read_text() for rank in (0, 1)]
    assert said[0] == said[1]
    machine = re.escape(socket.gethostname())
    first, second = (re.escape(str(tmp_path / f"disk-{rank}")) for rank in (0, 1))
    assert re.search(f"directory {first} of rank 0 on {machine}: rank 1 on {machine}", said[0])
    assert re.search(f"with {second} .it does not see the files of rank 0", said[0])
    # Nothing is left behind.
    assert not list(tmp_path.glob("shared/.*"))
    assert not list(tmp_path.glob("disk-*/.*"))


def test_one_process_shares_with_nobody(tmp_path):
    require_shared(tmp_path / "missing", Ranks())
