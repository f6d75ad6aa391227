"""The batching of a service: the texts of requests wait, get rows, and are answered.

Other threads submit, cancel and change settings through a lock.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, wait
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from decode.draw.sampling import Sampling
from decode.loop.batcher import Batcher, News
from decode.loop.decoding import Decoder, Decoding
from decode.loop.rows import require_prompts
from decode.stats import Judged
from decode.text_stream import Stop
from decode.trace import rejected_tokens
from decode.verification import Verification
from draftsmith.net.few_lines import server_logger
from draftsmith.serve.batching.answer_tokens import NewTokens, TokenBytes
from draftsmith.serve.batching.metrics import AnswerSpeed, Metrics
from draftsmith.serve.batching.requests import (
    AnswerChoice,
    DecodeRequest,
    Refusal,
    RequestBounds,
    each_once,
)

logger = server_logger(__name__)

AHEAD = 256  # tokens past its prompt that a text has memory for when it begins


class RequestBatcher(Batcher[AnswerChoice]):
    """Decodes the texts of all requests together.

    decoder: used by its thread alone from now on. tokenizer: the tokenizer of the target, not used
    by other threads. draft_temperature: None: as the texts'.

    drafter_version: the version of the weights that draft. lossy: the rule in use, if it is lossy
    for such requests; None if it is lossless. on_waiting: called with the number of texts that
    wait, before each pass and when some give up. These are set in the decoding thread, by
    `between`.
    """

    bounds: RequestBounds

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: PreTrainedTokenizerBase,
        bounds: RequestBounds,
        metrics: Metrics,
        draft_temperature: float | None = None,
    ) -> None:
        super().__init__(decoder, bounds, AHEAD)
        self.metrics = metrics
        self.drafter_version = 0
        self.lossy: Callable[[Sampling], str | None] | None = None
        self.on_waiting: Callable[[int], None] | None = None
        self._tokenizer, self._token_bytes = tokenizer, TokenBytes(tokenizer)
        self._draft_temperature, self._texts = draft_temperature, _Texts(self)
        self._waiting: deque[AnswerChoice] = deque()
        self._unsent: set[DecodeRequest] = set()  # requests whose answers are not sent
        self._changes: list[Future[None]] = []  # of settings; they are not in use yet
        self._busy_at = time.monotonic()  # when a text last waited or ran
        self._speed = AnswerSpeed()
        decoder.observers.append(self._observe)
        metrics.running.set_function(lambda: len(self._rows))
        metrics.waiting.set_function(lambda: len(self._waiting))
        self._start("decode")
        self.done.add_done_callback(_log_failure)

    # --- called from other threads ----------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether it still decodes. False after draining."""
        return not self.done.done()

    @property
    def error(self) -> BaseException | None:
        """What ended the thread. None: it runs, or has ended as it should."""
        return self.done.exception() if self.done.done() else None

    @property
    def held(self) -> int:
        """Texts of requests that wait, run or are not sent yet. Each takes a place."""
        with self._changed:
            requests = self._unsent.union(self._requests())
        return sum(len(request.choices) for request in requests)

    def live(self) -> dict[str, int]:
        """Figures of this moment: the texts that run and wait, γ, and `Metrics.totals`."""
        return {
            "running": len(self._rows),
            "waiting": len(self._waiting),
            "gamma": self.decoder.policy.max_depth,
            **self.metrics.totals(),
        }

    def submit(self, request: DecodeRequest) -> None:
        """Let the texts of a request wait for rows. Raises Refusal if there is no place, and
        UserError for prompts and settings that cannot be decoded."""
        lm = self.decoder.lm
        job, texts = request.job, len(request.choices)
        require_prompts(job.prompts, lm.max_positions, self.decoder.vocab_size)
        settings = request.take(self._texts, self._draft_temperature)
        self.decoder.parts.require_sampling([(settings.sampling, settings.drafts)])
        with self._changed:
            self.require_room(texts, sum(map(len, job.prompts)))
            self._waiting.extend(request.choices)
            self._unsent.add(request)
            self._changed.notify()

    def require_room(self, texts: int, tokens: int = 0) -> None:
        """Raise Refusal unless these texts can be held too, with their tokens of prompts. A
        text is not read before this."""
        if self.draining or not self.alive:
            raise self._count(_ending())
        held = self.held
        if held + texts > self.bounds.capacity:
            found = f"{held} texts wait, run or are not sent yet"
            raise self._full(found, self.bounds.capacity)
        if not tokens:
            return
        waiting = sum(map(len, each_once(choice.prompt for choice in self._waiting)))
        if waiting and waiting + tokens > self.bounds.held_tokens:
            found = f"the prompts that wait have {waiting} tokens and this request has {tokens}"
            raise self._full(found, self.bounds.held_tokens)

    def _full(self, found: str, room: int) -> Refusal:
        message = f"{found}; there is room for {room}"
        return self._count(Refusal("full", message, self._retry_after()))

    def cancel(self, request: DecodeRequest) -> None:
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

        def change() -> None:
            try:
                act(self._decoding)
                done.set_result(None)
            except Exception as error:
                done.set_exception(error)
            self._changes.remove(done)

        with self._changed:
            self.require_room(0)
            self._changes.append(done)
            self.post(change)
        return done

    @property
    def idle_seconds(self) -> float:
        """How long no text has waited or run."""
        return 0.0 if self._busy() else time.monotonic() - self._busy_at

    def join(self, seconds: float) -> None:
        """Wait for the thread to end, for these seconds at the most."""
        wait([self.done], seconds)

    # --- the decoding thread ----------------------------------------------------------------------

    def text_of(self, row: int) -> AnswerChoice:
        """The text that has a row, for observers of the decode."""
        return self._rows[row]

    def _busy(self) -> bool:
        return bool(self._waiting or self._rows)

    def _finish(self) -> None:
        """Refuse all that is left. Nothing is held after this, and nothing is taken."""
        refusal = _ending()
        self.drain(0)
        with self._changed:
            left = self._requests()
            self._waiting.clear()
            self._rows.clear()
            changes = list(self._changes)
        for done in changes:
            done.set_exception(refusal)
        for request in left:
            if not request.cancelled:
                self._deliver(request, refusal)

    def _requests(self) -> list[DecodeRequest]:
        """Those whose texts wait or run, once each."""
        with self._changed:
            texts = [*self._waiting, *self._rows.values()]
        return list(dict.fromkeys(choice.request for choice in texts))

    def _expire(self) -> None:
        """Drop what was cancelled, and refuse what is too late."""
        now = time.monotonic()
        for request in self._requests():
            waits = request.begun is None
            if request.cancelled:
                self._give_up(request)
            elif waits and self.draining:
                self._refuse(request, _ending())
            elif waits and now - request.arrived > self.bounds.max_wait:
                message = f"no row was free in {self.bounds.max_wait:g} s"
                self._refuse(request, Refusal("waited", message, self._retry_after()))
            elif request.begun is not None and now - request.begun > self.bounds.max_seconds:
                message = f"a text was not complete after {self.bounds.max_seconds:g} s"
                self._refuse(request, Refusal("overran", message))

    def _admit(self) -> None:
        self._expire()
        while self._waiting:
            with self._changed:
                texts = next_texts(self._waiting, self._rows.values(), self.bounds.max_rows)
            if not texts:
                break
            self._seat(texts)
        self._look()

    def _look(self) -> None:
        if self.on_waiting is not None:
            self.on_waiting(len(self._waiting))

    def _seat(self, texts: list[AnswerChoice]) -> None:
        """Give rows to texts of one request that wait. They have the same prompt."""
        now, first, request = time.monotonic(), texts[0], texts[0].request
        settings = request.settings(first)
        left = request.job.new_tokens - len(first.tokens)
        samples = [choice.sample for choice in texts]
        if not self._begin(texts, first.ids, left, samples, settings):
            return
        try:
            for choice in texts:
                choice.begin(self._tokenizer, self._token_bytes)
        except Exception as error:
            return self._fail(first, error)
        request.begun = now
        with self._changed:
            for choice in texts:
                choice._last = request.arrived
                self._waiting.remove(choice)
                self.metrics.queue_time.observe(now - request.arrived)

    def _read(self) -> None:
        if not self._decoding.reads_beside:
            return super()._read()
        for row in self._decoding.unread:  # those that begin, and those that are complete
            if row in self._decoding.waiting:
                self._read_on(self._rows[row], row, 0)

    def _read_on(self, choice: AnswerChoice, row: int, tokens: int) -> News | None:
        known = self.decoder.prefixes
        looked_up = (0, 0) if known is None else (known.reused, known.read)
        news = super()._read_on(choice, row, tokens)
        if news is None:
            return None
        if known is not None:
            reused, read = known.reused - looked_up[0], known.read - looked_up[1]
            self.metrics.reused_tokens.inc(reused)
            self.metrics.prefix_tokens.inc(reused + read)
            if not choice.tokens:
                choice.cached = (choice.cached or 0) + reused
        self._hand_out(news)
        return news

    def _pass(self) -> None:
        started = time.monotonic()
        ran = [self._rows[row] for row in self._decoding.rows.numbers.tolist()]
        given = self._step(ran, None, self.bounds.prefill_tokens)
        if given is None:
            return
        for choice in ran:
            choice.suspect = False
        verification, news = given
        self._count_pass(verification)
        self._hand_out(news)
        tokens = sum(map(len, news.tokens.values()))
        self._speed.passed(tokens, time.monotonic() - started)

    def _lose(
        self, rows: dict[int, AnswerChoice], ran: list[AnswerChoice], error: Exception
    ) -> None:
        """Let the texts wait again, with the tokens that they have. Those that ran are suspects,
        which begin one by one. If a pass fails with one suspect, or with one text at all, its
        request is refused."""
        suspects = [choice for choice in ran if choice.suspect] or ran
        for choice in rows.values():
            choice.suspect = choice in ran
        with self._changed:
            self._waiting.extendleft(reversed(rows.values()))
        if len(suspects) == 1:
            self._fail(suspects[0], error)

    def _observe(self, step: Verification) -> None:
        """Keep what a pass drafted for the texts whose requests are traced."""
        for index, row in enumerate(step.rows.tolist()):
            choice = self._rows[row]
            if choice.request.job.trace:
                choice._traced = (int(step.accepted[index]), rejected_tokens(step, index))

    def _count_pass(self, step: Verification) -> None:
        """Count a pass that is done. One that fails is run again."""
        judged = Judged.of(step)
        self.metrics.passed(step, judged)
        drafted, accepted = judged.drafted.sum(1).tolist(), judged.accepted.sum(1).tolist()
        for index, row in enumerate(step.rows.tolist()):
            choice = self._rows[row]
            choice.steps += 1
            choice.versions = (choice.versions[0], self.drafter_version)
            if self.lossy is not None:
                choice.lossy = self.lossy(choice.request.job.sampling) or choice.lossy
            choice.drafted += drafted[index]
            choice.accepted += accepted[index]

    def _hand_out(self, news: News) -> None:
        """Deliver the tokens that the rows have got."""
        now = self._busy_at = time.monotonic()
        failed: list[tuple[AnswerChoice, Exception]]
        failed = [(self._rows[row], error) for row, error in news.failed.items()]
        for row, tokens in news.tokens.items():
            choice = self._rows[row]
            request = choice.request
            if choice.tokens:
                self.metrics.token_time.observe((now - choice._last) / len(tokens))
            else:
                choice.versions = (self.drafter_version, self.drafter_version)
                self.metrics.prompt_tokens.inc(len(choice.prompt))
                self.metrics.first_token.observe(now - request.arrived)
            choice._last = now
            choice.tokens += tokens
            self.metrics.generation_tokens.inc(len(tokens))
            entries = self._decoding.logprobs.get(row, [])[-len(tokens) :]
            if row in news.ended:
                self._end(choice)
            elif entries:
                self._decoding.logprobs[row].clear()
            if request.cancelled:
                continue
            traced, choice._traced = choice._traced, (0, ())
            try:
                piece = choice.piece(NewTokens(tokens, choice.reason, entries, *traced))
            except Exception as error:
                failed.append((choice, error))
                choice.text = None  # what comes after this piece must not be delivered
                continue
            if piece.text or piece.reason is not None:
                request.deliver(piece)
        for choice, failure in failed:
            self._fail(choice, failure)

    def _end(self, choice: AnswerChoice) -> None:
        """A text has ended, and its row is free."""
        decoder = self.decoder
        choice.end(decoder.lm.max_positions, decoder.eos)
        assert choice.reason is not None
        self._leave(choice)
        self._speed.ended(len(choice.tokens))
        self.metrics.ended(choice.reason)
        self.metrics.latency.observe(time.monotonic() - choice.request.arrived)

    def _give_up(self, request: DecodeRequest) -> None:
        """Free all rows of a request, and let none of its texts wait."""
        with self._changed:
            self._waiting = deque(other for other in self._waiting if other.request is not request)
        for choice in request.choices:
            self._leave(choice)
        self._busy_at = time.monotonic()
        self._look()

    def _refuse(self, request: DecodeRequest, refusal: Refusal) -> None:
        """Free all rows of a request, and say why, unless nobody waits for it any more."""
        cancelled, request.cancelled = request.cancelled, True
        self._give_up(request)
        if not cancelled:
            self._deliver(request, refusal)

    def _deliver(self, request: DecodeRequest, refusal: Refusal) -> None:
        """Say why a request ends. If some of its texts are complete, the others end with what they
        have: deliver what was held back of them."""
        complete = any(choice.reason for choice in request.choices)
        for choice in request.choices if complete else ():
            if choice.reason is not None or choice.text is None:
                continue
            try:
                choice.begin(self._tokenizer, self._token_bytes)
                piece = choice.piece(NewTokens([], "length"))
            except Exception as error:
                logger.error("a text ends without what was held back", exc_info=error)
                continue
            if piece.text or piece.tokens:
                request.deliver(replace(piece, reason=None))  # the refusal ends it
        request.deliver(self._count(refusal))

    def _fail(self, choice: AnswerChoice, error: Exception) -> None:
        request = choice.request
        # It cannot help to wait for memory if no other request holds some.
        others = any(other.request is not request for other in self._rows.values())
        self._refuse(request, Refusal.of(error, self._retry_after() if others else None))

    def _count(self, refusal: Refusal) -> Refusal:
        self.metrics.failed(refusal.reason)
        return refusal

    def _retry_after(self) -> int:
        """Seconds until the texts that wait are answered, at the speed of the last passes."""
        return self._speed.seconds_for(len(self._waiting))


class _Texts(Stop):
    """Adds the new tokens of a batcher's rows to their texts."""

    def __init__(self, batcher: RequestBatcher) -> None:
        self._batcher = batcher

    def start(self) -> None: ...

    def cut(self, row: int, tokens: list[int]) -> int | None:
        text = self._batcher.text_of(row).text
        return None if text is None else text.cut(tokens)


def next_texts(
    waiting: Iterable[AnswerChoice], running: Collection[AnswerChoice], max_rows: int
) -> list[AnswerChoice]:
    """The next texts that begin together, of those that wait in this order. None if no row is free
    or no text may begin.

    A free row goes to the request that has the fewest rows, and of these to the one that came
    first. So a request of many texts does not hold up the others. After a pass that failed, its
    texts begin one by one, until the next pass.
    """
    free = max_rows - len(running)
    alone = any(choice.suspect for choice in running)
    ready = [choice for choice in waiting if not (alone and choice.suspect)]
    if free < 1 or not ready:
        return []
    rows = Counter(choice.request for choice in running)
    first = min(ready, key=lambda choice: rows[choice.request])
    others = [rows[choice.request] for choice in ready if choice.request is not first.request]
    # As many as until another request has as few rows.
    count = max(min(free, min(others) - rows[first.request]), 1) if others else free
    return _alike(first, ready)[:count]


def _alike(first: AnswerChoice, waiting: Iterable[AnswerChoice]) -> list[AnswerChoice]:
    """The texts of a request that can begin together with its first one: they have the same prompt.
    A text that begins again has its own."""
    if first.tokens or first.suspect:
        return [first]
    return [
        choice
        for choice in waiting
        if choice.request is first.request and choice.prompt is first.prompt and not choice.tokens
    ]


def _ending() -> Refusal:
    return Refusal("draining", "the service is ending", 1)


def _log_failure(done: Future[None]) -> None:
    error = done.exception()
    if error is not None:
        logger.error("the decoding thread has failed", exc_info=error)
