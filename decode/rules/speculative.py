"""Speculative sampling (Leviathan et al., 2211.17192; Chen et al., 2302.01318), its residual, and
two variants that are LOSSY: with lenience, and without the residual."""

import torch
from torch import Tensor

from decode.base.device import surely_none
from decode.base.errors import UserError
from decode.draft import Draft
from decode.draw.sampling import CounterRNG, draw
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
        weights = torch.where(rejected, self.after_rejection(p_next, q_next), p_next)
        return Decision.of_chain(draft, accepted, draw(weights, rng.of_next(accepted)))

    def accepts(self, uniforms: Tensor, p_x: Tensor, q_x: Tensor) -> Tensor:
        """bool [B, N]: the draft tokens that are accepted if all before them are. Arguments:
        float64 [B, N]."""
        # Compare u·q < p, not u < p/q: the quotient of two tiny numbers is noise.
        return uniforms * q_x < p_x

    def after_rejection(self, p: Tensor, q: Tensor) -> Tensor:
        """[B, V]: the weights of the token that replaces a rejected one."""
        return residual(p, q)[0]


@RULES.register("lenience")
class Lenience(SpeculativeSampling):
    """Lossy: accepts with probability min(1, p(x)/(l·q(x))); the rest is speculative sampling.

    lenience: l in (0, 1]; 1 is speculative sampling, and then the rule is lossless. No token gets
    more than 1/l times its probability under the target. It can be changed at any time, also
    during decoding. Raises UserError outside this range.
    """

    lossless = False

    def __init__(self, lenience: float = 0.5) -> None:
        if not 0 < lenience <= 1:
            raise UserError(
                f"lenience is {lenience}; expected a number in (0, 1], where 1 is lossless"
            )
        self.lenience = lenience

    @property
    def lenience(self) -> float:
        return self._lenience

    @lenience.setter
    def lenience(self, lenience: float) -> None:
        self._lenience, self.lossless = lenience, lenience == 1

    def accepts(self, uniforms: Tensor, p_x: Tensor, q_x: Tensor) -> Tensor:
        return uniforms * (self._lenience * q_x) < p_x


@RULES.register("speculative_skip_residual")
class SkipResidual(SpeculativeSampling):
    """Lossy: draws from p after a rejection, not from norm((p − q)₊). Acceptance is the same as in
    speculative sampling, so any difference between the two comes from the residual.
    """

    lossless = False

    def after_rejection(self, p: Tensor, q: Tensor) -> Tensor:
        return p
