"""The one decode loop, for any drafter and any number of rows: they join, take steps together and
leave. A step is draft → verify → commit → roll back.

Shapes: B rows still decoding, N nodes in a draft, L committed tokens of a row, V vocabulary.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel

from decode.base.clock import Clock
from decode.base.errors import MemoryShortage, UserError, require_fits, require_whole
from decode.base.threads import OneAtATime
from decode.draft import Draft
from decode.drafters import Drafter, NoDrafter
from decode.draw.logits import LogitsProcessor
from decode.draw.logprobs import TokenLogprob, token_logprobs
from decode.draw.sampling import Sampling
from decode.lengths import Policy
from decode.loop.decoded import Decoded
from decode.loop.parts import Part, Parts
from decode.loop.rows import Rows, RowSettings, compacted, require_prompts, token_ids
from decode.loop.start import new_rows, start_drafter
from decode.loop.step import ask_drafter, decided, draft_depths
from decode.loop.waiting_rows import WaitingRows, shares
from decode.model.cache.cached_model import CachedLM
from decode.model.cache.long_read import ReadPart
from decode.model.cache.pass_size import PASS_TOKENS
from decode.model.cache.prefix_cache import PrefixCache
from decode.model.features import Features
from decode.model.generation_config import eos_ids
from decode.model.memory import affordable_slots
from decode.rules import Rule
from decode.stats import Tally, Timing
from decode.text_stream import Stop
from decode.verdict import Scores, Verdict, failure
from decode.verification import Observer, Outcome, Seconds, Verification

logger = logging.getLogger(__name__)

OnTokens = Callable[[int, list[int]], None]
OnEnd = Callable[[int, list[int]], None]
OnError = Callable[[int, UserError], None]

# New prompts join when 1/JOIN_SHARE of the batch is free.
JOIN_SHARE = 8


class Decoder:
    """A target, a drafter, a rule and a draft-length policy that fit each other, ready to decode.
    Decodes from several threads take turns.

    model: the target, or an object in the place of its `CachedLM`, such as a target on another
        machine.
    drafter: None: nothing is drafted, which is plain decoding.
    eos_token_ids: the ids that end a text; one id, or None, as in a generation config, too.
    gamma: the depth of every draft, at least 1. Ignored for drafts with a fixed depth
        (`Drafter.max_depth`), and if a policy is given.
    policy, rule: an instance, or a name with options (`decode.loop.parts`). policy None: `fixed`.
        rule None: `speculative`, or `multi_round` for trees. At temperature 0, exact match decides
        in the place of the rules that are equal to it there.
    sampling: how text is drawn. draft_sampling: how the drafter draws, if different.
    processors: as `transformers`' LogitsProcessorList. They change the target's logits after the
        repetition penalty, before temperature and filters. They must keep no state between calls,
        because they see rejected drafts too.
    stop: ends a text, in addition to the EOS ids and the length limit.
    observers: called with every verification pass except the prefill, after the drafter.
    prefill_tokens: how many tokens of prompts a pass reads, over all rows. Longer prompts take
        several passes, so no pass has a mask or activations for all of a long prompt.
    prefixes: keys and values of earlier texts, for prompts that begin like them, and the hidden
        states that the drafter reads. None: every prompt is read completely.
    first_target: the prefill pass yields the first token, so every draft follows a token of the
        target. If False, the first token is drafted and verified like all others. The text is the
        same (when sampled: its distribution), each prompt takes one more pass, and the counts
        include that token. So it is at an edge, and in engines that draft the first token too.
    numbers_repeat: whether a drafter that learns may remember a text that was drawn with the same
        random numbers. Such a drafter gets other numbers in each decode. Set it to False if each
        text has numbers of its own, or if the drafter forgets first.

    Raises UserError if γ < 1 or γ reaches the context length, for an unknown rule, a rule that
    cannot judge this drafter's drafts, a policy that watches chains for a drafter of trees, or a
    drafter with another vocabulary.
    """

    def __init__(
        self,
        model: PreTrainedModel | CachedLM,
        drafter: Drafter | None,
        *,
        eos_token_ids: Sequence[int] | int | None = (),
        gamma: int = 4,
        rule: Part | Rule | None = None,
        sampling: Sampling | None = None,
        draft_sampling: Sampling | None = None,
        policy: Part | Policy | None = None,
        processors: Sequence[LogitsProcessor] = (),
        stop: Stop | None = None,
        observers: Sequence[Observer] = (),
        prefill_tokens: int = PASS_TOKENS,
        prefixes: PrefixCache | None = None,
        first_target: bool = True,
    ) -> None:
        self.sampling = sampling or Sampling()
        self.usual = RowSettings(self.sampling, 0, stop, draft_sampling=draft_sampling)
        parts = Parts.of(NoDrafter() if drafter is None else drafter, rule, policy, gamma)
        parts.require_sampling([(self.sampling, self.usual.drafts)])
        require_fits(lambda x: x >= 1, "at least 1", prefill_tokens=prefill_tokens)
        cached = isinstance(model, CachedLM)
        self.lm = model if cached else CachedLM(model, pass_tokens=prefill_tokens)
        self.vocab_size = self.lm.vocab_size
        parts.require_target(self.lm)
        self.use(parts)
        self.stop = stop
        self.processors, self.observers = list(processors), list(observers)
        self.prefixes, self.first_target = prefixes, first_target
        self.numbers_repeat = True
        self._turn = OneAtATime("this decoder")
        self.eos = np.array(sorted(eos_ids(eos_token_ids)), dtype=np.int64)

    def use(self, parts: Parts) -> None:
        """Decode with these parts, which fit."""
        self.parts, self.drafter, self.policy = parts, parts.drafter, parts.policy
        self.lm.capture(parts.drafter.captured_layers)

    def slots(self, length: int, max_new_tokens: int) -> int:
        """How many slots a prompt of `length` tokens and its answer need. In a ragged batch, a row
        near its end is still fed a draft as deep as the others."""
        end = min(length + max_new_tokens, self.lm.max_positions)
        return end + self.drafter.max_nodes(self.policy.max_depth)

    def affordable_slots(self, rows: int, length: int) -> int:
        """How many slots to allocate from the start for each row, for texts of `length`
        tokens: fewer than they need if keys and values would take over half of the free memory."""
        return affordable_slots(self.lm.model, rows, self.slots(length, 0))

    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        seed: int = 0,
        row_ids: Sequence[int] | None = None,
        on_tokens: OnTokens | None = None,
        on_end: OnEnd | None = None,
        batch_size: int | None = None,
        settings: Sequence[RowSettings] | None = None,
    ) -> Decoded:
        """Continue all prompts (token ids) to their ends. Arguments are as for `Decoding`.

        settings: of each prompt. batch_size: how many are decoded together. When texts have ended,
        the next prompts take their places, some at a time: reading several costs little more than
        reading one. None: all.
        """
        prompts = token_ids(prompts)
        require_whole(max_new_tokens=max_new_tokens)
        require_prompts(prompts, self.lm.max_prompt, self.vocab_size)
        require_fits(lambda x: x is None or x >= 1, "at least 1", batch_size=batch_size)
        count = len(prompts)
        size = min(batch_size or count, count)
        with self._turn, self.drafter.turn:
            decoding = Decoding(
                self,
                seed=seed,
                on_tokens=on_tokens,
                on_end=on_end,
                rows=size,
                slots=self.slots(
                    max(map(len, self.lm.texts_and_sources(prompts)[0])), max_new_tokens
                ),
            )
            begin, group = 0, -(-size // JOIN_SHARE)
            while begin < count or not decoding.finished:
                end = min(begin + size - len(decoding.rows), count)
                if begin < end and (end - begin >= group or end == count):
                    ids = range(begin, end) if row_ids is None else row_ids[begin:end]
                    each = None if settings is None else settings[begin:end]
                    decoding.admit(prompts[begin:end], max_new_tokens, row_ids=ids, settings=each)
                    begin = end
                else:
                    decoding.step()
            return decoding.result()


class Decoding:
    """Texts that are being decoded. `admit` reads prompts, which then join the running rows. Each
    `step` is one verification pass over all rows. A row leaves when its text ends, or by `drop`.
    `begin` lets rows wait instead, and `read` reads their prompts a part at a time, with steps of
    the running rows in between, or `step` in the same pass.

    Every text ends with an EOS, after `max_new_tokens`, or at the end of the model's context.
    prompts, max_new_tokens, row_ids, settings: for a first `admit`. Without prompts, no row runs.
    seed: the random numbers of a row depend on the seed and on the row's id. With the row's index
        in a larger set as its id, its text is the same in any batch and whenever it joins, in
        float32 (see `CounterRNG`). Rows with settings of their own have their own seeds.
    on_tokens: called with (row, new tokens) as soon as they are final. on_end: called with (row,
        all new tokens) when a text has ended. A row's number is given by `admit`.
    on_error: called with (row, error) when a row ends because its logits are NaN, processors mask
        them all, or a processor or the row's stop raises. It gets no token of that pass, and the
        others go on. If the drafter raises, the pass goes on without drafts, and the drafter begins
        anew. None: such errors are raised.
    rows, slots: memory to allocate from the start, for `rows` rows of `slots` tokens (see
        `Decoder.slots`). More is allocated when it is needed.
    ahead: how many tokens past its prompt a new row has memory for. It gets more as its text grows;
        a row for which there is none ends with the error. None: memory for the longest text that a
        row may have, from the start.
    outputs: {row: its tokens so far}. logprobs: {row: one entry per token}, for rows that ask for
        them; it has the new ones when `on_tokens` is called. errors: {row: why it failed}. steps:
        the passes so far. A service that runs on and on deletes from all four what it does not
        need; `result` needs all outputs and steps.

    A decoder and its drafter can run only one decode at a time. All calls come from one thread.
    Raises UserError if a prompt is empty, leaves no room for an answer or has ids outside the
    vocabulary, if keys and values do not fit into memory, and, without `on_error`, if logits are
    NaN or processors mask them all. An `admit` or a `set` that raises leaves the running rows as
    they are.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]] = (),
        max_new_tokens: int = 0,
        *,
        seed: int = 0,
        row_ids: Sequence[int] | None = None,
        on_tokens: OnTokens | None = None,
        on_end: OnEnd | None = None,
        on_error: OnError | None = None,
        rows: int = 0,
        slots: int = 0,
        ahead: int | None = None,
        settings: Sequence[RowSettings] | None = None,
    ) -> None:
        self.ahead = ahead
        decoder.drafter.attach(decoder.lm)
        decoder.lm.drafter_bytes = decoder.drafter.token_bytes
        self.clock = Clock(decoder.lm.device, Timing())
        self.decoder = decoder
        self.on_tokens, self.on_end, self.on_error = on_tokens, on_end, on_error
        self.rows = Rows.none(decoder.lm.device)
        self.outputs: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[TokenLogprob]] = {}
        self.errors: dict[int, UserError] = {}
        self.steps: list[Verification] = []
        self._waiting = WaitingRows(
            decoder.lm, decoder.stop, decoder.prefixes, decoder.first_target
        )
        self._features: Features | None = None  # the hidden states of the last pass
        self._passes = 0  # verification passes, without prefills
        self._failed = False  # the drafter, in this pass
        if decoder.stop:
            decoder.stop.start()
        if decoder.prefixes is not None:
            decoder.prefixes.serve(decoder.lm.model)
        decoder.lm.reset(rows, slots, keep_states=decoder.prefixes is not None)
        decoder.lm.keep_rows(np.zeros(0, dtype=np.int64))
        self.seed = seed
        self._turn = ExitStack()
        self._held: Drafter | None = None
        self._admitted = 0
        if prompts:
            self.admit(prompts, max_new_tokens, row_ids=row_ids, settings=settings)

    def hold(self, drafter: Drafter | None) -> None:
        """Have the turn of this drafter in place of another one's, so that no other decode uses it.
        For a decode that runs on and on: while it has rows. None: have none. Waits for the turn,
        and raises UserError as `OneAtATime`."""
        if drafter is not self._held:
            self._turn.close()
            self._held = None
            if drafter is not None:
                self._turn.enter_context(drafter.turn)
            self._held = drafter

    @property
    def waiting(self) -> list[int]:
        """The rows that wait until their prompts are read."""
        return self._waiting.numbers

    @property
    def unread(self) -> dict[int, int]:
        """How many tokens of prompts are not read yet, by row. Rows that began together count
        together, under the number of the first one."""
        return {reading.numbers[0]: reading.left for reading in self._waiting.readings}

    def shares(self, tokens: int) -> dict[int, int]:
        """How many of `tokens` tokens to `read` next of each row in `unread`; see
        `decode.loop.waiting_rows.shares`."""
        return shares(self.unread, tokens)

    @property
    def emitted(self) -> int:
        """The number of tokens that all rows have got so far."""
        return sum(map(len, self.outputs.values()))

    def admit(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int],
        *,
        row_ids: Sequence[int] | None = None,
        settings: RowSettings | Sequence[RowSettings] | None = None,
    ) -> list[int]:
        """Read prompts (token ids) and let them join: `begin`, then `read` to the end."""
        numbers = self.begin(prompts, max_new_tokens, row_ids=row_ids, settings=settings)
        self.read(numbers[0])
        return numbers

    @torch.inference_mode()
    def begin(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int],
        *,
        row_ids: Sequence[int] | None = None,
        settings: RowSettings | Sequence[RowSettings] | None = None,
    ) -> list[int]:
        """Let rows for prompts (token ids) wait until `read` has read them. Returns the numbers of
        the rows: 0, 1, … in the order of all prompts so far.

        max_new_tokens, settings: one for all prompts, or one for each. settings None: the decoder's
        own sampling and stop, and the seed of this decode. row_ids: see `Decoding`. Default: the
        rows' numbers. Equal prompts are read once. Raises UserError also if the rule cannot judge
        drafts under these settings, and then changes nothing.
        """
        numbers = np.arange(self._admitted, self._admitted + len(prompts))
        decoder = self.decoder
        new = new_rows(
            decoder.lm,
            decoder.parts,
            decoder.eos,
            prompts,
            max_new_tokens,
            numbers,
            row_ids,
            replace(decoder.usual, seed=self.seed) if settings is None else settings,
            ahead=self.ahead,
            numbers_repeat=decoder.numbers_repeat,
        )
        self._waiting.begin(new, self.rows)
        self._admitted += len(new)
        self.outputs.update((number, []) for number in numbers.tolist())
        self.logprobs.update((number, []) for number in numbers[new.logprobs >= 0].tolist())
        return numbers.tolist()

    @torch.inference_mode()
    def read(self, row: int, tokens: int | None = None) -> int:
        """Read on in the prompt of a row that waits, and in those that began together with it: so
        many tokens of them all, but at least one of each. None: all. Returns how many were read.

        They are read apart from the running rows; a `step` can read them too. 0: none, but what is
        read before the tokens, sources and the prefix cache. When all of them are read, they join,
        and get their first token. Raises UserError if the row does not wait. After any other error
        these prompts are given up. The running rows and the others that wait go on as before.
        """
        decoder, first = self.decoder, len(self.rows)
        reading, place = self._waiting.of(row, first)
        self.clock.resume()
        try:
            count = reading.read_on(place, sys.maxsize if tokens is None else tokens)
            self.clock.mark("prefill")
            if reading.left:
                return count
            verdict, features = reading.result(place, decoder.parts, decoder.processors)
            slots = self._waiting.make_room(reading, place, first)
            new, contexts = reading.new, reading.new.contexts
            lengths = contexts.lengths
            outcome = self._commit(new, verdict, number=0)
            verification = Verification.of(
                verdict, outcome, contexts, rows=new.numbers, lengths=lengths, features=features
            )
        except BaseException:
            decoder.lm.keep_rows(self._waiting.give_up(reading, place, first))
            raise
        self._waiting.readings.remove(reading)
        decoder.lm.keep_rows(slots)
        self.clock.mark("prefill")
        try:
            self._join(new, verification)
            self.clock.mark("draft_prefill")
            self.retire(verification, first)
        except BaseException:
            self._part_again(first)
            raise
        self.clock.mark("draft_prefill")
        return count

    def _join(self, new: Rows, verification: Verification) -> None:
        """Append new rows, and tell drafter and policy. verification: their prefill."""
        decoder, features = self.decoder, verification.features
        if len(self.rows):
            self.rows.add(new)
            decoder.drafter.add_rows(self.rows.contexts, verification)
            decoder.policy.add_rows(len(new))
            if self._features is not None and decoder.observers:
                old = self._features.last()
                joins = old.none(len(new)) if features is None else features.last()
                self._features = old.joined(joins)
        else:
            self.rows, self._features = new, features
            decoder.drafter.start(new.contexts)
            decoder.drafter.observe(verification)
            decoder.policy.start(len(new))

    def _part_again(self, first: int) -> None:
        """After an error while rows joined: the rows from `first` on leave. The drafter may know
        some of them, so it starts anew with the others."""
        stays, waiting = np.arange(first), len(self.rows) + np.arange(self._waiting.count)
        self.rows.leave(np.arange(len(self.rows)) >= first)
        self.rows.keep(stays)
        self.decoder.lm.keep_rows(np.append(stays, waiting))
        if first:
            self.set(drafter=self.decoder.drafter)

    @property
    def finished(self) -> bool:
        """Whether no row runs."""
        return not self.rows.numbers.size

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
        self.clock.end_pass(at_once=self.decoder.policy.reads_times)
        self.decoder.policy.observe(verification)
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
        short = lengths + self.decoder.parts.draft_room > width
        if not short.any():
            return
        for reach in (lengths * 3 // 2 + ahead, lengths):
            rows.reach = np.where(short, np.minimum(reach, rows.ends), before)
            try:
                start_drafter(
                    self.decoder.lm, rows, self.decoder.parts, False, self._waiting.readings
                )
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
        decoder, waiting = self.decoder, self._waiting.readings
        if len(self.rows) or waiting:
            self._features = start_drafter(decoder.lm, self.rows, decoder.parts, True, waiting)
            self.rows.unread[:] = True

    @property
    def reads_beside(self) -> bool:
        """Whether passes of the running rows can read prompts too: where the target's forward does
        not pad."""
        return bool(len(self.rows)) and not self.decoder.lm.pads

    def _pass(self, most: np.ndarray | int | None, read: int) -> Verification:
        """Draft, verify, commit and roll back. The arguments are as for `step`."""
        decoder, rows, clock = self.decoder, self.rows, self.clock
        contexts, seconds = rows.contexts, Seconds()
        clock.resume(seconds)
        self._passes += 1
        rows.rng.at_lengths(contexts.lengths)
        depths, takes = draft_depths(decoder.parts, rows, most)
        draft = self._draft(depths)
        clock.mark("draft")
        counts = (draft.sizes + 1) * takes
        counts[0] += not counts.any()  # a pass feeds something
        beside = read and self._waiting.readings and self.reads_beside
        parts = self._waiting.parts(len(rows), read) if beside else []
        verdict = self._verified(draft, counts, parts)
        read, fed = sum(int(part.counts.sum()) for part in parts), decoder.lm.fed
        lost = verdict.lost & (draft.sizes > 0)
        if draft.tokens.shape[1] and lost.any():
            # The keys of a drafted token may not be finite, and no mask hides those. So other
            # tokens are fed in the place of the draft.
            draft.drop(lost, contexts.last_tokens(draft.tokens.device))
            verdict = self._verified(draft, counts)
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
            signals=decoder.policy.signals(),
        )
        if features is not None:
            self._features = features
        try:
            decoder.drafter.observe(verification)
        except Exception as error:
            self._drafter_raised(error)
        for observer in decoder.observers:
            observer(verification)
        clock.mark("overhead")
        return verification

    def _verified(
        self, draft: Draft, counts: np.ndarray, parts: Sequence[ReadPart] = ()
    ) -> Verdict:
        """Feed a draft to the target, as `CachedLM.verify` does, and let the rule judge it."""
        decoder, rows = self.decoder, self.rows
        logits = decoder.lm.verify(rows.contexts, draft, counts, parts)
        self.clock.mark("verify")
        scores = Scores(logits, rows.sampling, draft, rows.contexts, decoder.processors)
        decision = decided(decoder.parts.rule, draft, scores, rows.rng)
        return Verdict.read(draft, scores, decision)

    def _draft(self, depths: np.ndarray) -> Draft:
        """The draft of each row, at most depths[b] deep, int [B]."""
        if depths.any():
            try:
                parts, device = self.decoder.parts, self.decoder.lm.device
                return ask_drafter(parts, self.rows, depths, self.clock, device)
            except Exception as error:
                self._drafter_raised(error)
        return Draft.none(len(depths), self.decoder.lm.device)

    def _drafter_raised(self, error: Exception) -> None:
        """With `on_error`, no text ends because the drafter raises: it begins anew after the
        pass."""
        if self.on_error is None:
            raise error
        logger.exception("the drafter fails and begins anew")
        self._failed = True

    def _commit(
        self, rows: Rows, verdict: Verdict, number: int, takes: np.ndarray | int = 1
    ) -> Outcome:
        """Append the tokens that a pass emits to the texts of the rows that take part, bool [B],
        and keep only the keys and values of accepted nodes. number: of the pass. A row whose logits
        give no token, or whose stop raises, fails. Without `on_error`, this raises its error and
        changes no text."""
        decoder, contexts, lengths = self.decoder, rows.contexts, rows.contexts.lengths
        room = (rows.ends - lengths) * takes
        ends = decoder.eos, rows.ignore_eos, rows.stops, rows.stop_ids
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
            decoder.lm.commit(lengths - 1, verdict.columns(), verdict.accepted + 1)
        contexts.append(verdict.block, outcome.emitted)
        return outcome

    def _kept_features(self, verdict: Verdict, outcome: Outcome) -> Features | None:
        """The hidden states of the tokens that stay, if the drafter captures layers."""
        if not self.decoder.drafter.captured_layers:
            return None
        counts = outcome.accepted + 1
        every = Features(self.decoder.lm.features, counts)
        return every.at(verdict.positions, counts) if verdict.draft.sizes.any() else every

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
        decoder, kept = self.decoder, compacted(stays)
        self.rows.leave(~stays)
        sound = ~np.isin(self.rows.numbers, list(self.errors))
        if decoder.prefixes is not None:
            left = np.flatnonzero(~stays & sound)
            decoder.prefixes.remember(decoder.lm, self.rows.contexts, left)
        waiting = len(stays) + np.arange(self._waiting.count)
        self.rows.keep(kept)
        decoder.lm.keep_rows(np.append(kept, waiting))
        if len(kept):
            if not self._failed:  # else it begins anew with the rows that are left
                decoder.drafter.keep_rows(kept)
            decoder.policy.keep_rows(kept)
            if self._features is not None and decoder.observers:
                self._features = self._features.keep_rows(kept)

    @torch.inference_mode()
    def drop(self, row: int) -> None:
        """Give up the text of a row that runs or waits, between two steps. Raises UserError for
        another row."""
        if row in self.rows.numbers:
            self._keep(self.rows.numbers != row)
            return
        running = self.rows.numbers.tolist()
        if row not in self.waiting:
            others = [*running, *self.waiting]
            raise UserError(f"row {row} neither runs nor waits; expected one of {others}")
        reading, place = self._waiting.of(row, len(running))
        reading.stays &= reading.new.numbers != row
        if not reading.stays.any():
            self.decoder.lm.keep_rows(self._waiting.give_up(reading, place, len(running)))

    @torch.inference_mode()
    def set(
        self,
        *,
        drafter: Drafter | None = None,
        policy: Part | Policy | None = None,
        rule: Part | Rule | None = None,
    ) -> None:
        """Exchange drafter, policy or rule between two steps, as if the decoder was made with them.

        What is None stays as it is. A new drafter reads the running texts; if it reads hidden
        states, the target reads them once more. Prompts of rows that wait are then read anew. The
        policy of running rows begins again. A rule that was not named is the default for the new
        drafts. Texts stay exact if the rule is lossless. Raises UserError as `Decoder` does, and if
        the rule does not fit the settings of a row.
        """
        decoder, rows = self.decoder, self.rows
        parts = decoder.parts.remade(drafter, policy, rule)
        every = [decoder.usual, *rows.settings, *self._waiting.settings]
        parts.require_sampling((x.sampling, x.drafts) for x in every)
        parts.require_target(decoder.lm)
        self.clock.resume()
        features, fresh, held = None, drafter is not None, self._held
        held_bytes = decoder.lm.drafter_bytes
        decoder.lm.drafter_bytes = parts.drafter.token_bytes
        try:
            if held is not None:
                self.hold(parts.drafter)
            if len(rows) or self._waiting.readings:
                features = start_drafter(decoder.lm, rows, parts, fresh, self._waiting.readings)
        except BaseException:
            decoder.lm.drafter_bytes = held_bytes
            self.hold(held)
            raise
        if len(rows):
            parts.policy.start(len(rows))
            if fresh:
                self._features, rows.unread[:] = features, True
        decoder.use(parts)
        self.clock.mark("draft_prefill")

    def result(self) -> Decoded:
        """All texts so far. Needs all `outputs` and `steps`."""
        self.clock.finish()
        tally = Tally(self._admitted, self.decoder.policy.max_depth)
        for step in self.steps:
            tally.add(step)
        timing = replace(
            self.clock.timing,
            steps=len(self.steps),
            draft_steps=sum(step.draft_steps for step in self.steps),
            tokens_fed=sum(step.width for step in self.steps),
        )
        outputs = [self.outputs[row] for row in range(self._admitted)]
        return Decoded(outputs, tally, timing, self.steps)
