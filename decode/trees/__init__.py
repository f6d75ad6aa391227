"""Shapes of drafts by name: the nodes of a drafter's tree, and how their tokens are chosen.

A shape is one file with one registration. It sees a drafter only as a `Growth`, so any drafter
that gives logits after a node works with any shape. It knows nothing about rules or the loop.
"""

from abc import ABC, abstractmethod

from torch import Tensor

from decode.draft import Draft, Limits, Siblings
from decode.errors import UserError
from decode.registry import Registry
from decode.sampling import CounterRNG, Sampling
from decode.trees.growth import Growth


class Shape(ABC):
    """Base class of shapes. Options are keyword arguments with JSON values, so that a config can
    name a shape.

    branches: its drafts can be trees, not only chains. depth: the max depth of its drafts; None:
    the requested depth.
    """

    branches: bool = True
    depth: int | None = None

    def describe(self, most: int | None = None) -> str:
        """A short description, such as `chain`. most: the max depth, if limited."""
        return type(self).__name__.lower()

    @abstractmethod
    def siblings(self, sampling: Sampling) -> Siblings:
        """How the children of one node are picked under this sampling."""

    @abstractmethod
    def most_nodes(self, gamma: int) -> int:
        """The number of nodes to make room for, for drafts at most `gamma` deep: the nodes of the
        draft or the nodes fed to the drafter, whichever is larger."""

    @abstractmethod
    def grow(self, growth: Growth, limits: Limits, sampling: Sampling, rng: CounterRNG) -> Draft:
        """A draft for each row, at most `limits` deep.

        Draws come from `rng.uniforms(CounterRNG.DRAFT, place, …)`. Each place is used once in a
        round, so that a row's draft does not depend on the other rows.
        """


def likeliest(logits: Tensor, count: int) -> Tensor:
    """int64 [..., count]: the drafter's likeliest tokens (rows of its vocabulary), best first.

    Raises UserError if its vocabulary has fewer than `count` tokens.
    """
    if count > logits.shape[-1]:
        raise UserError(
            f"a tree gives a node {count} children and the drafter's vocabulary has "
            f"{logits.shape[-1]} tokens; make the tree narrower"
        )
    return logits.topk(count, dim=-1).indices


def log_q(logits: Tensor, tokens: Tensor) -> Tensor:
    """float32 [..., k] ≤ 0: log q of tokens [..., k] at temperature 1. logits: [..., V']."""
    scores = logits.float()
    # Rounding must not make a path likelier than its prefix.
    return (scores.gather(-1, tokens) - scores.logsumexp(-1, keepdim=True)).clamp(max=0.0)


def require_whole(**options: object) -> None:
    """Raises UserError unless all these options are whole numbers ≥ 1."""
    for name, value in options.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{name} is {value!r}; expected a whole number ≥ 1")


SHAPES: Registry[type[Shape]] = Registry("shape")

from decode.trees import (  # noqa: E402, F401  (each registers itself)
    calibrated,
    chains,
    dynamic,
    sequoia,
    static,
)
