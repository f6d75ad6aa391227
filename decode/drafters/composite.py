"""Several drafters asked in turn, row by row."""

from collections.abc import Sequence

import numpy as np
import torch

from decode.draft import Draft, Siblings
from decode.drafters import Contexts, Drafter, Limits
from decode.drafters.group import Group
from decode.errors import UserError
from decode.sampling import CounterRNG, Sampling
from decode.trees import Shape


class CompositeDrafter(Group):
    """Each row takes the draft of the first drafter that has one for it: for example prompt lookup,
    then the trained drafter if lookup finds nothing. A drafter is asked only if some row has no
    draft yet.

    The drafter of a row depends only on the row's text, so decoding stays lossless. If some
    drafters draw and others choose their tokens, chosen tokens declare q = 1; if those drafts are
    trees, siblings are mixed. Raises UserError as `Group` does, and if one drafter draws the
    siblings of its trees without replacement and another makes trees in a different way.
    """

    @property
    def branches(self) -> bool:
        return any(drafter.branches for drafter in self.drafters)

    def siblings(self, sampling: Sampling) -> Siblings:
        kinds = [(drafter.siblings(sampling), drafter.branches) for drafter in self.drafters]
        together = _siblings(kinds)
        if together is None:
            said = ", ".join(
                f"{type(drafter).__name__}: {kind}{' trees' * branches}"
                for drafter, (kind, branches) in zip(self.drafters, kinds, strict=True)
            )
            raise UserError(
                f"the drafters of a composite do not go together ({said}); trees whose siblings "
                "are distinct go with chains, and with trees of the same kind"
            )
        return together

    def describe_drafts(self, most: int | None = None) -> str:
        return " or ".join(dict.fromkeys(x.describe_drafts(most) for x in self.drafters))

    def most_nodes(self, gamma: int) -> int:
        return max(drafter.most_nodes(gamma) for drafter in self.drafters)

    def with_shape(self, shape: Shape) -> "CompositeDrafter":
        """Gives the shape to all drafters that take shapes. Raises UserError if none does."""
        shaped: list[Drafter] = []
        refused = []
        for drafter in self.drafters:
            try:
                shaped.append(drafter.with_shape(shape))
            except UserError as error:
                shaped.append(drafter)
                refused.append(error)
        if len(refused) == len(shaped):
            raise refused[0]
        return CompositeDrafter(shaped)

    def draft(
        self, contexts: Contexts, limits: Limits, sampling: Sampling, rng: CounterRNG
    ) -> Draft:
        depths = limits.depths.copy()
        drafts: list[Draft] = []
        for drafter in self.drafters:
            if not depths.any():
                break
            draft = drafter.draft(contexts, Limits(depths.copy(), limits.stops), sampling, rng)
            # Drop drafts in rows that did not ask for one.
            draft.sizes = np.where(depths > 0, draft.sizes, 0)
            depths[draft.sizes > 0] = 0
            if draft.sizes.any():
                drafts.append(draft)
        if not drafts:
            return Draft.none(len(depths), "cpu")
        return _merged(drafts)


def _siblings(kinds: Sequence[tuple[Siblings, bool]]) -> Siblings | None:
    """The kind of siblings of one draft that joins different rows. kinds: (kind, whether it
    branches) of the drafts. None if no kind describes the mix. A chain has no siblings, so for
    chains only drawn or chosen matters."""
    if all(kind == "chosen" for kind, _ in kinds):
        return "chosen"
    trees = {kind for kind, branches in kinds if branches}
    if not trees:
        return "independent"
    if len(trees) > 1:
        return None if "distinct" in trees else "mixed"
    kind = trees.pop()
    # In one draft with drawn tokens, each chosen token needs its own q.
    return "mixed" if kind == "chosen" else kind


def _merged(drafts: list[Draft]) -> Draft:
    """Joins drafts that have nodes in different rows into one draft."""
    if len(drafts) == 1:
        return drafts[0]
    # Use the device of the drafts with q; drafts of chosen tokens are small to move.
    device = next((x.q.device for x in drafts if x.q is not None), drafts[0].tokens.device)
    drafts = [draft.to(device) for draft in drafts]
    rows = len(drafts[0].sizes)
    nodes = max(draft.tokens.shape[1] for draft in drafts)
    sizes = np.zeros(rows, dtype=np.int64)
    tokens = torch.zeros(rows, nodes, dtype=torch.int64, device=device)
    order = torch.arange(nodes, device=device)
    trees = any(not draft.is_chain for draft in drafts)
    parents = torch.full_like(tokens, -1) if trees else None
    drawn = [draft.q for draft in drafts if draft.q is not None]
    q = q_rows = None
    if drawn:
        depth = max(nodes, *(x.shape[1] for x in drawn))
        q = drawn[0].new_zeros(rows, depth, drawn[0].shape[2])
        q_rows = order.repeat(rows, 1)
    for draft in drafts:
        own = torch.as_tensor(np.flatnonzero(draft.sizes), device=device)
        count = draft.tokens.shape[1]
        sizes = np.maximum(sizes, draft.sizes)
        tokens[own, :count] = draft.tokens[own]
        if parents is not None:
            parents[own, :count] = (draft.parent_rows() - 1)[own]
        if q is None or q_rows is None:
            continue
        if draft.q is None:
            q[own, :count] = torch.nn.functional.one_hot(draft.tokens[own], q.shape[2]).to(q.dtype)
        else:
            q[own, : draft.q.shape[1]] = draft.q[own]
            q_rows[own, :count] = draft.rows_of_q()[own]
    if not trees:
        q_rows = None  # row i for node i, as in any chain
    kind = _siblings([(draft.siblings, not draft.is_chain) for draft in drafts])
    assert kind is not None, "the drafters do not draft what they said"
    return Draft(tokens, sizes, q, parents, q_rows, "independent" if kind == "chosen" else kind)
