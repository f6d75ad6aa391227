"""Whatever wraps or shards the module in training, the drafter that is written is the module.

The module is run on a batch at its end, in its engine. Then its files are read into a plain module
of the same stage, in a process of its own.
"""

import json
import os
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn

from decode.base.errors import UserError
from decode.model.loading import load_target
from distill.distillation_loss import Distillation
from distill.losses import WeightedLoss
from tests.stages import LOOP, make_stage, run_stage, stage_context
from tests.test_world_size import FSDP, alone_under_a_launcher
from tests.tiny import save_tiny
from tests.training import begin_anew, forked, in_new_process, status_of, tiny_student
from tests.training import tiny_trainer as trainer_of
from tests.training import two_ranks
from train.data.batches import collate, inputs
from train.loop.accelerator import launched_accelerator
from train.loop.trainer import Trainer

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

SETTINGS = {"loop": LOOP | {"max_steps": 3}, "optimizer": {"lr": 1e-2, "warmup_steps": 1}}
MEDUSA = {"kind": "heads", "heads": {"type": "medusa", "heads": 2}} | SETTINGS
SMALL = {"kind": "distill", "drafter": {"layers": [0]}} | SETTINGS
# Measured once, after the last step, which is then the best version.
DEV = {"every": 99, "decode_prompts": 2, "max_new_tokens": 4, "samples": 2}
KINDS: dict[str, dict[str, Any]] = {
    "distill": SMALL | {"dev": DEV, "loop": SETTINGS["loop"] | {"keep_best": True}},
    "heads": MEDUSA,
    "backbone": MEDUSA | {"backbone": {"lora": None}},
    "lora": SMALL | {"lora": {"r": 2}},
    "average": SMALL | {"optimizer": SETTINGS["optimizer"] | {"ema": 0.5}},
}
# Where the files of a stage belong in its module.
FILES = {
    "drafter/model.safetensors": "student.",
    "drafter/heads.safetensors": "heads.",
    "target/model.safetensors": "backbone.",
}
WRAPPED = {
    "plain": {},
    "dynamo": {"ACCELERATE_DYNAMO_BACKEND": "EAGER"},
    "regions": {
        "ACCELERATE_DYNAMO_BACKEND": "EAGER",
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "true",
    },
    "recomputed": {"FSDP_ACTIVATION_CHECKPOINTING": "true"},
}
ENGINES: dict[str, dict[str, str]] = {
    "one": {},
    "ddp": {},
    "fsdp2": FSDP,
    "zero3": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
}


def last_loss(trainer: Trainer) -> float:
    """The loss of the weights that are saved on the first samples, computed by the module itself."""
    torch.manual_seed(0)
    trainer.total_steps = 3  # of SETTINGS, before `fit` knows it
    samples = trainer.task.text.round(0, trainer.weights)
    batch = collate([samples[i] for i in range(4)], trainer.task.pad_id)
    with trainer.final_weights(), torch.no_grad():
        trainer.module.eval()
        tensors = inputs(batch, trainer.accelerator.device)
        loss, _ = trainer.task.step(trainer.module, tensors, batch["ids"])
        trainer.module.train()
    return float(loss)


def run_kind(base: Path, accelerator: Accelerator, place: Path, kind: str) -> None:
    target = load_target(str(base / "target"), dtype="float32", device="cpu")
    context = replace(stage_context(place, target), accelerator=accelerator)
    context.corpus.examples["test"] = context.corpus.examples["dev"]
    settings = dict(KINDS[kind])
    run_stage(context, make_stage(settings.pop("kind"), kind, **settings))


def train(base: Path, place: Path, kind: str, rank: int) -> None:
    """A rank's part: the stage, and the loss of its module before and after."""
    fit, found = Trainer.fit, []

    def measured(self: Trainer) -> Any:
        found.append(last_loss(self))
        progress = fit(self)
        found.append(last_loss(self))
        return progress

    Trainer.fit = measured  # type: ignore[method-assign]
    alone = "WORLD_SIZE" not in os.environ
    run_kind(base, Accelerator(cpu=True) if alone else launched_accelerator(cpu=False), place, kind)
    if rank == 0:
        (place / f"{kind}.json").write_text(json.dumps(found))


def read(base: Path, place: Path, kind: str) -> None:
    """The loss of a plain module with the weights that were written."""

    class Read(Exception):
        pass

    def filled(self: Trainer) -> Any:
        stored = {
            prefix + name: x
            for file, prefix in FILES.items()
            if (place / kind / file).exists()
            for name, x in load_file(place / kind / file).items()
        }
        with torch.no_grad():
            for name, p in self.task.module.named_parameters():
                own = name.replace("base_layer.", "").replace("heads.heads.", "heads.")
                if "lora_" not in name:  # new adapters are nothing
                    p.copy_(stored[own])
        self.average = None
        (place / f"{kind}-read.json").write_text(json.dumps(last_loss(self)))
        raise Read

    Trainer.fit = filled  # type: ignore[method-assign]
    try:
        run_kind(base, Accelerator(cpu=True), place / "again", kind)
    except Read:
        return
    raise AssertionError


def check(base: Path, place: Path, engine: str, wrapped: str, kinds: list[str]) -> None:
    """In a process that has computed nothing."""
    warnings.simplefilter("ignore")
    if status_of(forked(lambda: save_tiny(base / "target"))) != 0:
        raise AssertionError
    os.environ |= ENGINES[engine] | WRAPPED[wrapped]
    for kind in kinds:
        if engine == "one":
            found = [status_of(forked(partial(train, base, place, kind, 0)))]
        else:
            found = two_ranks(partial(train, base, place, kind))
        assert not any(found), (kind, found)
    for name in {*ENGINES[engine], *WRAPPED[wrapped]}:
        del os.environ[name]
    for kind in kinds:
        assert status_of(forked(partial(read, base, place, kind))) == 0, kind


# What is trained, in one cell of each kind of wrapping.
CELLS = [("one", "dynamo"), ("fsdp2", "recomputed")]
MORE = [
    *(("one", x) for x in ("plain", "regions")),
    *(("ddp", x) for x in ("plain", "dynamo", "regions")),
    *(("fsdp2", x) for x in ("plain", "dynamo", "regions")),
    *(("zero3", x) for x in ("plain", "dynamo", "regions")),
]
FEW = ["distill", "backbone"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("engine", "wrapped", "kinds"),
    [
        *((*cell, FEW) for cell in CELLS),
        *(
            pytest.param(*cell, [x for x in KINDS if x not in FEW], marks=pytest.mark.thorough)
            for cell in CELLS
        ),
        *(pytest.param(*cell, list(KINDS), marks=pytest.mark.thorough) for cell in MORE),
    ],
)
def test_the_written_drafter_is_the_module_of_the_last_step(
    tmp_path: Path, engine: str, wrapped: str, kinds: list[str]
) -> None:
    if engine == "zero3":
        pytest.importorskip("deepspeed")
        # Under DeepSpeed the forward pass has the last weights, not their average.
        kinds = [x for x in kinds if x != "average"]
    place = tmp_path / "stages"
    place.mkdir()
    call = f"check(Path({str(tmp_path)!r}), Path({str(place)!r}), {engine!r}, {wrapped!r}, {kinds})"
    in_new_process(__name__, call)
    for kind in kinds:
        first, last = json.loads((place / f"{kind}.json").read_text())
        written = json.loads((place / f"{kind}-read.json").read_text())
        assert abs(last - first) > 0.01 * abs(first), kind
        assert written == pytest.approx(last, rel=1e-4), kind
