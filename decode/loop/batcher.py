"""One thread that decodes many texts together: they get rows, are read, share passes and leave."""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from decode.base.errors import UserError
from decode.base.threads import run_in_thread
from decode.loop.decoding import Decoder, Decoding
from decode.loop.rows import RowSettings
from decode.verification import Verification

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BatchBounds:
    """max_rows: texts that decode together. prefill_tokens: tokens of new prompts that are read
    with a pass, or between two. row_tokens: tokens of a text for which each row has memory from the
    start, if half of the free memory is enough. A longer text makes all rows longer, which copies
    them."""

    max_rows: int = 16
    prefill_tokens: int = 512
    row_tokens: int = 2048


class HasRow(Protocol):
    """A text. row: its row in the decode; None: it has none."""

    row: int | None


T = TypeVar("T", bound=HasRow)


@dataclass
class News:
    """What a read or a pass gave: the new tokens by row, the rows that ended, and the errors of
    those that failed."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    failed: dict[int, UserError] = field(default_factory=dict)


class Batcher(ABC, Generic[T]):
    """Decodes texts in one thread, which alone uses the decoder. Other threads `post` calls.

    In turn, the thread makes these calls, gives up what is too late, gives free rows to texts,
    reads parts of their prompts, and takes a pass. A subclass chooses the texts and sends their
    tokens. While texts have rows, no other decode uses the drafter.

    An error at one text ends that text. After a pass that fails for no known row, the decode begins
    anew without rows. An error of the thread itself ends it.

    ahead: as for `Decoding`. done: set when the thread has ended. It has the error that ended it.
    Raises UserError if there is no memory for the rows.
    """

    done: "Future[None]"

    def __init__(self, decoder: Decoder, bounds: BatchBounds, ahead: int | None = None) -> None:
        self.decoder, self.bounds, self._ahead = decoder, bounds, ahead
        self._changed = threading.Condition()  # guards what other threads read and change
        self._calls: deque[Callable[[], None]] = deque()
        self._ends_at: float | None = None  # when the thread ends at the latest
        self._rows: dict[int, T] = {}
        self._news = News()  # of the read or pass that runs
        self._decoding = self._make_decoding()

    def _start(self, name: str) -> None:
        """Start the thread, which has this name."""
        self.done = run_in_thread(self._run, name)

    # --- called from other threads ----------------------------------------------------------------

    def post(self, call: Callable[[], None]) -> None:
        """Make a call between two passes, in the decoding thread. An error that it raises ends the
        thread."""
        with self._changed:
            self._calls.append(call)
            self._changed.notify()

    @property
    def draining(self) -> bool:
        """Whether the thread is about to end, or has ended."""
        return self._ends_at is not None

    def drain(self, seconds: float) -> None:
        """End when there is no work left, but after `seconds` at the latest."""
        with self._changed:
            if self._ends_at is None:
                self._ends_at = time.monotonic() + seconds
            self._changed.notify()

    # --- what a subclass adds, in the decoding thread ---------------------------------------------

    @abstractmethod
    def _busy(self) -> bool:
        """Whether texts wait for a read or a pass. If not, the thread sleeps until a call comes."""

    def _seconds_to_expiry(self) -> float | None:
        """How long the thread may sleep. None: until a call comes."""
        return None

    @abstractmethod
    def _admit(self) -> None:
        """Give up what is too late, and give the free rows to texts, by `_begin`."""

    @abstractmethod
    def _pass(self) -> None:
        """Take a pass, by `_step`, and send what it gave. Some row has been read."""

    @abstractmethod
    def _fail(self, text: T, error: Exception) -> None:
        """End a text with an error, and free its row."""

    @abstractmethod
    def _lose(self, rows: dict[int, T], ran: list[T], error: Exception) -> None:
        """All these texts have lost their rows, and `ran` took part in the pass that failed: end
        them, or let them wait again."""

    @abstractmethod
    def _finish(self) -> None:
        """The thread ends: say so to all who wait."""

    # --- the decoding thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait():
                self._admit()
                if self._decoding.unread:
                    self._read()
                if not self._decoding.finished:
                    self._pass()
                self._shrink()
        finally:
            self._decoding.hold(None)
            self._finish()

    def _wait(self) -> bool:
        """Wait for something to do, and make the calls of other threads. False: it is time to
        end."""
        if not self._rows:
            self._decoding.hold(None)
        with self._changed:
            self._changed.wait_for(
                lambda: self._calls or self.draining or self._busy(), self._seconds_to_expiry()
            )
        while self._calls:
            self._calls.popleft()()
        ends_at = self._ends_at
        return ends_at is None or (self._busy() and time.monotonic() < ends_at)

    def _make_decoding(self) -> Decoding:
        """A decode without rows."""
        rows, length = self.bounds.max_rows, self.bounds.row_tokens
        decoding = Decoding(
            self.decoder,
            rows=rows,
            slots=self.decoder.affordable_slots(rows, length),
            ahead=self._ahead,
            on_tokens=lambda row, tokens: self._news.tokens.update({row: tokens}),
            on_end=lambda row, _: self._news.ended.add(row),
            on_error=lambda row, error: self._news.failed.update({row: error}),
        )
        self._allocated = self.decoder.lm.slots.allocated
        return decoding

    def _shrink(self) -> None:
        """Give memory back that longer texts took, when none is left."""
        if not self._rows and self.decoder.lm.slots.allocated != self._allocated:
            self._decoding.hold(None)
            self._decoding = self._make_decoding()

    def _begin(
        self,
        texts: Sequence[T],
        prompt: Sequence[int],
        max_new_tokens: int,
        row_ids: Sequence[int],
        settings: RowSettings,
    ) -> bool:
        """Give rows to texts with the same prompt. False: they cannot begin, and the first one has
        failed."""
        try:
            self._decoding.hold(self.decoder.drafter)
            rows = self._decoding.begin(
                [prompt] * len(texts), max_new_tokens, row_ids=row_ids, settings=settings
            )
        except Exception as error:  # the other rows are as they were
            self._fail(texts[0], error)
            return False
        with self._changed:
            for row, text in zip(rows, texts, strict=True):
                text.row, self._rows[row] = row, text
        return True

    def _read(self) -> None:
        """Read on in the prompts of the rows that are not read yet."""
        for row, tokens in self._decoding.shares(self.bounds.prefill_tokens).items():
            if row in self._decoding.waiting:  # an error at one row may take others away
                self._read_on(self._rows[row], row, tokens)

    def _read_on(self, text: T, row: int, tokens: int) -> News | None:
        """Read `tokens` tokens of the prompt of a row. None: the text has failed."""
        self._news = news = News()
        try:
            self._decoding.read(row, tokens)
        except Exception as error:  # the other rows are as they were
            self._fail(text, error)
            return None
        return news

    def _step(self, ran: list[T], *arguments: Any) -> tuple[Verification, News] | None:
        """One pass, in which the texts `ran` take part. None: it has failed. arguments: as for
        `Decoding.step`."""
        self._news = news = News()
        try:
            self._decoding.step(*arguments)
        except Exception as error:
            self._begin_anew(error, ran)
            return None
        return self._decoding.steps.pop(), news

    def _begin_anew(self, error: Exception, ran: list[T]) -> None:
        """After an error that leaves the rows in an unknown state: begin without rows."""
        logger.error("the decode begins anew", exc_info=error)
        with self._changed:
            rows, self._rows = self._rows, {}
            for text in rows.values():
                text.row = None
        self._lose(rows, ran, error)
        self._decoding.hold(None)
        self._decoding = self._make_decoding()

    def _leave(self, text: T) -> None:
        """Free the row of a text, if it has one."""
        row, decoding = text.row, self._decoding
        if row is None:
            return
        if row in decoding.rows.numbers or row in decoding.waiting:
            decoding.drop(row)
        with self._changed:
            del self._rows[row]
        for kept in (decoding.outputs, decoding.logprobs, decoding.errors):
            kept.pop(row, None)
        text.row = None
