"""What each rank of tests/test_engines.py runs: checks of the engine, a run that is killed, and the
plain command, which goes on."""

import copy
import gc
import json
import os
import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor

import train.report.plots
import train.run.run
from distill.distillation_loss import Distillation
from distill.losses import WeightedLoss
from draftsmith.cli.main import app
from tests.tiny import tiny_llama
from tests.training import forked, status_of
from train.loop import parallel
from train.loop.optimizer_step import take_step
from train.loop.rank_weights import RankWeights
from train.loop.trainer import Trainer
from train.settings.optimizer_config import OptimizerConfig


def probe(accelerator: Accelerator) -> dict[str, Any]:
    """Five steps with two learning rates and an average of the weights kept in shards.

    The figures must come out the same whatever the engine and the number of ranks.
    """
    student = tiny_llama(layers=2)
    plain = copy.deepcopy(student)
    module: Any = Distillation(student, WeightedLoss({"cross_entropy": 1.0}))
    trained = dict(module.named_parameters())
    slow = [p for name, p in trained.items() if "layers.0" in name]
    fast = [p for name, p in trained.items() if "layers.0" not in name]
    module.student.model.layers[0].mlp.requires_grad_(False)
    groups = [
        {"params": [p for p in slow if p.requires_grad], "lr": 1e-4, "base_lr": 1e-4},
        {"params": fast, "lr": 1e-2, "base_lr": 1e-2},
    ]
    config = OptimizerConfig(clip=0.5, warmup_steps=0, schedule="constant")
    door = RankWeights(accelerator, module)
    module, optimizer = parallel.prepare(accelerator, module, torch.optim.AdamW(groups), clip=0.5)
    door.follow(module)
    clip = partial(parallel.clip_gradients, accelerator, module)
    average = [share.clone() for share in door.local()]
    held = sum(share.numel() for share in average)
    rank, world = accelerator.process_index, accelerator.num_processes
    generator = torch.Generator().manual_seed(0)
    norms = []
    for step in range(6):
        for batch in range(2):
            ids = torch.randint(3, 300, (4, 9), generator=generator)
            mask = torch.ones_like(ids)
            with parallel.batch_context(accelerator, module, last=batch == 1):
                loss, _ = module(ids[rank::world], mask[rank::world], mask[rank::world].bool())
                # The last step's gradient is not finite, so it must change nothing.
                scale = float("nan") if step == 5 else world / 64
                parallel.backward(accelerator, module, loss * scale)
        norms.append(take_step(optimizer, config, step=step, total=6, clip=clip)[0])
        if step < 5:
            for share, now in zip(average, door.local(), strict=True):
                share.lerp_(now, 0.5)
    resident = sum(
        (p.to_local() if isinstance(p, DTensor) else p).numel()
        for p in accelerator.unwrap_model(module).parameters()
        if p.requires_grad
    )
    with torch.no_grad():  # leaves weights gathered under FSDP2
        module(ids, mask, mask.bool())
    assert door.changed()
    weights = door.gathered("student.", frozen=False)
    with door.exchanged(average):
        averaged = door.gathered("student.", frozen=False)
    again = door.gathered("student.")
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    # Every rank has them, and with those that are frozen they make the model.
    assert again.keys() == dict(plain.named_parameters()).keys()
    frozen = plain.model.layers[0].mlp.state_dict(prefix="model.layers.0.mlp.")
    assert again.keys() - weights.keys() == frozen.keys()
    assert all(torch.equal(again[name], x) for name, x in frozen.items())
    mine = door.gathered("student.", everywhere=False)
    assert mine.keys() == (again.keys() if accelerator.is_main_process else set())
    accelerator.free_memory()
    total = sum(x.numel() for x in weights.values())
    return {
        "engine": accelerator.distributed_type.value,
        "world": world,
        "share": held / total,
        "resident": resident / total,
        "norms": norms,
        "weights": weights,
        "averaged": averaged,
    }


def check_and_train(config: str, die_at: int, found: Path) -> None:
    """Check the engine, then run the config. die_at: the step before which to die (0: none).
    found: where each rank leaves what it found."""
    execute, step = train.run.run.Run.execute, Trainer._optimizer_step
    taken = [0]

    def checked(self: Any) -> Any:
        torch.save(probe(self.accelerator), found / f"{self.accelerator.process_index}.pt")
        return execute(self)

    def dying(self: Any, *args: Any) -> Any:
        taken[0] += 1
        if taken[0] == die_at:
            self.accelerator.wait_for_everyone()
            os._exit(9)
        return step(self, *args)

    train.run.run.Run.execute, Trainer._optimizer_step = checked, dying  # type: ignore[method-assign]
    app(["train", config, "threads=1"])


def main() -> None:
    """A rank's two lives: one that is checked and dies, in a fork, and the plain command."""
    config, die_at, found, stage, port = sys.argv[1:]
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        import deepspeed

        # Its own collectives for CPUs are compiled first, for most of a minute, and spin while they
        # wait. Without them it takes those of torch, as on GPUs.
        deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    gc.freeze()  # as tests/conftest.py does
    train.report.plots.can_plot = lambda: False  # as tests/conftest.py does

    def first_life() -> None:
        # The engine must not depend on whether accelerate was told that this is a CPU.
        os.environ["ACCELERATE_USE_CPU"] = "true"
        check_and_train(config, int(die_at), Path(found))

    died = status_of(forked(first_life))
    assert died == 9, died
    checkpoints = Path(stage, "checkpoints")
    kept = sorted(str(path.relative_to(checkpoints)) for path in checkpoints.glob("step-*/**/*"))
    (Path(found) / f"kept-{os.environ['RANK']}.json").write_text(json.dumps(kept), "utf-8")
    # The launcher's store still knows the ranks that died.
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": port}
    sys.argv[1:] = [config, "threads=1"]
    runpy.run_module("train", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
