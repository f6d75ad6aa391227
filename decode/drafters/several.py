"""Merges the drafts of several drafters into one tree (SpecInfer, 2305.09781).

Shapes: B rows, N nodes of all drafts together, R rows of q, V vocabulary.
"""

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from decode.draft import Draft, Drawn, Siblings
from decode.drafters import Contexts, Limits
from decode.drafters.group import Group
from decode.errors import UserError
from decode.sampling import CounterRNG, Sampling
from decode.trees.growth import first_equal, merged, pack


class SeveralDrafters(Group):
    """Each drafter drafts alone. Paths with the same beginning share their nodes.

    If any drafter draws its tokens, each node has the q of its drafter (1 for a chosen token), and
    siblings are mixed: independent draws from different q's. A token equal to an earlier sibling
    then stays as a leaf, and its children move to the earlier one (`decode.trees.chains` explains
    why). If all drafters choose their tokens, equal nodes become one.

    Siblings are in the order of the drafters. Raises UserError as `Group` does, and if one drafter
    draws without replacement: together with other draws this is not one kind of siblings.
    """

    @property
    def branches(self) -> bool:
        return True

    def siblings(self, sampling: Sampling) -> Siblings:
        kinds = [drafter.siblings(sampling) for drafter in self.drafters]
        if "distinct" in kinds:
            name = type(self.drafters[kinds.index("distinct")]).__name__
            raise UserError(
                f"{name} draws siblings without replacement, which cannot be merged with the "
                "drafts of others; give its shape another draw (independent or top)"
            )
        if len(kinds) > 1 and set(kinds) != {"chosen"}:
            return "mixed"
        return kinds[0]

    def most_nodes(self, gamma: int) -> int:
        return sum(drafter.most_nodes(gamma) for drafter in self.drafters)

    def draft(
        self, contexts: Contexts, limits: Limits, sampling: Sampling, rng: CounterRNG
    ) -> Draft:
        # With the same random numbers, drafters would not draw independently.
        drafts = [
            drafter.draft(contexts, Limits(limits.depths), sampling, rng.fork(part))
            for part, drafter in enumerate(self.drafters)
        ]
        devices = [draft.tokens.device for draft in drafts if draft.tokens.shape[1]]
        if not devices:
            return drafts[0]
        drafts = [draft.to(devices[0]) for draft in drafts if draft.sizes.any()]
        depth = max(draft.nodes_by_depth().shape[1] for draft in drafts)
        tokens, parents = _joined(drafts)
        keep = torch.cat([draft.valid() for draft in drafts], 1)
        depths = torch.cat([draft.ancestors().sum(2) for draft in drafts], 1)
        q, q_rows = _joined_q(drafts)

        # Shallow nodes first; at one depth, in the order of the drafters.
        by_depth = torch.where(keep, depths, depth + 1).sort(dim=1, stable=True).indices
        tokens, keep = tokens.gather(1, by_depth), keep.gather(1, by_depth)
        place = by_depth.argsort(1)
        above = parents.gather(1, by_depth)
        above = torch.where(above < 0, -1, place.gather(1, above.clamp(min=0)))
        first = first_equal(tokens, torch.where(keep, above, -1), depth)
        above = merged(above, first)
        if q is None:
            keep &= first == torch.arange(tokens.shape[1], device=tokens.device)
        order, above, sizes = pack(keep, above)
        if q_rows is not None:
            q_rows = q_rows.gather(1, by_depth).gather(1, order)
        drawn: Drawn = "independent" if len(self.drafters) == 1 else "mixed"
        return Draft(tokens.gather(1, order), sizes, q, above, q_rows, drawn)


def _joined(drafts: list[Draft]) -> tuple[Tensor, Tensor]:
    """Tokens and parents, int64 [B, N] each: the drafts side by side."""
    parents = []
    before = 0
    for draft in drafts:
        above = draft.parent_rows() - 1
        parents.append(torch.where(above < 0, -1, above + before))
        before += above.shape[1]
    return torch.cat([draft.tokens for draft in drafts], 1), torch.cat(parents, 1)


def _joined_q(drafts: list[Draft]) -> tuple[Tensor | None, Tensor | None]:
    """(q [B, R, V], q_rows int64 [B, N]). (None, None) if no token was drawn."""
    drawn = next((draft.q for draft in drafts if draft.q is not None), None)
    if drawn is None:
        return None, None
    q = []
    q_rows = []
    before = 0
    for draft in drafts:
        if draft.q is not None:
            q.append(draft.q)
            rows = draft.rows_of_q()
        else:
            # A chosen token is a draw from a one-hot distribution.
            q.append(one_hot(draft.tokens, drawn.shape[2]).to(drawn.dtype))
            rows = torch.arange(draft.tokens.shape[1], device=drawn.device)
            rows = rows.expand_as(draft.tokens)
        q_rows.append(rows + before)
        before += q[-1].shape[1]
    return torch.cat(q, 1), torch.cat(q_rows, 1)
