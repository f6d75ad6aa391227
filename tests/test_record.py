"""The recorder: bytes pass as they are, and only what may be stored is stored."""

import asyncio
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from starlette.requests import ClientDisconnect
from typer.testing import CliRunner

from decode.base.errors import UserError
from draftsmith.cli.main import app
from draftsmith.learn.record.consent import Keys
from draftsmith.learn.record.kept_answers import LONGEST_TEXT, Exchange, NotRecorded, exchanges
from draftsmith.learn.record.records import DAY, Records, Retention, make_record, tenants
from draftsmith.learn.record.redaction import passes_luhn, redact
from draftsmith.learn.record.upstream import Upstreams
from draftsmith.net.events import event, read_events
from draftsmith.net.hang_up import unless_hung_up
from draftsmith.net.limits import ServerLimits
from tests.service import until
from tests.upstream import ADMIN_KEY, FakeEngine, read_until, recorded, served
from train.data.read import read_examples

CHAT = "/v1/chat/completions"
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}


def chat(text: str = "What is a drafter?", **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}]} | fields


def record(text: str = "yes", *, at: float, user: str | None = None, request: str = "r") -> Any:
    messages = [{"role": "user", "content": "say it"}]
    return make_record(Exchange(request, "tiny", messages, text), user, at)


# --- bytes ----------------------------------------------------------------------------------------


def test_bytes_are_the_same_with_and_without_the_proxy(tmp_path: Path) -> None:
    body = os.urandom(300_000)
    headers = {"x-trace": "a,b", "authorization": "Bearer secret", "accept-encoding": "gzip"}
    engine = FakeEngine()
    with (
        served(engine.app()) as url,
        httpx2.Client(base_url=url, trust_env=False) as direct,
        recorded(url, tmp_path / "records") as proxied,
    ):

        def seen(client: Any, method: str, path: str, **options: Any) -> Any:
            with client.stream(method, path, headers=headers, **options) as answer:
                raw = b"".join(answer.iter_raw())
                fields = [(n, v) for n, v in answer.headers.multi_items() if n != "connection"]
                return answer.status_code, sorted(fields), raw

        def chunks() -> Any:
            yield body[:1000]
            yield body[1000:]

        path = "/echo/a%2Fb%20c;d?x=%C3%A9&x=2&y="
        for method, options in (
            ("GET", {}),
            ("HEAD", {}),
            ("POST", {"content": body}),
            ("PUT", {"content": b""}),
            ("POST", {"json": chat(store=True)}),
        ):
            assert seen(proxied, method, path, **options) == seen(direct, method, path, **options)
        # The proxy gives a chunked body a length; all else is the same.
        status, _, raw = seen(proxied, "POST", path, content=chunks())
        assert status == 203
        assert json.loads(raw[:-256])["sha256"] == hashlib.sha256(body).hexdigest()
        for options in (chat(), chat(stream=True), chat(store=True, stream=True)):
            engine.asked.clear()
            first = seen(direct, "POST", CHAT, json=options)
            engine.asked.clear()
            assert seen(proxied, "POST", CHAT, json=options) == first
            assert engine.asked == [options]


def test_a_hang_up_reaches_the_engine_and_leaves_no_record(tmp_path: Path) -> None:
    engine = FakeEngine(reply="word " * 400, slow=0.05)
    with served(engine.app()) as url, recorded(url, tmp_path) as client:
        with client.stream("POST", CHAT, json=chat(store=True, stream=True)) as answer:
            next(answer.iter_raw())
        until(lambda: engine.left == 1)
        # While the engine has not begun to answer.
        engine.slow = 3.0
        line = HTTPConnection(client.base_url.host, client.base_url.port)
        body = json.dumps(chat(store=True))
        line.request("POST", CHAT, body, {"content-type": "application/json"})
        until(lambda: len(engine.asked) > 1)
        line.close()
        until(lambda: engine.left > 1)
        state = client.get("/admin/upstream", headers=ADMIN).json()
        assert (state["in_flight"], tenants(tmp_path)) == (0, [])


def test_a_hang_up_does_not_stop_the_closing_of_connections() -> None:
    """httpx2 closes those that it finds dead when the next request comes, inside a shield."""
    closed = []

    async def request() -> None:
        began, hung_up = asyncio.Event(), asyncio.Event()

        async def receive() -> Any:
            await began.wait()
            asyncio.get_running_loop().call_later(0.01, hung_up.set)
            return {"type": "http.disconnect"}

        async def work() -> None:
            with anyio.CancelScope(shield=True):
                began.set()
                await hung_up.wait()
                closed.append("connection")
            await asyncio.Event().wait()

        with pytest.raises(ClientDisconnect):
            await unless_hung_up(receive, work())

    asyncio.run(request())
    assert closed == ["connection"]


def test_an_engine_may_die_and_come_back(tmp_path: Path) -> None:
    engine = FakeEngine()
    with served(engine.app()) as url, recorded(url, tmp_path) as client:
        assert client.get("/health").text == "engine"
        port = int(url.rpartition(":")[2])
    with recorded(url, tmp_path) as client:
        for _ in range(2):
            refused = client.post(CHAT, json=chat(store=True))
            assert refused.status_code == 502
            assert url in refused.json()["error"]["message"]
            with served(engine.app(), port):
                assert client.post(CHAT, json=chat(store=True)).status_code == 200
        assert len(read_until(tmp_path / "default", 2)) == 2


class Dying(BaseHTTPRequestHandler):
    """An engine that dies behind `answer`, whatever it is asked."""

    protocol_version = "HTTP/1.1"
    answer = b""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.wfile.write(self.answer)
        self.close_connection = True

    def log_message(self, *arguments: Any) -> None:
        pass


def test_requests_that_no_engine_should_get(tmp_path: Path) -> None:
    engine = FakeEngine()
    limits = ServerLimits(body_bytes=1000)
    with served(engine.app()) as url, recorded(url, tmp_path, limits=limits) as client:
        address = ("127.0.0.1", client.base_url.port)

        def status(request: bytes) -> bytes:
            with socket.create_connection(address) as line:
                line.sendall(request)
                return line.recv(4096).split()[1]

        both = b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
        here = b"Host: localhost\r\nConnection: close\r\n"
        assert status(b"POST /echo/x HTTP/1.1\r\n" + here + both) == b"400"
        # A target that is no path of a URL goes on as it is; this engine knows neither.
        for asked in (b"OPTIONS *", b"GET /a/../health", b"GET /./health"):
            assert status(asked + b" HTTP/1.1\r\n" + here + b"\r\n") == b"404"
        assert status(b"GET http://else.where/x HTTP/1.1\r\n" + here + b"\r\n") == b"400"
        evil = {"origin": "https://evil.example", "content-type": "text/plain"}
        body = json.dumps(chat(store=True)).encode()
        assert client.post(CHAT, content=body, headers=evil).status_code == 403
        assert client.post(CHAT, content=bytes(1001)).status_code == 503
        for path in ("/admin/upstream/", "/v1/load_lora_adapter", "/echo/x"):
            assert client.get(path, headers=ADMIN).status_code == 403
        twice = [*ADMIN.items(), ("authorization", "Bearer of-the-engine")]
        for sent in (twice, {"x-api-key": ADMIN_KEY}, {"cookie": f"a=b; key={ADMIN_KEY}"}):
            assert client.get("/echo/x", headers=sent).status_code == 403
        assert client.get("/echo/x", params={"key": ADMIN_KEY}).status_code == 403
        assert client.get("/echo/x", auth=("admin", ADMIN_KEY)).status_code == 403
        assert client.get(f"/{ADMIN_KEY}/x").status_code == 403
        assert engine.asked == []
        # The engine's own paths of this kind ask for nothing of ours.
        assert client.post("/v1/load_lora_adapter", json={}).status_code == 404


@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_dies_at_any_place_of_its_answer(tmp_path: Path, stream: bool) -> None:
    """Before the body begins, the client hears of it. Later, its connection is broken off too. Only
    a complete answer is recorded."""
    events = [
        {"choices": [{"index": 0, "delta": {"content": "yes"}, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    ]
    choice = {"index": 0, "message": {"content": "yes"}, "finish_reason": "stop"}
    if stream:
        texts = [f"data: {text}\n\n".encode() for text in (*map(json.dumps, events), "[DONE]")]
        body = [b"%x\r\n%s\r\n" % (len(text), text) for text in texts] + [b"0\r\n\r\n"]
        fields = b"content-type: text/event-stream\r\ntransfer-encoding: chunked"
    else:
        text = json.dumps({"choices": [choice]}).encode()
        body = [text[:9], text[9:-1], text[-1:]]
        fields = b"content-type: application/json\r\ncontent-length: %d" % len(text)
    pieces = [b"HTTP/1.1 2", b"00 OK\r\n", fields, b"\r\n\r\n", *body]
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), Dying) as engine,
        recorded(f"http://127.0.0.1:{engine.server_port}", tmp_path) as client,
    ):
        threading.Thread(target=engine.serve_forever, daemon=True).start()
        for count in range(len(pieces)):
            Dying.answer = b"".join(pieces[:count])
            if count < 4:
                refused = client.post(CHAT, json=chat(store=True, stream=stream))
                assert (refused.status_code, "does not answer" in refused.text) == (502, True)
            else:
                with pytest.raises(httpx2.RemoteProtocolError):
                    client.post(CHAT, json=chat(store=True, stream=stream))
        assert tenants(tmp_path) == []
        Dying.answer = b"".join(pieces)
        assert client.post(CHAT, json=chat(store=True, stream=stream)).status_code == 200
        (stored,) = read_until(tmp_path / "default", 1)
        assert stored["messages"][1]["content"] == "yes"
        # The answer ends a little before its request does.
        until(lambda: client.get("/admin/upstream", headers=ADMIN).json()["in_flight"] == 0)
        engine.shutdown()


def test_a_switch_lets_answers_end_where_they_began(tmp_path: Path) -> None:
    old, new = FakeEngine("old", "old words " * 10, slow=0.05), FakeEngine("new")
    with (
        served(old.app()) as first,
        served(new.app()) as second,
        recorded(first, tmp_path) as client,
    ):
        texts: list[bytes] = []
        running = threading.Thread(
            target=lambda: texts.append(client.post(CHAT, json=chat(stream=True)).content)
        )
        running.start()
        until(lambda: bool(old.asked))
        assert client.post("/admin/upstream", json={"url": second}).status_code == 401
        for proxied in ({"X-Forwarded-For": "127.0.0.1"}, {"Forwarded": "for=127.0.0.1"}):
            assert client.get("/admin/upstream", headers=ADMIN | proxied).status_code == 404
        for wrong in ("ftp://x/y", "http://[", "http://x:99999", "http://me:secret@x"):
            bad = client.post("/admin/upstream", headers=ADMIN, json={"url": wrong})
            assert (bad.status_code, "http://HOST:PORT" in bad.text) == (400, True)
        state = client.post("/admin/upstream", headers=ADMIN, json={"url": second}).json()
        assert state["url"] == second
        assert state["draining"] == [{"url": first, "in_flight": 1}]
        assert client.get("/health").text == "new"
        running.join()
        assert texts[0].count(b"words") == 10
        assert texts[0].endswith(b"[DONE]\n\n")

        def drained() -> bool:
            return not client.get("/admin/upstream", headers=ADMIN).json()["draining"]

        until(drained, 10)


def test_a_switch_is_remembered(tmp_path: Path) -> None:
    first, second, third = (f"http://127.0.0.1:{port}" for port in (8001, 8002, 8003))
    memory = tmp_path / "records" / "upstream.json"
    upstreams = Upstreams(first, memory)
    assert upstreams.current.url == first
    asyncio.run(upstreams.switch(second))
    assert Upstreams(first, memory).current.url == second
    assert Upstreams(third, memory).current.url == third
    memory.write_text("{", "utf-8")
    with pytest.raises(UserError, match="is damaged"):
        Upstreams(first, memory)


# --- what is recorded -----------------------------------------------------------------------------


def test_only_what_asks_is_recorded_and_is_training_data(tmp_path: Path) -> None:
    engine = FakeEngine(reply="Write to ann@example.org now.")
    with served(engine.app()) as url, recorded(url, tmp_path) as client:
        assert client.post(CHAT, json=chat()).status_code == 200
        for options in (chat(store=False), chat(store="true"), chat(stream=True)):
            client.post(CHAT, json=options)
        for fields in ({"stop": ["."]}, {"tools": [{}]}, {"response_format": {"type": "json"}}):
            client.post(CHAT, json=chat(store=True) | fields)
        engine.finish = "length"
        client.post(CHAT, json=chat(store=True))
        engine.finish = "stop"
        headers = {"authorization": "Bearer sk-secret"}
        asked = chat("Call +49 30 1234567", store=True, user="ann")
        client.post(CHAT, json=asked, headers=headers)
        client.post(CHAT, json=chat(store=True, stream=True))
        first, second = read_until(tmp_path / "default", 2)
        client.post(CHAT, content=json.dumps(chat(store=True)), headers={"content-type": "text/x"})
        counts = client.get("/admin/upstream", headers=ADMIN).json()["records"]
    # Who asks to be recorded in vain is counted, with the reason.
    assert counts == {
        "recorded": 2,
        "store is neither true nor false": 1,
        "the request has stop": 1,
        "the request has tools": 1,
        "the request has response_format": 1,
        "the answer ends by length, and not by the target": 1,
        "the content type of the request is not application/json": 1,
    }
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "default").rglob("*")}
    assert modes == {0o600}
    assert (tmp_path / "default").stat().st_mode & 0o777 == 0o700
    assert [path.name for path in tenants(tmp_path)] == ["default"]
    assert first["messages"] == [
        {"role": "user", "content": "Call [redacted: phone]"},
        {"role": "assistant", "content": "Write to [redacted: mail] now."},
    ]
    assert first["redacted"] == {"prompt": {"phone": 1}, "answer": {"mail": 1}}
    assert first["user"] == hashlib.sha256(b"ann").hexdigest()
    assert second["user"] is None
    assert second["messages"][1] == first["messages"][1]
    assert first["request"].startswith("chatcmpl-")
    (segment,) = (tmp_path / "default").glob("*.jsonl")
    stored = segment.read_text("utf-8")
    assert not [word for word in ("secret", "ann@", "1234567", '"ann"') if word in stored]
    examples, _ = read_examples(str(segment))
    assert [example.messages[-1]["role"] for example in examples] == ["assistant"] * 2


def test_keys_decide_and_keep_tenants_apart(tmp_path: Path) -> None:
    names = {"one": {"tenant": "a", "record": "all"}, "two": {"tenant": "b", "record": "asked"}}
    file = tmp_path / "keys.json"
    hashes = {hashlib.sha256(key.encode()).hexdigest(): value for key, value in names.items()}
    file.write_text(json.dumps(hashes), "utf-8")
    with (
        served(FakeEngine().app()) as url,
        recorded(url, tmp_path / "records", Keys.of_file(file)) as client,
    ):
        for key, store in (
            *(("one", None), ("one", False), ("one", True), ("two", None), ("two", True)),
            *(("three", True), ("", True)),
        ):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            client.post(CHAT, json=chat(f"{key} {store}", store=store), headers=headers)
        texts = {
            name: [r["messages"][0]["content"] for r in read_until(tmp_path / "records" / name, n)]
            for name, n in (("a", 2), ("b", 1))
        }
    assert texts == {"a": ["one None", "one True"], "b": ["two True"]}
    assert [path.name for path in tenants(tmp_path / "records")] == ["a", "b"]
    for bad in ('{"sk-key": {}}', json.dumps({key: {"tenant": "../x"} for key in hashes}), "[]"):
        file.write_text(bad, "utf-8")
        with pytest.raises(UserError, match="--record-keys") as error:
            Keys.of_file(file)
        assert "sk-key" not in str(error.value)


def test_reasoning_images_and_several_choices() -> None:
    def answer(*messages: dict[str, Any]) -> bytes:
        choices = [
            {"index": i, "message": message, "finish_reason": "stop"}
            for i, message in enumerate(messages)
        ]
        return json.dumps({"id": "x", "model": "m", "choices": choices}).encode()

    def reason(asked: dict[str, Any], body: bytes, *, stream: bool = False) -> str:
        try:
            found, left_out = exchanges(asked, body, stream=stream)
        except NotRecorded as error:
            return str(error)
        assert found == []
        (why,) = left_out
        return why

    plain = {"role": "assistant", "content": "yes", "reasoning": None}
    found, left_out = exchanges(chat(), answer(plain, plain | {"content": "no"}), stream=False)
    assert [exchange.answer for exchange in found] == ["yes", "no"]
    assert not left_out
    assert "reasoning" in reason(chat(), answer(plain | {"reasoning": "hm"}))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    ((found_one,), _) = exchanges(chat(parts), answer(plain), stream=False)  # type: ignore[arg-type]
    assert found_one.messages == [{"role": "user", "content": "a\nb"}]
    shape = "another shape"
    assert shape in reason(chat(), b"data: {}\n\n", stream=True)
    for odd in (5, ["x"], [{"message": "x"}], [{"index": [], "message": plain}], {"0": {}}):
        assert shape in reason(chat(), json.dumps({"choices": odd}).encode())
    assert shape in reason(chat(), answer(plain | {"content": ["x"]}))
    assert shape in reason(chat(), b"[1]")
    image = [{"type": "image_url", "image_url": {"url": "data:"}}]
    assert "no text" in reason(chat(image), answer(plain))  # type: ignore[arg-type]
    both = [{"text": "a", "image_url": {"url": "data:"}}]
    assert "no text" in reason(chat(both), answer(plain))  # type: ignore[arg-type]
    long = "a" * (LONGEST_TEXT + 1)
    assert "longer" in reason(chat(long), answer(plain))
    assert "longer" in reason(chat(), answer(plain | {"content": long}))
    assert "no choices" in reason(chat(), answer())


ANSWER = {"id": "x", "model": "m", "choices": [
    {"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}
]}  # fmt: skip


@pytest.mark.parametrize(
    "asked",
    [
        # reasoning that is hidden, limited or written in another way
        {"include_reasoning": False}, {"reasoning": {"exclude": True}}, {"reasoning_effort": "low"},
        {"thinking_token_budget": 5}, {"thinking": {"type": "disabled"}}, {"verbosity": "low"},
        {"separate_reasoning": False}, {"reasoning_format": "none"}, {"enable_thinking": False},
        {"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_budget": 0},
        # other weights
        {"lora_path": "a"}, {"lora": [{"id": 0, "scale": 0.5}]}, {"models": ["a", "b"]},
        # masks and formats
        {"regex": "[a-z]+"}, {"ebnf": "root ::= \"a\""}, {"structural_tag": "{}"},
        {"guided_json": {}}, {"guided_regex": "a"}, {"structured_outputs": {"regex": "a"}},
        {"json_schema": {}}, {"grammar": "root ::= \"a\""}, {"tools": [{}]},
        {"response_format": {"type": "json_object"}}, {"bad_words": ["a"]},
        {"allowed_token_ids": [1]}, {"logit_bias": {"1": 2}},
        # penalties, processors and other samplers
        {"presence_penalty": 0.1}, {"frequency_penalty": -1}, {"repetition_penalty": 1.1},
        {"repeat_penalty": 1.1}, {"dry_multiplier": 0.8}, {"xtc_probability": 0.5}, {"mirostat": 2},
        {"samplers": ["top_k"]}, {"custom_logit_processor": "x"}, {"custom_params": {"a": 1}},
        {"logits_processors": ["x"]}, {"vllm_xargs": {"a": 1}}, {"temperature": 1.5},
        {"use_beam_search": True}, {"adaptive_target": 0.5},
        # another end, another beginning
        {"stop": ["a"]}, {"stop_regex": "a"}, {"stop_token_ids": [1]}, {"ignore_eos": True},
        {"min_tokens": 4}, {"continue_final_message": True}, {"echo": True}, {"prefill": "a"},
        {"truncate_prompt_tokens": 3}, {"chat_template": "x"}, {"documents": [{}]},
        {"skip_special_tokens": False}, {"include_stop_str_in_output": True},
        {"prediction": {"type": "content", "content": "a"}}, {"a_field_of_next_year": 0},
        {"a client's own words": 1},
    ],
)  # fmt: skip
def test_a_request_that_may_bend_the_text_is_not_recorded(asked: dict[str, Any]) -> None:
    (name,) = asked
    shown = name if name.isidentifier() else "a field with another name"
    with pytest.raises(NotRecorded, match=f"^the request has {shown}$"):
        exchanges(chat() | asked, json.dumps(ANSWER).encode(), stream=False)
    found, _ = exchanges(chat() | {name: None}, json.dumps(ANSWER).encode(), stream=False)
    assert [one.answer for one in found] == ["yes"]


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "seed": 1},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "stop": []},
        {"max_tokens": 9, "max_completion_tokens": 9, "n": 1, "logprobs": True, "top_logprobs": 2},
        {"user": "a", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}},
        {"include_reasoning": True, "skip_special_tokens": True, "min_tokens": 0, "rid": "a"},
        {"cache_prompt": True, "priority": 1, "draftsmith": {"label": "a"}},
    ],
)
def test_a_request_that_leaves_the_text_alone_is_recorded(asked: dict[str, Any]) -> None:
    assert exchanges(chat() | asked, json.dumps(ANSWER).encode(), stream=False)[0]


@pytest.mark.parametrize(
    ("usage", "message", "said"),
    [
        ({"completion_tokens_details": {"reasoning_tokens": 7}}, {}, "reasoning that is not shown"),
        ({"reasoning_tokens": 7}, {}, "reasoning that is not shown"),
        ({"completion_tokens_details": None}, {"reasoning_content": "hm"}, "has reasoning_content"),
        ({}, {"name": "Ann"}, "has name"),
        ({}, {"weight": 0}, "has weight"),
        ({}, {"prefix": True}, "has prefix"),
        ({"lossy": "lenience"}, {}, "a lossy rule"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_fields_of_messages_and_lossy_rules(
    usage: dict[str, Any], message: dict[str, Any], said: str, stream: bool
) -> None:
    asked = chat()
    asked["messages"][0] |= message
    body = json.dumps(ANSWER | {"usage": usage, "draftsmith": {"lossy": usage.get("lossy")}})
    if stream:
        body = body.replace('"message"', '"delta"')
        body = f"data: {body}\n\ndata: [DONE]\n\n"
    with pytest.raises(NotRecorded, match=said):
        exchanges(asked, body.encode(), stream=stream)


def test_what_goes_on_behind_its_end_or_is_of_several_models_is_not_recorded() -> None:
    def piece(text: str, end: str | None, model: str = "a") -> dict[str, Any]:
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": end}
        return {"id": "1", "model": model, "choices": [choice]}

    end: dict[str, Any] = {"id": "1", "model": "", "choices": []}
    for chunks, said in (
        ([piece("a", None), piece("b", "stop"), piece("", None), end], None),
        ([piece("a", "stop"), piece("b", None)], "another shape"),
        ([piece("a", "stop"), piece("b", "stop")], "another shape"),
        ([piece("a", "stop"), {"error": {"message": "x"}}], "another shape"),
        ([piece("a", None), piece("b", "stop", "other")], "several models"),
    ):
        body = b"".join(map(event, chunks)) + b"data: [DONE]\n\n"
        if said is None:
            assert [x.answer for x in exchanges(chat(), body, stream=True)[0]] == ["ab"]
        else:
            with pytest.raises(NotRecorded, match=said):
                exchanges(chat(), body, stream=True)


def test_events_are_cut_into_lines_as_the_standard_does() -> None:
    for end in ("\n", "\r\n", "\r"):
        lines = [": a comment", "event: x", "data: {", "data:  \u2028\x85\x0b}", "", "id: 1", "",
                 "data", "", "data:[DONE]", "", "data: torn"]  # fmt: skip
        body = ("\ufeff" + end.join(lines)).encode()
        found = ["{\n \u2028\x85\x0b}".encode(), b"", b"[DONE]"]
        assert list(read_events(body)) == found
        assert list(read_events(body + end.encode())) == found
        assert list(read_events(body + 2 * end.encode())) == [*found, b"torn"]


@pytest.mark.parametrize("name", ["stop_reason", "matched_stop"])
def test_a_token_that_ends_a_turn_is_recorded_and_a_string_is_not(name: str) -> None:
    """vLLM and SGLang name the id if it is not the tokenizer's EOS: Gemma, GLM-4, Phi-4-mini."""
    choice = {"index": 0, "message": {"content": "yes"}, "finish_reason": "stop"}
    for value, count in ((None, 1), (106, 1), ("END", 0)):
        body = json.dumps({"choices": [choice | {name: value}]}).encode()
        found, left_out = exchanges(chat(), body, stream=False)
        assert (len(found), left_out.total()) == (count, 1 - count)
        event = {"choices": [{"delta": {"content": "yes"}, "finish_reason": "stop", name: value}]}
        stream = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode()
        assert len(exchanges(chat(), stream, stream=True)[0]) == count


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Mail ann.b+c@mail.example.co.uk, please", "mail"),
        ("My card is 4111 1111 1111 1111.", "card"),
        ("or 378282246310005", "card"),
        ("Call +1 (415) 555-0132 today", "phone"),
        ("Call (415) 555-0132", "phone"),
        ("030/1234567 is it", "phone"),
        ("key sk-proj-abcdefghijklmnop1234", "secret"),
        ("AKIAIOSFODNN7EXAMPLE is", "secret"),
        ('password = "hunter22hunter"', "secret"),
        ("postgres://me:pass@host/db", "secret"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc_def", "secret"),
        ("id-eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc_def", "secret"),
        ("authorization: bearer abcdefghijklmnop1234", "secret"),
        ("%20ann%2Eb@example.org", "mail"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----", "secret"),
    ],
)
def test_redaction(text: str, kind: str) -> None:
    cleaned, counts = redact(text)
    assert dict(counts) == {kind: 1}
    assert f"[redacted: {kind}]" in cleaned
    assert redact(cleaned) == (cleaned, {})


def test_redaction_leaves_other_text() -> None:
    for text in (
        "In 2024 there were 1234567890 people, 3.14159265358979 and 4111 1111 1111 1112.",
        "def f(x): return x @ y  # token: a word",
        "The years 1990-1999, page 12-34, version 1.2.3",
    ):
        assert redact(text) == (text, {})
    assert passes_luhn("79927398713")
    assert not passes_luhn("79927398714")


@pytest.mark.timeout(30)
@pytest.mark.parametrize("unit", ["%", "a%20b%2F", "eyJ-", "a@-", "://a:", "-----BEGIN A"])
def test_redaction_takes_linear_time(unit: str) -> None:
    """400 KB, written to make a pattern begin at every character. Takes a tenth of a second. A
    search that begins anew at each of them takes minutes, and runs into the limit."""
    text = unit * (400_000 // len(unit))
    assert redact(text) == (text, {})


# --- the journal ----------------------------------------------------------------------------------


def test_a_torn_line_is_skipped_and_cut_off(tmp_path: Path) -> None:
    records = Records(tmp_path)
    assert records.read() == []  # the directory comes before its first segment
    records.append(record("one", at=1.0))
    (segment,) = tmp_path.glob("*.jsonl")
    complete = segment.read_bytes()
    for length in (1, 20, 60):
        segment.write_bytes(complete + record_line()[:length])
        assert [r["messages"][1]["content"] for r in records.read()] == ["one"]
    records.append(record("two", at=2.0))
    assert len(read_examples(str(segment))[0]) == 2


def record_line() -> bytes:
    return json.dumps(record(at=3.0)).encode()


def test_retention_deletes_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_age = Records(tmp_path / "age", Retention(days=2))
    for day in range(5):
        by_age.append(record(at=day * DAY))
    # Only segments that may have old records are read.
    read: list[float] = []
    original = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(0) or original(path))
    assert by_age.prune(5 * DAY) == 3
    assert len(read) == 2
    assert [r["time"] / DAY for r in by_age.read()] == [3, 4]

    limit = 8000
    by_size = Records(tmp_path / "size", Retention(bytes=limit))
    for i in range(100):
        by_size.append(record("x" * 100, at=float(i)))
    size = sum(path.stat().st_size for path in (tmp_path / "size").glob("*.jsonl"))
    times = [r["time"] for r in by_size.read()]
    assert limit / 2 < size <= limit
    assert times == list(range(100 - len(times), 100))
    with pytest.raises(UserError, match="--keep-days"):
        Retention(days=0)


def test_forget_by_user_and_by_request(tmp_path: Path) -> None:
    for tenant in ("a", "b"):
        records = Records(tmp_path / tenant)
        records.append(record("x", at=1.0, user="ann", request="r1"))
        records.append(record("y", at=2.0, user="bob", request="r2"))
        records.append(record("z", at=2 * DAY, user="ann", request="r3"))

    def left() -> list[str]:
        texts = (r["messages"][1]["content"] for t in "ab" for r in Records(tmp_path / t).read())
        return list(texts)

    def forget(*options: str) -> Any:
        return CliRunner().invoke(app, ["forget", "--dir", str(tmp_path), *options])

    assert forget().exit_code == 2
    counts = tmp_path.with_suffix(".json")
    assert "b: 1 records deleted" in forget("--request", "r3", "--json", str(counts)).output
    assert json.loads(counts.read_text("utf-8")) == {"deleted": {"a": 1, "b": 1}, "learnt_from": {}}
    assert left() == ["x", "y"] * 2
    assert forget("--user", "ann").exit_code == 0
    assert left() == ["y"] * 2
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"ann" in _bytes(path)]


def _bytes(path: Path) -> bytes:
    return path.read_bytes()


def test_the_command_records_and_ends_its_answers(tmp_path: Path) -> None:
    """As a process: it says where it is, answers, and ends at SIGTERM with what it has written."""
    with served(FakeEngine().app()) as url:
        command = [sys.executable, "-m", "draftsmith.cli.main", "record", "--upstream", url]
        process = subprocess.Popen(
            [*command, "--out", str(tmp_path), "--port", "0", "--keep-days", "1"],
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[3].rstrip(";")
            with httpx2.Client(trust_env=False, timeout=30) as client:
                begin = time.time()
                assert client.post(f"{address}/chat/completions", json=chat(store=True)).json()
                hidden = client.get(address.replace("/v1", "/admin/upstream"), headers=ADMIN)
                assert hidden.status_code == 404
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) in (0, -signal.SIGTERM)
            (stored,) = read_until(tmp_path / "default", 1)
            assert begin <= stored["time"] <= time.time()
        finally:
            process.kill()
            process.communicate()
