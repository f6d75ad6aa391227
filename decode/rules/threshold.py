"""Probability threshold, as used for drafting on the edge and verifying in the cloud. LOSSY."""

from decode.base.errors import UserError
from decode.draft import Draft
from decode.draw.random_numbers import CounterRNG
from decode.rules import RULES, Rule
from decode.verdict import Decision, Scores


@RULES.register("threshold")
class Threshold(Rule):
    """Lossy: accepts tokens as long as the target gives them p(x) ≥ θ. The first token that fails
    is replaced by a draw from p there. After full acceptance one more token is drawn from p.
    Chains only.

    Greedy decoding uses the same rule, with p at temperature 1 and the argmax for draws.
    threshold: θ in [0, 1], calibrated for the drafter on dev text. Raises UserError outside this
    range.
    """

    lossless, trees, exact_when_greedy = False, False, False

    def __init__(self, threshold: float = 0.25) -> None:
        if not 0 <= threshold <= 1:
            raise UserError(f"threshold is {threshold}; expected a probability, from 0 to 1")
        self.threshold = threshold

    def decide(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Decision:
        judged = scores.sampling.warmed.probs(scores.logits[:, :-1])
        p_x = judged.gather(2, draft.tokens[..., None])[..., 0]
        accepted = ((p_x >= self.threshold) & (p_x > 0) & draft.valid()).long().cumprod(1).sum(1)
        next_token = scores.sampling.pick(scores.logits_at(accepted), rng.of_next(accepted))
        return Decision.of_chain(draft, accepted, next_token)
