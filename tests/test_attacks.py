"""Clients that hold what they can of a server, at a hundredth of the size: others go on."""

import asyncio
import contextlib
import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from decode.model.loading import Target
from draftsmith.edge import server as edge_server
from draftsmith.edge.protocol import VERSION, encode
from draftsmith.learn.record import proxy
from draftsmith.net.access import Guard, Paths
from draftsmith.net.body import BodyMemory
from draftsmith.net.limits import ServerLimits
from draftsmith.net.listen import bind
from draftsmith.net.page import FILES
from draftsmith.serve import api
from draftsmith.watch import server as watch_server
from draftsmith.watch.run_state import RunState
from draftsmith.watch.server import WatchServer
from tests import edge, service, upstream
from tests.imports import ROOT
from tests.service import until

KEY = "secret"
# A hundredth of the usual ones, in room. No test waits for these seconds: who is locked out stays
# so until its own ANSWER_SECONDS are over.
LIMITS = ServerLimits(
    connections=10,
    client_connections=6,
    header_seconds=300.0,
    body_seconds=300.0,
    unread_seconds=300.0,
    body_bytes=40_000,
    client_body_bytes=16_000,
    viewers=4,
    client_viewers=2,
)
SECONDS = "header_seconds", "body_seconds", "unread_seconds"
BRIEF = replace(LIMITS, **dict.fromkeys(SECONDS, 0.25))
MANY = 16  # connections of an attack
ANSWER_SECONDS = 60
WORKS = 5  # times that another client does its work meanwhile
COMES = 5  # times that a client connects, at most
HOST = "Host: 127.0.0.1"


@dataclass
class Server:
    """One of the four. paths: which key they ask for. routes: what it answers. post: a path with a
    body. work: what a second client does."""

    port: int
    paths: Paths
    routes: list[str]
    post: str
    work: Callable[[], None]
    stream: str | None = None


def raw(server: Server, request: str, source: str = "127.0.0.1") -> socket.socket:
    """A connection on which this has been sent."""
    line = socket.create_connection(("127.0.0.1", server.port), ANSWER_SECONDS, (source, 0))
    with contextlib.suppress(OSError):  # it may be dropped already
        line.sendall(request.encode())
    return line


def status(server: Server, request: str, source: str = "127.0.0.1") -> int:
    """The status of the answer. A line that is late with its request may be cut to make room, and
    comes again, as clients do."""
    for _ in range(COMES):
        with raw(server, request, source) as line, contextlib.suppress(ConnectionError):
            if answer := line.recv(4096):
                return int(answer.split()[1])
    return 0


def head(method: str, path: str, *fields: str) -> str:
    return "\r\n".join([f"{method} {path} HTTP/1.1", HOST, *fields, "", ""])


OTHER = "127.0.0.99"
GET_HEALTH = head("GET", "/health", "Connection: close")


@contextlib.contextmanager
def serve_server(limits: ServerLimits) -> Iterator[Server]:
    target: Target = service.target()
    options = {"guard": Guard(key=KEY, admin_key="admin"), "limits": limits}
    with service.serving(target, options=options) as running:
        port = int(running.url.rpartition(":")[2])
        routes = [one.path for one in running.service.app().routes if isinstance(one, Route)]
        body = json.dumps(service.chat("Go", max_tokens=2))
        asked = [f"Authorization: Bearer {KEY}", "Content-Type: application/json"]
        asked += ["Connection: close", f"Content-Length: {len(body)}"]
        chat = head("POST", service.CHAT, *asked) + body
        server = Server(port, api.PATHS, routes, service.CHAT, lambda: None, "/live")
        server.work = lambda: require(status(server, chat, OTHER) == 200)
        yield server


@contextlib.contextmanager
def record_server(limits: ServerLimits, directory: Path) -> Iterator[Server]:
    engine = upstream.FakeEngine()
    with (
        upstream.served(engine.app()) as url,
        upstream.recorded(url, directory, limits=limits) as client,
    ):
        server = Server(client.base_url.port, proxy.PATHS, [proxy.ADMIN], "/echo/x", lambda: None)
        post = head("POST", "/echo/x", "Connection: close", "Content-Length: 2") + "{}"
        server.work = lambda: require(status(server, post, OTHER) == 203)
        yield server


@contextlib.contextmanager
def watch_run(limits: ServerLimits, directory: Path) -> Iterator[Server]:
    (directory / "logs").mkdir(parents=True)
    settings = {"name": "trial", "target": {"model": "tiny"}, "stages": []}
    (directory / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    with bind("127.0.0.1", 0) as bound:
        running = WatchServer(RunState(directory), limits=limits)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            until(lambda: running.started)
            port, paths = bound.getsockname()[1], watch_server.PATHS
            server = Server(port, paths, [*FILES, "/live"], "/", lambda: None, "/live")
            page = head("GET", "/", "Connection: close")
            server.work = lambda: require(status(server, page, OTHER) == 200)
            yield server
        finally:
            running.should_exit = True
            thread.join(30)


@contextlib.contextmanager
def verify_server(limits: ServerLimits) -> Iterator[Server]:
    bounds = {"max_sessions": 5, "max_client_sessions": 3}
    with edge.serving(key=KEY, limits=limits, **bounds) as running:
        server = Server(running.port, edge_server.PATHS, ["/"], "/", lambda: None)

        def work() -> None:
            answers: list[bytes] = []
            # As `status` does.
            for _ in range(COMES):
                with contextlib.suppress(ConnectionClosed), edge_line(server, OTHER) as line:
                    line.send(encode("hello", version=VERSION))
                    answers.append(line.recv(ANSWER_SECONDS))
                if answers:
                    break
            assert b"welcome" in answers[0]

        server.work = work
        yield server


def edge_line(server: Server, source: str = "127.0.0.1") -> Any:
    return connect(
        f"ws://127.0.0.1:{server.port}",
        additional_headers={"Authorization": f"Bearer {KEY}"},
        source_address=(source, 0),
        compression=None,
        proxy=None,
    )


def require(holds: bool) -> None:
    assert holds


SERVERS = ["serve", "record", "watch", "verify-server"]


def only(*names: str, fixture: str = "server") -> Any:
    """Marks a test of some of the servers."""
    return pytest.mark.parametrize(fixture, names, indirect=True, scope="module")


def started(
    request: Any, factory: Any, limits: ServerLimits
) -> contextlib.AbstractContextManager[Any]:
    directory = factory.mktemp("server") / "new"
    made: dict[str, Callable[[], Any]] = {
        "serve": lambda: serve_server(limits),
        "record": lambda: record_server(limits, directory),
        "watch": lambda: watch_run(limits, directory),
        "verify-server": lambda: verify_server(limits),
    }
    return made[request.param]()


@pytest.fixture(scope="module", params=SERVERS)
def server(request: Any, tmp_path_factory: Any) -> Iterator[Server]:
    with started(request, tmp_path_factory, LIMITS) as server:
        yield server


@pytest.fixture(scope="module", params=SERVERS)
def brief(request: Any, tmp_path_factory: Any) -> Iterator[Server]:
    """A server that waits for a second."""
    with started(request, tmp_path_factory, BRIEF) as server:
        yield server


# --- keys -----------------------------------------------------------------------------------------


def test_each_path_asks_for_its_key_or_says_why_not(server: Server) -> None:
    odd = ["/x", "/admin/", "/admin/x", "/v1/load_lora_adapter", "/v1/x", "//x", "/%2e", "/metrics"]
    for path in {*server.routes, *server.paths.open, *server.paths.admin, *odd}:
        concrete = path.replace("{rest:path}", "x").replace("{name:path}", "x")
        for upgrade in ([], ["Upgrade: websocket", "Connection: Upgrade", *HANDSHAKE]):
            # From another site's page, which has no key.
            found = status(server, head("GET", concrete, "Connection: close", *upgrade))
            if path in server.paths.open:
                assert server.paths.open[path]
                assert found == 200, path
            elif server.paths.is_admin(concrete) or not server.paths.others:
                assert found == 401, path
    page = (ROOT / "docs/security.md").read_text(encoding="utf-8")
    for reason in (*server.paths.open.values(), server.paths.others):
        assert reason in page


@pytest.fixture
def _no_line(monkeypatch: Any) -> Iterator[None]:
    """A client cannot fill the log either."""
    found, written = [], logging.Logger.callHandlers

    def watched(logger: logging.Logger, record: logging.LogRecord) -> None:
        if record.exc_info or record.name.startswith("uvicorn"):
            found.append(record.getMessage())
        written(logger, record)

    monkeypatch.setattr(logging.Logger, "callHandlers", watched)
    yield
    assert found == []


# --- attacks --------------------------------------------------------------------------------------

HANDSHAKE = ["Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", "Sec-WebSocket-Version: 13"]
MINE = [f"Authorization: Bearer {KEY}"]
UPGRADED = head("GET", "/", "Upgrade: websocket", "Connection: Upgrade", *HANDSHAKE, *MINE)
JSON = [*MINE, "Content-Type: application/json"]
PING, PART, MORE = "\x89\x80\0\0\0\0", "\x02\x80\0\0\0\0", "\0\x80\0\0\0\0"

# What is sent at first, and what then follows, a little at a time. {post}: a path with a body.
ATTACKS = {
    "nothing": ("", ""),
    "headers that drip": ("GET / HTTP/1.1\r\nX: ", "x"),
    "huge headers": ("GET / HTTP/1.1\r\nX: " + 200_000 * "x", "x"),
    "a body that drips": (head("POST", "{post}", *JSON, "Content-Length: 9000") + 7000 * "x", "x"),
    "a body in small parts": (
        head("POST", "{post}", *JSON, "Transfer-Encoding: chunked") + 30_000 * "1\r\nx\r\n",
        "1\r\nx\r\n",
    ),
    "a broken body of a request for headers": (
        head("HEAD", "{post}", *JSON, "Transfer-Encoding: chunked") + "x\r\n",
        "x",
    ),
    "a body that is refused": (head("POST", "{post}", "Content-Length: 9000"), "x"),
    "a body that never begins": (
        head("POST", "{post}", *JSON, "Content-Length: 9000", "Expect: 100-continue"),
        "",
    ),
    "an idle connection after an answer": (head("GET", "/health"), ""),
    "many requests at once": (500 * head("GET", "/health"), ""),
    "half a handshake": ("GET / HTTP/1.1\r\nUpgrade: websocket\r\n", "X: y\r\n"),
    "a handshake and no message": (UPGRADED, PING),
    "a message without an end": (UPGRADED + PART, MORE),
    "half a frame": (UPGRADED + PART + MORE + "\x82\xfe\xff", ""),
}


@contextlib.contextmanager
def attacked(server: Server, first: str, then: str) -> Iterator[list[socket.socket]]:
    """Many connections of one address, and as many of many addresses, which all do this."""
    first = first.replace("{post}", server.post)
    sources = MANY * ["127.0.0.1"] + [f"127.0.0.{10 + number}" for number in range(MANY)]
    address = "127.0.0.1", server.port
    lines = [socket.create_connection(address, 10, (one, 0)) for one in sources]
    over = threading.Event()

    def send(line: socket.socket, data: str) -> None:
        with contextlib.suppress(OSError):
            line.send(data.encode("latin-1"))

    def drip() -> None:
        while not over.wait(0.05):
            for line in lines:
                send(line, then)

    for line in lines:
        line.setblocking(False)
        send(line, first)
    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        yield lines
    finally:
        over.set()
        dripping.join()
        for line in lines:
            line.close()


def ended(line: socket.socket) -> bool:
    """Whether the server has closed a connection."""
    try:
        while line.recv(1 << 16):
            pass
        return True
    except BlockingIOError:
        return False
    except OSError:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one loopback address")
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.usefixtures("_no_line")
def test_one_client_does_not_stop_the_others(server: Server, attack: str) -> None:
    with attacked(server, *ATTACKS[attack]):
        for _ in range(WORKS):
            server.work()
            assert status(server, GET_HEALTH, OTHER) == 200
        assert status(server, GET_HEALTH) == 200


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one loopback address")
@only("serve", "record", "verify-server", fixture="brief")  # watch reads as serve does
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.usefixtures("_no_line")
def test_no_attack_lasts_whatever_it_goes_on_to_send(brief: Server, attack: str) -> None:
    with attacked(brief, *ATTACKS[attack]) as lines:
        until(lambda: all(ended(line) for line in lines))


@only("verify-server")
@pytest.mark.parametrize("ends", [False, True], ids=["and stay", "and go"])
def test_edges_that_come_do_not_lock_others_out(server: Server, ends: bool) -> None:
    with contextlib.ExitStack() as lines:
        for number in range(MANY):
            line = lines.enter_context(edge_line(server, f"127.0.0.{10 + number % 4}"))
            line.send(encode("hello", version=VERSION))
            assert b"welcome" in line.recv(ANSWER_SECONDS)
            if ends:
                line.close()
        server.work()


FRAMES = {"pings": PING, "pongs": "\x8a\x80\0\0\0\0", "empty messages": "\x82\x80\0\0\0\0"}


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one loopback address")
@only("verify-server")
@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES)
def test_frames_of_one_client_are_read_at_a_pace(
    server: Server, frame: str, monkeypatch: Any
) -> None:
    read, of_event = [], edge_server.EdgeConnection.process_event

    def process_event(self: Any, event: Any) -> None:
        read.append(event)
        of_event(self, event)

    monkeypatch.setattr(edge_server.EdgeConnection, "process_event", process_event)
    begin = time.monotonic()
    with attacked(server, UPGRADED, 1000 * frame):
        for _ in range(WORKS):
            server.work()
        until(lambda: len(read) > MANY)
    # That of each of the attack's addresses, with what it has saved, and the first piece.
    each = LIMITS.client_frames * (time.monotonic() - begin + 1) + edge_server.PIECE_BYTES / 6
    assert len(read) < (MANY + 2) * each


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one loopback address")
@only("serve", "watch")
def test_streams_without_an_end_leave_room_for_others(server: Server) -> None:
    assert server.stream is not None
    first = head("GET", server.stream, f"Authorization: Bearer {KEY}", "Connection: close")
    with attacked(server, first, "") as lines:
        for _ in range(WORKS):
            server.work()
        until(lambda: sum(not ended(line) for line in lines) <= LIMITS.viewers)


class Pieces:
    """An answer of pieces of 64 KiB. left: the client has gone, or was cut."""

    def __init__(self, count: int, seconds: float) -> None:
        self.count, self.seconds, self.left = count, seconds, False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return
        await asyncio.sleep(self.seconds)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        sending = asyncio.create_task(self._send(send))
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left = not sending.done()
        await sending

    async def _send(self, send: Any) -> None:
        for number in range(self.count):
            await asyncio.sleep(self.seconds / self.count)
            more = number + 1 < self.count
            await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": more})


SHORT = replace(LIMITS, header_seconds=0.5, body_seconds=0.5, unread_seconds=2.0)


def test_what_works_for_its_client_is_not_cut() -> None:
    """An answer that waits and then takes many times as long as each limit, read slowly."""
    app = Pieces(20, 2.5)
    with upstream.served(app, limits=SHORT) as url:
        port = int(url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), 10) as line:
            line.sendall(head("GET", "/").encode())
            crowd = [socket.create_connection(("127.0.0.1", port), 10) for _ in range(MANY)]
            received = 0
            while received < 20 << 16:
                piece = line.recv(1 << 15)
                assert piece
                received += len(piece)
                time.sleep(0.06)
            assert not app.left
            for one in crowd:
                one.close()


def test_a_client_that_never_reads_is_cut() -> None:
    app = Pieces(1000, 0.1)
    with upstream.served(app, limits=SHORT) as url:
        port = int(url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), 10) as line:
            line.sendall(head("GET", "/").encode())
            until(lambda: app.left)


def test_a_full_memory_takes_the_oldest_unfinished_body(tmp_path: Path, monkeypatch: Any) -> None:
    memory = BodyMemory(LIMITS)
    monkeypatch.setattr(proxy, "BodyMemory", lambda limits: memory)
    with (
        upstream.served(upstream.FakeEngine().app()) as url,
        upstream.recorded(url, tmp_path, limits=LIMITS) as client,
    ):
        server = Server(client.base_url.port, proxy.PATHS, [], "/echo/x", lambda: None)
        unfinished = head("POST", "/echo/x", "Content-Length: 7000") + 6000 * "x"
        lines = []
        for number in range(3):
            until(lambda count=number: memory.pool.size == 6000 * count)
            lines.append(raw(server, unfinished))
        assert lines[0].recv(4096).split()[1] == b"503"
        for line in lines[1:]:
            line.sendall(1000 * b"x")
            assert line.recv(4096).split()[1] == b"203"
        for line in lines:
            line.close()


@only("serve", "record", fixture="brief")
def test_a_body_that_comes_too_slowly_is_refused_with_words(brief: Server) -> None:
    request = head("POST", brief.post, *JSON, "Content-Length: 9000") + "{"
    answer = b""
    for _ in range(COMES):  # as `status`
        with raw(brief, request) as line, contextlib.suppress(ConnectionError):
            answer = b"".join(iter(lambda line=line: line.recv(4096), b""))
        if answer:
            break
    assert answer.split()[1] == b"408"
    assert b"did not arrive in" in answer
