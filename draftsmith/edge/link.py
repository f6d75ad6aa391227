"""The line from an edge to a verification server, which is made again when it breaks."""

import json
import socket
import time
from contextlib import ExitStack, suppress
from typing import Any

from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.sync.client import ClientConnection, connect

from decode.base.errors import UserError
from draftsmith.edge.protocol import (
    DOWN,
    FRAME_BYTES,
    VERSION,
    Message,
    ProtocolError,
    decode,
    encode,
)

FIRST_WAIT, LONGEST_WAIT = 0.05, 2.0  # seconds between two attempts to connect
# Fields of the welcome that must stay as they were. A text that goes on under another rule, or with
# another target, is a mixture of two texts.
LASTING = ("rule", "lossless", "couples", "max_positions", "token_count", "fingerprint", "weights")


class LinkLost(Exception):
    """The line is broken, or nothing came over it for too long."""


class Link:
    """A session with a verification server.

    url: ws://HOST:PORT, or wss:// through a proxy. key: sent as `Authorization: Bearer KEY`.
    patience: seconds without an answer until the edge gives up. stall: seconds without an answer
    until the line counts as broken; a new one then resumes the session.

    welcome: what the server said of itself. session: its name; another one after the server has
    forgotten the first. connection: None while the line is broken.
    """

    def __init__(
        self, url: str, key: str | None = None, *, patience: float = 60.0, stall: float = 15.0
    ) -> None:
        if not url.startswith(("ws://", "wss://")):
            raise UserError(f"the verifier is {url!r}; expected ws://HOST:PORT or wss://HOST:PORT")
        for name, value in (("patience", patience), ("stall", stall)):
            if not value > 0:
                raise UserError(f"{name} is {value}; expected seconds above 0")
        self.url, self.patience, self.stall = url, patience, stall
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.welcome: Message = {}
        self.connection: ClientConnection | None = None
        self._closing = ExitStack()

    @property
    def session(self) -> str:
        return str(self.welcome.get("session", ""))

    def ready(self, deadline: float | None = None) -> None:
        """Connect if there is no line, and resume the session or begin one.

        deadline: the deadline of `time.monotonic`. None: after `patience`. Raises UserError if the
        server cannot be reached until then, refuses the key, speaks another version, or after a
        break has another rule or target than before it.
        """
        deadline = time.monotonic() + self.patience if deadline is None else deadline
        wait = FIRST_WAIT
        while self.connection is None:
            try:
                self._connect(deadline)
            except LinkLost as error:
                self.lose()
                if time.monotonic() + wait > deadline:
                    raise UserError(
                        f"the verifier {self.url} does not answer ({error}); start it with "
                        "`draftsmith verify-server`, or check the address"
                    ) from None
                time.sleep(wait)
                wait = min(2 * wait, LONGEST_WAIT)

    def _connect(self, deadline: float) -> None:
        seconds = max(min(self.stall, deadline - time.monotonic()), 0.1)
        try:
            self.connection = self._closing.enter_context(
                connect(
                    self.url,
                    additional_headers=self._headers,
                    max_size=FRAME_BYTES,
                    compression=None,
                    open_timeout=seconds,
                    close_timeout=0.2,
                    proxy=None,
                )
            )
        except InvalidStatus as error:
            status = error.response.status_code
            if status == 401:
                raise UserError(
                    f"the verifier {self.url} refused the key; give the key it was started with"
                ) from None
            if status in (403, 404):
                raise UserError(
                    f"the verifier {self.url} refused the call: {_reason(error.response.body)}"
                ) from None
            raise LinkLost(f"status {status}") from None
        except InvalidURI as error:
            raise UserError(f"the verifier's address is wrong: {error}") from None
        except (OSError, InvalidHandshake, TimeoutError, EOFError) as error:
            raise LinkLost(str(error) or type(error).__name__) from None
        kind, name = ("resume", {"session": self.session}) if self.welcome else ("hello", {})
        self.send(kind, version=VERSION, **name)
        answer = self.receive()
        if answer["type"] == "error" and answer["code"] == "session":
            self.send("hello", version=VERSION)
            answer = self.receive()
        if answer["type"] == "error" and not answer["retry_ms"]:
            self.lose()
            raise UserError(f"the verifier {self.url}: {answer['message']}")
        if answer["type"] != "welcome":
            raise LinkLost(answer.get("message", f"found {answer['type']}; expected welcome"))
        self._require_same(answer)
        self.welcome = answer

    def _require_same(self, welcome: Message) -> None:
        before = self.welcome or welcome
        changed = [
            f"{name} was {before[name]!r:.80}, now {welcome[name]!r:.80}"
            for name in LASTING
            if welcome[name] != before[name]
        ]
        if changed:
            self.close()
            raise UserError(
                f"the verifier {self.url} came back with another rule or target: "
                f"{'; '.join(changed)}. Start it as it was, or begin the text again"
            )

    def lose(self) -> None:
        """Give up the line, not the session."""
        connection, self.connection = self.connection, None
        if connection is not None:
            # Else closing it waits for the other side.
            with suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RDWR)
            self._closing.close()

    def send(self, kind: str, **fields: Any) -> int:
        """Send a message. Returns its bytes. Raises LinkLost."""
        frame = encode(kind, **fields)
        if self.connection is None:
            raise LinkLost("there is no line")
        try:
            self.connection.send(frame)
        except (ConnectionClosed, OSError) as error:
            raise LinkLost(str(error)) from None
        return len(frame)

    def receive(self) -> Message:
        """The next message, with its `bytes`. Raises LinkLost, also if none comes in time or what
        comes is no message."""
        if self.connection is None:
            raise LinkLost("there is no line")
        try:
            frame = self.connection.recv(self.stall)
            return decode(frame, DOWN) | {"bytes": len(frame)}
        except TimeoutError:
            raise LinkLost(f"nothing came in {self.stall:g} s") from None
        except (ConnectionClosed, OSError, ProtocolError) as error:
            raise LinkLost(str(error)) from None

    def close(self) -> None:
        """End the session."""
        if self.connection is None:
            return
        with suppress(LinkLost):
            self.send("bye")
        self.connection = None
        self._closing.close()


def _reason(body: bytes | bytearray) -> str:
    """What a server says with an error status. A proxy before it may say it in another way."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return bytes(body).decode("utf-8", "replace").strip()[:200]
