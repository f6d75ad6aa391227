"""Trains the default drafter of the decode benchmark."""

import re
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedModel

from benchmarks.common import UNJUDGED
from decode.target.loading import Target
from train.config import validate_config
from train.console import Reporter
from train.run import Run

PROMPTS = Path(__file__).parent.parent / "configs" / "prompts"
LAYERS = 4


def train_drafter(target: Target, *, quick: bool, runs: Path, reporter: Reporter) -> Path:
    """Return the directory of a small LM with the target's first layers and full vocabulary.

    It is trained on the target's answers to the shipped prompts in a separate run. The run is kept,
    so a second call reuses it. Other decoding loops do not support a reduced draft vocabulary.
    """
    config = validate_config(
        run_config(target.name, first_layers(target.model), target.device.type, quick, runs),
        base_dir=PROMPTS,
    )
    run = Run(config, Accelerator(cpu=target.device.type == "cpu"), reporter)
    run.execute()
    return run.stage_directory("distill") / "drafter"


def first_layers(model: PreTrainedModel) -> list[int]:
    """Return the numbers of the first LAYERS layers, but at most half of the model's layers."""
    return list(range(max(1, min(LAYERS, model.config.get_text_config().num_hidden_layers // 2))))


def run_config(
    target: str, layers: list[int], device: str, quick: bool, runs: Path
) -> dict[str, Any]:
    """Return the config of one run: the target's answers, and distillation on them."""
    answers: dict[str, Any] = {"kind": "generate", "batch_size": 32, "part_prompts": 64}
    if quick:
        texts = [answers | {"name": "answers", "prompts": 160, "max_new_tokens": 64}]
    else:
        texts = [
            answers | {"name": "answers", "max_new_tokens": 96},
            answers
            | {"name": "sampled", "max_new_tokens": 96}
            | {"sampling": {"temperature": 1.0}, "samples": 2},
        ]
    name = re.sub(r"[^A-Za-z0-9]+", "-", target).strip("-")
    return {
        "name": f"decode-{name}{'-quick' if quick else ''}",
        "output_dir": str(runs),
        "trackers": [],
        "precision": "bf16",
        "target": {"model": target, "dtype": "bfloat16", "device": device},
        "data": {split: f"{split}.jsonl" for split in ("train", "dev", "test")},
        # The benchmark measures the drafter, so the run's own evaluation would waste time.
        "evaluation": UNJUDGED,
        "stages": [
            *texts,
            {
                "name": "distill",
                "kind": "distill",
                "text": [text["name"] for text in texts],
                "drafter": {"layers": layers},
                "losses": {"forward_kl": 1.0},
                "train_embeddings": False,
                "loop": {
                    "epochs": 100,
                    "max_steps": 50 if quick else 300,
                    "tokens_per_batch": 1024,
                },
                "optimizer": {"lr": 2e-3},
            },
        ],
    }
