"""What the server keeps of each edge: sessions, and the texts that they decode."""

import secrets
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from decode.base.errors import UserError, require_fits
from decode.draw.sampling import Sampling
from decode.loop.batcher import BatchBounds
from decode.loop.rows import RowSettings
from draftsmith.edge.protocol import SAMPLING, Message, ProtocolError, hash_ids
from draftsmith.net.pool import Place, Pool


class Connection(Protocol):
    """The line to an edge. Both methods can be called from any thread. client: who is there, as of
    `net.pool.client_of`."""

    client: str

    def send(self, frame: bytes) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class SessionBounds(BatchBounds):
    """What a server holds at most.

    max_rows: texts whose keys and values are kept. max_sessions: sessions. max_client_sessions:
    those of one client. max_texts: texts of a session. max_ids, max_client_ids: token ids of all
    texts, of 4 bytes, and of those of one client. max_gamma: tokens of a draft. kv_seconds: how
    long the keys and values of a text without drafts are kept. session_seconds: how long a session
    without a connection is kept.

    Raises UserError for a bound that is not positive.
    """

    max_sessions: int = 256
    max_client_sessions: int = 64
    max_texts: int = 16
    max_ids: int = 16 << 20
    max_client_ids: int = 4 << 20
    max_gamma: int = 16
    kv_seconds: float = 60.0
    session_seconds: float = 600.0

    def __post_init__(self) -> None:
        require_fits(lambda value: value > 0, "a number above 0", **vars(self))


@dataclass(eq=False)
class EdgeText:
    """A text of an edge.

    place: in the pool of all token ids. ids: the committed token ids, the prompt included. length:
    how many the prompt has; fewer ids have not all arrived. end: the largest length. row: its row
    in the decode, None without keys and values. hash: the hash of the ids. seq: the number of the
    last draft that was answered. verdict: the frame of that answer. draft: the tokens of the draft
    that waits for a pass, and its number. arrived, read, used: moments of `time.monotonic`: of the
    draft, when the text was in its row, of the last use. prefill_s: seconds of reading the text for
    the next verdict.
    """

    session: "Session"
    req: int
    place: Place
    ids: "array[int]"
    length: int
    end: int
    settings: RowSettings
    row_id: int
    seq: int
    hash: int = 0
    row: int | None = None
    verdict: bytes | None = None
    draft: list[int] | None = None
    ended: bool = False
    arrived: float = 0.0
    read: float = 0.0
    used: float = field(default_factory=time.monotonic)
    prefill_s: float = 0.0

    @classmethod
    def of(
        cls, session: "Session", message: Message, dropped: Callable[["EdgeText"], None]
    ) -> "EdgeText":
        """The text of an `open`, as yet without ids. Raises ProtocolError for sampling that is out
        of range, and for more ids than it has."""
        given = dict(zip(SAMPLING, message["sampling"], strict=True))
        try:
            sampling = Sampling(**given | {"top_k": int(given["top_k"])})
        except UserError as error:
            raise ProtocolError("refused", str(error), req=message["req"]) from None
        text = cls(
            session,
            message["req"],
            Place(session.place.client, lambda: dropped(text)),
            array("i"),
            message["length"],
            message["length"] + message["max_tokens"],
            RowSettings(sampling, message["seed"]),
            message["row"],
            message["seq"],
        )
        text.require_fit(message["ids"])
        return text

    @property
    def complete(self) -> bool:
        """Whether the prompt has arrived."""
        return len(self.ids) >= self.length

    def require_fit(self, ids: list[int]) -> None:
        """Raise ProtocolError for more ids than the prompt lacks."""
        if len(self.ids) + len(ids) > self.length:
            raise ProtocolError(
                "limit",
                f"{len(self.ids) + len(ids)} ids of a prompt of {self.length} arrived",
                req=self.req,
            )

    def commit(self, ids: list[int]) -> None:
        """Append token ids."""
        self.ids.extend(ids)
        self.hash = hash_ids(ids, self.hash)

    def take(self, message: Message, max_gamma: int, arrived: float) -> bytes | None:
        """Let a `draft` wait for a pass. Returns the stored verdict for a draft that was answered.

        Raises ProtocolError for a draft that is not the next one, or too long.
        """
        req, seq, ids = self.req, message["seq"], message["ids"]
        if seq < self.seq:
            raise ProtocolError("late", f"draft {seq} is before {self.seq}", req=req, seq=seq)
        if seq == self.seq and self.verdict is not None:
            return self.verdict
        if seq != self.seq + 1 or self.ended or not self.complete:
            state = "has ended" if self.ended else f"expects draft {self.seq + 1}"
            if not self.complete:
                state = f"lacks {self.length - len(self.ids)} ids of its prompt"
            raise ProtocolError("order", f"found draft {seq}; the text {state}", req=req, seq=seq)
        if (message["length"], message["hash"]) != (len(self.ids), self.hash):
            raise ProtocolError(
                "order",
                f"the draft continues a text of {message['length']} ids, and the text here has "
                f"{len(self.ids)}, or other ids",
                req=req,
                seq=seq,
            )
        if len(ids) > max_gamma:
            raise ProtocolError(
                "limit", f"the draft has {len(ids)} ids; expected at most {max_gamma}", req=req
            )
        if self.draft is None:  # else it arrived twice
            self.draft, self.arrived = ids, arrived
        return None


class Session:
    """An edge. token: its secret name. connection: None while the line is broken, since `seen`.
    place: in the pool of all sessions."""

    def __init__(self, connection: Connection, dropped: Callable[["Session"], None]) -> None:
        self.token = secrets.token_urlsafe(16)
        self.connection: Connection | None = connection
        self.texts: dict[int, EdgeText] = {}
        self.seen = time.monotonic()
        self.place = Place(connection.client, lambda: dropped(self))

    def send(self, frame: bytes) -> None:
        """Send a frame, if there is a line."""
        if self.connection is not None:
            self.connection.send(frame)

    def text(self, message: Message) -> EdgeText:
        """The text that a message is about. Raises ProtocolError if there is none."""
        req = message["req"]
        if req not in self.texts:
            raise ProtocolError(
                "request",
                f"request {req} is unknown; open it first",
                req=req,
                seq=message.get("seq", -1),
            )
        return self.texts[req]

    @property
    def idle_rank(self) -> int | None:
        """Which sessions go first where there is no room for another one: those without a line and
        texts, those without a line, then any whose last message is the oldest. None: it waits for a
        verdict, and stays."""
        if any(text.draft is not None for text in self.texts.values()):
            return None
        if self.connection is None:
            return 1 if self.texts else 0
        return 2


class Sessions:
    """All sessions, by their secret names and by their connections. drop: ends a session that makes
    room for another one."""

    def __init__(self, bounds: SessionBounds, drop: Callable[[Session], None]) -> None:
        self._pool = Pool(bounds.max_sessions, bounds.max_client_sessions)
        self._ids = Pool(bounds.max_ids, bounds.max_client_ids)
        self._drop = drop
        self._by_token: dict[str, Session] = {}
        self._by_connection: dict[Connection, Session] = {}

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_token.values()))

    def __len__(self) -> int:
        return len(self._by_token)

    def of(self, connection: Connection) -> Session:
        """The session of a connection. Raises ProtocolError before `hello`."""
        if connection not in self._by_connection:
            raise ProtocolError("session", "found a message before hello; say hello first")
        return self._by_connection[connection]

    def begin(self, connection: Connection) -> Session:
        """A new session, or the one that this connection has. Raises ProtocolError if all others
        wait for verdicts."""
        if connection in self._by_connection:
            return self._by_connection[connection]
        session = Session(connection, self._drop)
        if not self._pool.take(session.place):
            raise ProtocolError("full", f"{len(self)} sessions are open", retry_ms=1000)
        self._by_token[session.token] = session
        return self._joined(session, connection)

    def resume(self, token: str, connection: Connection) -> Session:
        """The session of this name, on a new line. The old line ends. Raises ProtocolError for a
        name that is unknown, or no longer known."""
        session = self._by_token.get(token)
        if session is None:
            raise ProtocolError("session", "the session is unknown or has expired; say hello")
        if self._by_connection.get(connection) is not session:
            self.lose(connection)
        old = session.connection
        if old is not None and old is not connection:
            self._by_connection.pop(old, None)
            old.close()
        return self._joined(session, connection)

    def _joined(self, session: Session, connection: Connection) -> Session:
        session.connection = connection
        self._by_connection[connection] = session
        self.used(session)
        return session

    def used(self, session: Session) -> None:
        """Something has happened to a session."""
        self._pool.file(session.place, session.idle_rank)
        rank = int(session.connection is not None)
        for text in session.texts.values():
            self._ids.file(text.place, rank if text.draft is None else None)

    def commit(self, text: EdgeText, ids: list[int]) -> None:
        """Append token ids to a text. Those of the oldest idle texts make room. Raises
        ProtocolError if there is none."""
        self._ids.file(text.place, None)
        if not self._ids.take(text.place, len(ids)):
            raise ProtocolError(
                "limit",
                f"no room for {len(ids)} more ids: one client may have {self._ids.each}, all "
                f"{self._ids.in_all}",
                req=text.req,
            )
        text.commit(ids)

    def forget(self, text: EdgeText) -> None:
        """A text has ended. Its memory is free at once, also if something still knows it."""
        self._ids.leave(text.place)
        del text.ids[:]
        if text.session.texts.get(text.req) is text:
            del text.session.texts[text.req]
        self.used(text.session)

    def lose(self, connection: Connection) -> None:
        """The line of a session is broken."""
        session = self._by_connection.pop(connection, None)
        if session is not None:
            session.connection, session.seen = None, time.monotonic()
            self.used(session)

    def end(self, session: Session) -> None:
        """Forget a session."""
        self._pool.leave(session.place)
        self._by_token.pop(session.token, None)
        if session.connection is not None:
            self._by_connection.pop(session.connection, None)
