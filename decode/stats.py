"""Counts and times of decoding, and the figures computed from them.

A position is a depth in the draft: 1 is the first draft token. Draft tokens past the end of a text
(EOS or the length limit) count as neither drafted nor reached.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from decode.verification import Verification


@dataclass
class Counts:
    """Counts of one text, or pooled over several (`a + b`). Arrays are by position, [D].

    steps: verification passes. emitted: tokens they yielded, without the prefill's token.
    drafted, reached, accepted: draft tokens, judged ones with all before them accepted, and kept
    ones. by_accepted: how many passes kept 0, 1, … D draft tokens, [D + 1].
    """

    steps: int
    emitted: int
    drafted: np.ndarray
    reached: np.ndarray
    accepted: np.ndarray
    by_accepted: np.ndarray

    @classmethod
    def zero(cls) -> "Counts":
        nothing = np.zeros(0, dtype=np.int64)
        return cls(0, 0, nothing, nothing, nothing, np.zeros(1, dtype=np.int64))

    def __add__(self, other: "Counts") -> "Counts":
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Counts(*(_added(a, b) for a, b in pairs))

    @property
    def tokens_per_step(self) -> float:
        """Emitted tokens per verification pass, bonus token included; plain decoding is 1."""
        return _ratio(self.emitted, self.steps)

    @property
    def acceptance_rate(self) -> float:
        """Accepted tokens / positions reached: the α of the speed-up formula."""
        return _ratio(self.accepted.sum(), self.reached.sum())

    @property
    def draft_efficiency(self) -> float:
        """Accepted / drafted tokens. Engines often print this as the acceptance rate."""
        return _ratio(self.accepted.sum(), self.drafted.sum())

    @property
    def acceptance_by_position(self) -> list[float]:
        return [_ratio(a, r) for a, r in zip(self.accepted, self.reached, strict=True)]

    @property
    def nodes_per_step(self) -> float:
        return _ratio(self.drafted.sum(), self.steps)

    def to_dict(self) -> dict[str, object]:
        """Counts and figures for JSON. A figure is None if its denominator is 0."""
        figures = {
            "tokens_per_step": self.tokens_per_step,
            "acceptance_rate": self.acceptance_rate,
            "draft_efficiency": self.draft_efficiency,
            "nodes_per_step": self.nodes_per_step,
        }
        return {
            "steps": self.steps,
            "emitted": self.emitted,
            "drafted": int(self.drafted.sum()),
            "reached": int(self.reached.sum()),
            "accepted": int(self.accepted.sum()),
            **{name: finite(value) for name, value in figures.items()},
            "acceptance_by_position": [finite(x) for x in self.acceptance_by_position],
            "reached_by_position": self.reached.tolist(),
            "steps_by_accepted": self.by_accepted.tolist(),
        }


def finite(value: float) -> float | None:
    """The value, or None if it is not finite: JSON has no NaN."""
    return float(value) if np.isfinite(value) else None


def _ratio(part: float, total: float) -> float:
    return float(part / total) if total else float("nan")


def _added(a: Any, b: Any) -> Any:
    """The sum of two numbers, or of two arrays by position."""
    if not isinstance(a, np.ndarray):
        return a + b
    total = np.zeros(max(len(a), len(b)), dtype=np.int64)
    total[: len(a)] += a
    total[: len(b)] += b
    return total


@dataclass
class Timing:
    """Seconds of wall time, for all rows of a batch together.

    prefill: the target's pass over the prompts. draft_prefill: the same for the drafter, which
    starts and reads the prompts before its first draft (and the text after them, if that draft
    comes late). draft: the drafter's steps. verify: the target's forward. overhead: the rule and
    all bookkeeping outside of forwards.
    """

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    overhead: float = 0.0
    draft_prefill: float = 0.0
    steps: int = 0  # verification passes
    draft_steps: int = 0  # sum over all verification passes of the depth of the draft
    tokens_fed: float = 0  # sum over all verification passes of the tokens fed per row

    @property
    def total(self) -> float:
        return self.prefill + self.draft_prefill + self.stepping

    @property
    def stepping(self) -> float:
        """Seconds spent on the decode steps."""
        return self.draft + self.verify + self.overhead

    def to_dict(self) -> dict[str, float]:
        """Milliseconds per part, and the counts, as JSON values."""
        parts = ("prefill", "draft_prefill", "draft", "verify", "overhead")
        return {
            **{f"{part}_ms": 1000 * getattr(self, part) for part in parts},
            "steps": self.steps,
            "draft_steps": self.draft_steps,
            "tokens_fed": self.tokens_fed,
        }

    def __add__(self, other: "Timing") -> "Timing":
        return Timing(
            *(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True))
        )


def summary(steps: Iterable[Verification]) -> dict[str, Any]:
    """Many steps in a few JSON values. A figure is None if its denominator is 0.

    gamma_histogram: number of row-steps per max depth allowed. mean_gamma: mean of that depth.
    la_k: mean of accepted / draft tokens, over row-steps with a draft. plain_share: share of
    row-steps for which no draft was allowed. signals: mean of each signal of the policy.
    ms_per_step: mean milliseconds of a pass, by part.
    """
    steps = list(steps)
    gammas = np.concatenate([step.depths for step in steps] or [np.zeros(0, dtype=np.int64)])
    shares = [step.accepted_share()[step.drafted > 0] for step in steps]
    signals: dict[str, list[np.ndarray]] = {}
    for step in steps:
        for name, values in step.signals.items():
            signals.setdefault(name, []).append(values[~np.isnan(values)])
    depths, times = np.unique(gammas, return_counts=True)
    return {
        "gamma_histogram": {str(d): int(n) for d, n in zip(depths, times, strict=True)},
        "mean_gamma": _mean(gammas),
        "plain_share": _mean(gammas == 0),
        "la_k": _mean(np.concatenate(shares or [np.zeros(0)])),
        "signals": {name: _mean(np.concatenate(values)) for name, values in signals.items()},
        "ms_per_step": {
            part: _mean(1000 * np.array([getattr(step, f"{part}_s") for step in steps]))
            for part in ("draft", "verify", "overhead")
        },
    }


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


@dataclass
class Judged:
    """Draft tokens of one pass by row and position, int [B, D]: drafted, reached and accepted ones.
    A row whose text ended in this pass has none deeper than the tokens it emitted."""

    drafted: np.ndarray
    reached: np.ndarray
    accepted: np.ndarray

    @classmethod
    def of(cls, verification: Verification) -> "Judged":
        emitted, depth = verification.emitted, verification.nodes_by_depth.shape[1]
        positions = np.arange(depth)[None, :]
        inside = positions < np.where(verification.ended, emitted, depth)[:, None]
        accepted = np.minimum(verification.accepted, emitted)
        return cls(
            verification.nodes_by_depth * inside,
            (positions < verification.reached[:, None]) & inside,
            positions < accepted[:, None],
        )


class Tally:
    """Counts of B rows, one verification pass after the other: each figure of `Counts` as an array
    [B], or [B, D] by position. depth: D, which grows if it must."""

    def __init__(self, rows: int, depth: int = 0) -> None:
        self.depth = depth
        self.steps, self.emitted = np.zeros((2, rows), dtype=np.int64)
        self.drafted, self.reached, self.accepted = np.zeros((3, rows, depth), dtype=np.int64)
        self.by_accepted = np.zeros((rows, depth + 1), dtype=np.int64)

    def add(self, verification: Verification) -> None:
        """Count one pass."""
        rows, emitted = verification.rows, verification.emitted
        judged = Judged.of(verification)
        depth = judged.drafted.shape[1]
        self._grow(depth)
        part = 1 - verification.sits_out
        self.steps[rows] += part
        self.emitted[rows] += emitted
        self.drafted[rows, :depth] += judged.drafted
        self.reached[rows, :depth] += judged.reached
        self.accepted[rows, :depth] += judged.accepted
        self.by_accepted[rows, np.minimum(verification.accepted, emitted)] += part

    def row(self, row: int) -> Counts:
        """The counts of one row up to now."""
        return self._counts(lambda figure: figure[row])

    def pooled(self) -> Counts:
        """The counts of all rows together."""
        return self._counts(lambda figure: figure.sum(0))

    def _counts(self, of_rows: Callable[[np.ndarray], Any]) -> Counts:
        by_position = (self.drafted, self.reached, self.accepted, self.by_accepted)
        steps, emitted = int(of_rows(self.steps)), int(of_rows(self.emitted))
        return Counts(steps, emitted, *map(of_rows, by_position))

    def _grow(self, depth: int) -> None:
        missing = depth - self.depth
        if missing > 0:
            self.depth = depth
            for name in ("drafted", "reached", "accepted", "by_accepted"):
                setattr(self, name, np.pad(getattr(self, name), ((0, 0), (0, missing))))
