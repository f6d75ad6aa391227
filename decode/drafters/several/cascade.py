"""Cascades of drafters (Cascade Speculative Drafting, 2312.11462): a drafter that is itself sped up
by a smaller one, and a chain that one drafter begins and a cheaper one continues.

Shapes: B rows, D draft tokens, N tokens of an inner draft, V vocabulary.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from decode.base.device import to_device
from decode.base.errors import UserError, require_whole
from decode.draft import Contexts, Draft, Limits, Siblings
from decode.drafters import Drafter
from decode.drafters.several.combined import Group, chosen_rows, common_device, joined_q
from decode.drafters.trained import VerifyingDrafter
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling
from decode.rules import RULES, Rule
from decode.rules.exact import ExactMatch
from decode.verdict import Scores, Verdict
from decode.verification import Outcome, Verification

# The arguments of `Contexts.unchanged_lengths`: the tokens that a drafter saw after the committed
# texts, and the lengths of these texts.
Tail = tuple[np.ndarray, np.ndarray]


def require_chain_drafter(drafter: Drafter, place: str) -> None:
    """Raises UserError for a drafter of trees. place: what it is in the cascade."""
    if drafter.branches:
        raise UserError(
            f"{type(drafter).__name__} drafts trees, and the {place} of a cascade drafts chains; "
            "give it the shape chain"
        )


def require_tokens_only(drafter: Drafter, place: str) -> None:
    """Raises UserError for a drafter that reads the target's hidden states, or its keys and values.
    Drafted tokens do not have them yet."""
    if drafter.captured_layers or drafter.reads_cache:
        states = "hidden states" if drafter.captured_layers else "keys and values"
        raise UserError(
            f"{type(drafter).__name__} reads the target's {states}, and the {place} of a "
            "cascade reads tokens that the target has not read; use a lookup or a small model there"
        )


def require_rewind(drafter: Drafter, place: str) -> None:
    """Raises UserError for a drafter that does not take back tokens that are rejected."""
    if not drafter.rewinds:
        raise UserError(
            f"{type(drafter).__name__} takes back no tokens, and the {place} of a cascade is shown "
            "drafted tokens; use ngram, store or a small model with the target's tokenizer there, "
            "or define `rewind`"
        )


class VerticalCascade(Group):
    """A model that drafts by speculative decoding: `inner` drafts for it, and it verifies several
    tokens in one pass (2312.11462, section 3; staged speculation, 2308.04623).

    The inner rule is lossless for the distribution m that the model draws from (under the drafts'
    sampling parameters). So each token of the draft has the law m, given the tokens before it and
    given that it was drafted at all. q = m therefore holds at every place, also where the inner
    rule replaced a token.

    model: a small language model, or the target over a part of its keys and values (`sparse`;
    TriForce, 2404.11912). It always drafts chains. inner: any drafter of chains that reads tokens
    only, also another cascade. gamma: the max depth of its drafts. rule: the inner rule, by name or
    as an object. rounds: the most passes of the model per draft, which then ends where that pass
    ended; None: as many as the draft's depth needs. Where the target's rule couples random numbers
    (`coupled`), the inner rule does too, whatever its name.

    An inner rule that is lossy has no q that could be computed. It is refused unless drafts are
    greedy, and drafts then count as chosen. `threshold:threshold=1/l` is the lenience l of
    2312.11462 for tokens that are looked up. A lossy rule that is exact match for greedy drafts
    would never do anything, and is refused. Differences from the papers: both draft until a set
    number of tokens is there, and 2312.11462 is greedy only; 2308.04623 drafts trees. A policy that
    stops drafts (`Limits.stops`) sees the model's logits after each pass, so an inner draft may
    have gone further than needed.

    Raises UserError as `Group` does, for an inner drafter that does not fit, for an unknown rule or
    one that is refused, and for sizes below 1.
    """

    def __init__(
        self,
        model: VerifyingDrafter,
        inner: Drafter,
        *,
        gamma: int = 4,
        rule: str | Rule = "speculative",
        rounds: int | None = None,
    ) -> None:
        super().__init__([model, inner])
        require_chain_drafter(inner, "inner drafter")
        require_tokens_only(inner, "inner drafter")
        require_rewind(model, "model")
        require_rewind(inner, "inner drafter")
        require_whole(gamma=gamma, rounds=1 if rounds is None else rounds)
        self.model, self.inner, self.gamma, self.rounds = model, inner, gamma, rounds
        self.rule: Rule = rule if isinstance(rule, Rule) else RULES.make(rule)
        if not self.rule.lossless and self.rule.exact_when_greedy:
            raise UserError(
                f"the inner rule of a cascade is {type(self.rule).__name__}, which is exact match "
                "for greedy drafts, and a lossy inner rule judges no others; use threshold or "
                "top_k, or a lossless rule"
            )
        self._tail: Tail | None = None

    def max_depth(self, gamma: int) -> int:
        return gamma

    def siblings(self, sampling: Sampling) -> Siblings:
        if not sampling.greedy and not self.rule.lossless:
            raise UserError(
                f"the inner rule {type(self.rule).__name__} of a cascade is lossy, so the "
                "distribution of its drafts is not known; use speculative or block there, or draft "
                "greedily (draft_temperature 0)"
            )
        return "chosen" if sampling.greedy else "independent"

    def draft(
        self, contexts: Contexts, limits: Limits, sampling: Sampling, rng: CounterRNG
    ) -> Draft:
        before, device = contexts.lengths, self.model.device
        sizes = self.model.make_room(contexts, limits.depths)
        width = int(sizes.max(initial=0))
        if not width:
            return Draft.none(len(before), device)
        texts = replace(contexts, tokens=contexts.tokens.copy())
        rule = ExactMatch() if self.rule.is_exact_for(sampling) else self.rule
        rule = RULES["coupled"]() if rng.couples else rule
        drawn = not sampling.greedy and not rng.couples
        size = self.model.vocab_size
        assert size is not None, "attach() comes before draft()"
        q = torch.zeros(len(before), width, size, device=device) if drawn else None
        for index in range(self.rounds or width):
            room, offset = before + sizes - texts.lengths, texts.lengths - before
            if not (room > 0).any():
                break
            noise = rng.continued(index, texts.lengths)
            done = self._pass(texts, room, sampling, rule, noise, index + 1)
            sizes = np.where(done.broken, offset, sizes)
            if limits.stops is not None:
                sizes = _stopped(limits, done, offset, sizes)
            if q is not None:
                row, column = np.nonzero(np.arange(done.block.shape[1]) < done.emitted[:, None])
                at, place, from_ = (
                    to_device(x, device) for x in (row, offset[row] + column, column)
                )
                q[at, place] = done.scores.probs()[at, from_]
        sizes = np.minimum(sizes, texts.lengths - before)
        tokens = _after(texts, before, width)
        self._tail = tokens, before
        chosen = sampling.greedy_rows(len(before)) if drawn else None
        return Draft(to_device(tokens, device), sizes, q, _chosen_rows=chosen)

    def _pass(
        self,
        texts: Contexts,
        room: np.ndarray,
        sampling: Sampling,
        rule: Rule,
        noise: CounterRNG,
        number: int,
    ) -> Verification:
        """One pass of the model over an inner draft. Rows with `room`, int [B], for more tokens get
        one or more, which are appended to their texts."""
        drafting, lengths = room > 0, texts.lengths
        # A pass emits a token more than was accepted. So a draft never has more than its depth.
        depths = np.clip(room - 1, 0, self.gamma)
        inner_noise = noise.coupled() if rule.couples else noise
        draft = self.inner.draft(texts, Limits(depths.copy()), sampling, inner_noise)
        draft = draft.to(self.model.device)
        draft.limit_depth(depths)
        scores = Scores(self.model.verify(texts, draft, drafting), sampling, draft, texts)
        verdict = Verdict.read(draft, scores, rule.decide(draft, scores, noise))
        rows, no = np.arange(len(lengths)), np.zeros(len(lengths), dtype=bool)
        outcome = Outcome.after(verdict, rows, room, rows[:0], no)
        texts.append(verdict.block, outcome.emitted)
        done = Verification.of(verdict, outcome, texts, rows=rows, lengths=lengths, number=number)
        self.model.rewind(texts.lengths - 1)
        self.inner.observe(done)
        return done

    def observe(self, verification: Verification) -> None:
        tail, self._tail = self._tail, None
        if tail is not None:
            self.rewind(verification.contexts.unchanged_lengths(*tail))
        super().observe(verification)


def _stopped(
    limits: Limits, done: Verification, offset: np.ndarray, sizes: np.ndarray
) -> np.ndarray:
    """The sizes, int [B], with drafts ended where `limits.stops` ends them at a token of this pass.
    offset: int [B], the index of each row's first token of the pass. The stop depends on the tokens
    before, and so leaves the law of each token as it is."""
    assert limits.stops is not None
    logits, reached = done.scores.logits, offset + done.emitted
    rows = torch.arange(len(offset), device=logits.device)
    ends = to_device(sizes, logits.device)
    begin = int(offset[done.emitted > 0].min(initial=reached.max(initial=0)))
    for position in range(begin, int(reached.max())):
        column = to_device(np.clip(position - offset, 0, logits.shape[1] - 1), logits.device)
        here = to_device((offset <= position) & (position < reached), logits.device)
        drafting = here & (ends > position)
        ended = limits.stops(position, logits[rows, column], drafting, None) & drafting
        ends = ends.masked_fill(ended, position + limits.stops_after)
    # Read once, after all positions.
    stopped: np.ndarray = ends.cpu().numpy()
    return stopped


class HorizontalCascade(Group):
    """One chain from two drafters: `first` drafts its first tokens, at most `depth`, and `later`
    continues (2312.11462, section 3: the earlier a token, the more often it is accepted, so the
    better drafter is worth its cost there). `later` can be another such cascade.

    Each token keeps the q that it was drawn from, and chosen tokens have q 1. `first` can be any
    drafter of chains, also heads; `later` reads tokens only. Where a policy ends a row's draft
    inside the part of `first`, the row's draft ends; it does not watch the part of `later`. A row
    for which `first` has no draft, or a shorter one, is continued from where it ends.

    Raises UserError as `Group` does, for drafters that do not fit, and for a depth below 1.
    """

    def __init__(self, first: Drafter, later: Drafter, *, depth: int = 1) -> None:
        super().__init__([first, later])
        for drafter, place in ((first, "first drafter"), (later, "later drafter")):
            require_chain_drafter(drafter, place)
        require_tokens_only(later, "later drafter")
        require_rewind(later, "later drafter")
        require_whole(depth=depth)
        self.first, self.later, self.depth = first, later, depth
        self._tail: Tail | None = None

    @property
    def estimates(self) -> bool:
        return self.first.estimates  # no policy is asked about the part of `later`

    def max_depth(self, gamma: int) -> int:
        return gamma

    def siblings(self, sampling: Sampling) -> Siblings:
        kinds = {drafter.siblings(sampling) for drafter in self.drafters}
        return "chosen" if kinds == {"chosen"} else "independent"

    def draft(
        self, contexts: Contexts, limits: Limits, sampling: Sampling, rng: CounterRNG
    ) -> Draft:
        before, stopped = contexts.lengths, np.zeros(len(contexts.lengths), dtype=bool)
        depths = np.minimum(limits.depths, self.depth)
        seen: list[Tensor] = []

        def stops(
            position: int, logits: Tensor, drafting: Tensor, estimate: Tensor | None
        ) -> Tensor:
            assert limits.stops is not None
            seen.append(limits.stops(position, logits, drafting, estimate) & drafting)
            return seen[-1]

        watched = None if limits.stops is None else stops
        parts = replace(limits, depths=depths, stops=watched)
        head = self.first.draft(contexts, parts, sampling, rng.fork(0))
        head.limit_depth(depths)
        if seen:
            stopped = torch.stack(seen).any(0).cpu().numpy()
        texts = replace(contexts, tokens=contexts.tokens.copy())
        texts.append(head.tokens.cpu().numpy(), head.sizes)
        self._tail = _after(texts, before, limits.max_depth), before
        left = np.where(stopped, 0, limits.depths - head.sizes)
        if not left.any():
            return head
        noise = rng.continued(1, texts.lengths)
        rest = self.later.draft(texts, Limits(left.copy()), sampling, noise)
        rest.limit_depth(left)
        texts.append(rest.tokens.cpu().numpy(), rest.sizes)
        self._tail = _after(texts, before, limits.max_depth), before
        return _one_chain(head, rest)

    def observe(self, verification: Verification) -> None:
        tail, self._tail = self._tail, None
        if tail is not None:
            self.later.rewind(verification.contexts.unchanged_lengths(*tail))
        super().observe(verification)


def _after(texts: Contexts, lengths: np.ndarray, count: int) -> np.ndarray:
    """int64 [B, count]: the tokens of each text after its first lengths[b]."""
    return np.take_along_axis(texts.tokens, lengths[:, None] + np.arange(count), axis=1)


def _one_chain(head: Draft, rest: Draft) -> Draft:
    """The chains of `rest` after those of `head`."""
    if not head.tokens.shape[1] or not rest.tokens.shape[1]:
        return head if head.tokens.shape[1] else rest
    device = common_device([head, rest])
    parts = [head.to(device), rest.to(device)]
    sizes = head.sizes + rest.sizes
    place = torch.arange(int(sizes.max()), device=device)
    first = to_device(head.sizes, device)[:, None]
    order = torch.where(place < first, place, place - first + head.tokens.shape[1])
    order = order.clamp(max=head.tokens.shape[1] + rest.tokens.shape[1] - 1)
    q, q_rows = joined_q(parts)
    return Draft(
        torch.cat([part.tokens for part in parts], 1).gather(1, order),
        sizes,
        q,
        q_rows=None if q_rows is None else q_rows.gather(1, order),
        _chosen_rows=chosen_rows(parts),
    )
