"""TRL's two trainers, as contestants of `benchmarks.distill`. Needs TRL."""

import tempfile
from collections.abc import Sequence
from typing import Any

import datasets
import torch
from torch import Tensor
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback
from trl import DistillationConfig, DistillationTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.utils import DataCollatorForChatML

from benchmarks.shared.distill_settings import Meter, Settings
from decode.model.loading import Target
from train.data.chat_tokens import Sample
from train.settings.optimizer_config import OptimizerConfig


def train_trl(
    contestant: str,
    target: Target,
    student: PreTrainedModel,
    texts: Sequence[Sample],
    settings: Settings,
    meter: Meter,
) -> None:
    """Train one epoch with TRL, in the texts' order.

    Uses TRL's defaults, except those that make it slower or change the training: no gradient
    checkpointing, no generation (λ = 0), β = 0, the forward KL, and our learning rate. The
    optimizer is TRL's default, AdamW in one fused kernel.
    """

    class Watch(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            meter.tick()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            meter.tick()

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            meter.losses += [logs["loss"]] if "loss" in logs else []

    # Otherwise transformers stores the keys and values of the batch, which nobody uses.
    target.model.config.use_cache = False
    rows = [
        {"prompt": text.id, "input_ids": text.tokens, "completion_mask": [*map(int, text.mask)]}
        for text in texts
    ]
    with tempfile.TemporaryDirectory() as directory:
        common = {
            "output_dir": directory,
            "per_device_train_batch_size": settings.rows,
            "num_train_epochs": 1,
            "learning_rate": settings.lr,
            "lr_scheduler_type": "constant",
            "weight_decay": 0.0,
            "adam_beta2": OptimizerConfig().beta2,
            "max_grad_norm": OptimizerConfig().clip,
            "beta": 0.0,
            "gradient_checkpointing": False,
            "bf16": settings.precision == "bf16",
            "use_cpu": settings.device == "cpu",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            "seed": settings.seed,
        }
        make = _trl_chunked if contestant == "trl_chunked" else _trl_gkd
        trainer = make(
            common,
            meter,
            model=student,
            teacher_model=target.model,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=target.tokenizer,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(Watch())
        trainer.train()


def _trl_gkd(common: dict[str, Any], meter: Meter, **parts: Any) -> Any:
    collator = DataCollatorForChatML(tokenizer=parts["processing_class"])

    def collate(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = collator(examples)
        meter.count_batch(batch["attention_mask"], batch["labels"][:, 1:] != -100)
        return batch

    args = GKDConfig(lmbda=0.0, temperature=1.0, train_sampling_strategy="sequential", **common)
    return GKDTrainer(args=args, data_collator=collate, **parts)


def _trl_chunked(common: dict[str, Any], meter: Meter, **parts: Any) -> Any:
    """Return TRL's trainer with the chunked loss. It always generates, so here `_generate` returns
    the given texts."""

    class FixedTextTrainer(DistillationTrainer):  # type: ignore[misc, unused-ignore]
        def _generate(self, prompts: list[str]) -> tuple[Any, ...]:
            prompt_ids, answer_ids = zip(*(split[prompt] for prompt in prompts), strict=True)
            return list(prompt_ids), list(answer_ids), None, None, []

        def _compute_loss(self, student: Any, inputs: dict[str, Tensor], items: Any) -> Any:
            mask = inputs["completion_mask"]
            meter.count_batch(torch.cat([inputs["prompt_mask"], mask], dim=1), mask)
            return super()._compute_loss(student, inputs, items)

    split = {}
    for row in parts["train_dataset"]:
        begin = row["completion_mask"].index(1)
        split[row["prompt"]] = row["input_ids"][:begin], row["input_ids"][begin:]
    args = DistillationConfig(temperature=1.0, shuffle_dataset=False, **common)
    return FixedTextTrainer(args=args, **parts)
