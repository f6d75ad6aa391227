"""A training that goes on with another number of ranks, and ranks that do not share a disk.

Without dropout all numbers of ranks train the same, up to the order of sums.
"""

import json
import os
import re
import socket
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from decode.base.errors import UserError
from distill.losses import WeightedLoss
from distill.row_numbers import row_numbers
from distill.student_settings import ParallelConfig
from distill.students.parallel_student import ParallelDistillation
from heads.head_training import HeadTraining
from heads.heads_directory import new_heads
from heads.options import HeadOptions
from tests.test_block_drafters import target
from tests.test_distill import batch_of
from tests.test_pard import MASK, masked
from tests.tiny import tiny_llama
from tests.trained_heads import features_of
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
from train.base.shared_disk import require_shared
from train.loop import parallel
from train.loop.accelerator import launched_accelerator
from train.loop.checkpoint import Checkpoints
from train.measure.ranks import Ranks

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
    accelerator = Accelerator(cpu=True) if engine == "ddp" else launched_accelerator(cpu=False)
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
    (directory / f"drawn-{rank}.json").write_text(json.dumps(drawn), "utf-8")
    if rank == 0:
        save_file(weights, directory / "weights.safetensors")
        (directory / "history.json").write_text(json.dumps(progress.history), "utf-8")


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
    history = json.loads((base / "unbroken/history.json").read_text("utf-8"))
    drawn = json.loads((base / "unbroken/drawn-0.json").read_text("utf-8"))
    for engine in ("ddp", "fsdp2"):
        for first, second in ((2, 1), (1, 2)):
            directory = base / f"{engine}-{first}-{second}"
            assert ranks(first, directory, engine, breaks=True) == [1] * first
            if second == 2 or engine == "ddp":
                refused = ranks(second, directory, engine, breaks=False)
                assert refused == [2] * second
            settings = {"breaks": False, "allow_changes": True}
            assert ranks(second, directory, engine, **settings) == [0] * second
            # Where every rank has all of the average, one writes it.
            written = {x.name for x in directory.glob("checkpoints/*/average*")}
            assert written == {"average" if engine == "fsdp2" else "average-0.safetensors"}
            found = json.loads((directory / "history.json").read_text("utf-8"))
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
                numbers = json.loads((directory / f"drawn-{rank}.json").read_text("utf-8"))
                assert numbers == drawn[DIE_IN - 1 :]


@pytest.mark.slow
def test_ddp_and_fsdp2_go_on_with_another_number_of_ranks(tmp_path):
    done = in_new_process(__name__, f"check_world_sizes(Path({str(tmp_path)!r}))")
    refusal = (
        r"UserError: .*step-2 was made by 1 ranks under (NO|FSDP), not 2 ranks.*--allow-changes"
    )
    assert len(re.findall(refusal, done.stderr)) == 4
    assert done.stderr.count("was made by 2 ranks under MULTI_") == 1


# --- random numbers of a step ---------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "eagle1": {"noise": 2.0},
    "p_eagle": {"tokens": 4, "layers": 1, "captured_layers": [0, 2]},
    "pass": {"tokens": 3},
    "dflash": {"block": 4, "layers": 1, "taps": [2], "anchors": 4},
}


def gradients(kind: str, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Of a first step's loss, with what training draws."""
    torch.manual_seed(3)
    if kind == "pard":
        parallel = ParallelConfig(tokens=4, keep=0.5, place_smoothing=0.5)
        student, text = masked(tiny_llama(seed=1, layers=1)), WeightedLoss({"cross_entropy": 1.0})
        loss, _ = ParallelDistillation(student, text, parallel, MASK).train()(**batch)
        return list(torch.autograd.grad(loss, list(student.parameters())))
    model = target().model
    heads = new_heads(HeadOptions.of({"type": kind} | KINDS[kind]), target(), None)
    heads.borrow(model, torch.float32)
    losses = WeightedLoss({"cross_entropy": 0.1, "total_variation": 1.8})
    module = HeadTraining(heads, losses, model, smoothing=None if kind == "eagle1" else 0.5)
    ids, mask = batch["input_ids"], batch["loss_mask"]
    features = features_of(model, heads, ids)
    loss, _ = module.train()(ids, mask, features, heads.loss_weights(0.5))
    return list(torch.autograd.grad(loss, list(heads.parameters()), allow_unused=True))


@pytest.mark.parametrize("kind", ["pard", *KINDS])
def test_ranks_draw_what_one_rank_draws_for_the_same_rows(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank with the short rows has less padding than both together."""
    batch = batch_of([(4, 40), (3, 15), (5, 30), (9, 8)])
    whole = gradients(kind, batch)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)

    def summed(world: int) -> list[torch.Tensor]:
        monkeypatch.setattr("torch.distributed.get_world_size", lambda: world)
        parts = []
        for rank in (0, 1):
            monkeypatch.setattr("torch.distributed.get_rank", partial(int, rank % world))
            rows = {name: x[rank::2] for name, x in batch.items()}
            width = int(rows["attention_mask"].sum(1).amax())
            parts.append(gradients(kind, {name: x[:, :width] for name, x in rows.items()}))
        return [a + b for a, b in zip(*parts, strict=True)]

    for found, expected in zip(summed(2), whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    # As if each rank were alone, the second one would draw the numbers of other rows.
    alone = zip(summed(1), whole, strict=True)
    assert any((found - expected).abs().max() > 1e-3 for found, expected in alone)


def test_the_numbers_of_a_row_are_its_own_at_each_step() -> None:
    torch.manual_seed(0)
    first, second = row_numbers(3, 50), row_numbers(3, 50)
    assert len({*first.flatten().tolist(), *second.flatten().tolist()}) == 300
    torch.manual_seed(0)
    assert torch.equal(row_numbers(2, 40, dtype=torch.float32), first[:2, :40].float())
    assert torch.equal(row_numbers(3, 9, training=False), row_numbers(4, 9, training=False)[:3])


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
    checkpoints = Checkpoints(
        Accelerator(cpu=True), tmp_path, Lines(), keep=2, trained=[], allow_changes=True
    )
    (engine, count), (stored_engine, stored_count) = now, before
    checkpoints._made_with = lambda: {"ranks": count, "engine": engine}  # type: ignore[method-assign]
    with pytest.raises(UserError, match=advice) as caught:
        checkpoints._require_same({"ranks": stored_count, "engine": stored_engine}, tmp_path)
    assert f"Launch {stored_count} ranks under {stored_engine} again" in str(caught.value)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_model_that_will_be_shards_is_never_whole_on_a_device(sharded: bool) -> None:
    module, device = torch.nn.Linear(2, 2), torch.device("meta")
    accelerator: Any = SimpleNamespace(is_fsdp2=sharded, device=device)
    parallel.place(accelerator, module)
    assert module.weight.device.type == ("cpu" if sharded else "meta")


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
        (base / f"said-{rank}").write_text(str(caught.value), "utf-8")

    for name in ("shared", "disk-0", "disk-1"):
        (base / name).mkdir()
    assert two_ranks(part) == [0, 0]


@pytest.mark.slow
def test_ranks_that_do_not_share_the_runs_directory_are_told_so(tmp_path):
    in_new_process(__name__, f"check_disks(Path({str(tmp_path)!r}))")
    said = [(tmp_path / f"said-{rank}").read_text("utf-8") for rank in (0, 1)]
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
