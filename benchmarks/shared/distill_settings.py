"""The settings of `benchmarks.distill`, and what it measures of a training."""

import time
from dataclasses import dataclass, field

from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.common import TARGET
from benchmarks.shared.process_memory import peak_resident_memory
from decode.model.loading import Target, load_target
from distill.untrained_student import student_from_layers


@dataclass(frozen=True)
class Settings:
    """rows: of a batch; an average if batches are formed by length. steps: measured, one epoch.

    layers: those of the target that are the student.
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

    def load(self) -> Target:
        """Load the target."""
        dtype = {"fp32": "float32", "bf16": "bfloat16"}[self.precision]
        return load_target(self.target, dtype=dtype, device="cpu")

    def make_student(self, target: Target) -> PreTrainedModel:
        """Return the untrained student, in float32."""
        return student_from_layers(target.model, self.layers)


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
