"""Decode settings by names and options. Configs and commands build a `Decoder` from them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from decode.base.errors import UserError
from decode.base.registry import Choice
from decode.costs import Costs
from decode.drafters import Drafter
from decode.draw.sampling import Sampling
from decode.lengths import Policy
from decode.loop.decoding import Decoder
from decode.loop.parts import Part, make_policy, make_rule, make_shape, plans_by_costs
from decode.model.generation_config import decoder_processors
from decode.model.loading import Target
from decode.rules import default_rule
from decode.text_stream import Stop
from decode.time_costs import measure_costs


@dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """Which parts decode, and how text is drawn.

    gamma: the max depth of a draft, unless the policy or the structure of a tree sets it.
    rule, policy, shape: parts by name, with options. rule None: `speculative`, or `multi_round` for
        trees. policy None: `fixed`. shape None: the drafter's own shape. A tree that is named here
        or stored with its drafter is drafted in full, unless the policy's options set `max_depth`.
    draft_temperature: the temperature of the drafter, if different.

    Raises UserError for settings that are unknown, out of range or incompatible. Loads nothing.

    >>> settings = DecodeSettings(rule="exact", policy="heuristic:max_depth=8")
    >>> settings.make_policy().max_depth
    8
    """

    gamma: int = 4
    sampling: Sampling = field(default_factory=Sampling)
    rule: Part | None = None
    policy: Part | None = None
    shape: Part | None = None
    draft_temperature: float | None = None

    def __post_init__(self) -> None:
        policy, draft_sampling = self.make_policy(), self.draft_sampling
        if self.shape is None:
            make_rule(self.rule, self.sampling, "a chain", False, "chosen")
            return
        shape = make_shape(self.shape, policy.max_depth)
        name = f"shape {Choice.of(self.shape)}"
        siblings = shape.siblings(draft_sampling)
        make_rule(self.rule, self.sampling, name, shape.branches, siblings)
        make_policy(policy, policy.max_depth, name, shape.branches)

    @property
    def draft_sampling(self) -> Sampling:
        if self.draft_temperature is None:
            return self.sampling
        return replace(self.sampling, temperature=self.draft_temperature)

    @property
    def branches(self) -> bool | None:
        """Whether the shape drafts trees. None: no shape is named."""
        return None if self.shape is None else make_shape(self.shape, self.gamma).branches

    def for_drafter(self, drafter: Drafter) -> "DecodeSettings":
        """The same settings. If no rule was named, they get the default rule for this drafter."""
        branches = drafter.branches if self.branches is None else self.branches
        return replace(self, rule=self.rule or default_rule(branches))

    def make_policy(self) -> Policy:
        return make_policy(self.policy, self.gamma)

    @property
    def plans(self) -> bool:
        """Whether the shape is planned by costs that are measured before decoding begins."""
        return self.shape is not None and plans_by_costs(self.shape)

    @property
    def needs_costs(self) -> bool:
        """Whether the policy or the shape uses costs that are measured before decoding begins."""
        return self.plans or self.make_policy().needs_costs

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
        decoder = self._decoder(target, drafter, None, stop)
        if prompt is None or not self.needs_costs:
            return decoder, None
        # One level of a tree takes one pass of the drafter, like one token of a chain.
        plain = replace(self, shape=None, policy=None)._decoder(target, drafter, None)
        depth = decoder.policy.max_depth
        width = decoder.drafter.max_nodes(depth) + 1
        trees = decoder.drafter.branches
        costs = measure_costs(plain, [prompt], max_depth=depth, max_width=width, trees=trees)
        return self._decoder(target, drafter, costs, stop), costs

    def _decoder(
        self, target: Target, drafter: Drafter, costs: Costs | None, stop: Stop | None = None
    ) -> Decoder:
        drafter = self.shaped(drafter, costs)
        return Decoder(
            target.model,
            drafter,
            eos_token_ids=target.eos_token_ids,
            rule=self.rule,
            sampling=self.sampling,
            draft_sampling=self.draft_sampling,
            policy=self.policy_for(drafter, costs),
            processors=decoder_processors(target.model, target.eos_token_ids),
            stop=stop,
        )

    def shaped(self, drafter: Drafter, costs: Costs | None = None) -> Drafter:
        """The drafter with the shape that is named here, if one is. Raises UserError if it cannot
        change its shape."""
        if self.shape is None:
            return drafter
        return drafter.with_shape(make_shape(self.shape, self.make_policy().max_depth, costs))

    def policy_for(self, drafter: Drafter, costs: Costs | None = None) -> Policy:
        """The policy for the drafts of this drafter, whose shape is set. Raises UserError as
        `make_policy` does."""
        depth, name = drafter.max_depth(self.gamma), type(drafter).__name__
        policy = make_policy(self.policy, depth, name, drafter.branches)
        if costs is not None:
            policy.use_costs(costs)
        return policy

    def to_dict(self) -> dict[str, Any]:
        """As JSON values. gamma: the max depth of a draft. Parts as `Choice` writes them."""
        return {
            "gamma": self.make_policy().max_depth,
            "rule": None if self.rule is None else str(Choice.of(self.rule)),
            "policy": str(Choice.of(self.policy or "fixed")),
            "shape": None if self.shape is None else str(Choice.of(self.shape)),
            "sampling": self.sampling.numbers,
            "draft_temperature": self.draft_temperature,
        }


@dataclass(frozen=True, kw_only=True)
class EvaluationProtocol(DecodeSettings):
    """The settings of an evaluation and its sizes.

    max_new_tokens, batch_size: for the acceptance run over all prompts. To measure time,
    `timed_prompts` of the prompts, evenly spread, are decoded again for `timed_tokens` tokens, in
    batches of `timed_batch_size` prompts with similar lengths. generate: whether `generate()` of
    `transformers` is timed too. Raises UserError unless timed_prompts is a multiple of
    timed_batch_size.
    """

    max_new_tokens: int = 64
    batch_size: int = 16
    timed_prompts: int = 8
    timed_tokens: int = 64
    timed_batch_size: int = 1
    generate: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.timed_batch_size
        if size < 1 or self.timed_prompts % size:
            raise UserError(
                f"timed_batch_size is {size} and timed_prompts {self.timed_prompts}; expected a "
                "timed_batch_size of at least 1, and timed_prompts as a multiple of it"
            )
