"""What is counted while decoding, and the figures made of the counts.

A position is a depth in the draft: 1 is the first drafted token. Tokens drafted past the end of a
text (EOS or the length limit) count as neither drafted nor reached.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Counts:
    """Counts of one text, or pooled over several (`a + b`). Arrays are by position, [D].

    steps: verification passes. emitted: tokens they yielded, without the prefill's token.
    by_accepted: how many passes kept 0, 1, … D drafted tokens, [D + 1].
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
        return Counts(
            self.steps + other.steps,
            self.emitted + other.emitted,
            _add(self.drafted, other.drafted),
            _add(self.reached, other.reached),
            _add(self.accepted, other.accepted),
            _add(self.by_accepted, other.by_accepted),
        )

    @property
    def tokens_per_step(self) -> float:
        """Emitted tokens per verification pass, bonus token included; plain decoding is 1."""
        return _ratio(self.emitted, self.steps)

    @property
    def acceptance_rate(self) -> float:
        """Accepted / positions reached: the α of the speed-up formula."""
        return _ratio(self.accepted.sum(), self.reached.sum())

    @property
    def draft_efficiency(self) -> float:
        """Accepted / drafted: what engines often print as acceptance."""
        return _ratio(self.accepted.sum(), self.drafted.sum())

    @property
    def acceptance_by_position(self) -> list[float]:
        return [_ratio(a, r) for a, r in zip(self.accepted, self.reached, strict=True)]

    @property
    def nodes_per_step(self) -> float:
        return _ratio(self.drafted.sum(), self.steps)

    def to_dict(self) -> dict[str, object]:
        """Counts and figures for JSON; a figure without a denominator is None."""
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
    """The value, or None where it is not a number: JSON has no NaN."""
    return float(value) if np.isfinite(value) else None


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else float("nan")


def _add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    total = np.zeros(max(len(a), len(b)), dtype=np.int64)
    total[: len(a)] += a
    total[: len(b)] += b
    return total


@dataclass
class Timing:
    """Seconds of wall time, for all rows of a batch together.

    prefill: the target's pass over the prompts. draft_prefill: the same for the drafter; it starts
    and reads the prompts before its first draft (and what followed them, if that draft comes late).
    verify is the target's forward; overhead is the rule and all bookkeeping outside of forwards.
    """

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    overhead: float = 0.0
    draft_prefill: float = 0.0
    steps: int = 0  # verification passes
    draft_depth: int = 0  # how deep each pass's draft was, summed: the number of draft steps
    width: int = 0  # tokens each pass was fed per row, summed

    def count(self, step: "Step") -> None:
        """Count a pass whose seconds are already added."""
        self.steps += 1
        self.draft_depth += step.depth
        self.width += step.width

    @property
    def total(self) -> float:
        return self.prefilling + self.stepping

    @property
    def prefilling(self) -> float:
        """What is spent on the prompts, by target and drafter."""
        return self.prefill + self.draft_prefill

    @property
    def stepping(self) -> float:
        """What is spent on the steps after that."""
        return self.draft + self.verify + self.overhead

    def to_dict(self) -> dict[str, float]:
        """Milliseconds by part, and the counts, as JSON values."""
        parts = ("prefill", "draft_prefill", "draft", "verify", "overhead")
        return {
            **{f"{part}_ms": 1000 * getattr(self, part) for part in parts},
            "steps": self.steps,
            "draft_steps": self.draft_depth,
            "tokens_fed": self.width,
        }

    def __add__(self, other: "Timing") -> "Timing":
        return Timing(
            *(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True))
        )


@dataclass
class Step:
    """One verification pass over B rows, as it is handed to policies and reports.

    rows: int [B], which prompts. depths: int [B], how deep each draft was allowed to be. drafted,
    accepted, emitted: int [B], nodes drafted, drafted tokens kept and tokens emitted; reached:
    int [B], drafted positions judged with all before them accepted. width: tokens fed per row.
    depth: how many draft steps were taken. The times are seconds for the whole batch. signals:
    what a policy looked at, float64 [B, D] by name, NaN where it did not.
    """

    rows: np.ndarray
    depths: np.ndarray
    drafted: np.ndarray
    reached: np.ndarray
    accepted: np.ndarray
    emitted: np.ndarray
    width: int
    depth: int
    draft_s: float
    verify_s: float
    overhead_s: float
    signals: dict[str, np.ndarray] = field(default_factory=dict)

    def longest(self) -> np.ndarray:
        """int [B]: how many drafted tokens of a row could stay; in a tree that is a path's."""
        return np.minimum(self.drafted, np.minimum(self.depths, self.depth))

    def kept_share(self) -> np.ndarray:
        """float64 [B]: la/k, accepted over drafted tokens (in a tree: over the draft's depth);
        0 for a row that drafted nothing."""
        share: np.ndarray = self.accepted / np.maximum(self.longest(), 1)
        return share

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, milliseconds. gamma: how deep each row's draft was allowed to be; la_k:
        None where nothing was drafted; signals by row, each as long as it was looked at."""
        shares = np.where(self.drafted > 0, self.kept_share(), np.nan)
        return {
            "rows": self.rows.tolist(),
            "gamma": self.depths.tolist(),
            "drafted": self.drafted.tolist(),
            "reached": self.reached.tolist(),
            "accepted": self.accepted.tolist(),
            "emitted": self.emitted.tolist(),
            "la_k": [finite(share) for share in shares],
            "width": self.width,
            "draft_steps": self.depth,
            "draft_ms": 1000 * self.draft_s,
            "verify_ms": 1000 * self.verify_s,
            "overhead_ms": 1000 * self.overhead_s,
            **{
                name: [row[~np.isnan(row)].round(4).tolist() for row in values]
                for name, values in self.signals.items()
            },
        }


def summary(steps: Iterable[Step]) -> dict[str, Any]:
    """Many steps in a few JSON values; a figure without a denominator is None.

    gamma_histogram: row-steps by how deep a draft was allowed to be. la_k: mean of accepted over
    drafted tokens, over row-steps that drafted. plain_share: row-steps that were given no draft.
    signals: mean of what the policy looked at. ms_per_step: mean milliseconds of a pass, by part.
    """
    steps = list(steps)
    gammas = np.concatenate([step.depths for step in steps] or [np.zeros(0, dtype=np.int64)])
    shares = [step.kept_share()[step.drafted > 0] for step in steps]
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
        "signals": {name: _mean(np.concatenate(found)) for name, found in signals.items()},
        "ms_per_step": {
            part: _mean(1000 * np.array([getattr(step, f"{part}_s") for step in steps]))
            for part in ("draft", "verify", "overhead")
        },
    }


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


@dataclass
class Tally:
    """The loop's running counts for B rows, written a whole step at a time."""

    rows: int
    depth: int = 0
    steps: np.ndarray = field(init=False)
    emitted: np.ndarray = field(init=False)
    drafted: np.ndarray = field(init=False)
    reached: np.ndarray = field(init=False)
    accepted: np.ndarray = field(init=False)
    by_accepted: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.steps = np.zeros(self.rows, dtype=np.int64)
        self.emitted = np.zeros(self.rows, dtype=np.int64)
        for name in ("drafted", "reached", "accepted"):
            setattr(self, name, np.zeros((self.rows, self.depth), dtype=np.int64))
        self.by_accepted = np.zeros((self.rows, self.depth + 1), dtype=np.int64)

    def step(
        self,
        rows: np.ndarray,
        nodes_by_depth: np.ndarray,
        reached: np.ndarray,
        accepted: np.ndarray,
        emitted: np.ndarray,
        ended: np.ndarray,
    ) -> None:
        """One pass for the given rows, int [B'] each; nodes_by_depth is int [B', D].

        Rows whose text ended in this pass count nothing deeper than what they emitted.
        """
        depth = nodes_by_depth.shape[1]
        self._grow(depth)
        positions = np.arange(depth)[None, :]
        counts = (positions < np.where(ended, emitted, depth)[:, None]).astype(np.int64)
        kept = np.minimum(accepted, emitted)
        self.steps[rows] += 1
        self.emitted[rows] += emitted
        self.drafted[rows, :depth] += nodes_by_depth * counts
        self.reached[rows, :depth] += (positions < reached[:, None]) * counts
        self.accepted[rows, :depth] += positions < kept[:, None]
        self.by_accepted[rows, kept] += 1

    def row(self, row: int) -> Counts:
        """The counts of one row so far."""
        return Counts(
            int(self.steps[row]),
            int(self.emitted[row]),
            self.drafted[row],
            self.reached[row],
            self.accepted[row],
            self.by_accepted[row],
        )

    def pooled(self) -> Counts:
        """The counts of all rows together."""
        return Counts(
            int(self.steps.sum()),
            int(self.emitted.sum()),
            self.drafted.sum(0),
            self.reached.sum(0),
            self.accepted.sum(0),
            self.by_accepted.sum(0),
        )

    def _grow(self, depth: int) -> None:
        missing = depth - self.depth
        if missing > 0:
            self.depth = depth
            for name in ("drafted", "reached", "accepted", "by_accepted"):
                setattr(self, name, np.pad(getattr(self, name), ((0, 0), (0, missing))))
