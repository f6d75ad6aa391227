"""What steps with drafts cost on this machine, by the load and the length of texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from decode.base.errors import UserError
from decode.costs import BUSY, busy
from decode.drafters import Drafter
from decode.measure.time_costs import measure_costs
from decode.model.loading import Target
from train.run.config import EvaluationConfig


@dataclass(frozen=True)
class StepCost:
    """A step that drafts and verifies, in plain steps of as many rows: the tokens per step above
    which drafts pay. noise: its relative standard error. load: rows that are decoded together.
    length: tokens of each text before the step."""

    load: int
    length: int
    cost: float
    noise: float


@dataclass(frozen=True)
class Worksite:
    """What the costs of steps are measured on, at each load and length.

    settings: how the run evaluates. text: token ids that texts are made of.
    """

    target: Target
    settings: EvaluationConfig
    text: Sequence[int]
    loads: Sequence[int]
    lengths: Sequence[int]

    def costs(
        self, drafter: Drafter, *, trained: bool, depth: int, width: float
    ) -> tuple[list[StepCost], list[str]]:
        """The costs of a drafter's steps, and why some were not measured.

        depth: of a draft. width: tokens that a pass verifies, on average.
        """
        found, missing = list[StepCost](), list[str]()
        protocol = self.settings.protocol(trained=trained)
        for length, load in product(self.lengths, self.loads):
            # Different texts, as their tokens choose different experts of a mixture.
            prompts = [piece(self.text, length, 7 * row) for row in range(load)]
            decoder, _ = protocol.decoder(self.target, drafter, prompts[0])
            try:
                costs = measure_costs(
                    decoder,
                    prompts,
                    max_depth=depth,
                    max_width=max(2, round(width + 0.5)),
                    trees=drafter.branches,
                )
            except UserError as error:
                missing.append(f"{load} rows of {length} tokens: {error}")
                continue
            if busy(costs.others):
                missing.append(
                    f"{load} rows of {length} tokens were measured while other processes took "
                    f"{costs.others:.0%} of the processor (more than {BUSY:.0%})"
                )
            cost = float(costs.draft(depth) + costs.verify(np.array(width)))
            found.append(StepCost(load, length, cost, costs.noise))
        return found, missing


def piece(text: Sequence[int], length: int, begin: int) -> list[int]:
    """So many tokens of a text, from a place on, again from its beginning after its end.

    >>> piece([1, 2, 3], 4, 5)
    [3, 1, 2, 3]
    """
    return [text[(begin + place) % len(text)] for place in range(length)]
