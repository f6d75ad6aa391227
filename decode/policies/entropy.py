"""The flatter the drafter's distribution, the shorter the draft."""

import math

import numpy as np
import torch
from torch import Tensor

from decode.errors import UserError
from decode.policies import POLICIES, Watcher
from decode.verification import Verification


@POLICIES.register("entropy")
class Entropy(Watcher):
    """The normalised entropy h = H/log V' of the drafter's distribution at temperature 1 sets the
    length: γ(h) = most − (most − least)·min(1, h/flat), rounded. It is `most` for h = 0 and `least`
    for h ≥ `flat`. A draft stops before token i = 0, 1, … if i ≥ γ(h_i).

    ema: the weight of the past in an EMA (exponential moving average) that replaces h. 0: no EMA.
    The next draft continues the EMA from the first rejected token. Later places are left out,
    because their text was not kept.
    """

    signal = "entropy"

    def __init__(self, most: int = 8, least: int = 1, flat: float = 0.3, ema: float = 0.0) -> None:
        super().__init__(most, least)
        if not 0 < flat <= 1:
            raise UserError(f"flat is {flat}; expected a normalised entropy, above 0 and at most 1")
        if not 0 <= ema < 1:
            raise UserError(f"ema is {ema}; expected a weight from 0 (none) to below 1")
        self.flat, self.ema = flat, ema
        self._past = np.zeros(0)  # [B], NaN before a row's first draft
        self._running: Tensor | None = None

    def start(self, rows: int) -> None:
        super().start(rows)
        self._past = np.full(rows, np.nan)

    def measure(self, logits: Tensor) -> Tensor:
        log_q = logits.float().log_softmax(-1)
        entropy = torch.special.entr(log_q.exp()).sum(-1)
        return entropy / math.log(max(logits.shape[-1], 2))

    def ends(self, place: int, value: Tensor) -> Tensor:
        if self.ema:
            past = torch.as_tensor(self._past, dtype=value.dtype, device=value.device)
            before = past if place == 0 or self._running is None else self._running
            value = torch.where(before.isnan(), value, self.ema * before + (1 - self.ema) * value)
            self._running = value
        gamma = self.most - (self.most - self.least) * (value / self.flat).clamp(max=1.0)
        return place >= gamma.round()

    def learn(self, done: Verification, values: np.ndarray, asked: np.ndarray) -> None:
        kept = np.minimum(asked, done.accepted + 1)
        for place in range(values.shape[1] if self.ema else 0):
            now = values[:, place]
            average = np.where(
                np.isnan(self._past), now, self.ema * self._past + (1 - self.ema) * now
            )
            self._past = np.where(place < kept, average, self._past)

    def keep_rows(self, rows: np.ndarray) -> None:
        super().keep_rows(rows)
        self._past = self._past[rows]
