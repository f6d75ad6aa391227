"""Typical acceptance (Medusa, 2401.10774, section 2.3.1). LOSSY."""

import torch

from decode.draft import Draft
from decode.errors import UserError
from decode.rules import RULES, Rule
from decode.sampling import CounterRNG, draw
from decode.verification import Scores, Verification


@RULES.register("typical")
class TypicalAcceptance(Rule):
    """Lossy: accepts a token if p(x) > min(ε, δ·exp(−H(p))), where H is the entropy of p in nats.
    So less likely tokens pass if the target is uncertain. The longest accepted path wins; among
    several, the likeliest under p. The next token is drawn from p. Trees of any kind.

    epsilon: ε in (0, 1]; delta: δ > 0. Raises UserError outside these ranges.
    """

    lossless, trees = False, True

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3) -> None:
        if not 0 < epsilon <= 1:
            raise UserError(f"epsilon is {epsilon}; expected a number in (0, 1]")
        if not delta > 0:
            raise UserError(f"delta is {delta}; expected a number > 0")
        self.epsilon, self.delta = epsilon, delta

    def verify(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verification:
        rows, nodes = draft.tokens.shape
        device = draft.tokens.device
        above, valid = draft.parent_rows(), draft.valid()
        # For each row of p: its depth, −1 if its path is not accepted; and the path's log p.
        depth = torch.full((rows, nodes + 1), -1, dtype=torch.int64, device=device)
        depth[:, 0] = 0
        log_p = torch.zeros(rows, nodes + 1, dtype=torch.float64, device=device)
        for level in range(draft.nodes_by_depth().shape[1]):
            # Few nodes of a large tree are accepted, and only their children are checked.
            row, node = ((depth.gather(1, above) == level) & valid).nonzero(as_tuple=True)
            parent = above[row, node]
            flat, which = (row * (nodes + 1) + parent).unique(return_inverse=True)
            p = scores.sampling.probs(scores.logits.flatten(0, 1)[flat])
            entropy = torch.special.entr(p).sum(-1)
            bound = (self.delta * torch.exp(-entropy)).clamp(max=self.epsilon)
            p_x = p[which, draft.tokens[row, node]]
            stays = p_x > bound[which]
            row, node, parent = row[stays], node[stays], parent[stays]
            depth[row, node + 1] = level + 1
            log_p[row, node + 1] = log_p[row, parent] + p_x[stays].double().log()

        accepted = depth.amax(1)
        longest = depth == accepted[:, None]
        last = torch.where(longest, log_p, -torch.inf).argmax(1)
        went_on = ((above == last[:, None]) & valid).any(1)
        uniform = rng.uniforms(CounterRNG.NEXT, 0, 1)[:, 0]
        next_token = draw(scores.probs_at(last), uniform)
        return Verification.of(
            draft,
            scores,
            path=draft.path_to(last - 1),
            accepted=accepted,
            reached=accepted + went_on,
            next_token=next_token,
        )
