"""The thread that verifies: drafts arrive, share the passes of one decode, and get verdicts."""

import math
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import numpy as np

from decode.base.errors import UserError
from decode.base.registry import Choice
from decode.draft import Contexts, Draft, Limits
from decode.drafters import Drafter
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling
from decode.loop.batcher import Batcher, News
from decode.loop.decoding import Decoder
from decode.loop.parts import Part
from decode.model.identity import sampled_weights_sha256
from decode.model.loading import Target
from decode.rules import RULES, Rule
from decode.rules.coupled import Coupled
from decode.rules.threshold import Threshold
from draftsmith.edge.protocol import UP, VERSION, Message, ProtocolError, decode, encode
from draftsmith.edge.sessions import Connection, EdgeText, Session, SessionBounds, Sessions
from draftsmith.net.few_lines import server_logger

logger = server_logger(__name__)


class ArrivedDrafts(Drafter):
    """Hands out the drafts that arrived. chains: the chains of each running row, in their order."""

    def __init__(self) -> None:
        self.chains: list[list[int]] = []

    def draft(
        self, contexts: Contexts, limits: Limits, sampling: Sampling, rng: CounterRNG
    ) -> Draft:
        return Draft.chosen(self.chains)


def make_verified_rule(rule: Part) -> Rule:
    """The rule of a verifier. Raises UserError for an unknown rule or option, and for a rule that
    judges by the drafter's probabilities, which are not sent."""
    made: Rule = RULES.make(rule)
    if not isinstance(made, Coupled | Threshold):
        raise UserError(
            f"the rule is {rule}; an edge sends token ids alone, so choose coupled (lossless) or "
            "threshold (lossy)"
        )
    return made


class Verifier(Batcher[EdgeText]):
    """Verifies the drafts of many edges in one decode.

    Drafts that arrive during a pass share the next one. Texts without a draft sit it out. The keys
    and values of a text stay for its next draft, and leave when they expire or another text needs
    the row; the text is then read again. Long texts are read in parts, with passes in between.

    An error at one text or message ends that text or session. The other texts are read again.

    target, rule: as for `Decoder`. passes, drafts: how many there were so far. Raises UserError as
    `Decoder` does, and for a rule that judges by the drafter's probabilities, which are not sent.
    """

    bounds: SessionBounds

    def __init__(
        self, target: Target, rule: Part = "coupled", bounds: SessionBounds | None = None
    ) -> None:
        self.target, bounds = target, bounds or SessionBounds()
        self._drafter = ArrivedDrafts()
        decoder = Decoder(
            target.model,
            self._drafter,
            eos_token_ids=target.eos_token_ids,
            gamma=bounds.max_gamma,
            rule=make_verified_rule(rule),
            first_target=False,
        )
        super().__init__(decoder, bounds)
        self.rule = self.decoder.parts.rule
        self.rule_name = str(Choice.of(rule))
        self._weights = ""  # those that are offloaded cannot be compared
        with suppress(UserError):
            self._weights = sampled_weights_sha256(target.model)
        self.passes = self.drafts = 0
        self._sessions = Sessions(bounds, self._end)
        self._crowded = False  # texts with drafts waited for rows in the last pass
        self._start("verify")

    # --- called from other threads ----------------------------------------------------------------

    def put(self, connection: Connection, frame: bytes | str | None) -> None:
        """A frame arrived. None: the line is broken."""
        self.post(partial(self._serve, connection, frame, time.monotonic()))

    @property
    def waiting(self) -> int:
        """How many frames wait."""
        return len(self._calls)

    def end(self) -> None:
        """End after the pass that runs. Raises the error that ended the thread, if it failed."""
        self.drain(0)
        self.done.result()

    # --- messages, in the verifying thread --------------------------------------------------------

    def _serve(self, connection: Connection, frame: bytes | str | None, arrived: float) -> None:
        if frame is None:
            self._sessions.lose(connection)
            return
        try:
            self._handle(connection, decode(frame, UP), arrived)
        except ProtocolError as error:
            _send_error(connection, error)
        except Exception as error:
            self._begin_anew(error, [])
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
            self._end(session)
            return
        if kind == "open":
            self._open(session, message)
        elif kind == "ids":
            text = session.text(message)
            text.require_fit(message["ids"])
            self._add(text, message["ids"])
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
            self._drop(session.texts[message["req"]])
        self._sessions.used(session)

    def _end(self, session: Session) -> None:
        """End a session, its texts and its line."""
        for text in list(session.texts.values()):
            self._drop(text)
        connection = session.connection
        self._sessions.end(session)
        if connection is not None:
            connection.close()

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
            self._drop(session.texts[req])
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
        session.texts[req] = EdgeText.of(session, message, self._drop)
        self._add(session.texts[req], message["ids"])

    def _add(self, text: EdgeText, ids: list[int]) -> None:
        """More ids of a prompt. A text that they have no room for ends."""
        try:
            self._sessions.commit(text, ids)
        except ProtocolError:
            self._drop(text)
            raise
        self._seat(text)

    def _drop(self, text: EdgeText) -> None:
        """End a text, also if its edge does not know. If it asks, it hears that it is unknown, and
        opens it again."""
        self._leave(text)
        text.draft = None
        self._sessions.forget(text)

    def _seat(self, text: EdgeText) -> None:
        """Give a row to a text that has arrived, if one is free: the edge drafts while it is
        read."""
        waits = text.complete and text.row is None and not text.ended
        if waits and len(self._rows) < self.bounds.max_rows:
            left = text.end - len(text.ids)
            self._begin([text], text.ids.tolist(), left, [text.row_id], text.settings)

    def _window(self) -> int:
        """How long drafts may be. 0 under load: verdicts of drafts come later than tokens."""
        return 0 if self._crowded else self.bounds.max_gamma

    # --- rows, in the verifying thread ------------------------------------------------------------

    def _busy(self) -> bool:
        return bool(self._decoding.waiting or any(self._drafted()))

    def _finish(self) -> None:
        for session in self._sessions:
            if session.connection is not None:
                session.connection.close()

    def _drafted(self) -> Iterator[EdgeText]:
        """The texts whose drafts wait for a pass."""
        for session in self._sessions:
            yield from (text for text in session.texts.values() if text.draft is not None)

    def _read_on(self, text: EdgeText, row: int, tokens: int) -> News | None:
        started = time.monotonic()
        news = super()._read_on(text, row, tokens)
        if news is not None:
            text.read = text.used = time.monotonic()
            text.prefill_s += text.read - started
        return news

    def _expire(self) -> None:
        now = time.monotonic()
        for session in self._sessions:
            if session.connection is None and now - session.seen > self.bounds.session_seconds:
                self._end(session)
        for text in list(self._rows.values()):
            if text.draft is None and now - text.used > self.bounds.kv_seconds:
                self._leave(text)

    def _seconds_to_expiry(self) -> float | None:
        now = time.monotonic()
        moments = [text.used + self.bounds.kv_seconds for text in self._rows.values()]
        moments += [
            session.seen + self.bounds.session_seconds
            for session in self._sessions
            if session.connection is None
        ]
        first = min(moments, default=math.inf)
        return None if first == math.inf else max(first - now, 0.0) + 0.01

    def _admit(self) -> None:
        """Give rows to the texts with drafts. Idle rows leave for those that have none, the longest
        idle first."""
        self._expire()
        drafted = sorted(self._drafted(), key=lambda text: text.arrived)
        idle = sorted(
            (text for text in self._rows.values() if text.draft is None),
            key=lambda text: -text.used,
        )
        for text in drafted:
            if text.row is None and len(self._rows) >= self.bounds.max_rows and idle:
                self._leave(idle.pop())
            self._seat(text)
        if drafted:
            self._crowded = any(text.row is None for text in self._drafted())

    def _pass(self) -> None:
        """One pass over the drafts that are here."""
        rows = [self._rows[row] for row in self._decoding.rows.numbers.tolist()]
        taking = np.array([text.draft is not None for text in rows])
        drafted = [text for text in rows if text.draft is not None]
        if not drafted:
            return
        started = time.monotonic()
        self._drafter.chains = [text.draft or [] for text in rows]
        given = self._step(drafted, np.where(taking, self.bounds.max_gamma, -1))
        if given is None:
            return
        step, news = given
        self.passes += 1
        self.drafts += len(drafted)
        accepted = dict(zip(step.rows.tolist(), step.accepted.tolist(), strict=True))
        seconds = time.monotonic() - started
        for text in drafted:
            assert text.row is not None
            self._answer(text, text.row, news, accepted[text.row], started, seconds)

    def _lose(self, rows: dict[int, EdgeText], ran: list[EdgeText], error: Exception) -> None:
        """End the texts of the pass that failed. All others are read again."""
        for text in ran:
            self._refuse(text, "failed", f"the server failed at the text: {error}")

    def _fail(self, text: EdgeText, error: Exception) -> None:
        if isinstance(error, UserError):
            self._refuse(text, "refused", str(error))
        else:
            logger.error("a text ends with an error", exc_info=error)
            self._refuse(text, "failed", f"the server failed at the text: {error}")

    def _refuse(self, text: EdgeText, code: str, message: str) -> None:
        """End a text, and say why."""
        connection = text.session.connection
        self._drop(text)
        if connection is not None:
            _send_error(connection, ProtocolError(code, message, req=text.req))

    def _answer(
        self, text: EdgeText, row: int, news: News, accepted: int, started: float, seconds: float
    ) -> None:
        """Commit what a pass of these seconds gave to a text, and send the verdict."""
        if row in news.failed:
            self._refuse(text, "failed", str(news.failed[row]))
            return
        tokens = news.tokens.get(row, [])
        accepted = min(accepted, len(tokens))
        try:
            self._sessions.commit(text, tokens)
        except ProtocolError as error:
            self._refuse(text, error.code, str(error))
            return
        text.seq += 1
        text.ended = row in news.ended
        queued = max(started - max(text.arrived, text.read), 0.0)
        text.verdict = encode(
            "verdict",
            req=text.req,
            seq=text.seq,
            accepted=accepted,
            next=tokens[-1] if len(tokens) > accepted else -1,
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
        text.session.send(text.verdict)
        self._sessions.used(text.session)
        if text.ended:
            self._leave(text)


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
