"""The settings of `benchmarks.distill`, and what it measures of a training."""

import os
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.common import TARGET
from decode.model.loading import Target, load_model_and_tokenizer, load_target
from distill.untrained_student import student_from_layers
from train.loop.meters.peak_memory import peak_memory
from train.measure.time_passes import finish


@dataclass(frozen=True)
class Settings:
    """rows: of a batch; an average if batches are formed by length. steps: measured, one epoch.

    student: a model directory. "": the student is the target's `layers`. device: cpu or cuda.
    equal_length: all texts have the same number of tokens, and all tokens but the first are
    predicted, so no contestant can save work on padding or prompts.
    """

    target: str = TARGET
    layers: tuple[int, ...] = (0, 1, 2, 3)
    student: str = ""
    device: str = "cpu"
    precision: str = "fp32"
    rows: int = 8
    steps: int = 12
    equal_length: bool = False
    lr: float = 3e-4
    seed: int = 0

    def load(self) -> Target:
        """Load the target. Call it before anything else on a GPU."""
        if self.device != "cpu":
            # With several GPUs in sight, TRL's trainers split each batch over them.
            os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
        dtype = {"fp32": "float32", "bf16": "bfloat16"}[self.precision]
        return load_target(self.target, dtype=dtype, device=self.device)

    def make_student(self, target: Target) -> PreTrainedModel:
        """Return the untrained student on the device, in float32."""
        if not self.student:
            return student_from_layers(target.model, self.layers).to(self.device)
        loaded = load_model_and_tokenizer(self.student, dtype="float32", device=self.device)
        student: PreTrainedModel = loaded.model.train().requires_grad_(True)
        return student


@dataclass
class Meter:
    """Times, losses, tokens and peak memory of a training run, step by step.

    times: seconds on the clock, at the start and then at the end of each step. cpu: the same in
    processor time of all threads, which other programs disturb less.
    tokens: of each batch (text tokens, predicted tokens, tokens with padding).
    losses: mean over each batch's predicted tokens. device: cpu or cuda; whose memory it is.
    """

    device: str = "cpu"
    times: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    tokens: list[tuple[int, int, int]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak: int = 0

    def tick(self) -> None:
        # Read at each step, to exclude the work of a trainer after the last step.
        finish(torch.device(self.device))
        self.times.append(time.perf_counter())
        self.cpu.append(time.process_time())
        self.peak = peak_memory(self.device)

    def count_batch(self, attention_mask: Tensor, predicted: Tensor) -> None:
        """Count a batch. attention_mask: [B, T]. predicted: bool [B, T − 1], tokens in the loss."""
        self.tokens.append(
            (int(attention_mask.sum()), int(predicted.sum()), attention_mask.numel())
        )
