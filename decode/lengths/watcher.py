"""The base class of policies that look at the drafter's logits, and checks of settings.

Shapes: B rows, D draft tokens, V' draft vocabulary.
"""

from abc import abstractmethod

import numpy as np
import torch
from torch import Tensor

from decode.base.errors import UserError, require_fits
from decode.lengths import Policy
from decode.verification import Verification


def require_threshold(threshold: float) -> None:
    """Raise UserError unless the threshold is a probability."""
    require_fits(lambda x: 0 <= x <= 1, "a probability, 0 to 1", threshold=threshold)


class Watcher(Policy):
    """A policy that looks at one number per draft token, computed from the drafter's logits.

    signal: the name of that number in `Verification.signals`. min_depth: a draft is never stopped
    before it has this many tokens. Raises UserError unless 1 ≤ min_depth ≤ max_depth.
    """

    watches = True
    signal: str

    def __init__(self, max_depth: int, min_depth: int) -> None:
        super().__init__(max_depth)
        if not 1 <= min_depth <= max_depth:
            raise UserError(
                f"min_depth is {min_depth} and max_depth {max_depth}; expected 1 ≤ min_depth ≤ "
                "max_depth"
            )
        self.min_depth = min_depth
        self._forget()

    def _forget(self) -> None:
        # By position: the number, float [B], NaN in rows it was not computed for.
        self._seen: list[Tensor] = []
        self._on_host: list[Tensor] = []  # the same, once the device has passed the draft

    def depths(self) -> np.ndarray:
        return np.full(self.rows, self.max_depth)

    @abstractmethod
    def measure(self, logits: Tensor, estimate: Tensor | None) -> Tensor:
        """float32 [B]: the number, from the drafter's logits [B, V'] or its estimate of acceptance,
        float32 [B]."""

    @abstractmethod
    def ends(self, position: int, value: Tensor) -> Tensor:
        """bool [B]: the rows whose draft ends before this position, or after it if `stops_after`.
        value: the number there, [B], NaN in rows that are not drafting."""

    def learn(self, verification: Verification, values: np.ndarray, watched: np.ndarray) -> None:
        """values: float64 [B, D], the number at each position. watched: int [B], at how many
        positions `stops` was called for a row: the first ones. After them, values are NaN."""
        return None

    def start(self, rows: int) -> None:
        super().start(rows)
        self._forget()

    def stops(
        self, position: int, logits: Tensor, drafting: Tensor, estimate: Tensor | None = None
    ) -> Tensor:
        value = torch.where(drafting, self.measure(logits, estimate), torch.nan)
        seen = value
        if position < len(self._seen):  # another drafter called before, for other rows
            seen = torch.where(drafting, value, self._seen[position].to(value))
        self._seen[position:] = [seen, *self._seen[position + 1 :]]
        # The verdict on this draft is read after this copy, so `signals` waits for nothing.
        copy = seen.to("cpu", non_blocking=True)
        self._on_host[position:] = [copy, *self._on_host[position + 1 :]]
        ended = self.ends(position, value) & drafting
        shortest = position + self.stops_after  # the draft, if it ends here
        return ended if shortest >= self.min_depth else torch.zeros_like(ended)

    def signals(self) -> dict[str, np.ndarray]:
        seen = self._on_host
        return {self.signal: torch.stack(seen, 1).double().numpy()} if seen else {}

    def observe(self, verification: Verification) -> None:
        values = verification.signals.get(self.signal)
        if values is None:
            return
        known = ~np.isnan(values)
        watched = np.where(known.any(1), values.shape[1] - known[:, ::-1].argmax(1), 0)
        self.learn(verification, values, watched)
        self._forget()
