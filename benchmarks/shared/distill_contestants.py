"""The contestants of `benchmarks.distill`, with ours; TRL's are in `benchmarks.shared.distill_trl`.

All train the same student on the same texts in the same number of optimizer steps, with the same
loss, the forward KL(teacher‖student) per predicted token, AdamW and gradient clipping.
"""

import copy
import gc
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.common import PROMPTS, start_process
from benchmarks.shared.distill_settings import Meter, Settings
from benchmarks.shared.process_memory import forget_peak, resident_memory
from decode.model.loading import Target
from distill.distillation_loss import Distillation
from distill.losses import WeightedLoss
from distill.teacher.linear_logits import split_model
from distill.teacher.live_teacher import LiveTeacher
from train.base.console import Bar, Reporter
from train.data.batches import Inputs, bucket_batches
from train.data.chat_tokens import Sample, prompt_tokens
from train.data.read import read_examples
from train.data.training_text import FixedText
from train.loop.trainer import Trainer
from train.loop.training_task import TrainingTask
from train.settings.optimizer_config import OptimizerConfig
from train.settings.training import LoopConfig

# Answer lengths as in instruction data: medians of 50 to 110 tokens and a standard deviation of the
# logarithm of 0.4 to 1.1 (Alpaca, Dolly, GSM8K).
ANSWER_MEDIAN, ANSWER_SPREAD, ANSWER_LIMITS = 90, 0.8, (8, 512)
# About the average length of the texts of mixed lengths, including the prompt.
EQUAL_LENGTH = 160
NAMES = {
    "ours": "ours",
    "trl": "TRL GKDTrainer",
    "trl_chunked": "TRL DistillationTrainer on given texts",
}


def make_texts(tokenizer: Any, count: int, settings: Settings, first: int = 0) -> list[Sample]:
    """Return `count` texts of an endless random sequence, which is the same in every process.

    Prompts of this repository in the target's chat template, with answers made of the words of
    other prompts: throughput depends on lengths, not on meaning. first: the number of texts to
    skip.
    """
    examples, _ = read_examples(str(PROMPTS / "train.jsonl"))
    prompts = [prompt_tokens(example, tokenizer) for example in examples]
    words = [
        tokenizer(example.prompt, add_special_tokens=False)["input_ids"] for example in examples
    ]
    texts = []
    for number in range(first, first + count):
        draw = random.Random(f"{settings.seed} {number}")
        low, high = ANSWER_LIMITS
        length = round(ANSWER_MEDIAN * draw.lognormvariate(0, ANSWER_SPREAD))
        length = min(max(length, low), high)
        prompt = list(draw.choice(prompts))
        if settings.equal_length:
            prompt, length = prompt[:1], EQUAL_LENGTH - 1
        answer: list[int] = []
        while len(answer) < length:
            answer += draw.choice(words)
        mask = [False] * len(prompt) + [True] * length
        texts.append(Sample(str(number), prompt + answer[:length], mask))
    return texts


def measure(contestant: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return one contestant's figures. Call it in a fresh process.

    Before the measurement, it trains one step on other texts with a copy of the student, to start
    threads and libraries.
    """
    start_process()
    options = Settings(**settings)
    train = train_ours
    if contestant != "ours":
        # Import before reading memory: the size of a library is not part of its training memory.
        from benchmarks.shared.distill_trl import train_trl as train
    target = options.load()
    student = options.make_student(target)
    gc.collect()
    loaded = resident_memory()
    texts = make_texts(target.tokenizer, options.rows * options.steps, options)
    warm_up = make_texts(target.tokenizer, options.rows, options, first=len(texts))
    train(contestant, target, copy.deepcopy(student), warm_up, options, Meter())
    gc.collect()
    forget_peak()
    meter = Meter()
    train(contestant, target, student, texts, options, meter)
    seconds = meter.times[-1] - meter.times[0]
    text_tokens, predicted, padded = (sum(column) for column in zip(*meter.tokens, strict=True))
    weighted = zip(meter.losses, meter.tokens, strict=True)
    return {
        "seconds": seconds,
        "cpu_seconds": meter.cpu[-1] - meter.cpu[0],
        "step_seconds": [b - a for a, b in zip(meter.times, meter.times[1:], strict=False)],
        "steps": len(meter.losses),
        "text_tokens": text_tokens,
        "predicted_tokens": predicted,
        "padding_share": 1 - text_tokens / padded,
        "text_tokens_per_second": text_tokens / seconds,
        "predicted_tokens_per_second": predicted / seconds,
        "losses": meter.losses,
        "mean_loss": sum(loss * tokens[1] for loss, tokens in weighted) / predicted,
        "loaded_bytes": loaded,
        "peak_bytes": meter.peak,
        "training_bytes": meter.peak - loaded,
        # AdamW's two moments and the gradient of each weight. Every contestant needs these.
        "optimizer_bytes": 12 * sum(p.numel() for p in student.parameters()),
        "threads": torch.get_num_threads(),
    }


def train_ours(
    contestant: str,
    target: Target,
    student: PreTrainedModel,
    texts: Sequence[Sample],
    settings: Settings,
    meter: Meter,
) -> None:
    """Train one epoch as `train.stages.distill` does, without writing a drafter directory."""
    terms = WeightedLoss({"forward_kl": 1.0})
    teacher = LiveTeacher(split_model(target.model))

    def step(module: nn.Module, batch: Inputs, names: Sequence[str]) -> tuple[Tensor, Tensor]:
        meter.count_batch(batch["attention_mask"], batch["loss_mask"][:, 1:])
        loss, parts = module(**batch, teacher=teacher.signal(**batch, ids=names))
        return loss, parts

    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            Accelerator(cpu=True, mixed_precision="bf16" if settings.precision == "bf16" else "no"),
            _MeteredReporter(meter),
            TrainingTask(
                "training",
                Distillation(student, terms),
                step,
                terms.names,
                FixedText(texts),
                target.tokenizer.pad_token_id or 0,
            ),
            LoopConfig(
                epochs=1,
                tokens_per_batch=_tokens_per_batch(texts, settings.rows, settings.seed),
                log_every=1,
                save_every=len(texts),
                seed=settings.seed,
            ),
            OptimizerConfig(lr=settings.lr, warmup_steps=0, schedule="constant"),
            Path(directory),
        )
        meter.losses += [entry["loss"] for entry in trainer.fit().history]


class _MeteredReporter(Reporter):
    """A silent reporter. Its bar calls the meter at the start of training and after each step."""

    def __init__(self, meter: Meter) -> None:
        super().__init__(silent=True)
        self.meter = meter

    @contextmanager
    def bar(self, what: str, total: int) -> Iterator[Bar]:
        with super().bar(what, total) as bar:
            yield _MeteredBar(bar, self.meter)


class _MeteredBar(Bar):
    def __init__(self, bar: Bar, meter: Meter) -> None:
        vars(self).update(vars(bar))
        self._meter = meter

    def update(self, done: int, note: str = "", what: str | None = None) -> None:
        self._meter.tick()


def _tokens_per_batch(texts: Sequence[Sample], rows: int, seed: int) -> int:
    """Return the batch size in tokens at which batching by length needs no more batches than
    batches of `rows` texts."""
    lengths = [len(text.tokens) for text in texts]
    steps = -(-len(texts) // rows)
    size = max(*lengths, rows * sum(lengths) // len(lengths))
    while len(bucket_batches(lengths, tokens_per_batch=size, seed=seed, epoch=0)) > steps:
        size += max(1, size // 200)
    return size
