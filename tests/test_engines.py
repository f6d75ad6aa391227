"""Two ranks under every engine train what one rank trains, and go on after being killed.

Each engine is launched once: its ranks die in the second training, and then run the plain command,
which goes on from there. The figures are those of one process.
"""

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from decode.base.install_command import install_command
from tests.tiny import VOCAB, save_tiny, write_rows
from tests.training import in_new_process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parent.parent
WORDS = ["the", "a", "dog", "fox", "sea", "shell", "target", "drafter", "token", "sells", "jumps"]
# These make a new target.
NEW_TARGETS = ("both", "tuned", "skip")
# PARD's loss is a mean over the predictions of a batch, and of a rank's share of it. So its figures
# are near those of one process, and its weights are not compared.
SHARED_MEAN = "pard"
# In these every step is clipped.
CLIPPED = ("tied", "reduced", "frozen")
# The other engines train these. FSDP2, which hides most from a module, trains all kinds; DDP is
# under test_run, test_training and test_world_size too.
FEW = ("tied", "reduced", "frozen", "own", "medusa", "both")
# Every step is clipped: the gradients of tiny models are larger than 0.5.
CLIP = 0.5

# Of each stage: its loop, optimizer and dev figures, unless it has others.
LOOP: dict[str, Any] = {"max_steps": 4, "tokens_per_batch": 120, "log_every": 1}
SHORT = LOOP | {"max_steps": 2}
ACCUMULATED = LOOP | {"accumulation": 2}
OPTIMIZER: dict[str, Any] = {"lr": 3e-3, "warmup_steps": 2, "clip": 0.1}
CLIPS = OPTIMIZER | {"warmup_steps": 5, "clip": CLIP}
DEV = {"text": "data", "samples": 3, "every": 2, "decode_prompts": 2, "gamma": 2}
DEV |= {"max_new_tokens": 6}
TREE = {"nodes": 3, "width": 2, "prompts": 2, "max_new_tokens": 6}
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "sampling": {"temperature": 0}}
KL, BOTH = {"forward_kl": 1.0}, {"forward_kl": 1.0, "cross_entropy": 0.1}
BACKBONE = {
    "lora": {"r": 4, "dropout": 0.0},
    "losses": {"forward_kl": 0.5, "cross_entropy": 0.5},
    "ramp": 0.5,
}
BLOCKS: dict[str, Any] = {"layers": 2, "taps": [0, 2]}
NORMS, TRAINED = {"fc_norm": True, "norm_output": True}, {"embeddings": "trained"}


def of_heads(kind: str, options: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return {"kind": "heads", "heads": {"type": kind} | options, **settings}


def of_lm(*layers: int, **settings: Any) -> dict[str, Any]:
    return {"kind": "distill", "drafter": {"layers": list(layers)}, **settings}


# Nothing is drawn in the later stages (keep: 1.0, no dropout): what a rank draws depends on its
# share of a batch.
STAGES: dict[str, dict[str, Any]] = {
    "tied": of_lm(0, loop=LOOP | {"epochs": 99, "max_steps": 8, "save_every": 8}, optimizer=CLIPS),
    "reduced": of_lm(
        1,
        draft_vocabulary=120,
        losses=BOTH,
        loop=ACCUMULATED | {"epochs": 99, "max_steps": 10, "save_every": 6},
        optimizer=CLIPS,
    ),
    "frozen": {
        "kind": "distill",
        "drafter": {"stage": "reduced"},
        "train_embeddings": False,
        "loop": LOOP | {"epochs": 99},
        "optimizer": CLIPS | {"ema": 0.5},
    },
    "own": of_lm(
        0,
        lora={"r": 4},
        on_policy=GREEDY | {"fraction": 0.5, "samples": 6, "drafter": "none"},
        dev=DEV,
        optimizer=OPTIMIZER | {"clip": CLIP},
    ),
    "medusa": of_heads(
        "medusa", {"heads": 2}, draft_vocabulary=120, losses=BOTH, dev=DEV, tree=TREE
    ),
    "blockwise": of_heads("blockwise", {"k": 3}, loop=ACCUMULATED),
    "both": of_heads("medusa", {"heads": 2}, start="medusa", backbone=BACKBONE, dev=DEV),
    "tuned": of_heads(
        "blockwise",
        {"k": 3, "sub_loss": "mean"},
        draft_vocabulary=120,
        backbone={"lora": None},
        loop=ACCUMULATED,
        optimizer=OPTIMIZER | {"ema": 0.5},
    ),
    "eagle1": of_heads("eagle1", {"depth": 2, "noise": 0.0}, losses={"forward_kl": 0.1}),
    "eagle3": of_heads("eagle3", {"steps": 3}, draft_vocabulary=120, losses=KL, dev=DEV),
    "hydra": of_heads("hydra", {"heads": 2}),
    "hydra_plus": of_heads("hydra_plus", {"heads": 2, "layers": 2}, losses=KL),
    "eagle31": of_heads("eagle3", {"steps": 2} | NORMS, losses=KL, loop=SHORT),
    "mtp": of_heads("mtp", {"depth": 2}, losses=KL, loop=SHORT),
    "p_eagle": of_heads("p_eagle", {"tokens": 3, "layers": 2, "keep": 1.0} | TRAINED, loop=SHORT),
    "dflash": of_heads("dflash", BLOCKS | {"block": 4}, loop=SHORT),
    "dspark": of_heads(
        "dspark",
        BLOCKS | {"block": 3, "rank": 8},
        losses={"cross_entropy": 0.1, "total_variation": 1.8},
        place_smoothing=0.5,
        loop=SHORT,
    ),
    "dflash2": of_heads(
        "dflash2", BLOCKS | {"block": 4, "rank": 8}, place_smoothing=0.5, loop=SHORT
    ),
    "kangaroo": of_heads("kangaroo", {"exit_layer": 2, "depth": 2}, losses=KL, loop=SHORT),
    "pass": of_heads("pass", {"tokens": 2, "keep": 1.0}, loop=SHORT),
    "pard": of_lm(0, parallel={"tokens": 3, "keep": 1.0}, loop=SHORT),
    "skip": {"kind": "layer_skip", "exit_layer": 3, "layer_dropout": 0.0, "loop": SHORT},
}


def config(base: Path, name: str, few: bool = False) -> Path:
    """A run of this name with all stages, or with FEW."""
    stages = [
        {"name": stage, "loop": LOOP, "optimizer": OPTIMIZER} | own
        for stage, own in STAGES.items()
        if stage in FEW or not few
    ]
    data = {"train": "train.jsonl", "dev": "test.jsonl", "test": "test.jsonl"}
    settings = {
        "name": name,
        "output_dir": str(base / "runs"),
        "trackers": [],
        "target": {"model": str(base / "target"), "dtype": "float32", "device": "cpu"},
        "data": data | {"duplicates": "keep"},
        "evaluation": {"stages": [], "baselines": []},
        "stages": stages,
    }
    path = base / f"config-{name}.yaml"
    path.write_text(json.dumps(settings), "utf-8")
    return path


# 8 steps of the first training and 9 of the second, whose newest checkpoint is then step 6.
DIE_BEFORE = 18

LAUNCH = """
compute_environment: LOCAL_MACHINE
use_cpu: false
num_machines: 1
num_processes: 2
machine_rank: 0
"""
# engine → its part of the accelerate config; what accelerate must then say it runs; a rank's share
# of the trained float32 weights; the share that its module holds between steps; a file that only
# this engine's checkpoints have. Without the last four, DDP passes for any of them.
ENGINES: dict[str, tuple[str, str, float, float, str]] = {
    "ddp": (
        "mixed_precision: 'no'\ndistributed_type: MULTI_GPU\n",
        "MULTI_CPU",
        1.0,
        1.0,
        "model.safetensors",
    ),
    "fsdp2": (
        "mixed_precision: 'no'\ndistributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n"
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
        "  fsdp_state_dict_type: SHARDED_STATE_DICT\n",
        "FSDP",
        0.5,
        0.5,
        "pytorch_model_fsdp_0/.metadata",
    ),
    "zero2": (
        "distributed_type: DEEPSPEED\n"
        "deepspeed_config:\n  deepspeed_config_file: {base}/zero2.json\n",
        "DEEPSPEED",
        0.5,
        1.0,
        "pytorch_model/mp_rank_00_model_states.pt",
    ),
    "zero3": (
        "distributed_type: DEEPSPEED\n"
        "deepspeed_config:\n  deepspeed_config_file: {base}/zero3.json\n",
        "DEEPSPEED",
        0.5,
        0.0,
        "pytorch_model/zero_pp_rank_1_mp_rank_00_model_states.pt",
    ),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target and its data, with what one process makes of them."""
    base = tmp_path_factory.mktemp("engines")
    # Some ids are no tokens, for masks.
    save_tiny(base / "target", "llama", layers=7, vocab=VOCAB + 4)
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 24), ("test", 2)):
        rows = []
        for i in range(count):
            drawn = torch.randint(len(WORDS), (8 + i % 5,), generator=generator).tolist()
            words = [WORDS[word] for word in drawn]
            row = {"prompt": " ".join(words[:3]), "reference": " ".join(words[3:])}
            rows.append({"id": f"{split}-{i}"} | row)
        write_rows(base / f"{split}.jsonl", rows)
    for stage in (2, 3):
        # Threshold 0: ZeRO-3 would otherwise leave parameters as small as these whole.
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        (base / f"zero{stage}.json").write_text(json.dumps({"zero_optimization": zero}), "utf-8")
    alone, left = str(config(base, "one")), str(found(base, "one"))
    in_new_process("tests.engine_worker", f"check_and_train({alone!r}, 0, Path({left!r}))")
    return base


def found(base: Path, engine: str) -> Path:
    directory = base / "found" / engine
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def launch(base: Path, engine: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Both ranks with these arguments, and another port that is free."""
    settings = base / f"{engine}.yaml"
    settings.write_text(LAUNCH + ENGINES[engine][0].format(base=base), "utf-8")
    with socket.socket() as one, socket.socket() as other:
        one.bind(("", 0))
        other.bind(("", 0))
        port, second = (str(free.getsockname()[1]) for free in (one, other))
    command = f"{sys.executable} -m accelerate.commands.launch --main_process_port {port}"
    return subprocess.run(
        [*command.split(), "--config_file", str(settings), *arguments, second],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )


def largest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name].double() - b[name].double()).abs().max().item() for name in b)


def weight_files(stage: Path) -> list[str]:
    """Of its drafter, and of its new target, if it made one."""
    found = (stage.glob(f"{part}/*.safetensors") for part in ("drafter", "target"))
    return sorted(str(path.relative_to(stage)) for paths in found for path in paths)


def stage_directories(run: Path) -> dict[str, Path]:
    return {path.name.partition("-")[2]: path for path in sorted((run / "stages").iterdir())}


# In `make test`: `test_world_size` goes on under FSDP2, `test_doors` ends under it and ZeRO-3.
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("engine", "few"),
    [
        ("zero2", True),
        *((name, False) for name in ("ddp", "fsdp2", "zero3")),
    ],
)
def test_two_ranks_train_as_one_and_go_on_after_a_kill(base, engine, few):
    _, kind, share, resident, file = ENGINES[engine]
    if kind == "DEEPSPEED" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip(f"needs DeepSpeed: {install_command('deepspeed')}")
    run = base / "runs" / engine
    shutil.rmtree(run, ignore_errors=True)
    path, directory = config(base, engine, few), found(base, engine)
    arguments = (str(path), str(DIE_BEFORE), str(directory), str(run / "stages/01-reduced"))
    done = launch(base, engine, "-m", "tests.engine_worker", *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "continuing after step 6 of 10" in done.stdout

    one = torch.load(base / "found/one/0.pt")
    for rank in range(2):
        probe = torch.load(directory / f"{rank}.pt")
        assert (probe["engine"], probe["world"]) == (kind, 2)
        assert probe["share"] == pytest.approx(share, abs=0.02)
        assert probe["resident"] == pytest.approx(resident, abs=0.02)
        assert probe["norms"][:5] == pytest.approx(one["norms"][:5], rel=1e-4)
        assert not torch.isfinite(torch.tensor(probe["norms"][5]))
        assert largest(probe["weights"], one["weights"]) < 1e-4
        assert largest(probe["averaged"], one["averaged"]) < 1e-4
        kept = json.loads((directory / f"kept-{rank}.json").read_text("utf-8"))
        assert f"step-6/{file}" in kept
        assert {name.partition("/")[0] for name in kept} == {"step-6"}
    stages, alone_stages = stage_directories(run), stage_directories(base / "runs/one")
    settings = json.loads(path.read_text("utf-8"))["stages"]
    steps = {stage["name"]: stage["loop"]["max_steps"] for stage in settings}
    assert list(stages) == list(steps)
    assert not (stages["tied"] / "checkpoints").exists()  # of a finished stage
    for stage, ours in stages.items():
        theirs = alone_stages[stage]
        training, reference = (
            json.loads((place / "done.json").read_text("utf-8"))["summary"]["training"]
            for place in (ours, theirs)
        )
        two, alone = training["history"], reference["history"]
        assert len(two) == len(alone) == steps[stage]
        assert min(entry["gradient_norm"] for entry in alone) > CLIP or stage not in CLIPPED
        assert len(training["dev"]) == len(reference["dev"])
        for looked, expected in zip(training["dev"], reference["dev"], strict=True):
            assert looked == pytest.approx(expected, rel=1e-4)
        close = 5e-3 if stage == SHARED_MEAN else 1e-4
        for figure in ("loss", "gradient_norm", "lr"):
            figures = [entry[figure] for entry in alone]
            assert [entry[figure] for entry in two] == pytest.approx(figures, rel=close), figure
        files = weight_files(theirs)
        assert files == weight_files(ours)
        assert any("target/" in name for name in files) == (stage in NEW_TARGETS)
        for name in files if stage != SHARED_MEAN else ():
            # Equal names too: a tied output layer is in neither file.
            assert largest(load_file(ours / name), load_file(theirs / name)) < 1e-4
