"""The thread that verifies: drafts arrive, share the passes of one decode, and get verdicts."""

import logging
import math
import queue
import time
from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from decode.base.device import compute_apart
from decode.base.errors import UserError
from decode.base.registry import Choice
from decode.loop.decoding import Decoder, Decoding
from decode.loop.parts import Part
from decode.model.identity import weights_sha256
from decode.model.loading import Target
from decode.verification import Verification
from draftsmith.edge.arrived_drafts import ArrivedDrafts, make_verified_rule
from draftsmith.edge.protocol import UP, VERSION, Message, ProtocolError, decode, encode
from draftsmith.edge.sessions import Bounds, Connection, Session, Sessions, Text

logger = logging.getLogger(__name__)


class Verifier:
    """Verifies the drafts of many edges in one decode, in one thread.

    Drafts that arrive during a pass share the next one. Texts without a draft sit it out. The keys
    and values of a text stay for its next draft, and leave when they expire or another text needs
    the row; the text is then read again. Long texts are read in parts, with passes in between.

    An error at one text or message ends that text or session. The other texts are read again. An
    error of the thread itself ends it, and `done` has the error.

    target, rule: as for `Decoder`. passes, drafts: how many there were so far. done: set when the
    thread has ended. Raises UserError as `Decoder` does, and for a rule that judges by the
    drafter's probabilities, which are not sent.
    """

    def __init__(
        self, target: Target, rule: Part = "coupled", bounds: Bounds | None = None
    ) -> None:
        self.target, self.bounds = target, bounds or Bounds()
        self._drafter = ArrivedDrafts()
        self.decoder = Decoder(
            target.model,
            self._drafter,
            eos_token_ids=target.eos_token_ids,
            gamma=self.bounds.max_gamma,
            rule=make_verified_rule(rule),
            first_target=False,
        )
        self.rule = self.decoder.parts.rule
        self.rule_name = str(Choice.of(rule))
        self._weights = ""  # those that are offloaded cannot be compared
        with suppress(UserError):
            self._weights = weights_sha256(target.model)
        self.passes = self.drafts = 0
        self._sessions = Sessions(self.bounds)
        self._rows: dict[int, tuple[Session, Text]] = {}
        # Frames with the moments of their arrival. None: it is time to end.
        self._inbox: queue.SimpleQueue[tuple[Connection, bytes | str | None, float] | None] = (
            queue.SimpleQueue()
        )
        self._crowded = False  # texts with drafts waited for rows in the last pass
        self._ending = False
        self._decoding = self._new_decoding()
        self.done = compute_apart(self._run, "verify")

    # --- called from other threads ----------------------------------------------------------------

    def put(self, connection: Connection, frame: bytes | str | None) -> None:
        """A frame arrived. None: the line is broken."""
        self._inbox.put((connection, frame, time.monotonic()))

    @property
    def waiting(self) -> int:
        """How many frames wait."""
        return self._inbox.qsize()

    def end(self) -> None:
        """End after the pass that runs. Raises the error that ended the thread, if it failed."""
        self._inbox.put(None)
        self.done.result()

    # --- the verifying thread ---------------------------------------------------------------------

    def _new_decoding(self) -> Decoding:
        rows, length = self.bounds.max_rows, self.bounds.row_tokens
        return Decoding(
            self.decoder,
            on_error=lambda row, error: None,
            rows=rows,
            slots=self.decoder.affordable_slots(rows, length),
        )

    def _run(self) -> None:
        try:
            while True:
                self._take_all()
                if self._ending:
                    return
                self._expire()
                self._read()
                if any(text.draft is not None for _, text in self._texts()):
                    self._pass()
        finally:
            for session in self._sessions:
                if session.connection is not None:
                    session.connection.close()

    def _texts(self) -> Iterator[tuple[Session, Text]]:
        for session in self._sessions:
            for text in list(session.texts.values()):
                yield session, text

    def _take_all(self) -> None:
        """Serve all frames that are here. Wait for one if there is nothing else to do."""
        drafts = any(text.draft is not None for _, text in self._texts())
        waits = not drafts and not self._decoding.waiting
        while True:
            try:
                entry = self._inbox.get(waits, self._next_expiry() if waits else None)
            except queue.Empty:
                return
            if entry is None:
                self._ending = True
                return
            waits = False
            self._serve(*entry)

    def _serve(self, connection: Connection, frame: bytes | str | None, arrived: float) -> None:
        if frame is None:
            self._sessions.lose(connection)
            return
        try:
            self._handle(connection, decode(frame, UP), arrived)
        except ProtocolError as error:
            _send_error(connection, error)
        except Exception as error:
            self._begin_anew([], error)
            problem = ProtocolError("failed", f"the server failed at a message: {error}")
            _send_error(connection, problem)
            with suppress(ProtocolError):
                self._sessions.end(self._sessions.of(connection))
            connection.close()

    def _handle(self, connection: Connection, message: Message, arrived: float) -> None:
        kind = message["type"]
        if kind in ("hello", "resume"):
            self._greet(connection, message)
            return
        session = self._sessions.of(connection)
        if kind == "bye":
            for text in session.texts.values():
                self._leave(text)
            self._sessions.end(session)
            connection.close()
        elif kind == "open":
            self._open(session, message)
        elif kind == "ids":
            text = session.text(message)
            text.add(message["ids"])
            self._begin(session, text)
        elif kind == "draft":
            text = session.text(message)
            if max(message["ids"], default=0) >= self.decoder.vocab_size:
                raise ProtocolError(
                    "limit",
                    f"a draft has the id {max(message['ids'])}; expected ids below "
                    f"{self.decoder.vocab_size}",
                    req=text.req,
                    seq=message["seq"],
                )
            stored = text.take(message, self.bounds.max_gamma, arrived)
            if stored is not None:
                session.send(stored)
        elif kind == "cancel" and message["req"] in session.texts:
            self._leave(session.texts.pop(message["req"]))

    def _greet(self, connection: Connection, message: Message) -> None:
        if message["version"] != VERSION:
            found = message["version"]
            raise ProtocolError("version", f"found version {found} of the protocol; {VERSION} here")
        resumed = message["type"] == "resume"
        if resumed:
            session = self._sessions.resume(message["session"], connection)
        else:
            session = self._sessions.begin(connection)
        target = self.target
        session.send(
            encode(
                "welcome",
                version=VERSION,
                session=session.token,
                resumed=resumed,
                rule=self.rule_name,
                lossless=self.rule.lossless,
                couples=self.rule.couples,
                window=self._window(),
                max_positions=self.decoder.lm.max_positions,
                fingerprint=target.fingerprint.to_dict(),
                token_count=target.token_count,
                weights=self._weights,
                kv_seconds=self.bounds.kv_seconds,
                session_seconds=self.bounds.session_seconds,
            )
        )

    def _open(self, session: Session, message: Message) -> None:
        req, length = message["req"], message["length"]
        if req in session.texts:  # again, after the line was broken
            self._leave(session.texts.pop(req))
        if len(session.texts) >= self.bounds.max_texts:
            found = len(session.texts)
            raise ProtocolError("limit", f"the session has {found} texts; cancel some", req=req)
        if not 0 < length < self.decoder.lm.max_positions:
            raise ProtocolError(
                "refused",
                f"the text has {length} ids; expected 1 to {self.decoder.lm.max_positions - 1}",
                req=req,
            )
        if not message["max_tokens"]:
            raise ProtocolError("refused", "max_tokens is 0; expected at least 1", req=req)
        text = session.texts[req] = Text.of(message)
        self._begin(session, text)

    def _begin(self, session: Session, text: Text) -> None:
        """Give a row to a text that has arrived, if one is free: the edge drafts while it is
        read."""
        waits = text.complete and text.row is None and not text.ended
        if waits and len(self._rows) < self.bounds.max_rows:
            self._admit(session, text)

    def _window(self) -> int:
        """How long drafts may be. 0 under load: verdicts of drafts come later than tokens."""
        return 0 if self._crowded else self.bounds.max_gamma

    # --- rows -------------------------------------------------------------------------------------

    def _admit(self, session: Session, text: Text) -> None:
        """Give a row to a text, or refuse it."""
        try:
            (text.row,) = self._decoding.begin(
                [text.ids], text.end - len(text.ids), row_ids=[text.row_id], settings=text.settings
            )
        except Exception as error:  # the other rows are as they were
            self._refuse(session, text, *_reason(error))
            return
        self._rows[text.row] = session, text

    def _read(self) -> None:
        """Read on in the texts of the rows that are not read yet."""
        for row, tokens in self._decoding.shares(self.bounds.prefill_tokens).items():
            if row in self._decoding.waiting:  # an error at one row may take others away
                self._read_on(*self._rows[row], tokens)

    def _read_on(self, session: Session, text: Text, tokens: int) -> None:
        """Read so many tokens of a text into its row, or refuse it."""
        assert text.row is not None
        started = time.monotonic()
        try:
            self._decoding.read(text.row, tokens)
        except Exception as error:  # the other rows are as they were
            self._forget(text)
            self._refuse(session, text, *_reason(error))
            return
        text.read = text.used = time.monotonic()
        text.prefill_s += text.read - started

    def _leave(self, text: Text) -> None:
        """Drop the row of a text."""
        if text.row is None:
            return
        if text.row in self._decoding.rows.numbers or text.row in self._decoding.waiting:
            self._decoding.drop(text.row)
        self._forget(text)

    def _forget(self, text: Text) -> None:
        assert text.row is not None
        del self._rows[text.row]
        self._decoding.outputs.pop(text.row, None)
        self._decoding.errors.pop(text.row, None)
        text.row = None

    def _expire(self) -> None:
        now = time.monotonic()
        for session in self._sessions:
            if session.connection is None and now - session.seen > self.bounds.session_seconds:
                for text in session.texts.values():
                    self._leave(text)
                self._sessions.end(session)
        for _, text in list(self._rows.values()):
            if text.draft is None and now - text.used > self.bounds.kv_seconds:
                self._leave(text)

    def _next_expiry(self) -> float | None:
        """Seconds until something may expire. None: nothing can."""
        now = time.monotonic()
        moments = [text.used + self.bounds.kv_seconds for _, text in self._rows.values()]
        moments += [
            session.seen + self.bounds.session_seconds
            for session in self._sessions
            if session.connection is None
        ]
        first = min(moments, default=math.inf)
        return None if first == math.inf else max(first - now, 0.0) + 0.01

    def _seat(self) -> list[tuple[Session, Text]]:
        """The texts with drafts that have rows and are read. Idle rows leave for those that have
        none, the longest idle first."""
        waiting = [(session, text) for session, text in self._texts() if text.draft is not None]
        waiting.sort(key=lambda entry: entry[1].arrived)
        idle = sorted(
            (text for _, text in self._rows.values() if text.draft is None),
            key=lambda text: -text.used,
        )
        for session, text in waiting:
            if text.row is None and len(self._rows) >= self.bounds.max_rows and idle:
                self._leave(idle.pop())
            if text.row is None and len(self._rows) < self.bounds.max_rows:
                self._admit(session, text)
        self._crowded = any(
            text.row is None and text.req in session.texts for session, text in waiting
        )
        # Only now: a text at which the server failed took all rows away.
        read = set(self._decoding.rows.numbers.tolist())
        return [(session, text) for session, text in waiting if text.row in read]

    def _pass(self) -> None:
        seated = self._seat()
        if not seated:
            return
        started = time.monotonic()
        numbers = self._decoding.rows.numbers
        drafts = {text.row: text.draft for _, text in seated}
        self._drafter.chains = [drafts.get(row) or [] for row in numbers.tolist()]
        taking = np.array([row in drafts for row in numbers.tolist()])
        try:
            self._decoding.step(None if taking.all() else taking)
        except Exception as error:
            self._begin_anew(seated, error)
            return
        step = self._decoding.steps.pop()
        self.passes += 1
        self.drafts += len(seated)
        places = {row: index for index, row in enumerate(step.rows.tolist())}
        seconds = time.monotonic() - started
        for session, text in seated:
            self._answer(session, text, step, places[text.row], started, seconds)

    def _begin_anew(self, failed: list[tuple[Session, Text]], error: Exception) -> None:
        """After an error that leaves the rows in an unknown state: these texts end, and all others
        are read again."""
        logger.error("the decode begins anew", exc_info=error)
        for _, text in self._rows.values():
            text.row = None
        self._rows.clear()
        self._decoding = self._new_decoding()
        for session, text in failed:
            self._refuse(session, text, "failed", f"the server failed at the text: {error}")

    def _refuse(self, session: Session, text: Text, code: str, message: str) -> None:
        """End a text, and say why."""
        session.texts.pop(text.req, None)
        text.draft = None
        if session.connection is not None:
            _send_error(session.connection, ProtocolError(code, message, req=text.req))

    def _answer(
        self,
        session: Session,
        text: Text,
        step: Verification,
        index: int,
        started: float,
        seconds: float,
    ) -> None:
        """Commit what a pass, which took so many seconds, gave to a text, and send the verdict."""
        row = text.row
        if row in self._decoding.errors:
            error = self._decoding.errors[row]
            self._forget(text)
            self._refuse(session, text, "failed", str(error))
            return
        emitted = int(step.emitted[index])
        tokens = step.block[index, :emitted].tolist()
        accepted = min(int(step.accepted[index]), emitted)
        text.commit(tokens)
        text.seq += 1
        text.ended = bool(step.ended[index])
        queued = max(started - max(text.arrived, text.read), 0.0)
        text.verdict = encode(
            "verdict",
            req=text.req,
            seq=text.seq,
            accepted=accepted,
            next=tokens[-1] if emitted > accepted else -1,
            length=len(text.ids),
            hash=text.hash,
            ended=text.ended,
            window=self._window(),
            busy_ms=round(1e3 * (time.monotonic() - text.arrived), 3),
            queue_ms=round(1e3 * queued, 3),
            prefill_ms=round(1e3 * text.prefill_s, 3),
            verify_ms=round(1e3 * seconds, 3),
        )
        text.draft, text.prefill_s, text.used = None, 0.0, time.monotonic()
        session.send(text.verdict)
        if text.ended:
            self._forget(text)


def _reason(error: Exception) -> tuple[str, str]:
    """The code of an error at one text, and its message."""
    if isinstance(error, UserError):
        return "refused", str(error)
    logger.error("a text ends with an error", exc_info=error)
    return "failed", f"the server failed at the text: {error}"


def _send_error(connection: Connection, error: ProtocolError) -> None:
    connection.send(
        encode(
            "error",
            code=error.code,
            message=str(error)[:1000],
            req=error.req,
            seq=error.seq,
            retry_ms=error.retry_ms,
        )
    )
    if error.closes:
        connection.close()
