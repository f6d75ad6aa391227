"""Verification rules by name: a rule decides which draft tokens are accepted and draws the next.

A rule is one file with one registration. It sees a draft, the target's logits and the sampling
parameters. It knows nothing about drafters or the loop.
"""

from abc import ABC, abstractmethod
from typing import get_args

from decode.base.errors import UserError
from decode.base.registry import Registry, import_all
from decode.draft import Draft, Siblings
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling
from decode.verdict import Decision, Scores


class Rule(ABC):
    """A verification rule.

    lossless: the emitted text has exactly the target's distribution (greedy: its exact tokens).
    trees: the rule judges trees too, not only chains.
    siblings: the kinds of siblings that the rule judges in trees. A node of a chain has one child,
        drawn or chosen, and every rule judges that.
    exact_when_greedy: at temperature 0 the rule is equal to exact match, which then decides in its
        place (`decode.loop.step.decided`).
    couples: chains are to be drawn with the noise of the text (`CounterRNG.coupled`).
    """

    lossless: bool
    trees: bool
    siblings: frozenset[Siblings] = frozenset(get_args(Siblings))
    exact_when_greedy: bool = True
    couples: bool = False

    @classmethod
    def judges(cls, branches: bool, siblings: Siblings) -> bool:
        """Whether the rule fits drafts with these siblings. branches: the drafts can be trees."""
        return not branches or (cls.trees and siblings in cls.siblings)

    def is_exact_for(self, sampling: Sampling) -> bool:
        """Whether the rule is equal to exact match for texts that are drawn so."""
        return self.exact_when_greedy and sampling.greedy

    @abstractmethod
    def decide(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Decision:
        """Judges a draft by the target's scores. It reads no value on an accelerator: it computes
        tensors from tensors, and `torch.compile` traces it as one graph."""


RULES: Registry[type[Rule]] = Registry(
    "verification rule",
    gone={"speculative_skip_residual": "use speculative; lenience is the lossy rule beside it"},
)


def default_rule(branches: bool) -> str:
    """The rule that is used if none is named: speculative sampling, which is `multi_round` for
    trees. branches: the drafts can be trees."""
    return "multi_round" if branches else "speculative"


def require_fitting(rule: Rule, drafter: str, branches: bool, siblings: Siblings) -> None:
    """Raises UserError if the rule cannot judge these drafts. drafter: the name of the drafter or
    shape, for the message."""
    if rule.judges(branches, siblings):
        return
    judged = " or ".join(sorted(rule.siblings)) + " siblings" if rule.trees else "chains only"
    instead = "use the shape chain"
    if siblings == "mixed":  # chains that are merged are a tree again
        instead = "use its drafters in turn (A+B) instead of merging them into one tree (A++B)"
    fitting = ", ".join(name for name in RULES if RULES[name].judges(branches, siblings))
    raise UserError(
        f"{drafter} drafts trees of {siblings} siblings, but the rule {type(rule).__name__} judges "
        f"{judged}; choose a rule for such trees: {fitting}; or {instead}"
    )


import_all(__name__)
