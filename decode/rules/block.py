"""Block verification (Sun et al., 2403.10444)."""

import torch
from torch import Tensor

from decode.draft import Draft
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import draw
from decode.rules import RULES, Rule
from decode.rules.speculative import TINY, residual
from decode.verdict import Decision, Scores


@RULES.register("block")
class BlockVerification(Rule):
    """Judges the γ draft tokens together. It accepts at least as many tokens as speculative
    sampling, and on average as many as any lossless rule can on a chain. Chains only.

    P₀ = 1, Pᵢ = min(1, Pᵢ₋₁·p(xᵢ)/q(xᵢ)); Sᵢ = Σₓ (Pᵢ·p(x|x≤ᵢ) − q(x|x≤ᵢ))₊; hᵢ = Sᵢ/(Sᵢ+1−Pᵢ)
    for i < γ, h_γ = P_γ. Each i has its own uniform. The number of accepted tokens is the last i
    with uᵢ < hᵢ, regardless of earlier ones. The next token is drawn from norm((Pᵢ·p − q)₊), or
    from p if i = γ.
    """

    lossless, trees = True, False

    def decide(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Decision:
        rows, nodes = draft.tokens.shape
        p = scores.probs()
        drafted = draft.valid().sum(1)
        if nodes == 0:
            return Decision.of_chain(draft, drafted, draw(p[:, 0], rng.of_next(drafted)))
        p_x = p[:, :-1].gather(2, draft.tokens[..., None])[..., 0].double()
        q_x = draft.q_of_tokens()
        # Products of quotients, in float64. Tokens with p = 0 have ratio 0, also if q = 0.
        ratio = torch.where(p_x > 0, p_x / q_x, 0.0)
        products = [torch.ones_like(ratio[:, 0])]
        for i in range(nodes):
            products.append((products[-1] * ratio[:, i]).clamp(max=1.0))
        P = torch.stack(products, 1)  # [B, N+1]

        inner = P[:, 1:-1]  # i = 1 … N−1: positions that can have a draft token after them
        if draft.q is None:
            S = inner * (1.0 - p_x[:, 1:])  # q is one-hot: everything except the chosen token
        else:
            row = torch.arange(rows, device=p.device)[:, None]
            q = draft.q[row, draft.rows_of_q()[:, 1:]]
            # P·p − q as P·(p − q/P). If P is 0, S stays 0.
            S = inner * residual(p[:, 1:-1], q / inner.clamp(min=TINY)[..., None].float())[1]
        spare = S + 1.0 - inner
        u = rng.uniforms(CounterRNG.ACCEPT, 0, nodes)
        ends = torch.arange(1, nodes + 1, device=p.device) == drafted[:, None]
        stays = u < P[:, 1:]
        # h = 0/0 counts as 1: acceptance up to here was certain, and it stays certain.
        stays[:, :-1] = torch.where(
            ends[:, :-1], stays[:, :-1], (u[:, :-1] * spare < S) | (spare <= 0)
        )
        accepted = self.last(stays & draft.valid())

        at = torch.arange(rows, device=p.device)
        p_next = p[at, accepted]
        q_next = draft.q_of(accepted.clamp(max=nodes - 1), p.shape[2])[0]
        scale = P[at, accepted].clamp(min=TINY)[:, None].float()
        left = residual(p_next, q_next / scale)[0]
        weights = torch.where((accepted < drafted)[:, None], left, p_next)
        return Decision.of_chain(draft, accepted, draw(weights, rng.of_next(accepted)))

    @staticmethod
    def last(stays: Tensor) -> Tensor:
        """int64 [B]: the last true place of stays, bool [B, N]: 1 … N, or 0 for none."""
        return (stays * torch.arange(1, stays.shape[1] + 1, device=stays.device)).amax(1)
