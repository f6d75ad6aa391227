"""The draft tokens of all rows together that give the most tokens per second by measured costs."""

from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np

from decode.draft import Draft
from decode.lengths import POLICIES
from decode.lengths.cost_model import CostModel
from decode.tree_structure import down_the_paths
from decode.verification import Verification

# Results count as much as what they refine after this number of expected tokens: those of a row as
# much as the batch's, those of a depth as much as those of all depths, and these as much as what
# the drafter says. Results of nodes are remembered so many times as long as those of drafts.
OWN, LONGER = 2.0, 4
# The grade of a node is the binary logarithm of the odds that the drafter gives it, rounded.
LEAST, MOST, TINY = -6, 7, 1e-9


@POLICIES.register("worth")
class Worth(CostModel):
    """Feeds a drafted token if its chance of being accepted is worth more than its cost.

    The chance of a node is the product of the acceptance of the nodes on its path. That of a node
    after its parent is what the drafter says of it (`Draft.confidence`), corrected by what became
    of nodes of which it said as much, at this depth; and it is as many times more or less as this
    row accepted more or less than that. Older results weigh less. Of a chain whose drafter says
    nothing, the depth and the row count.

    A node costs what one more token adds to a pass. In that time the batch could get other tokens.
    So its price is that time × the tokens per second that the batch gets, and a node is fed if its
    chance is at least its price. No other set of nodes has more Σ (chance − price), and no node has
    a larger chance than its parent. Sequoia (2402.12374) and EAGLE-2 (2406.16858) choose the nodes
    of one row by chances alone; here they have a price, and all rows compete.

    How deep drafts are, and how often a drafter that does not pay is tried again, is that of
    `cost_model`, for the nodes that are worth their price. A draft that is made to learn from has
    the first node of each row too.

    Price and corrections are known before a draft, and what the drafter says of a node is known
    before the node is drawn. So every lossless rule keeps its law.
    """

    weighs = True
    per_row = MappingProxyType({"_kept": 0.0, "_expected_of": 0.0})
    _kept: np.ndarray  # [B]: nodes that were accepted
    _expected_of: np.ndarray  # [B]: those that the chances of all rows made expect
    _fed_nodes: "_Nodes | None" = None  # of this pass
    _nodes_fed: "_Nodes | None" = None  # of the last draft

    @cached_property
    def _graded(self) -> np.ndarray:
        """float64 [2, grades, max_depth]: nodes that were accepted, and nodes that were judged."""
        return np.zeros((2, MOST - LEAST + 1, self.max_depth))

    def _chances(self) -> np.ndarray:
        """float64 [grades, max_depth]: of nodes, if those above them are accepted."""
        kept, judged = self._graded
        said = 1 / (1 + 2.0 ** -np.arange(LEAST, MOST + 1))
        every = (kept.sum(1) + OWN * said) / (judged.sum(1) + OWN)
        chances = (kept + OWN * every[:, None]) / (judged + OWN)
        # Of what a drafter is surer of, more is accepted. Else elder siblings could be left out.
        rising, falling = np.maximum.accumulate(chances), np.minimum.accumulate(chances[::-1])
        return (rising + falling[::-1]) / 2

    def depths(self) -> np.ndarray:
        self._fed_nodes = None
        return super().depths()

    def kept(self, draft: Draft) -> np.ndarray | None:
        if not draft.sizes.any() or (draft.confidence is None and not draft.is_chain):
            return None
        chances, own = self._chances(), (self._kept + OWN) / (self._expected_of + OWN)
        nodes = _Nodes.of(draft, chances, own, self._price())
        keep = nodes.worth
        if self._asks:
            keep = keep.copy()
            keep[:, 0] = nodes.valid[:, 0]
        every = bool((keep == nodes.valid).all())
        self._fed_nodes = nodes if every else nodes.only(keep)
        return None if every else keep

    def observe(self, verification: Verification) -> None:
        super().observe(verification)
        faded = self.memory**verification.emitted
        self._kept, self._expected_of = self._kept * faded, self._expected_of * faded
        self._graded *= self.memory ** (float(verification.emitted.mean()) / LONGER)
        if (nodes := self._fed_nodes) is None:
            return
        accepted, judged = nodes.outcomes(verification)
        self._kept += accepted.sum(1)
        self._expected_of += (nodes.chances * judged).sum(1)
        for table, which in zip(self._graded, (accepted, judged), strict=True):
            np.add.at(table, (nodes.grades[which], nodes.depths[which]), 1.0)

    def _results(self, verification: Verification) -> tuple[np.ndarray, np.ndarray]:
        if (nodes := self._fed_nodes) is None:
            return super()._results(verification)
        accepted = nodes.worth & nodes.outcomes(verification)[0]
        return accepted.sum(1), np.bincount(nodes.depths[nodes.worth])


@dataclass
class _Nodes:
    """The nodes of a draft, [B, N] each.

    valid: those that are no padding. parents: −1 is the root; None: chains. depths: 0 for the
    root's children. grades, chances: by what the drafter says, if their parents are accepted.
    worth: bool, those that are worth their price.
    """

    valid: np.ndarray
    parents: np.ndarray | None
    depths: np.ndarray
    grades: np.ndarray
    chances: np.ndarray
    worth: np.ndarray

    @classmethod
    def of(cls, draft: Draft, chances: np.ndarray, own: np.ndarray, price: float) -> "_Nodes":
        """Arguments: those of `Worth`, [grades, max_depth], and [B], how much more of a row's nodes
        is accepted."""
        count = draft.tokens.shape[1]
        valid = np.arange(count) < draft.sizes[:, None]
        confidence = draft.confidences().cpu().numpy()
        odds = confidence / np.maximum(1 - confidence, TINY) + TINY
        grades = np.log2(odds).clip(LEAST, MOST).round().astype(np.int64) - LEAST
        parents = None if draft.is_chain else draft.parents_on_host()
        levels = draft.levels()
        if parents is None:
            depths = np.broadcast_to(np.arange(count), grades.shape)
        else:
            depths = down_the_paths(np.ones_like(parents), parents, levels, np.add) - 1
        found = chances[grades, depths]
        reached = np.minimum(own[:, None] * found, 1.0)
        if parents is None:
            reached = reached.cumprod(1)
        else:
            reached = down_the_paths(reached, parents, levels, np.multiply)
        return cls(valid, parents, depths, grades, found, valid & (reached >= price))

    def only(self, keep: np.ndarray) -> "_Nodes":
        """The nodes that are kept, bool [B, N], in the same order."""
        order = np.argsort(~keep, axis=1, kind="stable")[:, : int(keep.sum(1).max())]
        parents = self.parents
        if parents is not None:
            number = np.pad(keep.cumsum(1) - 1, ((0, 0), (0, 1)), constant_values=-1)
            parents = np.take_along_axis(np.take_along_axis(number, parents, 1), order, 1)
        some = [
            np.take_along_axis(x, order, 1)
            for x in (keep, self.depths, self.grades, self.chances, self.worth)
        ]
        return _Nodes(some[0], parents, *some[1:])

    def outcomes(self, verification: Verification) -> tuple[np.ndarray, np.ndarray]:
        """bool [B, N] each: the nodes that were accepted, and those whose parents were."""
        accepted = verification.accepted[:, None]
        if self.parents is None:
            place = np.arange(self.valid.shape[1])
            return self.valid & (place < accepted), self.valid & (place <= accepted)
        rows, count = self.valid.shape
        stays = np.zeros((rows, count + 1), dtype=bool)
        stays[:, -1] = True  # the root
        row, place = np.nonzero(np.arange(verification.nodes.shape[1]) < accepted)
        stays[row, verification.nodes[row, place]] = True
        judged = self.valid & np.take_along_axis(stays, self.parents, 1)
        return stays[:, :-1] & judged, judged
