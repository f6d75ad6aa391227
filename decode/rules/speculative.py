"""Speculative sampling (Leviathan et al., 2211.17192; Chen et al., 2302.01318)."""

import torch
from torch import Tensor

from decode.draft import Draft
from decode.logits import Scores
from decode.rules import RULES, Rule, Verdict
from decode.rules.residual import residual
from decode.sampling import CounterRNG, draw


@RULES.register("speculative")
class SpeculativeSampling(Rule):
    """Accepts x ~ q with probability min(1, p(x)/q(x)). Draws the next token from norm((p − q)₊) at
    the first rejection, or from p after full acceptance. The output has the target's distribution
    p. The expected acceptance rate at a position is Σ min(p, q) = 1 − TV(p, q). Chains only.
    """

    lossless, trees = True, False

    def verify(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        rows, nodes = draft.tokens.shape
        p = scores.probs()
        last_uniform = rng.uniforms(CounterRNG.NEXT, 0, 1)[:, 0]
        if nodes == 0:
            zero = torch.zeros(rows, dtype=torch.int64, device=p.device)
            return Verdict(draft.tokens, zero, zero, draw(p[:, 0], last_uniform))
        p_x = p[:, :-1].gather(2, draft.tokens[..., None])[..., 0].double()
        stays = self.accepts(rng.uniforms(CounterRNG.ACCEPT, 0, nodes), p_x, draft.q_of_tokens())
        accepted = (stays & draft.valid()).long().cumprod(1).sum(1)
        drafted = draft.valid().sum(1)

        # The distribution after the last accepted token, [B, V].
        p_next = p[torch.arange(rows, device=p.device), accepted]
        q_next = draft.q_of(accepted.clamp(max=nodes - 1), p.shape[2])[0]
        rejected = (accepted < drafted)[:, None]
        weights = torch.where(rejected, self.after_rejection(p_next, q_next), p_next)
        path = torch.arange(nodes, device=p.device).expand(rows, -1)
        return Verdict(
            path, accepted, torch.minimum(accepted + 1, drafted), draw(weights, last_uniform)
        )

    def accepts(self, uniforms: Tensor, p_x: Tensor, q_x: Tensor) -> Tensor:
        """bool [B, N]: the draft tokens that are accepted if all before them are. Arguments:
        float64 [B, N]."""
        # Compare u·q < p, not u < p/q: the quotient of two tiny numbers is rng.
        return uniforms * q_x < p_x

    def after_rejection(self, p: Tensor, q: Tensor) -> Tensor:
        """[B, V]: the weights of the token that replaces a rejected one."""
        return residual(p, q)[0]
