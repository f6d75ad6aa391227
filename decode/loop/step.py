"""What a step asks of a drafter, and how a rule judges its drafts.

Shapes: B rows still decoding, N nodes in a draft.
"""

import numpy as np
import torch

from decode.base.clock import Clock
from decode.base.device import to_device
from decode.base.errors import UserError
from decode.draft import Draft, Limits
from decode.draw.random_numbers import CounterRNG
from decode.loop.parts import Parts
from decode.loop.rows import Rows
from decode.rules import Rule
from decode.rules.exact import ExactMatch
from decode.tree_nodes import leave_out
from decode.verdict import Decision, Scores


def draft_depths(
    parts: Parts, rows: Rows, most: np.ndarray | int | None
) -> tuple[np.ndarray, np.ndarray]:
    """int [B]: the max depth of each draft, and bool [B]: the rows that take part. most: as for
    `decode.loop.decoding.Decoding.step`. Raises UserError as it does."""
    drafter = parts.drafter
    # The pass itself emits a token, so drafting the last one is never worth it. Each row has
    # its own limit. Otherwise its text would depend on the other rows.
    depths = np.minimum(parts.policy.depths(), rows.ends - rows.contexts.lengths - 1)
    if most is not None:
        depths = np.minimum(depths, most)
    takes = depths >= 0
    if drafter.captured_layers and not takes.all():
        raise UserError(
            f"{type(drafter).__name__} reads hidden states, so no row can sit out a pass; let "
            "all rows take part"
        )
    return np.maximum(depths, 0), takes


def ask_drafter(
    parts: Parts, rows: Rows, depths: np.ndarray, clock: Clock, device: torch.device
) -> Draft:
    """The drafter's drafts, at most depths[b] deep, int [B], on the target's device. Texts that it
    never read are read first."""
    drafter, policy, unread = parts.drafter, parts.policy, rows.unread
    if unread.any():
        # Not earlier: a policy may decode a complete text without a draft.
        drafter.prefill(rows.contexts, int(unread.argmax()))
        clock.mark("draft_prefill")
        unread[:] = False
    stops = policy.stops if policy.watches else None
    grows = policy.grows if policy.weighs else None
    limits = Limits(depths, stops, policy.stops_after, grows, by_source=policy.by_source)
    rng = rows.rng.coupled() if parts.rule.couples else rows.rng
    draft = drafter.draft(rows.contexts, limits, rows.draft_sampling, rng)
    if draft.asked:
        reading = sum(one.reading for one in draft.asked)
        clock.move(reading, "draft", "draft_prefill")
    draft = draft.to(device)
    draft.limit_depth(depths)
    kept = policy.kept(draft)
    if kept is not None:
        leave_out(draft, kept)
    return draft


def decided(rule: Rule, draft: Draft, scores: Scores, rng: CounterRNG) -> Decision:
    """The decision of a rule. Exact match decides in its place where both are equal: for greedy
    rows and, if the rule is lossless, for rows whose tokens were chosen and not drawn.

    For chosen tokens no lossless rule accepts more on average, because a draft can be accepted no
    further than the target's text agrees with it. And exact match does not let the drafts change
    the text: it stays the same whatever the drafter remembers of earlier texts.
    """
    if isinstance(rule, ExactMatch):
        return rule.decide(draft, scores, rng)
    if rule.is_exact_for(scores.sampling):
        return ExactMatch().decide(draft, scores, rng)
    exact = np.zeros(len(draft.sizes), dtype=bool)
    if rule.exact_when_greedy:
        exact |= scores.sampling.greedy_rows(len(exact))
        if rule.lossless:
            exact |= draft.chosen_rows()
    if exact.all():
        return ExactMatch().decide(draft, scores, rng)
    decision = rule.decide(draft, scores, rng)
    if not exact.any():
        return decision
    rows = to_device(exact, draft.tokens.device)
    return decision.replaced(rows, ExactMatch().decide(draft, scores, rng))
