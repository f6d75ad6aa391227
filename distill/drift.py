"""Measures how far training moved a model from the original, on text not used in training.

Shapes: n predicted tokens, V vocabulary.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from distill.teacher.live_teacher import LiveTeacher


@dataclass(frozen=True)
class Drift:
    """The drift of a trained model on a text.

    kl: KL(original‖new) at temperature 1, in nats per token, on the contexts of the text.
    perplexity_original, perplexity_new: the perplexity of the text's tokens. tokens: their number.
    """

    kl: float
    perplexity_original: float
    perplexity_new: float
    tokens: int

    def to_dict(self) -> dict[str, float]:
        """Return the fields as JSON values."""
        return asdict(self)

    def in_words(self, path: Path) -> str:
        """A line for the log. path: the new model's directory."""
        return (
            f"  the new target {path}: KL(original‖new) {self.kl:.4f} nats per token, perplexity "
            f"{self.perplexity_original:.2f} → {self.perplexity_new:.2f} on {self.tokens} held-out "
            "tokens"
        )


@torch.no_grad()
def measure_drift(
    original: PreTrainedModel,
    new: PreTrainedModel,
    batches: Iterable[tuple[Tensor, Tensor, Tensor]],
    *,
    chunk: int = 128,
) -> Drift:
    """Compare both models on the same batches.

    batches: input_ids and attention_mask int64 [B, T], and loss_mask bool [B, T], True where the
    token counts. Log-probabilities are float32, sums are float64.
    """
    kl, before, after, tokens = 0.0, 0.0, 0.0, 0
    teachers = [LiveTeacher(model) for model in (original, new)]
    for ids, attention, mask in batches:
        signals = [teacher.signal(ids, attention, mask, []) for teacher in teachers]
        labels = ids[:, 1:][mask[:, 1:]]
        for begin in range(0, len(labels), chunk):
            part = slice(begin, begin + chunk)
            log_p, log_q = (signal(part).logits.float().log_softmax(-1) for signal in signals)
            chunk_labels = labels[part, None]
            kl += float((log_p.exp() * (log_p - log_q)).sum(dtype=torch.float64))
            before -= float(log_p.gather(1, chunk_labels).sum(dtype=torch.float64))
            after -= float(log_q.gather(1, chunk_labels).sum(dtype=torch.float64))
        tokens += len(labels)
    return Drift(kl / tokens, math.exp(before / tokens), math.exp(after / tokens), tokens)
