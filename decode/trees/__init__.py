"""Shapes of drafts by name: which nodes a drafter's tree gets, and how their tokens are chosen.

A shape is one file with one registration. It sees a drafter only as a `Growth`, so any drafter
that can say what follows a node drafts in any shape; it knows nothing of rules or of the loop.
"""

from abc import ABC, abstractmethod

from torch import Tensor

from decode.contexts import Limits
from decode.draft import Draft, Siblings
from decode.errors import UserError
from decode.registry import Registry
from decode.sampling import Noise, Sampling
from decode.trees.growth import Growth


class Shape(ABC):
    """Options come by keyword and are JSON values, so that a shape can stand in a config.

    branches: its drafts may be trees, not only chains. depth: how deep they are at most; None: as
    deep as is asked.
    """

    branches: bool = True
    depth: int | None = None

    def describe(self, most: int | None = None) -> str:
        """In a few words, such as `chain`. most: where no draft may be deeper."""
        return type(self).__name__.lower()

    @abstractmethod
    def siblings(self, sampling: Sampling) -> Siblings:
        """How the children of one node come about under this sampling."""

    @abstractmethod
    def most_nodes(self, gamma: int) -> int:
        """How many nodes a draft at most `gamma` deep takes room for: those it has, or those that
        are fed to the drafter on the way, whichever are more."""

    @abstractmethod
    def grow(self, growth: Growth, limits: Limits, sampling: Sampling, noise: Noise) -> Draft:
        """A draft for each row, at most `limits` deep.

        Draws come from `noise.uniforms(Noise.DRAFT, place, …)`, a place used once in a round, so
        that a row's draft does not depend on the rows beside it.
        """


def likeliest(logits: Tensor, count: int) -> Tensor:
    """int64 [..., count]: the drafter's likeliest tokens (rows of its vocabulary), best first.

    Raises UserError when it has fewer tokens.
    """
    if count > logits.shape[-1]:
        raise UserError(
            f"a tree gives a node {count} children and the drafter's vocabulary has "
            f"{logits.shape[-1]} tokens; make the tree narrower"
        )
    return logits.topk(count, dim=-1).indices


def log_q(logits: Tensor, tokens: Tensor) -> Tensor:
    """float32 [..., k] ≤ 0: log q of tokens [..., k] at temperature 1, logits being [..., V']."""
    scores = logits.float()
    # Rounding must not make a path likelier than its beginning.
    return (scores.gather(-1, tokens) - scores.logsumexp(-1, keepdim=True)).clamp(max=0.0)


def require_whole(**options: object) -> None:
    """UserError unless all of these options are whole numbers ≥ 1."""
    for name, value in options.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{name} is {value!r}; expected a whole number ≥ 1")


SHAPES: Registry[type[Shape]] = Registry("shape")

from decode.trees import (  # noqa: E402, F401  (each registers itself)
    calibrated,
    chain,
    chains,
    dynamic,
    sequoia,
    static,
)
