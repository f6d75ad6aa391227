"""Speculative sampling (Leviathan et al., 2211.17192; Chen et al., 2302.01318)."""

import torch

from decode.draft import Draft
from decode.rules import RULES, Rule, Verdict
from decode.sampling import Noise, draw
from decode.scores import Scores


@RULES.register("speculative")
class SpeculativeSampling(Rule):
    """Accept x ~ q with probability min(1, p(x)/q(x)); at the first rejection draw from
    norm((p − q)₊), after full acceptance from p. The output has the target's distribution p.
    The expected acceptance rate at a position is Σ min(p, q) = 1 − TV(p, q).
    """

    lossless, trees = True, False
    siblings = frozenset({"chosen", "independent"})

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        rows, nodes = draft.tokens.shape
        p = scores.probs()
        last_uniform = noise.uniforms(Noise.NEXT, 0, 1)[:, 0]
        if nodes == 0:
            zero = torch.zeros(rows, dtype=torch.int64, device=p.device)
            return Verdict(draft.tokens, zero, zero, draw(p[:, 0], last_uniform))
        token = draft.tokens[..., None]
        p_x = p[:, :-1].gather(2, token)[..., 0].double()
        # A token that was chosen, not drawn, has q = one-hot: accepted with probability p(x).
        q_x = 1.0 if draft.q is None else draft.q.gather(2, token)[..., 0].double()
        # u·q < p, never u < p/q: the quotient of two tiny numbers is noise.
        stays = (noise.uniforms(Noise.ACCEPT, 0, nodes) * q_x < p_x) & draft.valid()
        accepted = stays.long().cumprod(1).sum(1)
        drafted = draft.valid().sum(1)

        index = accepted[:, None, None].expand(-1, 1, p.shape[2])
        p_next = p.gather(1, index)[:, 0]  # [B, V]: the row after the last accepted token
        at_rejected = accepted.clamp(max=nodes - 1)[:, None]
        if draft.q is None:
            q_next = torch.zeros_like(p_next).scatter_(1, draft.tokens.gather(1, at_rejected), 1.0)
        else:
            q_next = draft.q.gather(1, index.clamp(max=nodes - 1))[:, 0]
        rejected = (accepted < drafted)[:, None]
        residual = torch.where(rejected, (p_next - q_next).clamp(min=0), p_next)
        # p ≈ q can leave nothing in float32; then p itself is the limit of the residual. So it is
        # where a broken drafter's q is not a number: what it drafted was rejected for sure.
        empty = ~(residual.sum(1, keepdim=True) > 0)
        residual = torch.where(empty, p_next, residual)
        path = torch.arange(nodes, device=p.device).expand(rows, -1)
        return Verdict(
            path,
            accepted,
            torch.minimum(accepted + 1, drafted),
            draw(residual, last_uniform),
        )
