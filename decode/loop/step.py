"""One speculative step of the running rows: draft → verify → commit → roll back, for any drafter.

Shapes: B rows still decoding, N nodes in a draft, L committed tokens of a row, V vocabulary.
"""

import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch

from decode.base.clock import Clock
from decode.base.device import to_device
from decode.base.errors import MemoryShortage, UserError
from decode.draft import Draft, Limits
from decode.draw.logprobs import TokenLogprob, token_logprobs
from decode.draw.random_numbers import CounterRNG
from decode.loop.decoder_setup import Setup
from decode.loop.rows import Rows, compacted
from decode.loop.start import start_drafter
from decode.loop.waiting_rows import WaitingRows
from decode.model.cache.long_read import ReadPart
from decode.model.features import Features
from decode.rules import Rule
from decode.rules.exact import ExactMatch, used_rule
from decode.stats import Timing
from decode.tree_nodes import leave_out
from decode.verdict import Decision, Scores, Verdict, failure
from decode.verification import Outcome, Seconds, Verification

logger = logging.getLogger(__name__)

OnTokens = Callable[[int, list[int]], None]
OnEnd = Callable[[int, list[int]], None]
OnError = Callable[[int, UserError], None]


class RunningRows:
    """Rows that are being decoded. Each `step` is one verification pass over all of them.
    `decode.loop.decoding.Decoding` lets rows join, and its docstring has the arguments."""

    def __init__(
        self,
        setup: Setup,
        *,
        on_tokens: OnTokens | None,
        on_end: OnEnd | None,
        on_error: OnError | None,
        rows: int,
        slots: int,
        ahead: int | None,
    ) -> None:
        self.ahead = ahead
        setup.drafter.attach(setup.lm)
        setup.lm.drafter_bytes = setup.drafter.token_bytes
        self.clock = Clock(setup.lm.device, Timing())
        self.setup = setup
        self.on_tokens, self.on_end, self.on_error = on_tokens, on_end, on_error
        self.rows = Rows.none(setup.lm.device)
        self.outputs: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[TokenLogprob]] = {}
        self.errors: dict[int, UserError] = {}
        self.steps: list[Verification] = []
        self._waiting = WaitingRows(setup.lm, setup.stop, setup.prefixes, setup.first_target)
        self._features: Features | None = None  # the hidden states of the last pass
        self._passes = 0  # verification passes, without prefills
        self._failed = False  # the drafter, in this pass
        if setup.stop:
            setup.stop.start()
        if setup.prefixes is not None:
            setup.prefixes.serve(setup.lm.model)
        setup.lm.reset(rows, slots, keep_states=setup.prefixes is not None)
        setup.lm.keep_rows(np.zeros(0, dtype=np.int64))

    @property
    def finished(self) -> bool:
        """Whether no row runs."""
        return not len(self.rows)

    @torch.inference_mode()
    def step(self, most: np.ndarray | int | None = None, read: int = 0) -> None:
        """One verification pass: draft, verify, commit the accepted tokens, roll back the rest.

        most: the most draft tokens of each row, int [B], or of all rows, whatever the policy says.
        0: the row gets one token. −1: the row sits this pass out. It gets no token, and its caches,
        random numbers and policies stay as they are; it is not fed, but where the target's forward
        pads. None: the policy alone decides. read: the most tokens of the prompts of waiting rows
        that the same pass reads, if `reads_beside` (chunked prefill, 2403.02310). Raises UserError
        if no row runs, and if rows sit out and the drafter reads hidden states.
        """
        if not self.rows.numbers.size:
            raise UserError("no row runs, so there is no step to take; admit prompts first")
        verification = self._pass(most, read)
        self.clock.end_pass(at_once=self.setup.policy.reads_times)
        self.setup.policy.observe(verification)
        self.steps.append(verification)
        self.retire(verification)
        if self.ahead is not None:
            self._make_room(self.ahead)
        if self._failed:
            self._failed = False
            self.restart_drafter()

    def _make_room(self, ahead: int) -> None:
        """Get memory for the next pass. A step of growth is at least a half of a text, because each
        one copies everything; less if memory is short. Rows for which there is none fail."""
        rows, width = self.rows, self.rows.contexts.tokens.shape[1]
        lengths = np.minimum(rows.contexts.lengths + 1, rows.ends)
        before = rows.reach = np.maximum(rows.reach, lengths)
        short = lengths + self.setup.parts.draft_room > width
        if not short.any():
            return
        for reach in (lengths * 3 // 2 + ahead, lengths):
            rows.reach = np.where(short, np.minimum(reach, rows.ends), before)
            try:
                start_drafter(self.setup.lm, rows, self.setup.parts, False, self._waiting.readings)
                return
            except MemoryShortage as error:
                shortage = error
        # The target has the memory and the drafter has not.
        self._failed = rows.contexts.tokens.shape[1] > width
        self._fail(short, shortage)

    def _fail(self, failing: np.ndarray, error: UserError) -> None:
        """End these rows, bool [B], with an error."""
        if self.on_error is None:
            raise error
        numbers = self.rows.numbers[failing].tolist()
        self.errors.update((number, error) for number in numbers)
        self._keep(~failing)
        for number in numbers:
            self.on_error(number, error)

    def restart_drafter(self) -> None:
        """Let the drafter begin anew with the running texts, and let the target read the prompts of
        rows that wait once more. Raises UserError if memory is missing."""
        setup, waiting = self.setup, self._waiting.readings
        if len(self.rows) or waiting:
            self._features = start_drafter(setup.lm, self.rows, setup.parts, True, waiting)
            self.rows.unread[:] = True

    @property
    def reads_beside(self) -> bool:
        """Whether passes of the running rows can read prompts too: where the target's forward does
        not pad."""
        return bool(len(self.rows)) and not self.setup.lm.pads

    def _pass(self, most: np.ndarray | int | None, read: int) -> Verification:
        """Draft, verify, commit and roll back. The arguments are as for `step`."""
        setup, rows, clock = self.setup, self.rows, self.clock
        contexts, seconds = rows.contexts, Seconds()
        clock.resume(seconds)
        self._passes += 1
        rows.rng.at_lengths(contexts.lengths)
        depths, takes = self._depths(most)
        rule = self._rule()
        draft = self._draft(depths, rule)
        clock.mark("draft")
        counts = (draft.sizes + 1) * takes
        counts[0] += not counts.any()  # a pass feeds something
        beside = read and self._waiting.readings and self.reads_beside
        parts = self._waiting.parts(len(rows), read) if beside else []
        verdict = self._verified(draft, rule, counts, parts)
        read, fed = sum(int(part.counts.sum()) for part in parts), setup.lm.fed
        lost = verdict.lost & (draft.sizes > 0)
        if lost.any():
            # The keys of a drafted token may not be finite, and no mask hides those. So other
            # tokens are fed in the place of the draft.
            draft.drop(lost, contexts.last_tokens(draft.tokens.device))
            verdict = self._verified(draft, rule, counts)
        lengths = contexts.lengths
        outcome = self._commit(rows, verdict, self._passes, takes)
        before, features = self._features, self._kept_features(verdict, outcome)
        verification = Verification.of(
            verdict,
            outcome,
            contexts,
            rows=rows.numbers,
            lengths=lengths,
            number=self._passes,
            depths=depths,
            fed=fed - read,
            fed_beside=read,
            features=features,
            previous_features=None if features is None else before,
            seconds=seconds,
            signals=setup.policy.signals(),
        )
        if features is not None:
            self._features = features
        try:
            setup.drafter.observe(verification)
        except Exception as error:
            self._drafter_raised(error)
        for observer in setup.observers:
            observer(verification)
        clock.mark("overhead")
        return verification

    def _depths(self, most: np.ndarray | int | None) -> tuple[np.ndarray, np.ndarray]:
        """int [B]: the max depth of each draft, and bool [B]: the rows that take part."""
        rows, drafter = self.rows, self.setup.drafter
        # The pass itself emits a token, so drafting the last one is never worth it. Each row has
        # its own limit. Otherwise its text would depend on the other rows.
        depths = np.minimum(self.setup.policy.depths(), rows.ends - rows.contexts.lengths - 1)
        if most is not None:
            depths = np.minimum(depths, most)
        takes = depths >= 0
        if drafter.captured_layers and not takes.all():
            raise UserError(
                f"{type(drafter).__name__} reads hidden states, so no row can sit out a pass; let "
                "all rows take part"
            )
        return np.maximum(depths, 0), takes

    def _verified(
        self, draft: Draft, rule: Rule, counts: np.ndarray, parts: Sequence[ReadPart] = ()
    ) -> Verdict:
        """Feed a draft to the target, as `CachedLM.verify` does, and let the rule judge it."""
        setup, rows = self.setup, self.rows
        logits = setup.lm.verify(rows.contexts, draft, counts, parts)
        self.clock.mark("verify")
        scores = Scores(logits, rows.sampling, draft, rows.contexts, setup.processors)
        return Verdict.read(draft, scores, decided(rule, draft, scores, rows.rng))

    def _draft(self, depths: np.ndarray, rule: Rule) -> Draft:
        """The draft of each row, at most depths[b] deep, int [B]."""
        if depths.any():
            try:
                return self._ask_drafter(depths, rule)
            except Exception as error:
                self._drafter_raised(error)
        return Draft.none(len(depths), self.setup.lm.device)

    def _drafter_raised(self, error: Exception) -> None:
        """With `on_error`, no text ends because the drafter raises: it begins anew after the
        pass."""
        if self.on_error is None:
            raise error
        logger.exception("the drafter fails and begins anew")
        self._failed = True

    def _ask_drafter(self, depths: np.ndarray, rule: Rule) -> Draft:
        setup = self.setup
        unread = self.rows.unread
        if unread.any():
            # Not earlier: a policy may decode a complete text without a draft.
            setup.drafter.prefill(self.rows.contexts, int(unread.argmax()))
            self.clock.mark("draft_prefill")
            unread[:] = False
        policy = setup.policy
        stops = policy.stops if policy.watches else None
        grows = policy.grows if policy.weighs else None
        limits = Limits(depths, stops, policy.stops_after, grows, by_source=policy.by_source)
        rows = self.rows
        rng = rows.rng.coupled() if rule.couples else rows.rng
        draft = setup.drafter.draft(rows.contexts, limits, rows.draft_sampling, rng)
        reading = sum(one.reading for one in draft.asked)
        self.clock.move(reading, "draft", "draft_prefill")
        draft = draft.to(setup.lm.device)
        draft.limit_depth(depths)
        kept = policy.kept(draft)
        if kept is not None:
            leave_out(draft, kept)
        return draft

    def _rule(self) -> Rule:
        """The rule for the running rows. Exact match serves only if all are greedy."""
        sampling = self.rows.sampling
        if sampling.greedy == self.setup.sampling.greedy:
            return self.setup.rule
        return used_rule(self.setup.parts.rule, sampling)

    def _commit(
        self, rows: Rows, verdict: Verdict, number: int, takes: np.ndarray | int = 1
    ) -> Outcome:
        """Append the tokens that a pass emits to the texts of the rows that take part, bool [B],
        and keep only the keys and values of accepted nodes. number: of the pass. A row whose logits
        give no token, or whose stop raises, fails. Without `on_error`, this raises its error and
        changes no text."""
        setup, contexts, lengths = self.setup, rows.contexts, rows.contexts.lengths
        room = (rows.ends - lengths) * takes
        ends = setup.eos, rows.ignore_eos, rows.stops, rows.stop_ids
        outcome = Outcome.after(verdict, rows.numbers, room, *ends)
        kind = "verification" if number else "prefill"
        for index in outcome.broken.nonzero()[0].tolist():
            prompt, length = rows.numbers[index], lengths[index]
            where = f"in step {number} ({kind}) for prompt {prompt}, after {length} tokens of text"
            error = outcome.failed.get(index)
            problem = failure("the stop", where, error) if error else verdict.problem(index, where)
            if self.on_error is None:
                raise problem
            self.errors[int(prompt)] = problem
        if not verdict.draft.is_chain:
            setup.lm.commit(lengths - 1, verdict.columns(), verdict.accepted + 1)
        contexts.append(verdict.block, outcome.emitted)
        return outcome

    def _kept_features(self, verdict: Verdict, outcome: Outcome) -> Features | None:
        """The hidden states of the tokens that stay, if the drafter captures layers."""
        if not self.setup.drafter.captured_layers:
            return None
        counts = outcome.accepted + 1
        every = Features(self.setup.lm.features, counts)
        return every.at(verdict.positions(), counts) if verdict.draft.sizes.any() else every

    def retire(self, verification: Verification, first: int = 0) -> None:
        """Hand out the new tokens of a pass over the rows from `first` on, and drop the rows whose
        text has ended."""
        asked = self.rows.logprobs[first:]
        if (asked >= 0).any():
            for row, entries in token_logprobs(verification, asked).items():
                self.logprobs[row] += entries
        for index, row in enumerate(verification.rows.tolist()):
            tokens = verification.block[index, : verification.emitted[index]].tolist()
            self.outputs[row] += tokens
            if self.on_tokens and tokens:
                self.on_tokens(row, tokens)
        verification.release()
        if verification.ended.any():
            self._keep(np.append(np.ones(first, dtype=bool), ~verification.ended))
            for row in verification.rows[verification.ended].tolist():
                if row in self.errors and self.on_error:
                    self.on_error(row, self.errors[row])
                elif self.on_end:
                    self.on_end(row, self.outputs[row])
        self.clock.mark("overhead")

    def _keep(self, stays: np.ndarray) -> None:
        """Keep only these rows, bool [B]."""
        setup, kept = self.setup, compacted(stays)
        self.rows.leave(~stays)
        sound = ~np.isin(self.rows.numbers, list(self.errors))
        if setup.prefixes is not None:
            left = np.flatnonzero(~stays & sound)
            setup.prefixes.remember(setup.lm, self.rows.contexts, left)
        waiting = len(stays) + np.arange(self._waiting.count)
        self.rows.keep(kept)
        setup.lm.keep_rows(np.append(kept, waiting))
        if len(kept):
            if not self._failed:  # else it begins anew with the rows that are left
                setup.drafter.keep_rows(kept)
            setup.policy.keep_rows(kept)
            if self._features is not None and setup.observers:
                self._features = self._features.keep_rows(kept)


def decided(rule: Rule, draft: Draft, scores: Scores, rng: CounterRNG) -> Decision:
    """The decision of a rule. Exact match decides in its place where both are equal: for greedy
    rows and, if the rule is lossless, for rows whose tokens were chosen and not drawn.

    For chosen tokens no lossless rule accepts more on average, because a draft can be accepted no
    further than the target's text agrees with it. And exact match does not let the drafts change
    the text: it stays the same whatever the drafter remembers of earlier texts.
    """
    if isinstance(rule, ExactMatch):
        return rule.decide(draft, scores, rng)
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
