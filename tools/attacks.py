"""How long a second client waits for an answer while another one attacks the server.

    python -m tools.attacks [--quick] [--json FILE] [--only WORD]

Each of the four servers runs in this process, with room for a hundredth of what it usually takes,
and each attack comes from another process, from one address and from many. The second client does
its work without the attack and under it, in turn. The table has its median times, and their ratio.
--only: servers and attacks with this word in their names.
"""

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from benchmarks.common import describe_machine
from draftsmith.cli.command import write_json
from tests.attacks import ATTACKS, EDGE_ATTACKS, LIMITS, MINE, SERVERS, Server, attacked, head
from tools.markdown import table
from train.base.console import quieten

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
