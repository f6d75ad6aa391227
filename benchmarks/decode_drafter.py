"""The drafter that the decode benchmark makes where none is given."""

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
    """The directory of a small LM made of the target's first layers and its whole vocabulary.

    It is trained on the target's answers to the shipped prompts in a run of its own, which is kept:
    a second call finds it done. Other decoding loops take no drafter with a reduced vocabulary.
    """
    config = validate_config(
        run_config(target.name, first_layers(target.model), target.device.type, quick, runs),
        base_dir=PROMPTS,
    )
    run = Run(config, Accelerator(cpu=target.device.type == "cpu"), reporter)
    run.execute()
    return run.stage_directory("distill") / "drafter"


def first_layers(model: PreTrainedModel) -> list[int]:
    """LAYERS of them, but of a small model no more than half."""
    return list(range(max(1, min(LAYERS, model.config.get_text_config().num_hidden_layers // 2))))


def run_config(
    target: str, layers: list[int], device: str, quick: bool, runs: Path
) -> dict[str, Any]:
    """One run: the target's answers, and the divergence to its distribution over them."""
    answers: dict[str, Any] = {"kind": "generate", "batch_size": 32, "part_prompts": 64}
    if quick:
        texts = [answers | {"name": "answers", "prompts": 160, "max_new_tokens": 64}]
    else:
        texts = [
            answers | {"name": "answers", "max_new_tokens": 96},
            answers | {"name": "sampled", "max_new_tokens": 96, "temperature": 1.0, "samples": 2},
        ]
    name = re.sub(r"[^A-Za-z0-9]+", "-", target).strip("-")
    return {
        "name": f"decode-{name}{'-quick' if quick else ''}",
        "output_dir": str(runs),
        "trackers": [],
        "precision": "bf16",
        "target": {"model": target, "dtype": "bfloat16", "device": device},
        "data": {split: f"{split}.jsonl" for split in ("train", "dev", "test")},
        # The benchmark measures the drafter; the run's own evaluation would be time lost.
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
