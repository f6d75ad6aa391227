"""Run by the Python of the environment of the library speculators: `speculators_child.py JOB
ANSWER`.

JOB: {target, drafter: directories, attention: sdpa or eager, states: the file of texts and hidden
states, steps and decay of the training-time test, and texts, tokens and half for `measure_steps`}.
With `trainer`, a directory for its files, the library's trainer takes the first step instead.
ANSWER: the figures of `measure_steps`; of the trainer {error: its error, or None}.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from speculators import SpeculatorModel
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import shift_batch
from speculators.train.trainer import Trainer, TrainerConfig
from torch import Tensor
from torch.utils.data import DataLoader

# The environment has the library, and the repository is not installed there.
sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.shared.timed_steps import measure_steps

Batch = dict[str, Tensor]


def main(job_file: str, answer_file: str) -> None:
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    model = load(job["drafter"], job["target"], job["attention"]).train()
    states = load_file(job["states"])
    # Its fused loss is a Triton kernel, which needs a GPU.
    settings = {
        "ttt_steps": job["steps"],
        "ttt_step_loss_decay": job["decay"],
        "loss_config": resolve_loss_config("kl_div", "eager"),
    }

    def loss_of(text: int, tokens: int) -> Tensor:
        _, loss, _ = model(**batch_of(states, text, tokens), **settings)
        return loss

    if directory := job.get("trainer"):
        batch = batch_of(states, 0, job["tokens"])
        answer: dict[str, Any] = {"error": error_of_trainer(model, batch, settings, directory)}
    else:
        measured = {name: job[name] for name in ("texts", "tokens", "half")}
        answer = measure_steps(model.parameters(), loss_of, **measured)
    Path(answer_file).write_text(json.dumps(answer), encoding="utf-8")


def load(drafter: str, target: str, attention: str) -> Any:
    """The drafter with the weights of an export, built as the library's command for training builds
    a new one. Its `from_pretrained` would leave random embeddings: an export has none, and the
    library takes the target's only where its own are NaN, as they are in a new model."""
    kind = SpeculatorModel.registry["eagle3"]
    config = kind.config_class.from_pretrained(drafter)
    config.transformer_layer_config._attn_implementation = attention
    config.speculators_config.verifier.name_or_path = target
    model = kind(config=config)
    weights = load_file(Path(drafter, "model.safetensors"))
    if unread := model.load_state_dict(weights, strict=False).unexpected_keys:
        raise KeyError(f"the library has no {', '.join(unread)}")
    model.load_verifier_weights()
    return model


def batch_of(states: Batch, text: int, tokens: int) -> Batch:
    """One text as the library's data loader gives it. Its mask is of positions whose next token
    the target predicts; at the last one ours has no token to compare with, so it is left out."""
    mask = torch.ones(tokens, dtype=torch.bool)
    mask[-1] = False
    shifted = shift_batch(
        {
            "input_ids": states["input_ids"][text, :tokens],
            "hidden_states": states["read"][text, :tokens],
            "verifier_last_hidden_states": states["last"][text, :tokens],
            "loss_mask": mask,
            "lengths": torch.tensor([tokens]),
            "position_ids": torch.arange(tokens),
        }
    )
    del shifted["lengths"]
    batch = {name: tensor[None] for name, tensor in shifted.items()}
    return batch | {"document_ids": torch.zeros_like(batch["input_ids"])}


def error_of_trainer(
    model: Any, batch: Batch, settings: dict[str, Any], directory: str
) -> str | None:
    """What the library's trainer ends with; None if it takes a step."""
    config = TrainerConfig(
        lr=1e-4, num_epochs=1, save_path=directory, max_steps=1, train_call_kwargs=settings
    )
    batches: Any = [batch | {"error_records": 0}]
    loader: DataLoader[Any] = DataLoader(batches, batch_size=None)
    try:
        Trainer(model, config, loader).run_training()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return None


if __name__ == "__main__":
    main(*sys.argv[1:])
