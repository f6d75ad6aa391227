"""The draft tokens of all rows together that give the most tokens per second by measured costs."""

from functools import cached_property
from types import MappingProxyType

import numpy as np
from torch import Tensor

from decode.draft import Draft
from decode.lengths import POLICIES
from decode.lengths.cost_model import DRAFTERS, CostModel
from decode.tree_structure import down_the_paths
from decode.verification import Verification

# Results count as much as what they refine after this number of expected tokens: those of a row as
# much as the batch's, those of a depth as much as those of all depths, these as much as those of
# all grades, and these as much as what the drafter says. Results of nodes are remembered so many
# times as long as those of drafts.
OWN, LONGER = 2.0, 2
# The grade of a node is the binary logarithm of the odds that the drafter gives it, rounded.
LEAST, MOST = -6, 7
GRADES = 1 / (1 + 2.0 ** -(np.arange(LEAST, MOST) + 0.5))  # the confidence between two of them


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
    `cost_model`, for the nodes that are worth their price. If none is in a draft that is made to
    learn from, the first node of the row with the best chance is fed.

    Price and corrections are known before a draft, and what the drafter says of a node is known
    before the node is drawn. So every lossless rule keeps its law.
    """

    weighs = True
    per_row = MappingProxyType({**CostModel.per_row, "_accepted": 0.0, "_expected_of": 0.0})
    _accepted: np.ndarray  # [B]: nodes that were accepted
    _expected_of: np.ndarray  # [B]: those that the chances of all rows made expect
    _chances: np.ndarray  # float64 [drafters, grades, max_depth], see `_chances_of_nodes`
    _reached: np.ndarray  # [B, N]: of the draft that grows, the chances of its nodes
    _fed_nodes: "_Nodes | None" = None  # of this pass

    @cached_property
    def _graded(self) -> np.ndarray:
        """float64 [2, drafters, grades, max_depth]: nodes that were accepted, and nodes that were
        judged, of each of several drafters. Those past the last count together."""
        return np.zeros((2, DRAFTERS, MOST - LEAST + 1, self.max_depth))

    def _chances_of_nodes(self) -> np.ndarray:
        """float64 [drafters, grades, max_depth]: of nodes, if those above them are accepted."""
        accepted, judged = self._graded
        said = 1 / (1 + 2.0 ** -np.arange(LEAST, MOST + 1))
        found, of = accepted.sum(2), judged.sum(2)  # [drafters, grades]
        over = (found.sum(1) + OWN) / ((of * said).sum(1) + OWN)
        every = (found + OWN * np.minimum(over[:, None] * said, 1.0)) / (of + OWN)
        chances = (accepted + OWN * every[..., None]) / (judged + OWN)
        # Of what a drafter is surer of, more is accepted. Else elder siblings could be left out.
        rising = np.maximum.accumulate(chances, 1)
        falling = np.minimum.accumulate(chances[:, ::-1], 1)[:, ::-1]
        both: np.ndarray = (rising + falling) / 2
        return both

    def _decide(self) -> None:
        super()._decide()
        self._chances = self._chances_of_nodes()

    def depths(self) -> np.ndarray:
        self._fed_nodes = None
        super().depths()
        for source in self._sources:
            source.ended = self.max_depth
            if source.grows and not source.asks:
                # The average decides whether to draft, and `grows` how deep.
                source.depth = self.max_depth
        return np.full(self.rows, max(self.by_source))

    def grows(
        self, depth: int, confidence: Tensor, parents: Tensor | None, source: int = 0
    ) -> bool:
        drafter = self._source(source)
        drafter.grows = True
        if drafter.asks:
            return True
        sure = confidence.numpy()
        chances = self._chances[min(source, DRAFTERS - 1), _grades(sure), depth - 1]
        reached = self._as_of_rows(chances) * (sure > 0)
        if depth == 1:
            self._reached = reached
        elif parents is None:
            self._reached = reached = reached * self._reached
        else:
            reached = reached * np.take_along_axis(self._reached, parents.numpy(), 1)
            self._reached = np.concatenate([self._reached, reached], 1)
        per_row = reached.max(1) * drafter.alpha[depth] - self._price() * drafter.width[depth]
        level = drafter.drafts(depth + 1) - drafter.drafts(depth)
        if np.maximum(per_row, 0.0).sum() >= self._rate * level:
            return True
        drafter.ended = depth
        return False

    def kept(self, draft: Draft) -> np.ndarray | None:
        if not draft.sizes.any() or (draft.confidence is None and not draft.is_chain):
            return None
        valid = np.arange(draft.tokens.shape[1]) < draft.sizes[:, None]
        parents = None if draft.is_chain else draft.parents_on_host()
        confidence = draft.confidences().cpu().numpy()
        sources = np.zeros(len(valid), dtype=int) if draft.sources is None else draft.sources
        nodes = _Nodes(confidence, parents, draft.levels(), sources, self._chances)
        nodes.reached = nodes.from_the_root(self._as_of_rows(nodes.chances), np.multiply)
        nodes.worth = keep = valid & (nodes.reached >= self._price())
        # Known before a node is drawn: a parent is worth as much as its children.
        for number, source in enumerate(self._sources):
            if not source.asks:
                continue
            its = valid & (sources == number)[:, None]
            if its.any() and not (keep & its).any():
                keep = keep.copy()
                row = int((nodes.reached * its)[:, 0].argmax())
                keep[row, 0] = True
        self._fed_nodes, nodes.fed = nodes, keep
        return None if (keep == valid).all() else keep

    def _as_of_rows(self, chances: np.ndarray) -> np.ndarray:
        """Chances as of all rows, [B, n], as many times more or less as each row accepts."""
        more = (self._accepted + OWN) / (self._expected_of + OWN)
        return np.minimum(more[:, None] * chances, 1.0)

    def observe(self, verification: Verification) -> None:
        if (nodes := self._fed_nodes) is not None:
            nodes.judge(verification)
        before = self._emitted
        super().observe(verification)
        faded = self.memory**verification.emitted
        self._accepted, self._expected_of = self._accepted * faded, self._expected_of * faded
        self._graded *= self.memory ** ((self._emitted - before) / LONGER)
        if nodes is None:
            return
        self._accepted += nodes.accepted.sum(1)
        self._expected_of += (nodes.chances * nodes.judged).sum(1)
        for table, which in zip(self._graded, (nodes.accepted, nodes.judged), strict=True):
            table += np.bincount(nodes.places[which], minlength=table.size).reshape(table.shape)

    def _results(
        self, verification: Verification, rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        if (nodes := self._fed_nodes) is None:
            return super()._results(verification, rows)
        worth = nodes.worth & rows[:, None]
        return (worth & nodes.accepted).sum(1), np.bincount(nodes.depths[worth])


def _grades(confidence: np.ndarray) -> np.ndarray:
    """int, same shape: of what a drafter says of its nodes. It may say NaN, as of logits that are
    not finite."""
    grades: np.ndarray = np.searchsorted(GRADES, np.fmax(confidence, 0.0))
    return grades


class _Nodes:
    """The nodes of a draft, [B, N] each.

    parents: −1 is the root; None: chains. levels: the depth of the deepest. sources: int [B], the
    drafters of the rows. table: the chances by drafter, grade and depth. depths: 0 for the root's
    children. places: in the table. chances: if their parents are accepted, as of all rows. reached:
    if that is not known, as of this row. worth, fed: bool, those that are worth their price, and
    those that are fed. accepted, judged: bool, those that were accepted, and those whose parents
    were.
    """

    reached: np.ndarray
    worth: np.ndarray
    fed: np.ndarray
    accepted: np.ndarray
    judged: np.ndarray

    def __init__(
        self,
        confidence: np.ndarray,
        parents: np.ndarray | None,
        levels: int,
        sources: np.ndarray,
        table: np.ndarray,
    ) -> None:
        self.parents, self.levels = parents, levels
        _, kinds, deepest = table.shape
        grades, drafters = _grades(confidence), np.minimum(sources, DRAFTERS - 1)[:, None]
        self.depths = self.from_the_root(np.ones_like(grades), np.add) - 1
        self.places = (drafters * kinds + grades) * deepest + self.depths
        self.chances = table.ravel()[self.places]

    def from_the_root(self, values: np.ndarray, joined: np.ufunc) -> np.ndarray:
        """[B, N]: the values of each node and of those above it, [B, N], joined."""
        if self.parents is None:
            found: np.ndarray = joined.accumulate(values, axis=1)
            return found
        return down_the_paths(values, self.parents, self.levels, joined)

    def judge(self, verification: Verification) -> None:
        """Set `accepted` and `judged`. The pass numbers those that were fed, in their order."""
        accepted = verification.accepted[:, None]
        if self.parents is None:
            place = np.arange(self.fed.shape[1])
            self.judged = self.fed & (place <= accepted)
            self.accepted = self.fed & (place < accepted)
            return
        rows, count = self.fed.shape
        stays = np.zeros((rows, count + 1), dtype=bool)
        stays[:, -1] = True  # the root
        row, place = np.nonzero(np.arange(verification.nodes.shape[1]) < accepted)
        order = np.argsort(~self.fed, axis=1, kind="stable")
        stays[row, order[row, verification.nodes[row, place]]] = True
        self.judged = self.fed & np.take_along_axis(stays, self.parents, 1)
        self.accepted = stays[:, :-1] & self.judged
