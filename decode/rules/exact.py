"""Exact match: a draft token is accepted if it is exactly the token the target emits there.

Shapes: B rows, N nodes, D depth.
"""

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
    rows, nodes = draft.tokens.shape
    if not nodes:  # there is no deepest one
        none = draft.tokens.new_zeros(rows)
        return draft.tokens, none, none, none
    passes = passes & draft.valid()
    if draft.is_chain:
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


@RULES.register("exact")
class ExactMatch(Rule):
    """The target emits one token per row of logits (greedy: the argmax; otherwise one draw). The
    draft only decides how many of these tokens lie on one path and can be emitted together.
    Lossless by construction, on any tree. In greedy decoding every lossless rule is equal to it.
    """

    lossless, trees = True, True

    def decide(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Decision:
        # A walk draws at few nodes of a tree. The likeliest tokens are there at once.
        at_once = scores.sampling.greedy or draft.is_chain
        walks = not at_once and reads_are_free(draft.tokens.device)
        emitted = (self._on_paths if walks else self._everywhere)(draft, scores, rng)
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

    def _everywhere(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Tensor:
        """int64 [B, N+1]: the token that the target emits at each position of the draft. The shapes
        do not depend on values."""
        greedy = scores.sampling.greedy
        numbers = None if greedy else self.numbers(rng, depths_of_rows(draft))
        return scores.emitted(self.draw, numbers)

    def _on_paths(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Tensor:
        """The same, but −1 at positions after tokens that the target does not emit. At one depth,
        several nodes can be reached: siblings may be equal."""
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
