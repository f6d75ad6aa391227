"""Drafters made of other drafters, by name and options: `vertical:model=DIRECTORY,inner=ngram`.

`A+B` and `A++B` (`combined`) have no options and are read by `open_drafter`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from decode.base.errors import UserError
from decode.base.registry import Registry
from decode.drafters import Drafter
from decode.drafters.several.cascade import HorizontalCascade, VerticalCascade
from decode.drafters.several.measured import Cost, MeasuredComposite
from decode.drafters.several.routed import RoutedDrafter
from decode.drafters.several.routing import ByAcceptance, ByLabel, ByText, Routing, TokenProfiles
from decode.drafters.trained import VerifyingDrafter
from decode.loop.decoding import Decoder
from decode.model.loading import Target
from decode.shapes import Chain
from decode.time_costs import measure_costs

# What costs are measured on: drafts after this text, of up to this number of tokens.
SAMPLE = "one, two, three, four, five, six; one, two, three, four, five, six; one, two, "
MEASURED_DEPTH = 8
# Opens a drafter by its name.
Opening = Callable[[str], Drafter]


class Combination(ABC):
    """The options of a combination. Drafters are options too, by name."""

    @abstractmethod
    def open(self, opened: Opening, target: Target) -> Drafter:
        """The drafter, for this target. Raises UserError as `opened` does, and for parts that do
        not fit."""


COMBINATIONS: Registry[type[Combination]] = Registry("combination of drafters")


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


@COMBINATIONS.register("measured")
@dataclass(frozen=True, kw_only=True)
class Measured(Combination):
    """Each row takes the drafter that is worth most there, by its acceptance and its cost
    (`decode.drafters.several.measured.MeasuredComposite`).

    costs: the costs of each drafter. None: they are measured once, when the drafters are opened
    (`decode.time_costs.measure_costs`)."""

    drafters: list[str]
    costs: list[Cost] | None = None
    prior: float = 0.7
    memory: float = 0.95

    def open(self, opened: Opening, target: Target) -> Drafter:
        drafters = [opened(name) for name in self.drafters]
        costs = self.costs
        if costs is None:
            costs = [_measured(drafter, target) for drafter in drafters]
        return MeasuredComposite(drafters, costs, prior=self.prior, memory=self.memory)


@COMBINATIONS.register("routed")
@dataclass(frozen=True, kw_only=True)
class Routed(Combination):
    """Each row has one of several drafters (`RoutedDrafter`), chosen by its text, by the request's
    label or by measured acceptance.

    examples: with `text`, a UTF-8 text file of each drafter's domain, for `TokenProfiles`.
    labels: with `label`, the label of each drafter."""

    drafters: list[str]
    by: Literal["text", "label", "acceptance"] = "text"
    examples: list[str] | None = None
    labels: list[str] | None = None

    def open(self, opened: Opening, target: Target) -> Drafter:
        routing = self.routing(target)
        return RoutedDrafter([opened(name) for name in self.drafters], routing)

    def routing(self, target: Target) -> Routing:
        """Raises UserError for examples that cannot be read, and if there is not one of what
        chooses for each drafter."""
        each = {"text": ("examples", self.examples), "label": ("labels", self.labels)}
        for kind, (name, values) in each.items():
            if values is not None and self.by != kind:
                raise UserError(f"routed has {name}, which are for by={kind}; leave them out")
        name, values = each.get(self.by, ("", self.drafters))
        count = len(values or ())
        if count != len(self.drafters):
            raise UserError(
                f"there are {count} {name} for {len(self.drafters)} drafters; expected one for each"
            )
        if self.by == "label":
            return ByLabel(self.labels or ())
        if self.by == "acceptance":
            return ByAcceptance(len(self.drafters))
        texts = [_ids(name, target) for name in self.examples or ()]
        return ByText(TokenProfiles(texts, target.vocab_size))


def _measured(drafter: Drafter, target: Target) -> Cost:
    """The cost of the drafter's drafts on this machine, for one row."""
    decoder = Decoder(target.model, drafter, gamma=MEASURED_DEPTH)
    prompt: list[int] = target.tokenizer(SAMPLE, add_special_tokens=False)["input_ids"]
    depth = decoder.policy.max_depth
    costs = measure_costs(decoder, [prompt], max_depth=depth, max_width=2)
    drafter.forget()  # the sample
    return costs.fixed, costs.per_depth


def _ids(name: str, target: Target) -> list[int]:
    """The token ids of a text file."""
    try:
        text = Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"the example {name} of a domain cannot be read ({error}); give a UTF-8 text file"
        ) from error
    ids: list[int] = target.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
