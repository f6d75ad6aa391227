"""The costs of drafting and verifying on this machine: c and v(n), in plain steps.

`decode.measure.time_costs` measures them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Costs:
    """Measured costs of one target with one drafter.

    step_s: seconds of a plain decoding step of `rows` rows. c: the cost of a draft step, in plain
    steps, without the drafter's pass over the prompt. widths, v: verifying widths[i] tokens per row
    costs v[i] plain steps; v at width 1 is 1. noise: the relative standard error of the cost of a
    draft and its verification, estimated from two halves of the measurement; 0 if unknown.
    others: the share of the processor that other processes used during the measurement
    (`decode.measure.other_processes`).

    >>> costs = Costs(0.05, 1, 0.1, (1, 2, 4), (1.0, 1.1, 1.3))
    >>> costs.verify([3, 8]).round(2).tolist()
    [1.2, 1.7]
    """

    step_s: float
    rows: int
    c: float
    widths: tuple[int, ...]
    v: tuple[float, ...]
    noise: float = 0.0
    others: float | None = None

    def verify(self, width: Sequence[int] | np.ndarray | int) -> np.ndarray:
        """v at these widths, float64, same shape as `width`. Linear between measured widths and
        beyond the last."""
        return straight_on(np.asarray(width), np.array(self.widths), np.array(self.v))

    def to_dict(self) -> dict[str, object]:
        """Converts to JSON values."""
        return {
            "step_ms": 1000 * self.step_s,
            "rows": self.rows,
            "c": self.c,
            "v": {str(n): cost for n, cost in zip(self.widths, self.v, strict=True)},
            "noise": self.noise,
            "others_share": self.others,
        }


def straight_on(x: np.ndarray, known: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Values at x of a function that never falls. It is linear between the known places
    (ascending), and continues beyond the last with the mean slope over all of them."""
    rising = np.maximum.accumulate(values)
    slope = (rising[-1] - rising[0]) / (known[-1] - known[0]) if len(known) > 1 else 0.0
    beyond = np.maximum(x - known[-1], 0)
    found: np.ndarray = np.interp(x, known, rising) + slope * beyond
    return found
