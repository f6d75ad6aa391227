"""The contestants of `benchmarks.distill`: our distillation, and TRL's two trainers.

All train the same student on the same texts in the same number of optimizer steps, with the same
loss, the forward KL(teacher‖student) per predicted token, AdamW and gradient clipping. B: rows of a
batch. T: tokens of its longest text. n: its predicted tokens. V: the vocabulary.
"""

import copy
import gc
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.trainer_pt_utils import get_length_grouped_indices

from benchmarks.common import PROMPTS, TARGET, forget_peak, peak_resident_memory, resident_memory
from decode.target.loading import Target, load_target
from distill.distillation_loss import Distillation
from distill.losses import WeightedLoss
from distill.teacher.teacher_signal import LiveTeacher, Teacher, TeacherLogits, split_model
from distill.untrained_student import student_from_layers
from train.cli.command import cores, quieten
from train.console import Bar, Reporter
from train.data.batches import Batches, Inputs, bucket_batches, padding_share
from train.data.chat import Sample, prompt_tokens
from train.data.read import read_examples
from train.data.training_text import FixedText
from train.training.optimizer import OptimizerConfig
from train.training.trainer import LoopConfig, Trainer, TrainingTask

# Answer lengths as in instruction data: medians of 50 to 110 tokens and a standard deviation of the
# logarithm of 0.4 to 1.1 (Alpaca, Dolly, GSM8K).
ANSWER_MEDIAN, ANSWER_SPREAD, ANSWER_LIMITS = 90, 0.8, (8, 512)
# About the average length of the texts of mixed lengths, including the prompt.
EQUAL_LENGTH = 160
MANY_TEXTS = 10_000

OURS = {
    "ours": "ours",
    "ours_eager": "ours, all logits at once",
    "ours_random": "ours, random order",
    "ours_eager_random": "ours, all logits at once, random order",
}
TRL = {
    "trl": "TRL GKDTrainer",
    "trl_grouped": "TRL GKDTrainer, group_by_length",
    "trl_chunked": "TRL DistillationTrainer on given texts",
}
NAMES = OURS | TRL


@dataclass(frozen=True)
class Settings:
    """rows: of a batch; an average if batches are formed by length. steps: measured, one epoch.

    equal_length: all texts have the same number of tokens, and all tokens but the first are
    predicted, so no contestant can save work on padding or prompts.
    """

    target: str = TARGET
    layers: tuple[int, ...] = (0, 1, 2, 3)
    precision: str = "fp32"
    rows: int = 8
    steps: int = 12
    equal_length: bool = False
    lr: float = 3e-4
    seed: int = 0


@dataclass
class Meter:
    """Times, losses, tokens and peak memory of a training run, step by step.

    times: seconds on the clock, at the start and then at the end of each step. cpu: the same in
    processor time of all threads, which other programs disturb less.
    tokens: of each batch (text tokens, predicted tokens, tokens with padding).
    losses: mean over each batch's predicted tokens.
    """

    times: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    tokens: list[tuple[int, int, int]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak: int = 0

    def tick(self) -> None:
        # Read at each step, to exclude the work of a trainer after the last step.
        self.times.append(time.perf_counter())
        self.cpu.append(time.process_time())
        self.peak = peak_resident_memory()

    def count_batch(self, attention_mask: Tensor, predicted: Tensor) -> None:
        """Count a batch. attention_mask: [B, T]. predicted: bool [B, T − 1], tokens in the loss."""
        self.tokens.append(
            (int(attention_mask.sum()), int(predicted.sum()), attention_mask.numel())
        )


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
    quieten()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores())
    options = Settings(**settings)
    train = train_trl if contestant in TRL else train_ours
    if contestant in TRL:
        # Import before reading memory: the size of a library is not part of its training memory.
        import trl.experimental.gkd
        import trl.trainer.distillation_trainer  # noqa: F401
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[options.precision]
    target = load_target(options.target, dtype=dtype, device="cpu")
    student = student_from_layers(target.model, options.layers)
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


def padding_of_many(settings: dict[str, Any]) -> dict[str, float]:
    """Return the share of padding in one epoch of MANY_TEXTS. Call it in a fresh process."""
    quieten()
    options = Settings(**settings)
    tokenizer = load_target(options.target, dtype="bfloat16", device="cpu").tokenizer
    texts = make_texts(tokenizer, MANY_TEXTS, options)
    lengths = [len(text.tokens) for text in texts]
    size = _tokens_per_batch(texts, options.rows, options.seed)
    torch.manual_seed(options.seed)
    grouped = get_length_grouped_indices(lengths, options.rows)
    unsorted = _in_order(len(texts), options.rows)
    batches = {
        "ours": bucket_batches(lengths, tokens_per_batch=size, seed=options.seed, epoch=0),
        "trl": unsorted,
        "trl_grouped": [[grouped[i] for i in batch] for batch in unsorted],
    }
    return {name: padding_share(numbers, lengths) for name, numbers in batches.items()}


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

    module = EagerDistillation if "eager" in contestant else Distillation
    loop = _InOrderTrainer if "random" in contestant else Trainer
    _InOrderTrainer.rows = settings.rows
    with tempfile.TemporaryDirectory() as directory:
        trainer = loop(
            Accelerator(cpu=True, mixed_precision="bf16" if settings.precision == "bf16" else "no"),
            _MeteredReporter(meter),
            TrainingTask(
                "distill",
                module(student, terms),
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


class EagerDistillation(Distillation):
    """`Distillation` with the logits of all n tokens at once, [n, V], and autograd's backward.

    Like `distill.distillation_loss.eager_loss`, but logits become float32 after the product, as
    TRL's do under autocast.
    """

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        loss_mask: Tensor,
        teacher: Teacher | None = None,
        agreement_with: Callable[[slice], TeacherLogits] | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert teacher is not None
        assert agreement_with is None
        hidden = self.student.base_model(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False
        ).last_hidden_state
        predicted = loss_mask[:, 1:]
        logits = self.student.get_output_embeddings()(hidden[:, :-1][predicted]).float()
        labels = input_ids[:, 1:][predicted]
        sums = self.weighted_loss.values(logits, teacher(slice(None)), labels).sum(-1)
        return self.weighted_loss.weigh(sums), sums.detach().double()


class _InOrderTrainer(Trainer):
    """Takes the texts in the given order, which is random, with `rows` in every batch."""

    rows: int

    def _text(self, number: int) -> Any:
        current = super()._text(number)
        current.batches = _FixedBatches(_in_order(len(current.samples), self.rows))
        return current

    def _total_steps(self) -> int:
        return len(self._text(0).batches)


class _FixedBatches(Batches):
    """A fixed list of batches."""

    def __init__(self, batches: list[list[int]]) -> None:
        self._batches = batches


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


def _in_order(count: int, rows: int) -> list[list[int]]:
    return [list(range(begin, min(begin + rows, count))) for begin in range(0, count, rows)]


def _tokens_per_batch(texts: Sequence[Sample], rows: int, seed: int) -> int:
    """Return the batch size in tokens at which batching by length needs no more batches than
    batches of `rows` texts."""
    lengths = [len(text.tokens) for text in texts]
    steps = len(_in_order(len(texts), rows))
    size = max(*lengths, rows * sum(lengths) // len(lengths))
    while len(bucket_batches(lengths, tokens_per_batch=size, seed=seed, epoch=0)) > steps:
        size += max(1, size // 200)
    return size


def train_trl(
    contestant: str,
    target: Target,
    student: PreTrainedModel,
    texts: Sequence[Sample],
    settings: Settings,
    meter: Meter,
) -> None:
    """Train one epoch with TRL, in the texts' order or grouped by length.

    Uses TRL's defaults, except those that make it slower or change the training: no gradient
    checkpointing, no generation (λ = 0), β = 0, the forward KL, and our learning rate. The
    optimizer is TRL's default, AdamW in one fused kernel.
    """
    import datasets
    from transformers import PrinterCallback, TrainerCallback

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
            "use_cpu": True,
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
            "group_by_length" if contestant == "trl_grouped" else "sequential",
            meter,
            model=student,
            teacher_model=target.model,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=target.tokenizer,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(Watch())
        trainer.train()


def _trl_gkd(common: dict[str, Any], order: str, meter: Meter, **parts: Any) -> Any:
    from trl.experimental.gkd import GKDConfig, GKDTrainer
    from trl.experimental.utils import DataCollatorForChatML

    collator = DataCollatorForChatML(tokenizer=parts["processing_class"])

    def collate(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = collator(examples)
        meter.count_batch(batch["attention_mask"], batch["labels"][:, 1:] != -100)
        return batch

    args = GKDConfig(lmbda=0.0, temperature=1.0, train_sampling_strategy=order, **common)
    return GKDTrainer(args=args, data_collator=collate, **parts)


def _trl_chunked(common: dict[str, Any], order: str, meter: Meter, **parts: Any) -> Any:
    """Return TRL's trainer with the chunked loss. It always generates, so here `_generate` returns
    the given texts."""
    from trl import DistillationConfig, DistillationTrainer

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
