"""Speculative sampling (Leviathan et al., 2211.17192; Chen et al., 2302.01318)."""

import torch
from torch import Tensor

from decode.base.device import surely_none
from decode.draft import Draft
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import draw
from decode.rules import RULES, Rule
from decode.verdict import Decision, Scores

# Replaces a divisor of 0 if only the sign of the quotient matters.
TINY = 1e-30


def residual(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """((p − q)₊, float32 [..., V], and its sum, float64 [...]) for weights p, q ≥ 0 [..., V].

    If p ≈ q leaves nothing in float32, the sum is 0 and the weights are p, the limit of the
    residual. If q of a broken drafter is NaN, its tokens are always rejected: the weights are p,
    and the sum is that of p.
    """
    left = (p - q).clamp_(min=0)
    mass = left.sum(-1, dtype=torch.float64)
    empty = ~(mass > 0)
    if surely_none(empty):
        return left, mass
    mass = torch.where(mass.isnan(), p.sum(-1, dtype=torch.float64), mass)
    return torch.where(empty[..., None], p, left), mass


@RULES.register("speculative")
class SpeculativeSampling(Rule):
    """Accepts x ~ q with probability min(1, p(x)/q(x)). Draws the next token from norm((p − q)₊) at
    the first rejection, or from p after full acceptance. The output has the target's distribution
    p. The expected acceptance rate at a position is Σ min(p, q) = 1 − TV(p, q). Chains only.
    """

    lossless, trees = True, False

    def decide(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Decision:
        rows, nodes = draft.tokens.shape
        p = scores.probs()
        if nodes == 0:
            zero = torch.zeros(rows, dtype=torch.int64, device=p.device)
            return Decision.of_chain(draft, zero, draw(p[:, 0], rng.of_next(zero)))
        p_x = p[:, :-1].gather(2, draft.tokens[..., None])[..., 0].double()
        stays = self.accepts(rng.uniforms(CounterRNG.ACCEPT, 0, nodes), p_x, draft.q_of_tokens())
        accepted = (stays & draft.valid()).long().cumprod(1).sum(1)

        # The distribution after the last accepted token, [B, V].
        p_next = p[torch.arange(rows, device=p.device), accepted]
        q_next = draft.q_of(accepted.clamp(max=nodes - 1), p.shape[2])[0]
        rejected = (accepted < draft.valid().sum(1))[:, None]
        weights = torch.where(rejected, residual(p_next, q_next)[0], p_next)
        return Decision.of_chain(draft, accepted, draw(weights, rng.of_next(accepted)))

    def accepts(self, uniforms: Tensor, p_x: Tensor, q_x: Tensor) -> Tensor:
        """bool [B, N]: the draft tokens that are accepted if all before them are. Arguments:
        float64 [B, N]."""
        # Compare u·q < p, not u < p/q: the quotient of two tiny numbers is noise.
        return uniforms * q_x < p_x
