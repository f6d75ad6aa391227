"""Decode settings by names and options. Configs and commands build a `Decoder` from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from decode.drafters import Drafter
from decode.errors import UserError
from decode.loop import Decoder
from decode.measure.costs import Costs
from decode.measure.time_costs import measure_costs
from decode.policies import POLICIES, Policy
from decode.registry import Choice, options_of
from decode.rules import RULES, Rule, default_rule, require_fitting, used_rule
from decode.sampling import Sampling
from decode.target.loading import Target
from decode.text_stream import Stop
from decode.trees import SHAPES, Shape

Part = str | Mapping[str, Any] | Choice  # as `Choice.of` reads it


@dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """Which parts decode, and how text is drawn.

    gamma: the max depth of a draft, unless the policy or the structure of a tree sets it.
    rule, policy, shape: parts by name, with options. rule None: `speculative`, or `multi_round` for
        trees. policy None: `fixed`. shape None: the drafter's own shape. A tree that is named here
        or stored with its drafter is drafted in full, unless the policy's options set `most`.
    draft_temperature: the temperature of the drafter, if different.

    Raises UserError for settings that are unknown, out of range or incompatible. Loads nothing.

    >>> settings = DecodeSettings(rule="exact", policy="heuristic:most=8")
    >>> settings.make_policy().most
    8
    """

    gamma: int = 4
    sampling: Sampling = field(default_factory=Sampling)
    rule: Part | None = None
    policy: Part | None = None
    shape: Part | None = None
    draft_temperature: float | None = None

    def __post_init__(self) -> None:
        rule, policy, sampling = self.make_rule(), self.make_policy(), self.draft_sampling
        if self.shape is None:
            return
        shape = self.make_shape()
        rule = self.make_rule(shape.branches)
        name = f"shape {Choice.of(self.shape)}"
        require_fitting(rule, name, shape.branches, shape.siblings(sampling))
        if policy.watches and shape.branches:
            raise UserError(
                f"the draft-length policy {Choice.of(self.policy or 'fixed').name} watches a chain "
                f"grow, and the {name} is a tree; leave one of them out"
            )

    @property
    def draft_sampling(self) -> Sampling:
        if self.draft_temperature is None:
            return self.sampling
        return replace(self.sampling, temperature=self.draft_temperature)

    def for_drafter(self, drafter: Drafter) -> "DecodeSettings":
        """The same settings. If no rule was named, they get the default rule for this drafter."""
        branches = self.make_shape().branches if self.shape is not None else drafter.branches
        return replace(self, rule=self.rule or default_rule(branches))

    def make_rule(self, branches: bool = False) -> Rule:
        """The rule in use. branches: whether drafts may be trees. At temperature 0 most rules are
        equivalent to exact match, which is then used."""
        rule: Rule = RULES.make(self.rule or default_rule(branches))
        return used_rule(rule, self.sampling)

    def make_policy(self, most: int | None = None) -> Policy:
        """most: the max depth of a draft, if the policy's options do not set it. None: γ."""
        policy: Policy = POLICIES.make(self.policy or "fixed", most=most or self.gamma)
        return policy

    def make_shape(self, costs: Costs | None = None) -> Shape:
        """costs: for shapes that plan by costs, unless their options give the costs. Such shapes
        plan for drafts as deep as the policy allows."""
        assert self.shape is not None
        planned: dict[str, Any] = {"depth": self.make_policy().most}
        if costs is not None:
            pairs = list(zip(costs.widths, costs.v, strict=True))
            planned |= {"draft_cost": costs.c, "verify_costs": pairs}
        shape: Shape = SHAPES.make(self.shape, **planned)
        return shape

    @property
    def needs_costs(self) -> bool:
        """Whether the policy or the shape uses costs that are measured before decoding begins."""
        return self.make_policy().needs_costs or self._shape_needs_costs

    @property
    def _shape_needs_costs(self) -> bool:
        if self.shape is None:
            return False
        choice = Choice.of(self.shape)
        return "verify_costs" in {*options_of(SHAPES[choice.name])} - {*choice.options}

    def decoder(
        self,
        target: Target,
        drafter: Drafter,
        prompt: Sequence[int] | None = None,
        *,
        stop: Stop | None = None,
    ) -> tuple[Decoder, Costs | None]:
        """A decoder, and the costs measured for its parts. The costs are None if no part uses them.

        prompt: token ids to measure costs on, for the policy or the shape. None: nothing is
        measured. Raises UserError as `Decoder` does, and if a shape is given for a drafter that
        cannot change its shape.
        """
        made = self._decoder(target, drafter, None, stop)
        if prompt is None or not self.needs_costs:
            return made, None
        # One level of a tree takes one pass of the drafter, like one token of a chain.
        plain = replace(self, shape=None, policy=None)._decoder(target, drafter, None)
        most = made.drafter.most_nodes(made.policy.most)
        trees = made.drafter.branches
        costs = measure_costs(
            plain, [prompt], max_depth=made.policy.most, max_width=most + 1, trees=trees
        )
        return self._decoder(target, drafter, costs, stop), costs

    def _decoder(
        self, target: Target, drafter: Drafter, costs: Costs | None, stop: Stop | None = None
    ) -> Decoder:
        if self.shape is not None:
            drafter = drafter.with_shape(self.make_shape(costs))
        policy = self.make_policy(drafter.deepest(self.gamma))
        if costs is not None:
            policy.use_costs(costs)
        return Decoder(
            target.model,
            drafter,
            eos_token_ids=target.eos_token_ids,
            rule=self.make_rule(drafter.branches),
            sampling=self.sampling,
            draft_sampling=self.draft_sampling,
            policy=policy,
            stop=stop,
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON values. gamma: the max depth of a draft. Parts as `Choice` writes them."""
        return {
            "gamma": self.make_policy().most,
            "rule": None if self.rule is None else str(Choice.of(self.rule)),
            "policy": str(Choice.of(self.policy or "fixed")),
            "shape": None if self.shape is None else str(Choice.of(self.shape)),
            "sampling": vars(self.sampling),
            "draft_temperature": self.draft_temperature,
        }
