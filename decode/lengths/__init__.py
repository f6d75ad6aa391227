"""Draft-length policies by name. A policy decides the depth of each row's next draft.

A policy is one file with one registration. It sees the results of earlier drafts and, if it asks,
the drafter's logits. It knows nothing about drafters, rules or the loop. A policy never changes the
distribution of the text: a token is left out for reasons that were known before it was drawn.

A row's draft depends on that row alone, so in float32 its text is the same in any batch. The
exceptions are policies that decide for the batch as a unit (`by_batch`, `cost_model`, `worth`);
their docstrings say so. With them, under rules that draw, except `exact`, a text may depend on the
batch. Its distribution never does.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from torch import Tensor

from decode import row_state
from decode.base.errors import UserError
from decode.base.registry import Registry, import_all
from decode.costs import Costs
from decode.draft import Draft
from decode.verification import Verification


class Policy(ABC):
    """Call order within one decode: start → (depths → (stops, grows)* → kept → signals → observe)*,
    with keep_rows and add_rows in between. `kept` comes only after a draft.

    max_depth: the max depth of a draft. watches: the drafter calls `stops` before each token of a
    chain.
    stops_after: a draft that `stops` ends still gets that token, and ends after it.
    constant: all drafts have the same depth, so figures per draft length are meaningful.
    needs_costs: `use_costs` is worth the seconds that measuring takes.
    weighs: `grows` and `kept` read how sure the drafter is of each node (`Draft.confidence`).
    by_batch: it decides for the batch as a unit, or from the batches before.
    per_row: the state that it keeps of each row (`decode.row_state`).
    reads_times: `observe` reads the seconds of the pass. The loop then waits for a CUDA device in
    each step. reads_estimates: `stops` needs the drafter's estimates of acceptance.
    """

    watches: bool = False
    stops_after: bool = False
    constant: bool = False
    needs_costs: bool = False
    weighs: bool = False
    by_batch: bool = False
    reads_times: bool = False
    reads_estimates: bool = False
    per_row: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, max_depth: int) -> None:
        if max_depth < 1:
            raise UserError(
                f"gamma is {max_depth}; expected at least 1 (for plain decoding use drafter none)"
            )
        self.max_depth = max_depth
        self.rows = 0

    def start(self, rows: int) -> None:
        """A new batch of `rows` rows begins. The policy may keep the costs it has learnt."""
        self.rows = rows
        row_state.begin(self, rows)

    @property
    def by_source(self) -> tuple[int, ...]:
        """The max depth of each of several drafters that are asked in turn, beside those of the
        rows: what `depths` decided. 0: it rests. Those past the end have those of the rows."""
        return ()

    @abstractmethod
    def depths(self) -> np.ndarray:
        """int [B], 0 … max_depth: the max depth of each row's next draft. All 0 is a plain step."""

    def stops(
        self, position: int, logits: Tensor, drafting: Tensor, estimate: Tensor | None = None
    ) -> Tensor:
        """bool [B]: the rows whose draft ends before its token number `position` (0, 1, …), or
        after it if `stops_after`, given the drafter's logits for that token, [B, V'], and its
        estimate of the token's acceptance, float32 [B], if it has one. Called only if `watches`.

        drafting: bool [B] on the same device, the rows that are still drafting. The logits of the
        other rows mean nothing: their draft has ended, or another drafter serves them. On an
        accelerator this is called for every position, also after all drafts have ended, because
        reading the result would take longer. In one round, several drafters may call this, each
        for different rows.
        """
        raise NotImplementedError

    def grows(
        self, depth: int, confidence: Tensor, parents: Tensor | None, source: int = 0
    ) -> bool:
        """Whether drafts that are `depth` deep get another level, given how sure the drafter is of
        each node of the last one, float32 [B, n], 0 where a row's draft ends, the parents of these,
        int64 [B, n], numbers of nodes of the draft, or None for chains, and the drafter's number
        among several. Called of each level in turn, only if `weighs`, where a drafter can say it,
        and not on an accelerator.
        """
        return True

    def kept(self, draft: Draft) -> np.ndarray | None:
        """bool [B, N]: the nodes of a draft that are fed, each with its parent and, if siblings
        were drawn without replacement, with its elder siblings. None: all. It must be known before
        a node is drawn whether it is kept: from the path above it, or from earlier drafts."""
        return None

    def signals(self) -> dict[str, np.ndarray]:
        """The numbers that `stops` looked at for the last draft, float64 [B, D] by name, NaN where
        it did not look. The drafter computed logits for each of the D tokens. Called when the
        verdict on the draft is known."""
        return {}

    def observe(self, verification: Verification) -> None:
        """Learn from the result of the draft."""
        return None

    def keep_rows(self, rows: np.ndarray) -> None:
        """Keep only these rows, in this order."""
        self.rows = len(rows)
        row_state.keep(self, rows)

    def add_rows(self, count: int) -> None:
        """So many rows join, after the others. They begin like the rows of a new batch."""
        self.rows += count
        row_state.add(self, count)

    def use_costs(self, costs: Costs) -> None:
        """Use costs that were measured before decoding begins."""
        return None


POLICIES: Registry[type[Policy]] = Registry(
    "draft-length policy",
    gone={"feedback": "heuristic follows the draft before, and worth weighs the acceptance so far"},
)


@POLICIES.register("fixed")
class Fixed(Policy):
    """Every draft is `max_depth` deep. Acceptance rates are compared with this policy."""

    constant = True

    def depths(self) -> np.ndarray:
        return np.full(self.rows, self.max_depth)


import_all(__name__)
