"""Exact match: a draft token is accepted if it is exactly the token the target emits there.

Shapes: B rows, N nodes, D depth.
"""

import numpy as np
import torch
from torch import Tensor

from decode.base.device import reads_are_free
from decode.draft import Draft
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling
from decode.rules import RULES, Rule
from decode.verdict import Decision, Scores


def longest_path(draft: Draft, passes: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(path, accepted, reached) as in `Decision`, and the position after the path, int64 [B].

    passes: bool [B, N]. A node is accepted if it and all its ancestors pass. If several paths have
    the same length, the one drafted first is taken.
    """
    if reads_are_free(passes.device):
        return _longest_on_host(draft, passes)
    rows, nodes = draft.tokens.shape
    passes = passes & draft.valid()
    if draft.is_chain or not nodes:
        accepted = passes.cumprod(1).sum(1)
        path = torch.arange(nodes, device=passes.device).expand(rows, -1)
        return path, accepted, torch.minimum(accepted + 1, draft.valid().sum(1)), accepted
    ancestors = draft.ancestors()
    stays = (ancestors <= passes[:, None, :]).all(2)
    accepted, last = (ancestors.sum(2) * stays).max(1)
    path = draft.path_to(torch.where(accepted > 0, last, -1))
    last_row = torch.where(accepted > 0, last + 1, 0)
    went_on = ((draft.parent_rows() == last_row[:, None]) & draft.valid()).any(1)
    return path, accepted, accepted + went_on, last_row


def _longest_on_host(draft: Draft, passes: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same, node by node: trees are small, and an operation of tensors takes longer than all of
    this does for one of them."""
    rows = len(draft.sizes)
    # As wide for any acceptance: what a row makes of it does not depend on the others.
    path = np.zeros((rows, draft.levels()), dtype=np.int64)
    accepted, reached, last = np.zeros((3, rows), dtype=np.int64)
    trees = draft.parents_on_host().tolist(), passes.tolist(), draft.sizes.tolist()
    for row, (parents, good, size) in enumerate(zip(*trees, strict=True)):
        depths = [0] + [-1] * size  # of the end of the text and of each node; −1: not accepted
        for node, above in enumerate(parents[:size]):
            if good[node] and depths[above + 1] >= 0:
                depths[node + 1] = depths[above + 1] + 1
        depth = max(depths)
        end = depths.index(depth) - 1
        accepted[row], last[row], reached[row] = depth, end + 1, depth + (end in parents[:size])
        for place in range(depth - 1, -1, -1):
            path[row, place], end = end, parents[end]
    ends = torch.from_numpy(accepted), torch.from_numpy(reached), torch.from_numpy(last)
    return torch.from_numpy(path), *ends


@RULES.register("exact")
class ExactMatch(Rule):
    """The target emits one token per row of logits (greedy: the argmax; otherwise one draw). The
    draft only decides how many of these tokens lie on one path and can be emitted together.
    Lossless by construction, on any tree. In greedy decoding every lossless rule is equal to it.
    """

    lossless, trees = True, True

    def decide(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Decision:
        greedy = scores.sampling.greedy
        # A walk draws at few nodes of a tree. The likeliest tokens are there at once.
        if greedy or draft.is_chain or not reads_are_free(draft.tokens.device):
            numbers = None if greedy else self.numbers(rng, depths_of_rows(draft))
            emitted = scores.emitted(self.draw, numbers)
        else:
            emitted = self._on_paths(draft, scores, rng)
        if not draft.tokens.shape[1]:  # plain decoding, whose steps have time for few operations
            none = torch.zeros_like(emitted[:, 0])
            return Decision(draft.tokens, none, none, emitted[:, 0])
        matches = draft.tokens == draft.before(emitted)
        path, accepted, reached, last_row = longest_path(draft, matches)
        return Decision(
            path=path,
            accepted=accepted,
            reached=reached,
            next_token=emitted.gather(1, last_row[:, None])[:, 0],
        )

    def numbers(self, rng: CounterRNG, depths: Tensor) -> Tensor:
        """[B, n]: a random number for each token of the text. depths: int64 [B, n], the offsets of
        the tokens from the end of the committed text."""
        return rng.of_text(depths)

    def draw(self, sampling: Sampling, logits: Tensor, numbers: Tensor) -> Tensor:
        """int64 [...]: the tokens that the target emits. logits: [..., V]. numbers: [...], those of
        their places."""
        return sampling.pick(logits, numbers)

    def _on_paths(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Tensor:
        """int64 [B, N+1]: the token that the target emits at each position of the draft, but −1
        after tokens that it does not emit. At one depth, several nodes can be reached: siblings may
        be equal."""
        above, valid = draft.parent_rows(), draft.valid()
        emitted = torch.full_like(torch.nn.functional.pad(above, (1, 0)), -1)
        row = torch.arange(len(emitted))
        place = torch.zeros_like(row)
        depth = torch.zeros_like(emitted[:, :1])
        while len(row):
            numbers = self.numbers(rng, depth)[row, 0]
            sampling, logits = scores.sampling.at(row), scores.logits[row, place]
            emitted[row, place] = self.draw(sampling, logits, numbers)
            reached = (draft.tokens == emitted.gather(1, above)) & valid & (emitted[:, 1:] < 0)
            row, node = reached.nonzero(as_tuple=True)
            place, depth = node + 1, depth + 1
        return emitted


def depths_of_rows(draft: Draft) -> Tensor:
    """int64 [B, N+1]: for each row of p, the offset of its next token from the end of the committed
    text."""
    rows, nodes = draft.tokens.shape
    if draft.is_chain:
        return torch.arange(nodes + 1, device=draft.tokens.device).expand(rows, -1)
    return torch.nn.functional.pad(draft.ancestors().sum(2), (1, 0))
