"""What steps with drafts cost, by the load and the length of texts: on this machine, or on that of
a forecast's file."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from decode.base.errors import UserError
from decode.costs import BUSY, Costs, busy
from decode.drafters import Drafter
from decode.model.loading import Target
from decode.opening.directory import open_drafter
from decode.time_costs import measure_costs
from draftsmith.forecast.answer import Cell, Forecast, Line
from draftsmith.forecast.pilots import PilotResult
from train.loop.trained_target import load_like
from train.run.config import EvaluationConfig


@dataclass(frozen=True)
class Worksite:
    """What the costs of steps are measured on, at each load and length.

    settings: how the run evaluates. text: token ids that texts are made of. known: what another
    machine measured; None: costs are measured here. until: by `time.perf_counter`; after that, only
    the first load and length of each drafter is measured.
    """

    target: Target
    settings: EvaluationConfig
    text: Sequence[int]
    loads: Sequence[int]
    lengths: Sequence[int]
    known: Forecast | None = None
    until: float = math.inf

    def weigh(self, name: str, made: PilotResult, *, trained: bool) -> tuple[Line, list[str]]:
        """A drafter's line with the costs of its steps alone, and why some are not known."""
        target = self.target if made.target is None else load_like(self.target, made.target)
        drafter = open_drafter(made.spec, target)
        if self.known is None:
            costs, missing = self._measure(drafter, target, made, trained)
        else:
            costs = [(x.load, x.length, x.costs) for x in self.known.cells_of(name)]
            missing = [] if costs else ["the file of --surface has no costs of it"]
        cells = [
            Cell(load, length, float(x.draft(made.depth) + x.verify(np.array(made.width))), x)
            for load, length, x in costs
        ]
        drafts = drafter.describe_drafts(self.settings.gamma)
        line = Line(name, trained, drafts, None, [], {}, {}, None, cells)
        return line, [f"{name}: {reason}" for reason in missing]

    def _measure(
        self, drafter: Drafter, target: Target, made: PilotResult, trained: bool
    ) -> tuple[list[tuple[int, int, Costs]], list[str]]:
        found, missing = list[tuple[int, int, Costs]](), list[str]()
        protocol = self.settings.protocol(trained=trained)
        for length, load in product(self.lengths, self.loads):
            where = f"{load} rows of {length} tokens"
            if found and time.perf_counter() > self.until:
                missing.append(f"{where}: --minutes were over")
                continue
            # Different texts, as their tokens choose different experts of a mixture.
            prompts = [piece(self.text, length, 7 * row) for row in range(load)]
            try:
                decoder, _ = protocol.decoder(target, drafter, prompts[0])
                costs = measure_costs(
                    decoder,
                    prompts,
                    max_depth=made.depth,
                    max_width=max(2, round(made.width + 0.5)),
                    trees=drafter.branches,
                )
            except (UserError, MemoryError, RuntimeError) as error:
                if not isinstance(error, UserError | MemoryError) and "memory" not in str(error):
                    raise
                missing.append(f"{where}: {error}")
                continue
            if busy(costs.others):
                missing.append(
                    f"{where} were measured while other processes took "
                    f"{costs.others:.0%} of the processor (more than {BUSY:.0%})"
                )
            found.append((load, length, costs))
        return found, missing


def piece(text: Sequence[int], length: int, begin: int) -> list[int]:
    """So many tokens of a text, from a place on, again from its beginning after its end.

    >>> piece([1, 2, 3], 4, 5)
    [3, 1, 2, 3]
    """
    return [text[(begin + place) % len(text)] for place in range(length)]
