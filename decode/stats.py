"""Counts made while decoding, and the figures computed from them.

A position is a depth in the draft: 1 is the first draft token. Draft tokens past the end of a text
(EOS or the length limit) count as neither drafted nor reached.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np


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
    draft_depth: int = 0  # sum of the draft depths of all passes: the number of draft steps
    width: int = 0  # sum over all passes of the tokens fed per row

    def count(self, step: "Step") -> None:
        """Count a pass. Its seconds are already added."""
        self.steps += 1
        self.draft_depth += step.depth
        self.width += step.width

    @property
    def total(self) -> float:
        return self.prefilling + self.stepping

    @property
    def prefilling(self) -> float:
        """Seconds that target and drafter spend on the prompts."""
        return self.prefill + self.draft_prefill

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
            "draft_steps": self.draft_depth,
            "tokens_fed": self.width,
        }

    def __add__(self, other: "Timing") -> "Timing":
        return Timing(
            *(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True))
        )


@dataclass
class Step:
    """One verification pass over B rows, for policies and reports.

    rows: int [B], the prompt of each row. depths: int [B], the max depth allowed for each draft.
    drafted, accepted, emitted: int [B], nodes drafted, draft tokens kept and tokens emitted.
    reached: int [B], draft positions that were judged with all before them accepted. width: tokens
    fed per row. depth: the number of draft steps. The times are seconds for the batch as a unit.
    signals: the numbers that a policy looked at, float64 [B, D] by name, NaN where it did not look.
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
        """int [B]: the most draft tokens of a row that could be accepted. In a tree, they are on
        one path."""
        return np.minimum(self.drafted, np.minimum(self.depths, self.depth))

    def kept_share(self) -> np.ndarray:
        """float64 [B]: la/k, accepted tokens / draft tokens (for a tree: / the draft's depth). It
        is 0 for a row without a draft."""
        share: np.ndarray = self.accepted / np.maximum(self.longest(), 1)
        return share

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, times in milliseconds. gamma: the max depth allowed for each row's draft.
        la_k: None for a row without a draft. Each signal is one list per row, without the places
        where the policy did not look."""
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
    """Many steps in a few JSON values. A figure is None if its denominator is 0.

    gamma_histogram: number of row-steps per max depth allowed. mean_gamma: mean of that depth.
    la_k: mean of accepted / draft tokens, over row-steps with a draft. plain_share: share of
    row-steps for which no draft was allowed. signals: mean of each signal of the policy.
    ms_per_step: mean milliseconds of a pass, by part.
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
    """The loop's running counts for B rows, updated once per step."""

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
        """Count one pass of the given rows. nodes_by_depth: int [B', D]; ended: bool [B']; the
        others: int [B'].

        A row whose text ended in this pass counts no positions deeper than the tokens it emitted.
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
        """The counts of one row up to now."""
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
