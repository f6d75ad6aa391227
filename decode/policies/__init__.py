"""Draft-length policies by name: how deep the next draft of each row shall be.

A policy is one file with one registration. It sees what became of earlier drafts and, if it asks,
the drafter's logits; it knows nothing of drafters, rules or the loop. None of them can change what
is sampled: a length is settled before the tokens that it would leave out are drawn.

A row's draft depends on that row alone, so that in float32 its text is the same in any batch.
Policies that decide for a batch together (`by_batch`, `cost_model`) say so: under rules that draw,
other than `exact`, their texts may differ with the batch; the distribution they are drawn from
never does.
"""

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from decode.errors import UserError
from decode.measure.costs import Costs
from decode.registry import Registry
from decode.stats import Step


class Policy(ABC):
    """Life within one decode: start → (depths → stops* → observe)* with keep_rows between.

    most: no draft is deeper. watches: `stops` is to be asked before each token of a chain.
    constant: every draft is as deep as any other, so that figures per draft length have a meaning.
    asked: before how many tokens of the last draft `stops` was asked; the drafter computed logits
    for each of them. needs_costs: `use_costs` is worth the seconds that measuring takes.
    """

    watches: bool = False
    constant: bool = False
    needs_costs: bool = False
    asked: int = 0

    def __init__(self, most: int) -> None:
        if most < 1:
            raise UserError(f"gamma is {most}; a draft needs at least 1 token (use drafter none)")
        self.most = most
        self.rows = 0

    def start(self, rows: int) -> None:
        """A new batch of so many rows begins. What was learnt of costs may be kept."""
        self.rows = rows

    @abstractmethod
    def depths(self) -> np.ndarray:
        """int [B], 0 … most: how deep each row's next draft may be; all 0 is a plain step."""

    def stops(self, place: int, logits: Tensor, drafting: np.ndarray) -> Tensor:
        """bool [B]: whose draft ends before its token number `place` (0, 1, …), given the drafter's
        logits for that token, [B, V']. Asked only where `watches`.

        drafting: bool [B], the rows that are asked about. The logits of all others mean nothing:
        their draft has ended, or another drafter serves them. Several drafters may ask in one
        round, each about rows of its own.
        """
        raise NotImplementedError

    def observe(self, step: Step) -> None:
        """What became of the draft."""
        return None

    def keep_rows(self, rows: np.ndarray) -> None:
        """Only these rows go on, in this order."""
        self.rows = len(rows)

    def use_costs(self, costs: Costs) -> None:
        """Costs that were measured before decoding begins."""
        return None


class Watcher(Policy):
    """A policy that looks at one number per drafted token, made of the drafter's logits.

    signal: what the number is called in `Step.signals`. least: a draft is never stopped before it
    has so many tokens. Raises UserError unless 1 ≤ least ≤ most.
    """

    watches = True
    signal: str

    def __init__(self, most: int, least: int) -> None:
        super().__init__(most)
        if not 1 <= least <= most:
            raise UserError(f"least is {least} and most is {most}; expected 1 ≤ least ≤ most")
        self.least = least
        self._forget()

    def _forget(self) -> None:
        # By place: the number, float [B], and which rows it was asked for, bool [B].
        self._seen: list[Tensor] = []
        self._drafting: list[np.ndarray] = []
        self.asked = 0

    def depths(self) -> np.ndarray:
        return np.full(self.rows, self.most)

    @abstractmethod
    def measure(self, logits: Tensor) -> Tensor:
        """float32 [B]: the number, from the drafter's logits [B, V']."""

    @abstractmethod
    def ends(self, place: int, value: Tensor) -> Tensor:
        """bool [B]: whose draft ends before this place, given the number there, [B]; NaN in rows
        that are not asked about."""

    def learn(self, step: Step, values: np.ndarray, asked: np.ndarray) -> None:
        """values: float64 [B, D], the number at each place; asked: int [B], at how many places a
        row was asked about: the first ones. Behind them values are NaN."""
        return None

    def start(self, rows: int) -> None:
        super().start(rows)
        self._forget()

    def stops(self, place: int, logits: Tensor, drafting: np.ndarray) -> Tensor:
        value = self.measure(logits)
        asked = torch.as_tensor(drafting, device=value.device)
        value = torch.where(asked, value, torch.nan)
        if place < len(self._seen):  # another drafter asked before, about other rows
            self._seen[place] = torch.where(asked, value, self._seen[place].to(value))
            self._drafting[place] = self._drafting[place] | drafting
        else:
            self._seen.append(value)
            self._drafting.append(drafting)
        self.asked = len(self._seen)
        ended = self.ends(place, value) & asked
        return ended if place >= self.least else torch.zeros_like(ended)

    def observe(self, step: Step) -> None:
        if not self._seen:
            return
        values = torch.stack(self._seen, 1).double().cpu().numpy()
        step.signals[self.signal] = values
        self.learn(step, values, np.stack(self._drafting, 1).sum(1))
        self._forget()


POLICIES: Registry[type[Policy]] = Registry("draft-length policy")

from decode.policies import (  # noqa: E402, F401  (each registers itself)
    adaptive_confidence,
    by_batch,
    confidence,
    cost_model,
    entropy,
    feedback,
    fixed,
    heuristic,
)
