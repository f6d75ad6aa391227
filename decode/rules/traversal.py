"""Traversal verification (Weng et al., 2505.12398)."""

import torch
from torch import Tensor

from decode.base.device import surely_none
from decode.draft import Draft
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import draw
from decode.rules import RULES, Rule
from decode.rules.block import BlockVerification
from decode.rules.speculative import TINY, residual
from decode.verdict import Decision, Scores


@RULES.register("traversal")
class Traversal(Rule):
    """Judges complete paths, from the leaves up. If a leaf is rejected, its parent can still be
    accepted. On a chain it is block verification. Trees of any kind.

    a(root) = 1, a(child) = min(1, a(parent)·p(x)/q(x)). The first leaf is accepted with its path
    if u < a. Otherwise it is removed, and at its parent S = Σ (a·p − q)₊, p ← norm((a·p − q)₊) and
    a ← S/(S+1−a). Then the first leaf of the remaining tree is judged, and so on. The next token is
    drawn from the current p at the accepted node. Siblings drawn without replacement are also
    removed from q.

    Leaves are visited in post-order, so only the path to the current node is kept: [B, D+1, V] for
    drafts D deep. On a CPU the number of passes depends on how many nodes are rejected. On an
    accelerator it is that of a tree with all nodes rejected, because a check would wait for it.
    """

    lossless, trees = True, True

    def decide(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Decision:
        if draft.is_chain:
            # The same verdict from the same random numbers, all positions at once.
            return BlockVerification().decide(draft, scores, rng)
        walk = _Walk(draft, scores, rng.uniforms(CounterRNG.ACCEPT, 0, draft.tokens.shape[1]))
        # A pass visits a new node, or comes back to a node whose children are all removed.
        inner = (draft.child_counts()[:, 1:] > 0).sum(1)
        for _ in range(int((draft.sizes + inner).max()) + 1):
            if surely_none(~walk.done):
                break
            walk.descend()
            walk.judge()
        depth = walk.depth
        path = walk.at[:, 1:] - 1
        weights = walk.p[walk.row, depth]
        went_on = walk.table[walk.row, walk.at[walk.row, depth], 0] >= 0
        next_token = draw(weights, rng.of_next(depth))
        return Decision(
            path=path.clamp(min=0),
            accepted=depth,
            reached=depth + went_on,
            next_token=next_token,
        )


class _Walk:
    """The current node of each row in its tree, and the state of the path to it.

    depth: int64 [B]. done: bool [B], the current node was accepted. By depth on the path, [B, D+1]
    each: at, int64, the row of p; next, int64, the index of the next child; a, float64; p, float32
    [B, D+1, V], unnormalised; mass, float64, the sum of p.
    """

    def __init__(self, draft: Draft, scores: Scores, uniforms: Tensor) -> None:
        self.draft, self.scores, self.uniforms = draft, scores, uniforms
        self.table = draft.children()
        rows, levels = len(draft.tokens), draft.levels() + 1
        device = draft.tokens.device
        self.row = torch.arange(rows, device=device)
        self.depth = torch.zeros(rows, dtype=torch.int64, device=device)
        self.done = torch.zeros(rows, dtype=torch.bool, device=device)
        self.at = torch.zeros(rows, levels, dtype=torch.int64, device=device)
        self.next = torch.zeros_like(self.at)
        self.a = torch.ones(rows, levels, dtype=torch.float64, device=device)
        self.mass = torch.ones_like(self.a)
        root = scores.probs_at(self.at[:, 0])
        self.p = root.new_zeros(rows, levels, root.shape[1])
        self.p[:, 0] = root

    def next_child(self) -> Tensor:
        """int64 [B]: the next child to visit from the current node of each row, −1 for none."""
        order = self.next[self.row, self.depth]
        children = self.table[self.row, self.at[self.row, self.depth]]
        last = children.shape[1] - 1
        child = children.gather(1, order.clamp(max=last)[:, None])[:, 0]
        return torch.where(self.done | (order > last), -1, child)

    def descend(self) -> None:
        """Steps down once, in rows that have a child left to visit."""
        child = self.next_child()
        down = child >= 0
        if surely_none(down):
            return
        row, depth, node = self.row, self.depth, child.clamp(min=0)
        mass, a, token = self.mass[row, depth], self.a[row, depth], self.draft.tokens[row, node]
        p_x = self.p[row, depth, token].double()
        a_child = a * (p_x / mass)
        if self.draft.q is not None:
            q, q_mass = self.draft.q_of(node, self.p.shape[2])
            a_child = a_child * (q_mass / q[row, token].double())
        # It is NaN if q is: then the child is never accepted.
        a_child = torch.where(p_x > 0, a_child, 0.0).clamp(max=1.0).nan_to_num(0.0)

        self.next[row, depth] += down.long()
        self.depth = below = depth + down.long()
        for values, new in (
            (self.at, node + 1),
            (self.next, torch.zeros_like(node)),
            (self.a, a_child),
            (self.mass, torch.ones_like(mass)),
        ):
            values[row, below] = torch.where(down, new, values[row, below])
        self._put_p(below, down, self.scores.probs_at(node + 1))

    def judge(self) -> None:
        """Accepts the current leaves, or removes them and goes back to their parents."""
        row, depth = self.row, self.depth
        leaf = ~self.done & (self.next_child() < 0)
        node = (self.at[row, depth] - 1).clamp(min=0)
        root = depth == 0
        if self.uniforms.shape[1]:
            stays = leaf & (root | (self.uniforms[row, node] < self.a[row, depth]))
        else:
            stays = leaf
        self.done = self.done | stays
        back = leaf & ~stays
        if surely_none(back):
            return
        self.depth = above = depth - back.long()
        p, mass, a = self.p[row, above], self.mass[row, above], self.a[row, above]
        if self.draft.q is None:
            # q is one-hot: the chosen token is removed.
            q = torch.zeros_like(p).scatter_(1, self.draft.tokens[row, node][:, None], 1.0)
        else:
            q, q_mass = self.draft.q_of(node, p.shape[1])
            # a·p/mass − q/q_mass up to a factor, so that p does not change if nothing is left.
            q = q * (mass / (q_mass * a).clamp(min=TINY))[:, None].float()
        left, left_mass = residual(p, q)
        S = a * left_mass / mass
        spare = S + 1.0 - a
        # 0/0 counts as 1: acceptance up to the parent was certain, and it stays certain.
        a_left = torch.where(spare > 0, S / spare, 1.0)
        self._put_p(above, back, left)
        left_mass = torch.where(left_mass > 0, left_mass, mass)
        self.mass[row, above] = torch.where(back, left_mass, mass)
        self.a[row, above] = torch.where(back, a_left, a)

    def _put_p(self, depth: Tensor, rows: Tensor, new: Tensor) -> None:
        """Sets p at depth[b] to new [B, V] in the given rows, bool [B]."""
        if not surely_none(~rows):
            new = torch.where(rows[:, None], new, self.p[self.row, depth])
        self.p[self.row, depth] = new
