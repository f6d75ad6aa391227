"""Shapes of drafts by name: which nodes a drafter's tree gets, and how their tokens are chosen.

A shape is one file with one registration. It sees a drafter only as a `Growth`, so any drafter
that can say what follows a node drafts in any shape; it knows nothing of rules or of the loop.
"""

from abc import ABC, abstractmethod

from decode.contexts import Limits
from decode.draft import Draft, Siblings
from decode.growth import Growth
from decode.registry import Registry
from decode.sampling import Noise, Sampling


class Shape(ABC):
    """branches: its drafts may be trees, not only chains."""

    branches: bool = True

    @abstractmethod
    def siblings(self, sampling: Sampling) -> Siblings:
        """How the children of one node come about under this sampling."""

    @abstractmethod
    def most_nodes(self, gamma: int) -> int:
        """How many nodes a draft at most `gamma` deep may have."""

    @abstractmethod
    def grow(self, growth: Growth, limits: Limits, sampling: Sampling, noise: Noise) -> Draft:
        """A draft for each row, at most `limits` deep.

        Draws come from `noise.uniforms(Noise.DRAFT, place, …)`, a place used once in a round, so
        that a row's draft does not depend on the rows beside it.
        """


SHAPES: Registry[type[Shape]] = Registry("shape")

from decode.shapes import chain  # noqa: E402, F401  (registers itself)
