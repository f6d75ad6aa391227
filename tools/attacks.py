"""How long a second client waits for an answer while another one attacks the server.

    python -m tools.attacks [--quick] [--json FILE] [--only WORD]

Each of the four servers runs in this process, with room for a hundredth of what it usually takes,
and each attack comes from another process, from one address and from many. The second client does
its work without the attack and under it, in turn. The table has its median times, and their ratio.
--only: servers and attacks with this word in their names. `tests/test_attacks.py` holds these
attacks against the limits.
"""

import argparse
import contextlib
import itertools
import json
import multiprocessing
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from starlette.routing import Route
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from benchmarks.common import describe_machine
from decode.model.loading import Target
from draftsmith.cli.command import write_json
from draftsmith.edge import verify_server as edge_server
from draftsmith.edge.protocol import VERSION, encode
from draftsmith.learn.record import proxy
from draftsmith.net.access import Guard, Paths
from draftsmith.net.limits import ServerLimits
from draftsmith.net.listen import bind
from draftsmith.net.page import FILES
from draftsmith.serve import api
from draftsmith.watch import watch_server
from draftsmith.watch.run_state import RunState
from draftsmith.watch.watch_server import WatchServer
from tests import edge, service, upstream
from tests.service import until
from tests.tiny import tiny_target
from tools.markdown import table
from train.base.console import quieten

KEY = "secret"
# A hundredth of the usual ones, in room. Nobody waits for these seconds: who is locked out stays so
# until its own ANSWER_SECONDS are over.
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
IDS = {"max_ids": 160_000, "max_client_ids": 40_000}  # of texts of edges
LONG = 4_000  # ids of one of their texts
MANY = 16  # connections of an attack
ANSWER_SECONDS = 60
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
    bounds = {"max_sessions": 5, "max_client_sessions": 3} | IDS
    long = tiny_target(max_positions=LONG + 1)
    with edge.serving(served=long, key=KEY, limits=limits, **bounds) as running:
        server = Server(running.port, edge_server.PATHS, ["/"], "/", lambda: None)
        # One address would wait for the pace of its own frames, which is a hundredth too.
        others = itertools.cycle([f"127.0.0.{number}" for number in range(60, 100)])

        def work() -> None:
            answers, source = [], next(others)
            # As `status` does.
            for _ in range(COMES):
                with contextlib.suppress(ConnectionClosed), edge_line(server, source) as line:
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


SERVERS: dict[str, Callable[[ServerLimits, Path], contextlib.AbstractContextManager[Server]]] = {
    "serve": lambda limits, directory: serve_server(limits),
    "record": record_server,
    "watch": watch_run,
    "verify-server": lambda limits, directory: verify_server(limits),
}

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


FRAMES = {"pings": PING, "pongs": "\x8a\x80\0\0\0\0", "empty messages": "\x82\x80\0\0\0\0"}


def text_of(req: int, missing: int = 1) -> bytes:
    """The message of an edge that opens a text of which so many ids never come."""
    ids = (LONG - missing) * [5]
    text = {"length": LONG, "ids": ids, "max_tokens": 9, "seed": 0, "row": 0}
    return encode("open", req=req, seq=0, **text, sampling=[0.0, 0.0, 1.0, 0.0, 1.0])


def framed(message: bytes) -> str:
    """A message as one frame of a WebSocket, of 126 to 65,535 bytes, with a mask of zeros."""
    return (b"\x82\xfe" + len(message).to_bytes(2, "big") + bytes(4) + message).decode("latin-1")


HELLO = encode("hello", version=VERSION)
TEXTS = "".join(framed(text_of(req)) for req in range(16))
# On verify-server alone.
EDGE_ATTACKS = {name: (UPGRADED, 1000 * frame) for name, frame in FRAMES.items()}
EDGE_ATTACKS["texts of many ids"] = (
    UPGRADED + f"\x82{chr(128 + len(HELLO))}\0\0\0\0" + HELLO.decode("latin-1") + TEXTS,
    TEXTS,
)


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


ROUNDS, TIMES = 3, 60
ALLOWED = 2.0  # times the usual answer time


def attacks_of(server: Server, name: str) -> dict[str, tuple[str, str]]:
    """What is sent at first, and what then follows, by attack."""
    found = dict(ATTACKS)
    if server.stream is not None:
        found["streams without an end"] = head("GET", server.stream, *MINE, "Connection: close"), ""
    if name == "verify-server":
        found |= EDGE_ATTACKS
    return found


def attack_for(orders: Connection) -> None:
    """Attack as ordered, each time until the next message. This is what the other process does."""
    for port, paths, post, first, then in iter(orders.recv, None):
        with attacked(Server(port, paths, [], post, lambda: None), first, then):
            orders.send("begun")
            orders.recv()
        orders.send("ended")


@contextmanager
def attacker() -> Iterator[Connection]:
    """The other process."""
    spawning = multiprocessing.get_context("spawn")
    orders, its_end = spawning.Pipe()
    process = spawning.Process(target=attack_for, args=(its_end,))
    process.start()
    try:
        yield orders
        orders.send(None)
        process.join(30)
    finally:
        process.kill()


def seconds_of(server: Server, times: int) -> list[float]:
    """How long the second client's work takes."""
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        server.work()
        taken.append(time.perf_counter() - begin)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few answers")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--only", default="", help="a part of a name")
    chosen = parser.parse_args()
    rounds, times = (1, 10) if chosen.quick else (ROUNDS, TIMES)
    quieten()
    rows = []
    with tempfile.TemporaryDirectory() as made, attacker() as orders:
        for name, make in SERVERS.items():
            with make(LIMITS, Path(made) / name) as server:
                seconds_of(server, times)
                for attack, sent in attacks_of(server, name).items():
                    if chosen.only not in f"{name} {attack}":
                        continue
                    usual, under = [], []
                    for _ in range(rounds):
                        usual += seconds_of(server, times)
                        orders.send((server.port, server.paths, server.post, *sent))
                        orders.recv()
                        under += seconds_of(server, times)
                        orders.send("end")
                        orders.recv()
                    ratio = median(under) / median(usual)
                    rows.append((name, attack, usual, under, ratio))
                    print(f"{name}: {attack}: {ratio:.2f}", flush=True)
    titles = ["server", "attack", "usual ms", "under it ms", "ratio"]
    cells = [
        [name, attack, f"{1e3 * median(usual):.2f}", f"{1e3 * median(under):.2f}", f"{ratio:.2f}"]
        for name, attack, usual, under, ratio in rows
    ]
    print("\n".join(table(titles, cells)))
    above = sum(ratio > ALLOWED for *_, ratio in rows)
    print(f"{above} of {len(rows)} above {ALLOWED:g}")
    keys = ("server", "attack", "usual_seconds", "attacked_seconds", "ratio")
    figures = [dict(zip(keys, row, strict=True)) for row in rows]
    write_json(chosen.json, {"machine": describe_machine(), "attacks": figures})


if __name__ == "__main__":
    main()
