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

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.tiny import VOCAB, save_tiny
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

# Nothing is drawn in the later stages (keep: 1.0, no dropout): what a rank draws depends on its
# share of a batch.
CONFIG = """
name: one
output_dir: {base}/runs
trackers: []
target: {{model: {base}/target, dtype: float32, device: cpu}}
data: {{train: train.jsonl, dev: test.jsonl, test: test.jsonl, duplicates: keep}}
evaluation: {{stages: [], baselines: []}}
stages:
  - name: tied
    kind: distill
    drafter: {{layers: [0]}}
    loop: {{epochs: 99, max_steps: 8, tokens_per_batch: 120, save_every: 8, log_every: 1}}
    optimizer: {{lr: 3e-3, warmup_steps: 5, clip: 0.5}}
  - name: reduced
    kind: distill
    drafter: {{layers: [1]}}
    draft_vocabulary: 120
    losses: {{forward_kl: 1.0, cross_entropy: 0.1}}
    loop: {{epochs: 99, max_steps: 10, tokens_per_batch: 120, accumulation: 2, save_every: 6,
      log_every: 1}}
    optimizer: {{lr: 3e-3, warmup_steps: 5, clip: 0.5}}
  - name: frozen
    kind: distill
    drafter: {{stage: reduced}}
    train_embeddings: false
    loop: {{epochs: 99, max_steps: 4, tokens_per_batch: 120, log_every: 1}}
    optimizer: {{lr: 3e-3, warmup_steps: 5, clip: 0.5, ema: 0.5}}
  - name: own
    kind: distill
    drafter: {{layers: [0]}}
    lora: {{r: 4}}
    on_policy: {{fraction: 0.5, samples: 6, max_new_tokens: 6, sampling: {{temperature: 0}},
      drafter: none}}
    dev: {{text: data, samples: 3, every: 2, decode_prompts: 2, gamma: 2, max_new_tokens: 6}}
    loop: {{max_steps: 4, tokens_per_batch: 120, log_every: 1}}
    optimizer: {{lr: 3e-3, warmup_steps: 2, clip: 0.5}}
  - name: medusa
    kind: heads
    heads: {{type: medusa, heads: 2}}
    draft_vocabulary: 120
    losses: {{forward_kl: 1.0, cross_entropy: 0.1}}
    dev: {{text: data, samples: 3, every: 2, decode_prompts: 2, gamma: 2, max_new_tokens: 6}}
    tree: {{nodes: 3, width: 2, prompts: 2, max_new_tokens: 6}}
    loop: {{max_steps: 4, tokens_per_batch: 120, log_every: 1}}
    optimizer: {{lr: 3e-3, warmup_steps: 2, clip: 0.1}}
  - name: blockwise
    kind: heads
    heads: {{type: blockwise, k: 3}}
    loop: {{max_steps: 4, tokens_per_batch: 120, accumulation: 2, log_every: 1}}
    optimizer: {{lr: 3e-3, warmup_steps: 2, clip: 0.1}}
  - name: both
    kind: heads
    heads: {{type: medusa, heads: 2}}
    start: medusa
    backbone:
      {{lora: {{r: 4, dropout: 0.0}}, losses: {{forward_kl: 0.5, cross_entropy: 0.5}}, ramp: 0.5}}
    dev: {{text: data, samples: 3, every: 2, decode_prompts: 2, gamma: 2, max_new_tokens: 6}}
    loop: {{max_steps: 4, tokens_per_batch: 120, log_every: 1}}
    optimizer: {{lr: 3e-3, warmup_steps: 2, clip: 0.1}}
  - name: tuned
    kind: heads
    heads: {{type: blockwise, k: 3, sub_loss: mean}}
    draft_vocabulary: 120
    backbone: {{lora: null}}
    loop: {{max_steps: 4, tokens_per_batch: 120, accumulation: 2, log_every: 1}}
    optimizer: {{lr: 3e-3, warmup_steps: 2, clip: 0.1, ema: 0.5}}
  - name: eagle1
    kind: heads
    heads: {{type: eagle1, depth: 2, noise: 0.0}}
    losses: {{forward_kl: 0.1}}
    loop: {{max_steps: 4, tokens_per_batch: 120, log_every: 1}}
    optimizer: {{lr: 3e-3, warmup_steps: 2, clip: 0.1}}
  - name: eagle3
    kind: heads
    heads: {{type: eagle3, steps: 3}}
    draft_vocabulary: 120
    losses: {{forward_kl: 1.0}}
    dev: {{text: data, samples: 3, every: 2, decode_prompts: 2, gamma: 2, max_new_tokens: 6}}
    loop: {{max_steps: 4, tokens_per_batch: 120, log_every: 1}}
    optimizer: {{lr: 3e-3, warmup_steps: 2, clip: 0.1}}
  - name: hydra
    kind: heads
    heads: {{type: hydra, heads: 2}}
    loop: {{max_steps: 4, tokens_per_batch: 120, log_every: 1}}
    optimizer: {{lr: 3e-3, warmup_steps: 2, clip: 0.1}}
  - name: hydra_plus
    kind: heads
    heads: {{type: hydra_plus, heads: 2, layers: 2}}
    losses: {{forward_kl: 1.0}}
    loop: {{max_steps: 4, tokens_per_batch: 120, log_every: 1}}
    optimizer: {{lr: 3e-3, warmup_steps: 2, clip: 0.1}}
  - name: eagle31
    kind: heads
    heads: {{type: eagle3, steps: 2, fc_norm: true, norm_output: true}}
    losses: {{forward_kl: 1.0}}
    loop: {{max_steps: 2, tokens_per_batch: 120, log_every: 1}}
    optimizer: {{lr: 3e-3, warmup_steps: 2, clip: 0.1}}
  - name: mtp
    kind: heads
    heads: {{type: mtp, depth: 2}}
    losses: {{forward_kl: 1.0}}
    loop: {{max_steps: 2, tokens_per_batch: 120, log_every: 1}}
    optimizer: {{lr: 3e-3, warmup_steps: 2, clip: 0.1}}
  - name: p_eagle
    kind: heads
    heads: {{type: p_eagle, tokens: 3, layers: 2, keep: 1.0, embeddings: trained}}
    loop: {{max_steps: 2, tokens_per_batch: 120, log_every: 1}}
    optimizer: {{lr: 3e-3, warmup_steps: 2, clip: 0.1}}
  - name: dflash
    kind: heads
    heads: {{type: dflash, layers: 2, block: 4, taps: [0, 2]}}
    loop: {{max_steps: 2, tokens_per_batch: 120, log_every: 1}}
    optimizer: {{lr: 3e-3, warmup_steps: 2, clip: 0.1}}
  - name: dspark
    kind: heads
    heads: {{type: dspark, layers: 2, block: 3, taps: [0, 2], rank: 8}}
    losses: {{cross_entropy: 0.1, total_variation: 1.8}}
    place_smoothing: 0.5
    loop: {{max_steps: 2, tokens_per_batch: 120, log_every: 1}}
    optimizer: {{lr: 3e-3, warmup_steps: 2, clip: 0.1}}
  - name: dflash2
    kind: heads
    heads: {{type: dflash2, layers: 2, block: 4, taps: [0, 2], rank: 8}}
    place_smoothing: 0.5
    loop: {{max_steps: 2, tokens_per_batch: 120, log_every: 1}}
    optimizer: {{lr: 3e-3, warmup_steps: 2, clip: 0.1}}
  - name: kangaroo
    kind: heads
    heads: {{type: kangaroo, exit_layer: 2, depth: 2}}
    losses: {{forward_kl: 1.0}}
    loop: {{max_steps: 2, tokens_per_batch: 120, log_every: 1}}
    optimizer: {{lr: 3e-3, warmup_steps: 2, clip: 0.1}}
  - name: pass
    kind: heads
    heads: {{type: pass, tokens: 2, keep: 1.0}}
    loop: {{max_steps: 2, tokens_per_batch: 120, log_every: 1}}
    optimizer: {{lr: 3e-3, warmup_steps: 2, clip: 0.1}}
  - name: pard
    kind: distill
    drafter: {{layers: [0]}}
    parallel: {{tokens: 3, keep: 1.0}}
    loop: {{max_steps: 2, tokens_per_batch: 120, log_every: 1}}
    optimizer: {{lr: 3e-3, warmup_steps: 2, clip: 0.1}}
  - name: skip
    kind: layer_skip
    exit_layer: 3
    layer_dropout: 0.0
    loop: {{max_steps: 2, tokens_per_batch: 120, log_every: 1}}
    optimizer: {{lr: 3e-3, warmup_steps: 2, clip: 0.1}}
"""
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
            rows.append(json.dumps({"id": f"{split}-{i}"} | row) + "\n")
        (base / f"{split}.jsonl").write_text("".join(rows))
    (base / "config.yaml").write_text(CONFIG.format(base=base))
    for stage in (2, 3):
        # Threshold 0: ZeRO-3 would otherwise leave parameters as small as these whole.
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        (base / f"zero{stage}.json").write_text(json.dumps({"zero_optimization": zero}))
    call = f"check_and_train({str(base / 'config.yaml')!r}, 0, Path({str(found(base, 'one'))!r}))"
    in_new_process("tests.engine_worker", call)
    return base


def found(base: Path, engine: str) -> Path:
    directory = base / "found" / engine
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def launch(base: Path, engine: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Both ranks with these arguments, and another port that is free."""
    settings = base / f"{engine}.yaml"
    settings.write_text(LAUNCH + ENGINES[engine][0].format(base=base))
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
        text=True,
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


def config_of(base: Path, engine: str, few: bool) -> Path:
    """The config of a run that has the name of its engine, with all stages or with FEW."""
    settings = yaml.safe_load((base / "config.yaml").read_text()) | {"name": engine}
    if few:
        settings["stages"] = [stage for stage in settings["stages"] if stage["name"] in FEW]
    path = base / f"config-{engine}.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def stage_directories(run: Path) -> dict[str, Path]:
    return {path.name.partition("-")[2]: path for path in sorted((run / "stages").iterdir())}


@pytest.mark.parametrize(
    ("engine", "few"),
    [
        ("fsdp2", False),
        ("zero3", True),
        pytest.param("zero2", True, marks=pytest.mark.thorough),
        *(pytest.param(name, False, marks=pytest.mark.thorough) for name in ("ddp", "zero3")),
    ],
)
def test_two_ranks_train_as_one_and_go_on_after_a_kill(base, engine, few):
    _, kind, share, resident, file = ENGINES[engine]
    if kind == "DEEPSPEED" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs DeepSpeed: pip install 'draftsmith[deepspeed]'")
    run = base / "runs" / engine
    shutil.rmtree(run, ignore_errors=True)
    config, directory = config_of(base, engine, few), found(base, engine)
    arguments = (str(config), str(DIE_BEFORE), str(directory), str(run / "stages/01-reduced"))
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
        kept = json.loads((directory / f"kept-{rank}.json").read_text())
        assert f"step-6/{file}" in kept
        assert {name.partition("/")[0] for name in kept} == {"step-6"}
    stages, alone_stages = stage_directories(run), stage_directories(base / "runs/one")
    settings = yaml.safe_load(config.read_text())["stages"]
    steps = {stage["name"]: stage["loop"]["max_steps"] for stage in settings}
    assert list(stages) == list(steps)
    assert not (stages["tied"] / "checkpoints").exists()  # of a finished stage
    for stage, ours in stages.items():
        theirs = alone_stages[stage]
        training, reference = (
            json.loads((place / "done.json").read_text())["summary"]["training"]
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
