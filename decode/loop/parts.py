"""Makes the parts of a decoder from their names and options: rule, policy, shape.

If the settings alone show that parts do not fit, the error comes before anything is loaded.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from decode.base.errors import UserError
from decode.base.registry import Choice, options_of
from decode.costs import Costs
from decode.draft import Siblings
from decode.drafters import Drafter
from decode.draw.sampling import Sampling
from decode.lengths import POLICIES, Policy
from decode.model.cache.cached_model import CachedLM
from decode.rules import RULES, Rule, default_rule, require_fitting
from decode.shapes import SHAPES, Shape

Part = str | Mapping[str, Any] | Choice  # as `Choice.of` reads it


@dataclass(frozen=True)
class Parts:
    """A drafter, a rule and a draft-length policy that fit each other.

    named: rule, policy and γ as they were given.
    """

    drafter: Drafter
    rule: Rule
    policy: Policy
    named: tuple[Part | Rule | None, Part | Policy | None, int]

    @classmethod
    def of(
        cls, drafter: Drafter, rule: Part | Rule | None, policy: Part | Policy | None, gamma: int
    ) -> "Parts":
        """The arguments of `decode.loop.decoding.Decoder`. Raises UserError as `make_rule`, for
        greedy sampling, and `make_policy` do, and for a policy that reads estimates of a drafter
        without any."""
        name, branches = type(drafter).__name__, drafter.branches
        named = rule if isinstance(rule, Rule) else RULES.make(rule or default_rule(branches))
        chosen = make_policy(policy, drafter.max_depth(gamma), name, branches)
        if chosen.reads_estimates and not drafter.estimates:
            raise UserError(
                f"the draft-length policy {type(chosen).__name__} reads the drafter's estimates of "
                f"acceptance, but {name} has none; use the policy confidence, or dspark heads with "
                "a confidence head"
            )
        return cls(drafter, named, chosen, (rule, policy, gamma))

    def remade(
        self,
        drafter: Drafter | None,
        policy: Part | Policy | None,
        rule: Part | Rule | None = None,
    ) -> "Parts":
        """The parts with another drafter, policy or rule, as if they were made with it from the
        start."""
        last_rule, last_policy, gamma = self.named
        return Parts.of(drafter or self.drafter, rule or last_rule, policy or last_policy, gamma)

    @cached_property
    def draft_room(self) -> int:
        """The max number of slots that one row's draft takes."""
        return self.drafter.max_nodes(self.policy.max_depth)

    def require_sampling(self, drawn: Iterable[tuple[Sampling, Sampling]]) -> None:
        """Raises UserError if the rule cannot judge the drafts for rows whose text and whose draft
        are drawn so."""
        name, branches = type(self.drafter).__name__, self.drafter.branches
        for sampling, drafts in dict.fromkeys(drawn):
            make_rule(self.rule, sampling, name, branches, self.drafter.siblings(drafts))

    def require_target(self, lm: CachedLM) -> None:
        """Attaches the drafter to the target. Raises UserError if the drafts do not fit into the
        target's context, or if the drafter does not fit the target, has another vocabulary, or
        cannot draft for a target with an encoder."""
        if lm.sources is not None:
            require_no_encoder(self.drafter, type(self.drafter).__name__)
        self.drafter.attach(lm)
        if self.policy.max_depth >= lm.max_positions:
            raise UserError(
                f"drafts of depth {self.policy.max_depth} do not fit into the target's context of "
                f"{lm.max_positions} tokens, text included; choose a smaller gamma, "
                "or a shallower tree"
            )
        if self.drafter.vocab_size not in (None, lm.vocab_size):
            raise UserError(
                f"{type(self.drafter).__name__} has a vocabulary of {self.drafter.vocab_size} "
                f"tokens, but the target's has {lm.vocab_size}; use a drafter made for this "
                "target. If the tokenizers are the same and only the padding differs, open the "
                "drafter by its name (`open_drafter`)"
            )


def require_no_encoder(drafter: Drafter | type[Drafter], name: str) -> None:
    """Raises UserError if a drafter, or a kind of drafters, cannot draft for a target with an
    encoder."""
    if drafter.decoder_only:
        raise UserError(
            f"{name} needs a decoder-only target: it does not read the source that this target's "
            "encoder reads; use ngram, store, medusa, blockwise or hydra heads, or a small model "
            "with an encoder"
        )


def make_rule(
    rule: Part | Rule | None, sampling: Sampling, drafts: str, branches: bool, siblings: Siblings
) -> Rule:
    """A rule. None: the default for such drafts. At temperature 0 most rules are equal to exact
    match, which judges all drafts.

    drafts: the name of the drafter or shape, for the message. branches: the drafts may be trees,
    with these `siblings`. Raises UserError for an unknown rule or option, and for a rule that
    cannot judge such drafts.
    """
    chosen = rule if isinstance(rule, Rule) else RULES.make(rule or default_rule(branches))
    if not chosen.is_exact_for(sampling):
        require_fitting(chosen, drafts, branches, siblings)
    return chosen


def make_policy(
    policy: Part | Policy | None, max_depth: int, drafts: str = "", branches: bool = False
) -> Policy:
    """The draft-length policy. None: `fixed`. max_depth: the max depth of a draft, if the policy's
    options do not set it.

    Raises UserError for an unknown policy or option, for a max depth below 1, and for a policy that
    watches chains where drafts are trees.
    """
    if not isinstance(policy, Policy):
        policy = POLICIES.make(policy or "fixed", max_depth=max_depth)
    assert isinstance(policy, Policy)
    if policy.watches and branches:
        raise UserError(
            f"the draft-length policy {type(policy).__name__} works only with chains, but {drafts} "
            "drafts trees; leave the policy out, or use the shape chain"
        )
    return policy


def make_shape(shape: Part | Shape, max_depth: int, costs: Costs | None = None) -> Shape:
    """The shape of drafts, planned for drafts at most `max_depth` deep. costs: for shapes that plan
    by costs, unless their options give the costs. Raises UserError for an unknown shape or option.
    """
    if isinstance(shape, Shape):
        return shape
    planned: dict[str, Any] = {"depth": max_depth}
    if costs is not None:
        pairs = list(zip(costs.widths, costs.v, strict=True))
        planned |= {"draft_cost": costs.per_depth, "draft_fixed": costs.fixed}
        planned |= {"verify_costs": pairs}
    planned_shape: Shape = SHAPES.make(shape, **planned)
    return planned_shape


def plans_by_costs(shape: Part) -> bool:
    """Whether the shape uses costs that are not among its options."""
    choice = Choice.of(shape)
    return "verify_costs" in {*options_of(SHAPES[choice.name])} - {*choice.options}
