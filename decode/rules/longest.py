"""The longest path of a draft whose nodes all pass, for rules that judge each node independently.

Shapes: B rows, N nodes, D depth.
"""

import torch
from torch import Tensor

from decode.draft import Draft


def longest_path(draft: Draft, passes: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(path, accepted, reached) as in `Verdict`, and the row of p after the path, int64 [B].

    passes: bool [B, N]. A node is accepted if it and all its ancestors pass. If several paths have
    the same length, the one drafted first is taken.
    """
    passes = passes & draft.valid()
    rows, nodes = draft.tokens.shape
    if draft.is_chain:
        accepted = passes.long().cumprod(1).sum(1)
        path = torch.arange(nodes, device=passes.device).expand(rows, -1)
        return path, accepted, torch.minimum(accepted + 1, draft.valid().sum(1)), accepted
    ancestors = draft.ancestors()
    stays = ((ancestors & ~passes[:, None, :]).sum(2) == 0) & passes
    accepted, deepest = (ancestors.sum(2) * stays).max(1)
    path = draft.path_to(torch.where(accepted > 0, deepest, -1))
    last_row = torch.where(accepted > 0, deepest + 1, 0)
    went_on = ((draft.parent_rows() == last_row[:, None]) & draft.valid()).any(1)
    return path, accepted, accepted + went_on, last_row
