"""Makes the parts of a decoder from their names and options: rule, policy, shape.

If the settings alone show that parts do not fit, the error comes before anything is loaded.
"""

from collections.abc import Mapping
from typing import Any

from decode.draft import Siblings
from decode.errors import UserError
from decode.measure.costs import Costs
from decode.policies import POLICIES, Policy
from decode.registry import Choice, options_of
from decode.rules import RULES, Rule, default_rule, require_fitting, used_rule
from decode.sampling import Sampling
from decode.trees import SHAPES, Shape

Part = str | Mapping[str, Any] | Choice  # as `Choice.of` reads it


def make_rule(
    rule: Part | Rule | None, sampling: Sampling, drafts: str, branches: bool, siblings: Siblings
) -> Rule:
    """The rule in use. None: the default for such drafts. At temperature 0 most rules are
    equivalent to exact match, which is then used.

    drafts: the name of the drafter or shape, for the message. branches: the drafts may be trees,
    with these `siblings`. Raises UserError for an unknown rule or option, and for a rule that
    cannot judge such drafts.
    """
    chosen = rule if isinstance(rule, Rule) else RULES.make(rule or default_rule(branches))
    used = used_rule(chosen, sampling)
    require_fitting(used, drafts, branches, siblings)
    return used


def make_policy(
    policy: Part | Policy | None, max_depth: int, drafts: str = "", branches: bool = False
) -> Policy:
    """The draft-length policy. None: `fixed`. max_depth: of a draft, if the policy's options do not
    set it.

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
        planned |= {"draft_cost": costs.c, "verify_costs": pairs}
    planned_shape: Shape = SHAPES.make(shape, **planned)
    return planned_shape


def plans_by_costs(shape: Part) -> bool:
    """Whether the shape uses costs that are not among its options."""
    choice = Choice.of(shape)
    return "verify_costs" in {*options_of(SHAPES[choice.name])} - {*choice.options}
