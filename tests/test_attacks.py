"""Clients that hold what they can of a server, at a hundredth of the size: others go on."""

import asyncio
import contextlib
import gc
import logging
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2
import msgpack
import pytest
from starlette.responses import PlainTextResponse
from websockets.sync.client import connect

from decode.base.errors import UserError
from decode.draw.sampling import Sampling
from draftsmith.edge import verify_server as edge_server
from draftsmith.edge.protocol import VERSION, encode
from draftsmith.edge.sessions import EdgeText
from draftsmith.learn.record import proxy
from draftsmith.net import few_lines
from draftsmith.net.body import BodyMemory
from draftsmith.net.limits import ServerLimits
from tests import edge, upstream
from tests.service import until
from tests.tiny import shortened, tiny_target
from tools.attacks import (
    ANSWER_SECONDS,
    ATTACKS,
    EDGE_ATTACKS,
    GET_HEALTH,
    HANDSHAKE,
    HELLO,
    IDS,
    JSON,
    KEY,
    LIMITS,
    LONG,
    MANY,
    OTHER,
    SERVERS,
    Server,
    attacked,
    edge_line,
    head,
    raw,
    status,
    text_of,
)
from tools.imports import ROOT, tracked

# `record` and `watch` read requests as `serve` does.
KINDS = ["serve", "verify-server"]
BRIEFLY = shortened(["serve", "record", "verify-server"], KINDS)
WORKS = 5  # times that another client does its work meanwhile
SECONDS = "header_seconds", "body_seconds", "unread_seconds"
BRIEF = replace(LIMITS, **dict.fromkeys(SECONDS, 0.4))


def only(*names: str, fixture: str = "server") -> Any:
    """Marks a test of some of the servers."""
    return pytest.mark.parametrize(fixture, names, indirect=True, scope="module")


def started(
    request: Any, factory: Any, limits: ServerLimits
) -> contextlib.AbstractContextManager[Server]:
    return SERVERS[request.param](limits, factory.mktemp("server") / "new")


@pytest.fixture(scope="module", params=SERVERS)
def server(request: Any, tmp_path_factory: Any) -> Iterator[Server]:
    with started(request, tmp_path_factory, LIMITS) as server:
        yield server


@pytest.fixture(scope="module", params=SERVERS)
def brief(request: Any, tmp_path_factory: Any) -> Iterator[Server]:
    """A server that hardly waits."""
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


def test_lines_of_one_kind_are_few(monkeypatch: Any, caplog: Any) -> None:
    for file in tracked("draftsmith"):
        if file.startswith(("draftsmith/serve", "draftsmith/edge", "draftsmith/learn/record")):
            assert "getLogger" not in (ROOT / file).read_text(encoding="utf-8"), file
    now = 0.0
    monkeypatch.setattr(few_lines, "monotonic", lambda: now)
    log = few_lines.server_logger("draftsmith.of-a-test")
    for number in range(2 * few_lines.LINES):
        log.warning("request %d", number)
    log.warning("something else")
    now = few_lines.SECONDS
    log.warning("request %d", 99)
    *few, other, last = [record.getMessage() for record in caplog.records]
    assert few == [f"request {number}" for number in range(few_lines.LINES)]
    assert other == "something else"
    assert last == f"request 99 ({few_lines.LINES} more such lines were left out before)"


# --- attacks --------------------------------------------------------------------------------------


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
@only(*shortened(SERVERS, KINDS))
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.usefixtures("_no_line")
def test_one_client_does_not_stop_the_others(server: Server, attack: str) -> None:
    with attacked(server, *ATTACKS[attack]):
        for _ in range(WORKS):
            server.work()
            assert status(server, GET_HEALTH, OTHER) == 200
        assert status(server, GET_HEALTH) == 200


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one loopback address")
@only(*BRIEFLY, fixture="brief")
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


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one loopback address")
@only("verify-server")
@pytest.mark.parametrize("attack", EDGE_ATTACKS)
def test_frames_of_one_client_are_read_at_a_pace(
    server: Server, attack: str, monkeypatch: Any
) -> None:
    """A frame counts by its size too: 12,000 token ids take as long as a verdict."""
    read, of_event = list[int](), edge_server.EdgeConnection.process_event

    def process_event(self: Any, event: Any) -> None:
        read.append(1 + len(getattr(event, "data", "")) // edge_server.COUNTED_BYTES)
        of_event(self, event)

    monkeypatch.setattr(edge_server.EdgeConnection, "process_event", process_event)
    begin = time.monotonic()
    with attacked(server, *EDGE_ATTACKS[attack]):
        for _ in range(WORKS):
            server.work()
        until(lambda: sum(read) > MANY)
    # That of each of the attack's addresses, with what it has saved, and the first piece.
    each = LIMITS.client_frames * (time.monotonic() - begin + 1) + edge_server.PIECE_BYTES / 6
    assert sum(read) < (MANY + 2) * each


@dataclass(eq=False)
class Edge:
    """A line of an edge."""

    client: str
    sent: list[Any] = field(default_factory=list)

    def send(self, frame: bytes) -> None:
        self.sent.append(msgpack.unpackb(frame))

    def close(self) -> None:
        self.sent.append({"type": "closed"})


@pytest.mark.parametrize("clients", [1, 8])
def test_ids_of_texts_are_bounded(clients: int) -> None:
    """Each client sends twice what all may have, in texts that never begin."""
    with edge.serving(served=tiny_target(max_positions=LONG + 1), **IDS) as running:
        verifier, other = running.verifier, Edge("other")
        pool = verifier._sessions._ids

        def put(line: Edge, *frames: bytes) -> None:
            for frame in frames:
                verifier.put(line, frame)
            handled = threading.Event()
            verifier.post(handled.set)
            assert handled.wait(60)

        put(other, HELLO, text_of(0))
        before, names = other.sent.copy(), [f"{clients} attackers: {n}" for n in range(clients)]
        for name in names:
            for _ in range(5):
                put(Edge(name), HELLO, *map(text_of, range(16)))
        texts = [text for session in verifier._sessions for text in session.texts.values()]
        assert pool.size == sum(len(text.ids) for text in texts)
        # All have taken what they may, and no more.
        full = min(clients * IDS["max_client_ids"], IDS["max_ids"])
        assert full - LONG < pool.size <= full + LONG
        # Four bytes each, also with the texts that have ended and are not collected yet.
        found = (one for one in gc.get_objects() if type(one) is EdgeText)  # some are weak proxies
        every = [text for text in found if text.session.place.client in names]
        assert sum(sys.getsizeof(text.ids) for text in every) < 4.5 * pool.size + 100 * len(every)
        # The text of another one is there, and can use its share.
        put(other, encode("ids", req=0, ids=[5]), *map(text_of, range(1, 9)))
        assert other.sent == before


def test_a_client_whose_own_text_has_no_room_hears_it() -> None:
    with edge.serving(max_client_ids=12, max_ids=40) as running, edge.edge(running.url) as client:
        with pytest.raises(UserError, match="no room for 13 more ids: one client may have 12"):
            client.decode([13 * [5]], 4)
        with pytest.raises(UserError, match="no room"):
            client.decode([4 * [5]], 40)
        assert len(client.decode([4 * [5]], 8).outputs[0]) == 8
        until(lambda: running.verifier._sessions._ids.size == 0)
        # Texts that wait for their edge make room, and go on when it comes back.
        with edge.edge(running.url) as second:

            def meanwhile(row: int, tokens: list[int]) -> None:
                if not done:
                    done.extend(second.decode([4 * [6]], 4).outputs)

            done: list[list[int]] = []
            expected = edge.plain_texts(Sampling(), prompts=[4 * [5]])[0][:8]
            assert client.decode([4 * [5]], 8, on_tokens=meanwhile).outputs == [expected]
        assert done


@pytest.mark.parametrize(
    ("trusted", "client"), [(None, "127.0.0.1"), ("10.0.0.0/8,127.0.0.1", "192.0.2.7")]
)
def test_proxies_are_believed_if_they_are_named(
    trusted: str | None, client: str, monkeypatch: Any
) -> None:
    monkeypatch.delenv("FORWARDED_ALLOW_IPS", raising=False)
    if trusted is not None:
        monkeypatch.setenv("FORWARDED_ALLOW_IPS", trusted)
    told = {"X-Forwarded-For": "198.51.100.1, 192.0.2.7, 10.0.0.3"}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse(scope["client"][0])(scope, receive, send)

    with upstream.served(app, limits=LIMITS) as url:
        assert httpx2.get(url, headers=told, trust_env=False).text == client
    with (
        edge.serving() as running,
        connect(running.url, additional_headers=told, proxy=None) as line,
    ):
        line.send(HELLO)
        line.recv(ANSWER_SECONDS)
        (session,) = running.verifier._sessions
        assert session.place.client == client


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


SHORT = replace(LIMITS, header_seconds=0.3, body_seconds=0.3, unread_seconds=1.0)


def test_what_works_for_its_client_is_not_cut() -> None:
    """An answer that waits and then takes many times as long as each limit, read slowly."""
    app = Pieces(20, 1.5)
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
                time.sleep(0.04)
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
    with raw(brief, request) as line:
        answer = b"".join(iter(lambda: line.recv(4096), b""))
    assert answer.split()[1] == b"408"
    assert b"the body did not arrive in" in answer
