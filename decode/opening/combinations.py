"""Drafters made of other drafters, by name and options: `vertical:model=DIRECTORY,inner=ngram`.

`A+B` and `A++B` (`combined`) have no options and are read by `open_drafter`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from decode.base.errors import UserError
from decode.base.registry import Registry
from decode.drafters import Drafter
from decode.drafters.several.cascade import HorizontalCascade, VerticalCascade
from decode.drafters.several.routed import RoutedDrafter
from decode.drafters.trained import VerifyingDrafter
from decode.model.loading import Target
from decode.shapes import Chain

# Opens a drafter by its name.
Opening = Callable[[str], Drafter]


class Combination(ABC):
    """The options of a combination. Drafters are options too, by name."""

    @abstractmethod
    def open(self, opened: Opening, target: Target) -> Drafter:
        """The drafter, for this target. Raises UserError as `opened` does, and for parts that do
        not fit."""


BY_LABEL = "give each drafter a label with routed:drafters=[…],labels=[…]"
COMBINATIONS: Registry[type[Combination]] = Registry(
    "combination of drafters",
    gone={
        "in_tree": "name the directory of the pass heads: it drafts with a pass of its own",
        "measured": "A+B asks the drafters in turn, and was as fast",
        "routed:by": f"leave it out; {BY_LABEL}",
        "routed:examples": BY_LABEL,
    },
)


@COMBINATIONS.register("vertical")
@dataclass(frozen=True, kw_only=True)
class Vertical(Combination):
    """A language model judges the chains of a cheaper drafter, and the target judges what it leaves
    (`decode.drafters.several.cascade.VerticalCascade`)."""

    model: str
    inner: str = "ngram"
    gamma: int = 4
    rule: str = "speculative"
    rounds: int | None = None

    def open(self, opened: Opening, target: Target) -> Drafter:
        model = opened(self.model)
        if not isinstance(model, VerifyingDrafter):
            raise UserError(
                f"the model of a vertical cascade is {self.model}, a {type(model).__name__}; "
                "expected a small language model, or sparse"
            )
        inner = _of_chains(opened(self.inner))
        return VerticalCascade(model, inner, gamma=self.gamma, rule=self.rule, rounds=self.rounds)


@COMBINATIONS.register("horizontal")
@dataclass(frozen=True, kw_only=True)
class Horizontal(Combination):
    """One drafter drafts the first tokens of a chain, and a cheaper one the later tokens
    (`decode.drafters.several.cascade.HorizontalCascade`)."""

    first: str
    later: str = "ngram"
    depth: int = 1

    def open(self, opened: Opening, target: Target) -> Drafter:
        first, later = _of_chains(opened(self.first)), _of_chains(opened(self.later))
        return HorizontalCascade(first, later, depth=self.depth)


def _of_chains(drafter: Drafter) -> Drafter:
    """The drafter with the shape chain. Raises UserError for one whose drafts are always trees."""
    if not drafter.branches:
        return drafter
    try:
        return drafter.with_shape(Chain())
    except UserError as error:
        raise UserError(
            f"{type(drafter).__name__} drafts trees, and a part of a cascade drafts chains; use "
            "ngram, store or a small model there"
        ) from error


@COMBINATIONS.register("routed")
@dataclass(frozen=True, kw_only=True)
class Routed(Combination):
    """Each row has one of several drafters, which the request's label names (`RoutedDrafter`).

    labels: the label of each drafter."""

    drafters: list[str]
    labels: list[str]

    def open(self, opened: Opening, target: Target) -> Drafter:
        return RoutedDrafter([opened(name) for name in self.drafters], self.labels)
