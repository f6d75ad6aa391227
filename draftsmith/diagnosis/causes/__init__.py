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

# A share must differ by more than this, and by more than chance makes it in one of 1,000 texts.
LEAST, LEVEL = 0.05, 1e-3


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


def surely_above(values: np.ndarray, least: float = LEAST) -> bool:
    """Whether the mean of values of single texts, [N], is above `least`, and not by chance."""
    if len(values) < 2 or values.mean() <= least:
        return False
    if values.std() == 0:
        return True
    return bool(stats.ttest_1samp(values, least, alternative="greater").pvalue < LEVEL)


def surely_falls(before: np.ndarray, after: np.ndarray) -> bool:
    """Whether the mean over texts falls by more than LEAST from one set to another, [N], [N']."""
    if min(len(before), len(after)) < 2 or before.mean() - after.mean() <= LEAST:
        return False
    if before.std() == after.std() == 0:
        return True
    test = stats.ttest_ind(before, after + LEAST, equal_var=False, alternative="greater")
    return bool(test.pvalue < LEVEL)


import_all("draftsmith.diagnosis.causes")
