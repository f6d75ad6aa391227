"""Verification rules by name: which drafted tokens stay, and what follows them.

A rule is one file with one registration. It sees a draft, the target's logits and the sampling
parameters, and knows nothing of drafters or of the loop.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from decode.draft import Draft
from decode.registry import Registry
from decode.sampling import Noise, Sampling


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


class Rule(ABC):
    """A verification rule.

    lossless: the emitted text has exactly the target's distribution (greedy: its exact tokens).
    trees: branching drafts are judged too, not only chains.
    needs_q: the rule reads the drafter's distributions.
    """

    lossless: bool
    trees: bool
    needs_q: bool

    @abstractmethod
    def verify(self, draft: Draft, logits: Tensor, sampling: Sampling, noise: Noise) -> Verdict:
        """Judge a draft. logits [B, N+1, V]: row 0 follows the context, row i+1 follows node i."""


RULES: Registry[type[Rule]] = Registry("verification rule")

from decode.rules import exact, speculative  # noqa: E402, F401  (each registers itself)
