"""Drafting at the edge against a server: texts, shared passes, bounds. Lines that break are in
`test_edge_lines.py`."""

import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import msgpack
import pytest
from typer.testing import CliRunner
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from decode.base.errors import UserError
from decode.drafters.lookup.ngram import NgramDrafter
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder
from decode.rules.threshold import Threshold
from draftsmith.cli.main import app
from draftsmith.edge.client import summary
from draftsmith.edge.link import Link
from draftsmith.edge.protocol import (
    FRAME_BYTES,
    VERSION,
    encode,
    hash_ids,
)
from draftsmith.edge.verify_server import LinkedEdge
from tests.edge import NEW, PROMPTS, edge, plain_texts, serving, target
from tests.relay import Relay
from tests.tiny import near_drafter, save_tiny, write_rows

GREEDY, SAMPLED = Sampling(), Sampling(0.9, top_p=0.95, repetition_penalty=1.1)


# --- texts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_text_is_that_of_decoding_alone(sampling: Sampling) -> None:
    expected = plain_texts(sampling, seed=3)
    with serving() as server:
        with edge(server.url, sampling=sampling) as client:
            decoded = client.decode(PROMPTS, NEW, seed=3)
            assert decoded.outputs == expected
            assert 0 < decoded.counts.acceptance_rate < 1
            assert sum(one.accepted for one in client.rounds) >= decoded.counts.accepted.sum()
            figures = summary(client.rounds)
            assert figures["rounds"] == decoded.counts.steps == server.verifier.drafts
        for options in (
            {"drafter": NgramDrafter(), "gamma": 2},
            {"policy": "entropy:max_depth=6,flat=0.9"},
            {"policy": "heuristic"},
            {"policy": "cost_model"},
        ):
            with edge(server.url, sampling=sampling, **options) as client:
                assert client.decode(PROMPTS, NEW, seed=3).outputs == expected


def test_threshold_texts_are_those_of_threshold_decoding_alone() -> None:
    rule = "threshold:threshold=0.2"
    alone = Decoder(
        target().model,
        near_drafter(),
        eos_token_ids=target().eos_token_ids,
        rule=rule,
        sampling=SAMPLED,
        first_target=False,
    )
    expected = alone.decode(PROMPTS, NEW, seed=5)
    with serving(rule) as server, edge(server.url, sampling=SAMPLED) as client:
        assert client.decode(PROMPTS, NEW, seed=5).outputs == expected.outputs
        assert not client.decoder.parts.rule.lossless
    assert expected.outputs != plain_texts(SAMPLED, seed=5)


def test_rules_that_need_the_drafters_probabilities_are_refused() -> None:
    with pytest.raises(UserError, match="choose coupled"), serving("speculative"):
        pass


def test_edges_share_passes() -> None:
    seeds = range(4)
    expected = [plain_texts(SAMPLED, seed=seed) for seed in seeds]
    outputs: dict[int, Any] = {}
    with serving() as server, Relay(server.port, rtt=0.02) as relay:

        def run(seed: int) -> None:
            with edge(relay.url, sampling=SAMPLED, gamma=3) as client:
                outputs[seed] = client.decode(PROMPTS, NEW, seed=seed).outputs

        threads = [threading.Thread(target=run, args=(seed,)) for seed in seeds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [outputs[seed] for seed in seeds] == expected
        assert server.verifier.passes < 0.8 * server.verifier.drafts


def test_messages_go_out_at_once() -> None:
    """Nagle's algorithm would hold every second of two verdicts for some 40 ms."""
    with serving() as server, edge(server.url) as client:
        client.decode(PROMPTS[:1], 2)
        (session,) = server.verifier._sessions
        assert isinstance(session.connection, LinkedEdge)
        socket_of_server = session.connection.socket.transport.get_extra_info("socket")
        line = client._lm.link.connection
        assert line is not None
        for end in (socket_of_server, line.socket):
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_more_texts_than_rows_take_turns() -> None:
    expected = plain_texts(SAMPLED, seed=1)
    with serving(max_rows=1) as server, edge(server.url, sampling=SAMPLED) as client:
        assert client.decode(PROMPTS, NEW, seed=1).outputs == expected
        # Under load the server asks for tokens without drafts.
        assert any(one.k == 0 for one in client.rounds)


# --- what the server refuses ----------------------------------------------------------------------


def test_the_key_is_asked_for() -> None:
    with serving(key="secret") as server:
        for key in (None, "wrong"):
            with pytest.raises(UserError, match="refused the key"):
                Link(server.url, key, patience=1).ready()
        with edge(server.url, key="secret") as client:
            assert client.decode(PROMPTS[:1], 2).outputs == [plain_texts(GREEDY)[0][:2]]


HELLO = encode("hello", version=VERSION)


def opened(**changes: Any) -> bytes:
    fields = {
        "req": 0,
        "seq": 0,
        "length": 2,
        "ids": [5, 9],
        "max_tokens": 9,
        "seed": 0,
        "row": 0,
        "sampling": [0.0, 0.0, 1.0, 0.0, 1.0],
    }
    return encode("open", **(fields | changes))


def drafted(**changes: Any) -> bytes:
    fields = {"req": 0, "seq": 1, "length": 2, "hash": hash_ids([5, 9]), "ids": [4]}
    return encode("draft", **(fields | changes))


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([b"\xc1"], "malformed"),
        (["text"], "malformed"),
        ([encode("verdict")], "malformed"),
        ([encode("hello", version="1")], "malformed"),
        ([encode("hello", version=VERSION, more=1)], "malformed"),
        ([encode("hello", version=99)], "version"),
        ([opened()], "session"),
        ([encode("resume", version=VERSION, session="x")], "session"),
        ([HELLO, drafted()], "request"),
        ([HELLO, opened(length=0, ids=[])], "refused"),
        ([HELLO, opened(ids=[5, 400])], "refused"),
        ([HELLO, opened(sampling=[-1.0, 0.0, 1.0, 0.0, 1.0])], "refused"),
        ([HELLO, opened(ids=[5, 9, 3])], "limit"),
        ([HELLO, opened(ids=[-5, 9])], "malformed"),
        ([HELLO, opened(ids=[5]), drafted()], "order"),
        ([HELLO, opened(), drafted(ids=[1] * 99)], "limit"),
        ([HELLO, opened(), drafted(ids=[400])], "limit"),
        ([HELLO, opened(), drafted(hash=1)], "order"),
        ([HELLO, opened(), drafted(length=3)], "order"),
        ([HELLO, opened(), drafted(seq=2)], "order"),
        ([HELLO, opened(seq=5), drafted(seq=4)], "late"),
        ([HELLO, *[opened(req=number) for number in range(20)]], "limit"),
    ],
)
def test_bad_messages_get_one_clear_error(
    frames: list[bytes | str], code: str, shared_server: str
) -> None:
    with connect(shared_server, proxy=None) as line:
        for frame in frames:
            line.send(frame)
        while (answer := msgpack.unpackb(line.recv(60)))["type"] != "error":
            assert answer["type"] == "welcome"
        assert answer["code"] == code
        assert answer["message"]
        if code in ("malformed", "version"):
            with pytest.raises(ConnectionClosed):
                line.recv(60)
    # The others are served.
    with edge(shared_server) as client:
        assert client.decode(PROMPTS[:1], 4).outputs == [plain_texts(GREEDY)[0][:4]]


@pytest.fixture(scope="module")
def shared_server() -> Any:
    with serving() as server:
        yield server.url


def test_frames_over_the_limit_end_the_connection(shared_server: str) -> None:
    with connect(shared_server, proxy=None) as line:
        line.send(b"x" * (FRAME_BYTES + 1))
        with pytest.raises(ConnectionClosed):
            line.recv(60)


def test_a_repeated_draft_gets_its_stored_verdict(shared_server: str) -> None:
    with connect(shared_server, proxy=None) as line:
        for frame in (HELLO, opened(), drafted()):
            line.send(frame)
        _, first = [msgpack.unpackb(line.recv(60)) for _ in range(2)]
        line.send(drafted())
        assert msgpack.unpackb(line.recv(60)) == first
        following = hash_ids([4] * first["accepted"] + [first["next"]], hash_ids([5, 9]))
        assert first["hash"] == following
        line.send(drafted(seq=2, length=first["length"], hash=following))
        assert msgpack.unpackb(line.recv(60))["seq"] == 2
        line.send(drafted())
        assert msgpack.unpackb(line.recv(60))["code"] == "late"


def test_messages_that_come_twice_take_one_session_and_one_row() -> None:
    with serving() as server, connect(server.url, proxy=None) as line:
        more = encode("ids", req=0, ids=[])
        for frame in (HELLO, HELLO, opened(), more, more, drafted()):
            line.send(frame)
        answers = [msgpack.unpackb(line.recv(60)) for _ in range(3)]
        assert answers[0]["session"] == answers[1]["session"]
        assert answers[2]["type"] == "verdict"
        assert len(server.verifier._decoding.rows) == 1


def test_long_prompts_come_and_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.edge.remote_target.FRAME_IDS", 3)
    prompts = [[100], [7, 9, 12, 40, 8, 8, 100] * 4, [7, 9]]
    read: list[int] = []
    with serving(prefill_tokens=3) as server, edge(server.url) as client:
        decoding: Any = server.verifier._decoding
        before = decoding.read
        decoding.read = lambda *args: read.append(before(*args))
        assert client.decode(prompts, NEW).outputs == plain_texts(GREEDY, prompts=prompts)
    assert len(read) > 9
    assert max(read) <= 3


# --- the command -------------------------------------------------------------------


def test_generate_drafts_here_and_verifies_there(tmp_path: Path) -> None:
    directory, rounds = save_tiny(tmp_path / "target"), tmp_path / "rounds.jsonl"
    common = ["generate", "What?", "--target", str(directory), "--drafter", "ngram"]
    common += ["--max-new-tokens", "12"]
    alone = CliRunner().invoke(app, common)
    with serving() as server:
        options = ["--verifier", server.url]
        there = CliRunner().invoke(app, [*common, *options, "--rounds", str(rounds)])
        other = CliRunner().invoke(app, [*common, *options, "--rule", "threshold"])
        heads_at_edge = CliRunner().invoke(app, [*common, *options, "--trace"])
    assert alone.exit_code == there.exit_code == 0, there.output
    assert there.stdout == alone.stdout
    assert "rule coupled" in there.stderr
    lines = [json.loads(line) for line in rounds.read_text("utf-8").splitlines()]
    assert {"k", "accepted", "la_k", "prefill_ms", "verify_ms", "queue_ms", "rtt_ms"} <= {*lines[0]}
    assert other.exit_code == 2
    assert "the verifier judges by coupled" in other.stderr
    assert heads_at_edge.exit_code == 2


def test_the_calibrated_threshold_is_the_servers(tmp_path: Path) -> None:
    directory, prompts = str(save_tiny(tmp_path / "target")), tmp_path / "dev.jsonl"
    write_rows(prompts, [{"prompt": "What?"}])
    command = ["calibrate", "--target", directory, "--drafter", directory, "--thresholds", "0.125"]
    command += ["--prompts", str(prompts), "--max-new-tokens", "8"]
    done = CliRunner().invoke(app, [*command, "--json", str(tmp_path / "figures.json")])
    assert done.exit_code == 0, done.output
    figures = json.loads((tmp_path / "figures.json").read_text("utf-8"))
    with serving(figures["rule"]) as server, edge(server.url) as client:
        assert isinstance(server.verifier.rule, Threshold)
        assert server.verifier.rule.threshold == figures["threshold"] == 0.125
        assert client._lm.link.welcome["rule"] == figures["rule"]
    assert f"--rule {figures['rule']}" in " ".join(done.output.split())


def test_a_server_without_texts_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    with serving() as server:
        monkeypatch.setattr(server.verifier, "_expire", lambda: looks.append(1))
        time.sleep(0.2)
        assert len(looks) <= 1  # one that was under way
    assert server.verifier.passes == 0
