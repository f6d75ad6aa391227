"""Run by the Python of the environment of the library speculators: `speculators_child.py JOB
ANSWER`.

JOB: {directory: where the target is, target: its name there, save: {directory: algorithm and
options, with `ids` if its draft vocabulary is reduced, and `target` for another one}, load:
{directory: file for its tensors}, run: {directory: file}}. `run` is for drafters of multi-token
prediction: the file has `input_ids` and `hidden_states`, and gets the `logits` of the first step.
ANSWER: {classes: the class of each loaded drafter, settings: of each, as the library saves them}.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel
from transformers import AutoConfig, LlamaConfig, Qwen3Config

# Shapes of the drafters' layers; the rest is the target's. EAGLE's layers are a llama's, and those
# of block drafters have Qwen3's norms.
LAYERS = {
    "eagle3": (LlamaConfig, 1),
    "peagle": (LlamaConfig, 2),
    "dflash": (Qwen3Config, 2),
    "dflash2": (Qwen3Config, 2),
    "dspark": (Qwen3Config, 2),
    "xpress": (Qwen3Config, 2),
}


def main(job_file: str, answer_file: str) -> None:
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    # An export names its target by the last part of its path.
    os.chdir(job["directory"])
    for directory, options in job["save"].items():
        save(directory, **({"target": job["target"]} | options))
    classes, settings = {}, {}
    for directory, file in job["load"].items():
        model = SpeculatorModel.from_pretrained(directory)
        stored = {name: x.contiguous().clone() for name, x in model.state_dict().items()}
        save_file(stored, file)
        classes[directory] = type(model).__name__
        model.save_pretrained(f"{file}-saved")
        settings[directory] = json.loads(
            Path(f"{file}-saved", "config.json").read_text(encoding="utf-8")
        )
    for directory, file in job.get("run", {}).items():
        with torch.no_grad():
            logits, *_ = SpeculatorModel.from_pretrained(directory)(**load_file(file))
        save_file({"logits": logits[0].contiguous()}, file)
    Path(answer_file).write_text(
        json.dumps({"classes": classes, "settings": settings}), encoding="utf-8"
    )


def save(directory: str, target: str, algorithm: str, **options: Any) -> None:
    """Make a drafter with random weights as the library's trainer makes it, and save it."""
    base = AutoConfig.from_pretrained(target)
    layers = base if algorithm == "mtp" else layers_of(base, *LAYERS[algorithm])
    ids, maps = options.pop("ids", None), {}
    options["draft_vocab_size"] = base.vocab_size
    if ids is not None:
        has_row = torch.zeros(base.vocab_size, dtype=torch.bool)
        has_row[ids] = True
        maps = {"t2d": has_row, "d2t": torch.tensor(ids) - torch.arange(len(ids))}
        options["draft_vocab_size"] = len(ids)
    torch.manual_seed(0)
    model = SpeculatorModel.registry[algorithm].from_training_args(
        layers, verifier_name_or_path=target, draft_attn_impl="sdpa", **maps, **options
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.requires_grad and "norm" in name:
                weight += 0.1 * torch.randn_like(weight)
    model.save_pretrained(directory)


def layers_of(base: Any, kind: Any, count: int) -> Any:
    """The config of a drafter's layers, for a target of this config."""
    return kind(
        vocab_size=base.vocab_size,
        hidden_size=base.hidden_size,
        intermediate_size=2 * base.hidden_size,
        num_hidden_layers=count,
        num_attention_heads=base.num_attention_heads,
        num_key_value_heads=base.num_key_value_heads,
        head_dim=base.head_dim,
        max_position_embeddings=base.max_position_embeddings,
        pad_token_id=None,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
