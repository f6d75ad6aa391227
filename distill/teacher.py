"""What the target says about a text: the signal that drafters learn from."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from distill.chunked import TeacherLogits
from distill.output import SplitModel


class LiveTeacher:
    """Runs the frozen target over each batch, once and without gradients.

    With `remember`, the last hidden states of every predicted token are kept on the CPU after
    their first use (H numbers a token in the target's dtype, not V), so that later epochs over the
    same samples cost no forward and still see the target's whole distribution.
    """

    def __init__(self, target: SplitModel, *, remember: bool = False) -> None:
        self.target = target
        self._kept: dict[str, Tensor] | None = {} if remember else None

    @torch.no_grad()
    def logits(
        self, input_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor, ids: Sequence[str]
    ) -> TeacherLogits:
        """For a batch [B, T] of samples `ids`: a function from a slice of its n predicted tokens
        to the target's logits for them, [c, V], made when it is called."""
        hidden = self._recall(ids, input_ids.device)
        if hidden is None:
            predicted = loss_mask[:, 1:]
            states = self.target.hidden(input_ids, attention_mask)[:, :-1]
            hidden = states[predicted]
            if self._kept is not None:
                counts = predicted.sum(1).tolist()
                self._kept.update(zip(ids, hidden.cpu().split(counts), strict=False))
        output = self.target.output

        @torch.no_grad()
        def teacher(part: slice) -> Tensor:
            return F.linear(hidden[part], output.weight, output.bias)

        return teacher

    def _recall(self, ids: Sequence[str], device: torch.device) -> Tensor | None:
        if not self._kept or not ids or any(sample not in self._kept for sample in ids):
            return None
        return torch.cat([self._kept[sample] for sample in ids]).to(device)
