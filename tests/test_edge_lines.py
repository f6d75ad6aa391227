"""Lines between an edge and its server that break, stall or are slow, and servers that fail or are
started again: the text is that of an unbroken line, or there is one clear error."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgpack
import pytest
import torch
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from decode.base.errors import UserError
from decode.draft import Contexts, Draft, Limits
from decode.drafters.small_lm import SmallLMDrafter
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling
from draftsmith.edge.link import Link
from draftsmith.edge.protocol import DOWN, UP, VERSION, encode
from tests.edge import NEW, PROMPTS, Serving, edge, plain_texts, serving
from tests.relay import Fate, Relay
from tests.tiny import near_drafter, tiny_target

GREEDY, SAMPLED = Sampling(), Sampling(0.9, top_p=0.95, repetition_penalty=1.1)
RESTARTS = {"restart before": "cut before", "restart after": "cut after"}


@dataclass
class Trouble:
    """Gives fates to some messages through a relay, which it must be given.

    events: in their order: the kind of a message, how many of this kind pass before it, and its
    fate. A restart cuts the line and lets the relay go on to the next of `ports`, a server that
    knows nothing of the texts.
    """

    events: list[tuple[str, int, str]]
    ports: list[int] = field(default_factory=list)
    relay: Relay | None = None

    def __call__(self, frame: bytes, up: bool) -> Fate:
        if not self.events or msgpack.unpackb(frame)["type"] != self.events[0][0]:
            return "pass"
        kind, left, fate = self.events[0]
        if left:
            self.events[0] = kind, left - 1, fate
            return "pass"
        del self.events[0]
        if fate in RESTARTS:
            assert self.relay is not None
            self.relay.port = self.ports.pop(0)
        return RESTARTS.get(fate, fate)  # type: ignore[return-value]

    def wait(self) -> None:
        """Until all has happened."""
        deadline = time.monotonic() + 60
        while self.events:
            assert time.monotonic() < deadline, self.events
            time.sleep(0.01)


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Serving]]:
    """Three that know nothing of each other's texts."""
    bounds = {"kv_seconds": 1.0}
    with serving(**bounds) as first, serving(**bounds) as second, serving(**bounds) as third:
        yield [first, second, third]


@pytest.fixture(scope="module")
def unbroken() -> list[list[int]]:
    return plain_texts(SAMPLED, seed=2)


# Messages that only come after another trouble, and that trouble.
BEFORE = {"resume": ("draft", 3, "cut before"), "error": ("draft", 3, "restart before")}
# A line delivers a message once. Only what an edge sends again can come twice.
TWICE = ("hello", "welcome", "open", "draft", "verdict", "cancel", "bye")
FATES = [
    (kind, fate)
    for kind in (*UP, *DOWN)
    for fate in ("cut before", "cut after", *RESTARTS, "twice")
    if fate != "twice" or kind in TWICE
]


@pytest.mark.parametrize(
    ("kind", "fate"),
    [
        pytest.param(kind, fate, marks=pytest.mark.thorough)
        # What "cut after" and "restart before" are together; the latter for each kind of state.
        if fate == "restart after"
        or (fate == "restart before" and kind not in ("open", "draft", "verdict"))
        else (kind, fate)
        for kind, fate in FATES
    ],
)
def test_a_text_is_unbroken_whatever_happens_to_a_message(
    kind: str,
    fate: str,
    servers: list[Serving],
    unbroken: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("draftsmith.edge.remote_target.FRAME_IDS", 3)  # some prompts come in parts
    number = 3 if kind in ("draft", "verdict") else 0
    events = [BEFORE[kind]] if kind in BEFORE else []
    trouble = Trouble([*events, (kind, number, fate)], [one.port for one in servers[1:]])
    with Relay(servers[0].port, fate=trouble) as relay:
        trouble.relay = relay
        with edge(relay.url, sampling=SAMPLED) as client:
            assert client.decode(PROMPTS, NEW, seed=2).outputs == unbroken
        trouble.wait()


def test_a_line_that_stalls_is_made_again_or_waited_for() -> None:
    expected = plain_texts(GREEDY)
    with serving() as server:
        for stall, patience in ((1.0, 0.2), (0.1, 5.0)):
            trouble = Trouble([("verdict", 2, "stall")])
            with (
                Relay(server.port, fate=trouble, stall=stall) as relay,
                edge(relay.url, stall=patience) as client,
            ):
                link = client._lm.link
                session, connection = link.session, link.connection
                assert client.decode(PROMPTS, NEW).outputs == expected
                assert relay.fates == {"stall": 1}
                assert link.session == session
                assert (link.connection is not connection) == (stall > patience)


class SlowDrafter(SmallLMDrafter):
    """Takes 10 ms for each depth."""

    def draft(
        self, contexts: Contexts, limits: Limits, sampling: Sampling, rng: CounterRNG
    ) -> Draft:
        time.sleep(0.01 * limits.max_depth)
        return super().draft(contexts, limits, sampling, rng)


def test_the_cost_model_drafts_more_on_a_slow_line() -> None:
    lengths = []
    with serving() as server:
        for rtt in (0.0, 0.1):
            drafter = SlowDrafter(near_drafter().lm.model)
            with (
                Relay(server.port, rtt=rtt) as relay,
                edge(relay.url, drafter=drafter, policy="cost_model:max_depth=4") as client,
            ):
                client.decode(PROMPTS, 16)
                late = [one.k for one in client.rounds if 6 < one.seq < 12]  # the costs are learnt
                lengths.append(sum(late) / len(late))
    assert lengths[0] < 0.5 < lengths[1]


# --- servers that are started again ---------------------------------------------------------------


def fine_tuned() -> Any:
    other = tiny_target()
    with torch.no_grad():
        next(other.model.parameters()).mul_(1.01)
    return other


@pytest.mark.parametrize("what", ["rule", "weights", "max_positions"])
def test_a_server_that_comes_back_as_another_one_is_refused(what: str) -> None:
    options: dict[str, Any] = {
        "rule": {"rule": "threshold:threshold=0.2"},
        "weights": {"served": fine_tuned()},
        "max_positions": {"served": tiny_target(max_positions=128)},
    }[what]
    with serving() as first, serving(**options) as second:
        trouble = Trouble([("draft", 2, "restart before")], [second.port])
        with Relay(first.port, fate=trouble) as relay, edge(relay.url) as client:
            trouble.relay = relay
            with pytest.raises(UserError, match=f"another rule or target: .*{what} was"):
                client.decode(PROMPTS, NEW)
            assert second.verifier.drafts == 0
            with pytest.raises(UserError, match="begin the text again"):
                client.decode(PROMPTS, NEW)  # as long as that server is there


def test_keys_and_sessions_expire_and_the_text_goes_on() -> None:
    expected = plain_texts(SAMPLED, seed=7)
    with serving(kv_seconds=0.02, session_seconds=0.05) as server:
        trouble = Trouble([("draft", 4, "cut before")])
        with Relay(server.port, fate=trouble) as relay, edge(relay.url, sampling=SAMPLED) as client:
            pauses = iter((0.1, 0.1, 0.1))

            def wait(row: int, tokens: list[int]) -> None:
                time.sleep(next(pauses, 0.0))

            assert client.decode(PROMPTS, NEW, seed=7, on_tokens=wait).outputs == expected
            read_again = [one for one in client.rounds if one.seq > 1 and one.prefill_ms > 0]
            assert read_again


def test_a_server_without_an_answer_is_one_clear_error() -> None:
    with pytest.raises(UserError, match="does not answer"):
        Link("ws://127.0.0.1:9", patience=0.2).ready()
    with pytest.raises(UserError, match="expected ws://"):
        Link("http://127.0.0.1:9")


# --- servers that fail ----------------------------------------------------------------------------


def test_an_error_while_a_prompt_is_read_ends_that_text_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = plain_texts(SAMPLED, seed=3)
    with (
        serving() as server,
        edge(server.url, sampling=SAMPLED) as client,
        edge(server.url) as other,
    ):
        lm = server.verifier.decoder.lm
        forward = lm.forward

        def fail_at_99(ids: torch.Tensor, *fed: Any, **options: Any) -> torch.Tensor:
            if (ids[:, :2] == 99).all():
                raise RuntimeError("out of memory")
            return forward(ids, *fed, **options)

        monkeypatch.setattr(lm, "forward", fail_at_99)

        def fail(row: int, tokens: list[int]) -> None:
            if len(failures) < 2:
                with pytest.raises(UserError, match="out of memory") as failure:
                    other.decode([[99, 99, 99]], 4)
                failures.append(failure)

        failures: list[Any] = []
        assert client.decode(PROMPTS, NEW, seed=3, on_tokens=fail).outputs == expected
        assert len(failures) == 2
        assert other.decode(PROMPTS[:1], NEW).outputs == plain_texts(GREEDY)[:1]


def test_an_error_at_a_message_ends_that_session_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain_texts(SAMPLED, seed=3)
    text = {"length": 2, "ids": [98, 98], "max_tokens": 9, "seed": 0, "row": 0}
    frames = [
        encode("hello", version=VERSION),
        encode("open", req=7, seq=0, **text, sampling=[0.0, 0.0, 1.0, 0.0, 1.0]),
        encode("cancel", req=7),
    ]
    codes = []
    with serving() as server, edge(server.url, sampling=SAMPLED) as client:
        leave = server.verifier._leave

        def fail(text: Any) -> None:
            if text.req == 7:
                raise RuntimeError("a fault")
            leave(text)

        monkeypatch.setattr(server.verifier, "_leave", fail)

        def interrupt(row: int, tokens: list[int]) -> None:
            if not codes:
                with connect(server.url, proxy=None) as line:
                    for frame in frames:
                        line.send(frame)
                    msgpack.unpackb(line.recv(60))
                    codes.append(msgpack.unpackb(line.recv(60))["code"])
                    with pytest.raises(ConnectionClosed):
                        line.recv(60)

        assert client.decode(PROMPTS, NEW, seed=3, on_tokens=interrupt).outputs == expected
        assert codes == ["failed"]
        assert len(server.verifier._sessions) == 1


def test_a_server_whose_thread_fails_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("a fault")

    def decode() -> None:
        with serving() as server, edge(server.url, patience=1) as client:
            monkeypatch.setattr(server.verifier, "_expire", fail)
            with pytest.raises(UserError, match=r"does not answer|gave no verdict"):
                client.decode(PROMPTS, NEW)
            ended.append(server.verifier.done.done())

    ended: list[bool] = []
    with pytest.raises(RuntimeError, match="a fault"):
        decode()
    assert ended == [True]
