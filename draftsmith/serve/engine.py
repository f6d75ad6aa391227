"""The thread that decodes: texts wait, join the running rows, and leave them.

Everything that touches the decode happens in this thread, between two passes. Other threads submit,
cancel and change settings through a lock.
"""

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from transformers import PreTrainedTokenizerBase

from decode.base.errors import MemoryShortage, UserError
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder, Decoding
from decode.loop.rows import require_prompts
from decode.stats import Judged
from decode.text_stream import StopStrings
from decode.trace import rejected_tokens
from decode.verification import Verification
from draftsmith.serve.metrics import Metrics
from draftsmith.serve.requests import Bounds, Choice, NewTokens, Refusal, Request, RowWatch

logger = logging.getLogger(__name__)

LONGEST_RETRY = 120  # seconds; OpenAI's client ignores longer ones
AHEAD = 256  # tokens past its prompt that a text has memory for when it begins


class Engine:
    """Decodes the texts of all requests together, in one thread.

    decoder: used by this thread alone from now on. tokenizer: of the target, not used by other
    threads. draft_temperature: None: as the texts'.

    watch: told of the rows, in the decoding thread. drafter_version: of the weights that draft.
    lossy: the rule in use, if it is lossy for such requests; None if it is lossless. before_pass:
    called with the number of texts that wait. These are set in the decoding thread, by `between`.
    error: what ended the decoding thread; None: it runs, or has ended as it should.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: PreTrainedTokenizerBase,
        bounds: Bounds,
        metrics: Metrics,
        draft_temperature: float | None = None,
        watch: RowWatch | None = None,
    ) -> None:
        self.decoder, self.bounds, self.metrics = decoder, bounds, metrics
        self.drafter_version = 0
        self.lossy: Callable[[Sampling], str | None] | None = None
        self.before_pass: Callable[[int], None] | None = None
        self._watch = watch or RowWatch()
        self._tokenizer = tokenizer
        self._draft_temperature = draft_temperature
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Request, Choice]] = deque()
        self._running: dict[int, tuple[Request, Choice]] = {}
        self._held = 0  # texts that wait, are being admitted or run
        self._unsent: set[Request] = set()  # requests whose answers are not sent
        self.error: BaseException | None = None
        self._changes: deque[tuple[Callable[[Decoding], None], Future[None]]] = deque()
        self._busy_at = time.monotonic()  # when a text last waited or ran
        self._ends_at: float | None = None  # when draining ends
        self._tokens_per_second = self._tokens_per_text = math.nan
        self._new: list[tuple[int, list[int]]] = []  # what the pass has given so far
        self._ended: set[int] = set()
        self._failed: dict[int, UserError] = {}
        self._counted = dict.fromkeys(
            ("generated", "steps", "emitted", "drafted", "reached", "accepted"), 0
        )
        decoder.observers.append(self._trace)
        self._decoding = self._make_decoding()
        metrics.running.set_function(lambda: len(self._running))
        metrics.waiting.set_function(lambda: len(self._waiting))
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._thread.start()

    # --- called from other threads ----------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether it still decodes. False after draining."""
        return self._thread.is_alive()

    @property
    def draining(self) -> bool:
        return self._ends_at is not None

    @property
    def held(self) -> int:
        """Texts of requests that wait, run or are not sent yet. Each takes a place."""
        with self._changed:
            requests = self._unsent.union(request for request, _ in self._entries())
        return sum(len(request.choices) for request in requests)

    def live(self) -> dict[str, int]:
        """Figures of this moment: the texts that run and wait, and γ; and what was counted since
        the start. generated: tokens; emitted: those of `steps`, the passes of single texts, whose
        draft tokens are drafted, reached and accepted as in `decode.stats.Counts`."""
        return {
            "running": len(self._running),
            "waiting": len(self._waiting),
            "gamma": self.decoder.policy.max_depth,
            **self._counted,
            **self._watch.live(),
        }

    def submit(self, request: Request) -> None:
        """Let the texts of a request wait for rows. Raises Refusal if there is no place, and
        UserError for prompts and settings that cannot be decoded."""
        lm = self.decoder.lm
        prompts = [choice.prompt for choice in request.choices]
        require_prompts(prompts, lm.max_positions, self.decoder.vocab_size)
        settings = request.settings(0, draft_temperature=self._draft_temperature)
        self.decoder.parts.require_sampling([(settings.sampling, settings.drafts)])
        if request.stop:
            StopStrings(self._tokenizer, request.stop)
        tokens = sum(len(prompt) for prompt in _each_once(prompts))
        with self._changed:
            self.require_room(len(prompts), tokens)
            self._waiting.extend((request, choice) for choice in request.choices)
            self._held += len(prompts)
            self._unsent.add(request)
            self._changed.notify()

    def require_room(self, texts: int, tokens: int = 0) -> None:
        """Raise Refusal unless so many texts more can be held, with so many tokens of prompts. A
        text is not read before this."""
        if self.draining or not self.alive:
            raise self._count(Refusal("draining", "the service is ending", 1))
        held = self.held
        if held + texts > self.bounds.capacity:
            message = (
                f"{held} texts wait, run or are not sent yet; there is room for "
                f"{self.bounds.capacity}"
            )
            raise self._count(Refusal("full", message, self._retry_after()))
        if not tokens:
            return
        wait = sum(map(len, _each_once(choice.prompt for _, choice in self._waiting)))
        if wait and wait + tokens > self.bounds.held_tokens:
            message = (
                f"the prompts that wait have {wait} tokens and this request has {tokens}; there is "
                f"room for {self.bounds.held_tokens}"
            )
            raise self._count(Refusal("full", message, self._retry_after()))

    def cancel(self, request: Request) -> None:
        """Its answer is sent, or nobody waits for it: free its places, and give up what is left of
        it before the next pass."""
        with self._changed:
            request.cancelled = True
            self._unsent.discard(request)
            self._changed.notify()

    def between(self, act: Callable[[Decoding], None]) -> "Future[None]":
        """Call `act` with the running decode between two passes, in the decoding thread. The result
        arrives once it has returned; what it raises is raised there. Raises Refusal if the service
        is ending."""
        done: Future[None] = Future()
        with self._changed:
            self.require_room(0)
            self._changes.append((act, done))
            self._changed.notify()
        return done

    @property
    def idle_seconds(self) -> float:
        """How long no text has waited or run."""
        return 0.0 if self._held else time.monotonic() - self._busy_at

    def drain(self, seconds: float) -> None:
        """Take no more requests, refuse those that wait, and end when all rows have ended, but
        after so many seconds at the latest."""
        with self._changed:
            if self._ends_at is None:
                self._ends_at = time.monotonic() + seconds
            self._changed.notify()

    def join(self, seconds: float) -> None:
        """Wait for the thread to end, for so many seconds at the most."""
        self._thread.join(seconds)

    # --- the decoding thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait():
                self._give_up()
                self._admit()
                self._read()
                if not self._decoding.finished:
                    self._pass()
                self._shrink()
        except BaseException as error:
            logger.exception("the decoding thread has failed")
            self.error = error
        finally:
            self._finish(Refusal("draining", "the service is ending", 1))

    def _finish(self, refusal: Refusal) -> None:
        """Refuse all that is left. Nothing is held after this, and nothing is taken."""
        with self._changed:
            self._ends_at = self._ends_at or time.monotonic()
            left = _different(self._entries())
            self._waiting.clear()
            self._running.clear()
            self._held = 0
            changes = list(self._changes)
        for _, done in changes:
            done.set_exception(refusal)
        for request in left:
            if not request.cancelled:
                request.deliver(self._count(refusal))

    def _wait(self) -> bool:
        """Wait for something to do. False: it is time to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._held or self._changes or self.draining)
            changes = [self._changes.popleft() for _ in range(len(self._changes))]
            ends = self._ends_at is not None and (
                not self._held or time.monotonic() >= self._ends_at
            )
        for act, done in changes:
            try:
                act(self._decoding)
                done.set_result(None)
            except Exception as error:
                done.set_exception(error)
        return not ends

    def _entries(self) -> list[tuple[Request, Choice]]:
        """All texts that wait or run."""
        with self._changed:
            return [*self._waiting, *self._running.values()]

    def _give_up(self) -> None:
        """Drop what was cancelled, and refuse what is too late."""
        now = time.monotonic()
        for request in _different(self._entries()):
            waits = request.begun is None
            if request.cancelled:
                self._leave(request)
            elif waits and self.draining:
                self._refuse(request, Refusal("draining", "the service is ending", 1))
            elif waits and now - request.arrived > self.bounds.max_wait:
                message = f"no row was free in {self.bounds.max_wait:g} s"
                self._refuse(request, Refusal("waited", message, self._retry_after()))
            elif request.begun is not None and now - request.begun > self.bounds.max_seconds:
                message = f"a text was not complete after {self.bounds.max_seconds:g} s"
                self._refuse(request, Refusal("overran", message))

    def _admit(self) -> None:
        """Give the free rows to texts that wait: each to the request that has the fewest, and of
        these to the one that came first. So a request of many texts does not hold up the others.
        After a pass that failed, its texts begin one by one, until the next pass."""
        while True:
            with self._changed:
                running = list(self._running.values())
                free = self.bounds.max_rows - len(running)
                alone = any(choice.suspect for _, choice in running)
                rows = Counter(request for request, _ in running)
                waiting = [entry for entry in self._waiting if not (alone and entry[1].suspect)]
            if free < 1 or not waiting:
                return
            request, first = min(waiting, key=lambda entry: rows[entry[0]])
            others = [rows[other] for other, _ in waiting if other is not request]
            # As many as until another request has as few rows.
            count = max(min(free, min(others) - rows[request]), 1) if others else free
            self._begin(request, _alike(request, first, waiting)[:count])

    def _begin(self, request: Request, texts: list[Choice]) -> None:
        """Give rows to texts that wait. They have the same prompt."""
        now = time.monotonic()
        first = texts[0]
        try:
            rows = self._decoding.begin(
                [first.text] * len(texts),
                request.max_new_tokens - len(first.tokens),
                row_ids=[choice.sample for choice in texts],
                settings=request.settings(
                    first.seed,
                    StopStrings(self._tokenizer, request.stop) if request.stop else None,
                    self._draft_temperature,
                ),
            )
        except Exception as error:  # the other rows are as they were
            self._refuse(request, self._refusal(error, request))
            return
        request.begun = now
        with self._changed:
            for row, choice in zip(rows, texts, strict=True):
                choice.row, choice._last = row, request.arrived
                self._waiting.remove((request, choice))
                self._running[row] = request, choice
                self.metrics.queue_time.observe(now - request.arrived)

    def _read(self) -> None:
        """Read on in the prompts of the rows that are not read yet."""
        for row, tokens in self._decoding.shares(self.bounds.prefill_tokens).items():
            if row in self._decoding.waiting:  # an error at one row may take others away
                self._read_on(row, tokens)

    def _read_on(self, row: int, tokens: int) -> None:
        """Read so many tokens of the prompt of a row. If it is complete, its texts begin."""
        request, choice = self._running[row]
        before, known = set(self._decoding.waiting), self.decoder.prefixes
        looked_up = (0, 0) if known is None else (known.reused, known.read)
        try:
            self._decoding.read(row, tokens)
        except Exception as error:  # the other rows are as they were
            self._new, self._ended, self._failed = [], set(), {}
            self._refuse(request, self._refusal(error, request))
            return
        if known is not None:
            reused, read = known.reused - looked_up[0], known.read - looked_up[1]
            self.metrics.reused_tokens.inc(reused)
            self.metrics.prefix_tokens.inc(reused + read)
            if not choice.tokens:
                choice.cached = (choice.cached or 0) + reused
        for joined in sorted(before.difference(self._decoding.waiting)):
            _, choice = self._running[joined]
            self._watch.join(joined, request)
            if not choice.tokens:
                choice.versions = (self.drafter_version, self.drafter_version)
                self.metrics.prompt_tokens.inc(len(choice.prompt))
        self._hand_out()

    def _pass(self) -> None:
        started = time.monotonic()
        if self.before_pass is not None:
            self.before_pass(len(self._waiting))
        try:
            self._decoding.step()
        except Exception as error:
            self._begin_anew(error)
            return
        for _, choice in self._running.values():
            choice.suspect = False
        for step in self._decoding.steps:
            self._tally(step)
        self._decoding.steps.clear()
        tokens = sum(len(new) for _, new in self._new)
        self._hand_out()
        speed = tokens / max(time.monotonic() - started, 1e-6)
        self._tokens_per_second = _averaged(self._tokens_per_second, speed)

    def _begin_anew(self, error: Exception) -> None:
        """After a pass that failed for no known row: begin with no rows, and let the texts wait
        again, with the tokens that they have. Those that ran are suspects, which begin one by one.
        If a pass fails with one suspect, or with one text at all, its request is refused."""
        logger.error("the decode begins anew", exc_info=error)
        self._new, self._ended, self._failed = [], set(), {}
        with self._changed:
            entries = list(self._running.items())
            self._running.clear()
            unread = set(self._decoding.waiting)
            ran = [entry for row, entry in entries if row not in unread]
            suspects = [entry for entry in ran if entry[1].suspect] or ran
            for row, (_, choice) in entries:
                choice.row, choice.suspect = None, row not in unread
                self._watch.leave(row)
            self._waiting.extendleft(entry for _, entry in reversed(entries))
        self._decoding = self._make_decoding()
        if len(suspects) == 1:
            request = suspects[0][0]
            self._refuse(request, self._refusal(error, request))

    def _shrink(self) -> None:
        """Give memory back that longer texts took, when none is left."""
        if not self._held and self.decoder.lm.slots.allocated != self._allocated:
            self._decoding = self._make_decoding()

    def _tally(self, step: Verification) -> None:
        judged = Judged.of(step)
        self.metrics.judged(judged)
        counted = self._counted
        counted["steps"] += len(step.rows)
        counted["emitted"] += int(step.emitted.sum())
        for name in ("drafted", "reached", "accepted"):
            counted[name] += int(getattr(judged, name).sum())
        drafted, accepted = judged.drafted.sum(1).tolist(), judged.accepted.sum(1).tolist()
        for index, row in enumerate(step.rows.tolist()):
            request, choice = self._running[row]
            choice.steps += 1
            choice.versions = (choice.versions[0], self.drafter_version)
            if self.lossy is not None:
                choice.lossy = self.lossy(request.sampling) or choice.lossy
            choice.drafted += drafted[index]
            choice.accepted += accepted[index]

    def _trace(self, step: Verification) -> None:
        """Keep what the pass drafted for the texts whose requests are traced."""
        for index, row in enumerate(step.rows.tolist()):
            request, choice = self._running[row]
            if request.trace:
                choice._traced = (int(step.accepted[index]), rejected_tokens(step, index))

    def _hand_out(self) -> None:
        """Deliver the tokens that the rows have got."""
        now = time.monotonic()
        new, ended, failed = self._new, self._ended, self._failed
        self._new, self._ended, self._failed = [], set(), {}
        for row, tokens in new:
            request, choice = self._running[row]
            if choice.tokens:
                self.metrics.token_time.observe((now - choice._last) / len(tokens))
            else:
                self.metrics.first_token.observe(now - request.arrived)
            choice._last = now
            choice.tokens += tokens
            self.metrics.generation_tokens.inc(len(tokens))
            self._counted["generated"] += len(tokens)
            entries = self._decoding.logprobs.get(row, [])[-len(tokens) :]
            if row in ended:
                self._end(request, choice)
            elif entries:
                self._decoding.logprobs[row].clear()
            if not request.cancelled:
                traced, choice._traced = choice._traced, (0, ())
                request.deliver(NewTokens(choice, tokens, choice.reason, entries, *traced))
        requests = [self._running[row][0] for row in failed]
        for request, (row, error) in zip(requests, failed.items(), strict=True):
            self._decoding.errors.pop(row)
            self._refuse(request, self._refusal(error, request))

    def _end(self, request: Request, choice: Choice) -> None:
        """A text has ended, and its row is free."""
        assert choice.row is not None
        room = self.decoder.lm.max_positions - len(choice.prompt)
        full = len(choice.tokens) >= min(request.max_new_tokens, room)
        is_eos = not request.ignore_eos and choice.tokens[-1] in self.decoder.eos
        stopped = is_eos or not full or self._has_stop_string(request, choice)
        choice.reason = "stop" if stopped else "length"
        self._forget(choice.row)
        self._tokens_per_text = _averaged(self._tokens_per_text, len(choice.tokens))
        self.metrics.ended(choice.reason)
        self.metrics.latency.observe(time.monotonic() - request.arrived)

    def _has_stop_string(self, request: Request, choice: Choice) -> bool:
        """Whether a stop string ends a text; its last token may also be the last that it may
        have."""
        if not request.stop:
            return False
        return StopStrings(self._tokenizer, request.stop).cut(0, choice.tokens) is not None

    def _forget(self, row: int) -> None:
        with self._changed:
            del self._running[row]
            self._held -= 1
            self._busy_at = time.monotonic()
        self._decoding.outputs.pop(row, None)
        self._decoding.logprobs.pop(row, None)
        self._watch.leave(row)

    def _leave(self, request: Request) -> None:
        """Free all rows of a request."""
        with self._changed:
            stays = [entry for entry in self._waiting if entry[0] is not request]
            self._held -= len(self._waiting) - len(stays)
            self._waiting = deque(stays)
        for row, (other, _) in list(self._running.items()):
            if other is request:
                if row in self._decoding.rows.numbers or row in self._decoding.waiting:
                    self._decoding.drop(row)
                self._forget(row)

    def _refuse(self, request: Request, refusal: Refusal) -> None:
        """Free all rows of a request, and say why, unless nobody waits for it any more."""
        cancelled, request.cancelled = request.cancelled, True
        self._leave(request)
        if not cancelled:
            request.deliver(self._count(refusal))

    def _refusal(self, error: Exception, request: Request) -> Refusal:
        """Why a request gets no more."""
        if isinstance(error, MemoryShortage):
            # It cannot help to wait if no other request holds memory.
            others = any(other is not request for other, _ in self._running.values())
            return Refusal("memory", str(error), self._retry_after() if others else None)
        if isinstance(error, UserError):
            return Refusal("failed", str(error))
        logger.error("a request ends with an error", exc_info=error)
        return Refusal("failed", f"the decode could not go on: {error}")

    def _count(self, refusal: Refusal) -> Refusal:
        self.metrics.failed(refusal.reason)
        return refusal

    def _make_decoding(self) -> Decoding:
        rows, length = self.bounds.max_rows, self.bounds.row_tokens
        decoding = Decoding(
            self.decoder,
            rows=rows,
            slots=self.decoder.affordable_slots(rows, length),
            ahead=AHEAD,
            on_tokens=lambda row, tokens: self._new.append((row, tokens)),
            on_end=lambda row, _: self._ended.add(row),
            on_error=self._failed_row,
        )
        self._allocated = self.decoder.lm.slots.allocated
        return decoding

    def _failed_row(self, row: int, error: UserError) -> None:
        self._failed[row] = error

    def _retry_after(self) -> int:
        """Seconds until the texts that wait are answered, at the speed of the last passes."""
        seconds = len(self._waiting) * self._tokens_per_text / self._tokens_per_second
        return min(max(math.ceil(seconds), 1), LONGEST_RETRY) if math.isfinite(seconds) else 1


def _averaged(before: float, new: float) -> float:
    """An exponential moving average. before: NaN at first."""
    return new if math.isnan(before) else 0.9 * before + 0.1 * new


def _each_once(prompts: Iterable[Sequence[int]]) -> list[Sequence[int]]:
    """The prompts without those that are the same object: the texts of one prompt share it."""
    return list({id(prompt): prompt for prompt in prompts}.values())


def _alike(
    request: Request, first: Choice, waiting: Iterable[tuple[Request, Choice]]
) -> list[Choice]:
    """The texts of a request that can begin together with its first one: they have the same prompt.
    A text that begins again has its own."""
    if first.tokens or first.suspect:
        return [first]
    return [
        choice
        for other, choice in waiting
        if other is request and choice.prompt is first.prompt and not choice.tokens
    ]


def _different(entries: Iterable[tuple[Request, Choice]]) -> list[Request]:
    """Each request once, in their order."""
    return list(dict.fromkeys(request for request, _ in entries))
