"""Verification rules by name: which drafted tokens stay, and what follows them.

A rule is one file with one registration. It sees a draft, the target's logits and the sampling
parameters, and knows nothing of drafters or of the loop.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from decode.draft import Draft, Siblings
from decode.errors import UserError
from decode.registry import Registry
from decode.sampling import Noise, Sampling
from decode.scores import Scores


@dataclass
class Verdict:
    """What a rule decided for B rows of N nodes; D ≤ N is the longest accepted path.

    path: int64 [B, D], the accepted nodes by depth; past accepted[b] it is padding.
    accepted: int64 [B], how many drafted tokens stay.
    reached: int64 [B], how many drafted positions were judged with all before them accepted.
    next_token: int64 [B], the token that follows the accepted ones.
    """

    path: Tensor
    accepted: Tensor
    reached: Tensor
    next_token: Tensor

    def places(self) -> Tensor:
        """int64 [B, D+1]: the rows of p along the path, that of the committed text first; past
        accepted[b] they are padding."""
        return torch.nn.functional.pad(self.path + 1, (1, 0))


class Rule(ABC):
    """A verification rule.

    lossless: the emitted text has exactly the target's distribution (greedy: its exact tokens).
    trees: branching drafts are judged too, not only chains.
    siblings: how the children of a node may have come about in the trees that are judged. A node
        of a chain has one child: drawn once or chosen, every rule judges it.
    exact_when_greedy: at temperature 0 the rule comes to exact match, which is then used.
    """

    lossless: bool
    trees: bool
    siblings: frozenset[Siblings] = frozenset(get_args(Siblings))
    exact_when_greedy: bool = True

    @classmethod
    def judges(cls, branches: bool, siblings: Siblings) -> bool:
        """Whether it fits drafts that branch, or do not, with siblings that came about so."""
        return not branches or (cls.trees and siblings in cls.siblings)

    @abstractmethod
    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        """Judge a draft by what the target says of it."""


RULES: Registry[type[Rule]] = Registry("verification rule")


def default_rule(branches: bool) -> str:
    """The rule for drafts that branch, or do not, where none is asked for: speculative sampling,
    which over trees is `multi_round`."""
    return "multi_round" if branches else "speculative"


def used_rule(rule: Rule, sampling: Sampling) -> Rule:
    """The rule itself, or exact match where at temperature 0 it comes to that."""
    return RULES["exact"]() if sampling.greedy and rule.exact_when_greedy else rule


def require_fitting(rule: Rule, drafter: str, branches: bool, siblings: Siblings) -> None:
    """Refuse a rule that cannot judge what a drafter or shape, called so, drafts (UserError)."""
    if rule.judges(branches, siblings):
        return
    judged = " or ".join(sorted(rule.siblings)) + " siblings" if rule.trees else "chains only"
    instead = "let it draft in the shape chain"
    if siblings == "mixed":  # chains that are merged are a tree again
        instead = "ask its drafters in turn (A+B), not for one tree (A++B)"
    fitting = ", ".join(name for name in RULES if RULES[name].judges(branches, siblings))
    raise UserError(
        f"{drafter} drafts trees of {siblings} siblings and the rule {type(rule).__name__} judges "
        f"{judged}; rules for such trees: {fitting}; or {instead}"
    )


from decode.rules import (  # noqa: E402, F401  (each registers itself)
    block,
    exact,
    lenience,
    multi_round,
    skip_residual,
    spectr,
    speculative,
    threshold,
    top_k,
    traversal,
    typical,
)
