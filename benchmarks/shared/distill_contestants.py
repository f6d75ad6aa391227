"""The contestants of `benchmarks.distill`, with ours; TRL's are in `benchmarks.shared.distill_trl`.

All train the same student on the same texts in the same number of optimizer steps, with the same
loss, the forward KL(teacher‖student) per predicted token, AdamW and gradient clipping. B: rows of a
batch. T: tokens of its longest text. n: its predicted tokens. V: the vocabulary.
"""

import copy
import gc
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.common import PROMPTS, start_process
from benchmarks.shared.distill_settings import Meter, Settings
from benchmarks.shared.process_memory import resident_memory
from decode.model.loading import Target, load_target
from distill.distillation_loss import Distillation
from distill.losses import WeightedLoss
from distill.teacher.live_teacher import LiveTeacher
from distill.teacher.teacher_signal import Teacher, TeacherLogits
from train.base.console import Bar, Reporter, quieten
from train.data.batches import Batches, Inputs, bucket_batches, padding_share
from train.data.chat_tokens import Sample, prompt_tokens
from train.data.read import read_examples
from train.data.training_text import FixedText
from train.loop.meters.peak_memory import restart_peak
from train.loop.trainer import Trainer
from train.loop.training_task import Step, TrainingTask
from train.settings.optimizer_config import OptimizerConfig
from train.settings.training import LoopConfig

# Answer lengths as in instruction data: medians of 50 to 110 tokens and a standard deviation of the
# logarithm of 0.4 to 1.1 (Alpaca, Dolly, GSM8K).
ANSWER_MEDIAN, ANSWER_SPREAD, ANSWER_LIMITS = 90, 0.8, (8, 512)
# About the average length of the texts of mixed lengths, including the prompt.
EQUAL_LENGTH = 160
MANY_TEXTS = 10_000
# (contestant, target, trained module, texts, settings, meter)
Training = Callable[[str, Target, Any, Sequence[Sample], Settings, Meter], None]

OURS = {
    "ours": "ours",
    "ours_eager": "ours, all logits at once",
    "ours_eager_random": "ours, all logits at once, random order",
}
TRL = {
    "trl": "TRL GKDTrainer",
    "trl_chunked": "TRL DistillationTrainer on given texts",
}
NAMES = OURS | TRL


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
    if contestant in TRL:
        # Import before reading memory: the size of a library is not part of its training memory.
        from benchmarks.shared.distill_trl import train_trl as train
    target = options.load()
    return measure_training(contestant, train, target, options.make_student(target), options)


def measure_training(
    contestant: str,
    train: Training,
    target: Target,
    student: nn.Module,
    options: Settings,
) -> dict[str, Any]:
    """Return the figures of a training in this process, after an unmeasured step on a copy."""
    gc.collect()
    loaded = resident_memory(options.device)
    texts = make_texts(target.tokenizer, options.rows * options.steps, options)
    warm_up = make_texts(target.tokenizer, options.rows, options, first=len(texts))
    train(contestant, target, copy.deepcopy(student), warm_up, options, Meter(options.device))
    gc.collect()
    restart_peak(options.device)
    meter = Meter(options.device)
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
    batches = {
        "ours": bucket_batches(lengths, tokens_per_batch=size, seed=options.seed, epoch=0),
        "trl": _in_order(len(texts), options.rows),
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
    teacher = LiveTeacher(target.model)

    def step(module: nn.Module, batch: Inputs, names: Sequence[str]) -> tuple[Tensor, Tensor]:
        meter.count_batch(batch["attention_mask"], batch["loss_mask"][:, 1:])
        loss, parts = module(**batch, teacher=teacher.signal(**batch, ids=names))
        return loss, parts

    module = EagerDistillation if "eager" in contestant else Distillation
    loop = _InOrderTrainer if "random" in contestant else Trainer
    _InOrderTrainer.rows = settings.rows
    trained = module(student, terms)
    fit(trained, step, terms.names, target, texts, settings, meter, loop=loop)


def fit(
    module: nn.Module,
    step: Step,
    terms: Sequence[str],
    target: Target,
    texts: Sequence[Sample],
    settings: Settings,
    meter: Meter,
    *,
    figures: Callable[[dict[str, float], int], dict[str, float]] | None = None,
    loop: type[Trainer] = Trainer,
) -> None:
    """Train a module for one epoch with our trainer. figures: as for `TrainingTask`."""
    with tempfile.TemporaryDirectory() as directory:
        trainer = loop(
            Accelerator(
                cpu=settings.device == "cpu",
                mixed_precision="bf16" if settings.precision == "bf16" else "no",
            ),
            _MeteredReporter(meter),
            TrainingTask(
                "training",
                module,
                step,
                terms,
                FixedText(texts),
                target.tokenizer.pad_token_id or 0,
                figures=figures,
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

    Logits become float32 after the product, as
    TRL's do under autocast.
    """

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        loss_mask: Tensor,
        teacher: Teacher | None = None,
        agreement_with: Callable[[slice], TeacherLogits] | None = None,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert teacher is not None
        assert agreement_with is None
        assert weights is None
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

    def __len__(self) -> int:
        return len(self._batches)

    def batch(self, i: int) -> list[int]:
        return self._batches[i]


class _MeteredReporter(Reporter):
    """A silent reporter. Its bar calls the meter at the start of training and after each step."""

    def __init__(self, meter: Meter) -> None:
        super().__init__(silent=True)
        self.meter = meter

    @contextmanager
    def bar(self, what: str, total: int, *, whole: bool = True) -> Iterator[Bar]:
        with super().bar(what, total, whole=whole) as bar:
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
