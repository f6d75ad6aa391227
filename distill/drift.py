"""How far a model has moved from the one it was trained from, on text that it was not trained on.

Shapes: n predicted tokens, V vocabulary.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from distill.teacher.output_layer import SplitModel


@dataclass(frozen=True)
class Drift:
    """kl: KL(original‖new), nats per token, at temperature 1, on the contexts of the text.
    perplexity_original, perplexity_new: of the text's tokens. tokens: how many."""

    kl: float
    perplexity_original: float
    perplexity_new: float
    tokens: int

    def to_dict(self) -> dict[str, float]:
        """JSON values."""
        return asdict(self)


@torch.no_grad()
def measure_drift(
    original: SplitModel,
    new: SplitModel,
    batches: Iterable[tuple[Tensor, Tensor, Tensor]],
    *,
    chunk: int = 128,
) -> Drift:
    """batches: input_ids, attention_mask int64 and loss_mask bool [B, T], True where the token
    counts. Both models see each batch alike; log-probabilities are float32, sums float64."""
    kl, before, after, tokens = 0.0, 0.0, 0.0, 0
    for ids, attention, mask in batches:
        predicted = mask[:, 1:]
        states = [m.hidden(ids, attention)[:, :-1][predicted] for m in (original, new)]
        labels = ids[:, 1:][predicted]
        for begin in range(0, len(labels), chunk):
            part = slice(begin, begin + chunk)
            log_p, log_q = (
                linear(x[part], m.output.weight, m.output.bias).float().log_softmax(-1)
                for x, m in zip(states, (original, new), strict=True)
            )
            own = labels[part, None]
            kl += float((log_p.exp() * (log_p - log_q)).sum(dtype=torch.float64))
            before -= float(log_p.gather(1, own).sum(dtype=torch.float64))
            after -= float(log_q.gather(1, own).sum(dtype=torch.float64))
        tokens += len(labels)
    return Drift(kl / tokens, math.exp(before / tokens), math.exp(after / tokens), tokens)
