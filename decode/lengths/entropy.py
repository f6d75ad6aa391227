"""The flatter the drafter's distribution, the shorter the draft."""

import math
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from decode.base.device import to_device
from decode.base.errors import require_fits
from decode.lengths import POLICIES
from decode.lengths.watcher import Watcher
from decode.verification import Verification


@POLICIES.register("entropy")
class Entropy(Watcher):
    """The normalised entropy h = H/log V' of the drafter's distribution at temperature 1 sets the
    length: γ(h) = max_depth − (max_depth − min_depth)·min(1, h/flat), rounded. It is `max_depth`
    for h = 0 and `min_depth` for h ≥ `flat`. A draft stops before token i = 0, 1, … if i ≥ γ(h_i).

    ema: the weight of the past in an EMA (exponential moving average) that replaces h. 0: no EMA.
    The next draft continues the EMA from the first rejected token. Later positions are left out,
    because their text was not kept.
    """

    signal = "entropy"
    per_row = MappingProxyType({"_past": np.nan})  # NaN before a row's first draft
    _past: np.ndarray  # [B]

    def __init__(
        self, max_depth: int = 8, min_depth: int = 1, flat: float = 0.3, ema: float = 0.0
    ) -> None:
        super().__init__(max_depth, min_depth)
        expected = "a normalised entropy, above 0 and at most 1"
        require_fits(lambda x: 0 < x <= 1, expected, flat=flat)
        require_fits(lambda x: 0 <= x < 1, "a weight from 0 (none) to below 1", ema=ema)
        self.flat, self.ema = flat, ema
        self._running: Tensor | None = None

    def measure(self, logits: Tensor, estimate: Tensor | None) -> Tensor:
        log_q = logits.float().log_softmax(-1)
        entropy = torch.special.entr(log_q.exp()).sum(-1)
        return entropy / math.log(max(logits.shape[-1], 2))

    def ends(self, position: int, value: Tensor) -> Tensor:
        if self.ema:
            past = to_device(self._past, value.device).to(value.dtype)
            before = past if position == 0 or self._running is None else self._running
            value = torch.where(before.isnan(), value, self.ema * before + (1 - self.ema) * value)
            self._running = value
        gamma = self.max_depth - (self.max_depth - self.min_depth) * (value / self.flat).clamp(
            max=1.0
        )
        return position >= gamma.round()

    def learn(self, verification: Verification, values: np.ndarray, watched: np.ndarray) -> None:
        kept = np.minimum(watched, verification.accepted + 1)
        for position in range(values.shape[1] if self.ema else 0):
            now = values[:, position]
            average = np.where(
                np.isnan(self._past), now, self.ema * self._past + (1 - self.ema) * now
            )
            self._past = np.where(position < kept, average, self._past)
