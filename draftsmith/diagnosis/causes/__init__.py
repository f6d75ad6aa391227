"""Causes of a low acceptance that are in the training. Each is one file with its measurement.

Shapes: N texts, P places of a text, γ tokens of a draft.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy import stats

from decode.base.registry import Registry, import_all
from draftsmith.diagnosis.evidence import Evidence

# A share must differ by more than this, and by more than chance makes it in one case of 1,000.
LEAST, LEVEL = 0.05, 1e-3
FEWEST = 8  # texts


@dataclass(frozen=True)
class Measurement:
    """found: whether it is a cause; None: it could not be judged. figures: what was measured, or
    what was missing."""

    found: bool | None
    figures: str


class Cause(ABC):
    """says: what is wrong. remedy: one sentence."""

    says: ClassVar[str]
    remedy: ClassVar[str]

    @abstractmethod
    def measure(self, evidence: Evidence) -> Measurement:
        """Measure it."""


CAUSES: Registry[type[Cause]] = Registry("cause")


def surely_above(values: np.ndarray) -> bool | None:
    """Whether the mean of values of single texts, [N], is above LEAST, and not by chance. None:
    there are too few texts."""
    return surely_falls(values, np.zeros(len(values)))


def surely_falls(before: np.ndarray, after: np.ndarray) -> bool | None:
    """Whether the mean over texts falls by more than LEAST from one set to another, [N], [N'], and
    not by chance. None: there are too few texts."""
    if min(len(before), len(after)) < FEWEST:
        return None
    if before.mean() - after.mean() <= LEAST:
        return False
    if before.std() == after.std() == 0:
        return True
    # Values may be all alike, of which the tests of samples warn.
    test = stats.ttest_ind_from_stats(
        before.mean(), before.std(ddof=1), len(before),
        after.mean() + LEAST, after.std(ddof=1), len(after),
        equal_var=False, alternative="greater",
    )  # fmt: skip
    return bool(test.pvalue < LEVEL)


import_all("draftsmith.diagnosis.causes")
