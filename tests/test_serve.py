"""The service: answers are those of the loop, and what joins, leaves or is refused leaves no
trace."""

import asyncio
import functools
import json
import math
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPConnection
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch

from decode.base.errors import UserError
from decode.drafters.lookup.ngram import NgramDrafter
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoding
from decode.model.pretrained import UNLIMITED_POSITIONS
from decode.text import prompt_ids
from decode.text_stream import AnswerText, TextStream
from draftsmith.net.access import Guard
from draftsmith.serve.batching.answer_tokens import Piece, TokenBytes
from draftsmith.serve.batching.request_batcher import RequestBatcher
from draftsmith.serve.batching.requests import DecodeRequest, Job, Refusal
from draftsmith.serve.openai.messages import LONGEST_STOP, MOST_STOPS
from draftsmith.serve.running import RunningRequest
from tests.service import (
    CHAT,
    LONG,
    MODEL,
    QUESTION,
    SAMPLED,
    Held,
    Running,
    alone,
    ask,
    asked,
    begin,
    chat,
    events,
    serving,
    streamed,
    target,
    text_of,
    until,
    words,
)
from tests.tiny import tiny_target


@pytest.fixture(scope="module")
def sampled() -> Iterator[Running]:
    with serving(target(), settings=SAMPLED) as running:
        yield running


# --- answers --------------------------------------------------------------------------------------


def test_the_openai_client_gets_the_texts_of_the_loop(service: Running) -> None:
    tokens = alone(target(), asked(QUESTION), 40)
    options: Any = {"model": MODEL, "messages": asked(QUESTION), "max_completion_tokens": 40}
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none") as client:
        answer = client.chat.completions.create(**options)
        (choice,) = answer.choices
        assert choice.message.content == words(tokens)
        assert choice.finish_reason == ("length" if len(tokens) == 40 else "stop")
        assert answer.usage.completion_tokens == len(tokens)
        counts = answer.draftsmith
        assert counts["steps"] + counts["accepted"] + 1 >= len(tokens)
        assert counts["drafted"] >= counts["accepted"] > 0

        pieces, last = [], None
        with client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        ) as stream:
            for chunk in stream:
                pieces += [c.delta.content or "" for c in chunk.choices]
                last = chunk
        assert "".join(pieces) == words(tokens)
        assert len(pieces) > 3
        assert last.choices == []
        assert (last.usage.total_tokens, last.draftsmith) == (answer.usage.total_tokens, counts)
        # The second time the prompt is in the prefix cache, but for its last token.
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
        assert last.usage.prompt_tokens_details.cached_tokens == last.usage.prompt_tokens - 1

        done = client.completions.create(
            model=MODEL, prompt=["The dog", "She sells"], max_tokens=12
        )
        expected = [words(alone(target(), text, 12)) for text in ("The dog", "She sells")]
        assert [choice.text for choice in done.choices] == expected
        assert client.models.list().data[0].id == MODEL
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("another")


def test_samples_of_a_seed_are_those_of_the_loop(sampled: Running) -> None:
    expected = [
        alone(target(), asked(QUESTION), 30, SAMPLED, seed=7, row_ids=[row]) for row in range(2)
    ]
    assert expected[0] != expected[1]
    with sampled.client() as client:
        body = chat(QUESTION, n=2, seed=7, max_tokens=30)
        answer = client.post(CHAT, json=body).json()
        texts = [choice["message"]["content"] for choice in answer["choices"]]
        assert texts == list(map(words, expected))
        assert answer["usage"]["completion_tokens"] == sum(map(len, expected))
        chunks = streamed(client, body)
        pieces = ["", ""]
        for chunk in chunks:
            for choice in chunk["choices"]:
                pieces[choice["index"]] += choice["delta"].get("content", "")
        assert pieces == texts
        assert chunks[-1]["draftsmith"] == answer["draftsmith"]
        assert len({chunk["id"] for chunk in chunks}) == 1


def test_requests_have_their_own_sampling(service: Running) -> None:
    expected = alone(target(), asked(QUESTION), 20, SAMPLED, seed=5)
    with service.client() as client:
        answer = ask(client, seed=5, max_tokens=20, temperature=0.8, top_p=0.95)
    assert text_of(answer) == words(expected)


def test_a_stop_string_in_the_last_token_is_why_a_text_ends(service: Running) -> None:
    tokens = alone(target(), asked(QUESTION), 40)
    limit = next(n for n in range(8, 40) if len(words(tokens[n - 1 : n]).strip()) > 1)
    stop = words(tokens[:limit])[-2:]
    assert words(tokens[: limit - 1]).find(stop) < 0
    name = 'draftsmith:request_success_total{finished_reason="stop"}'
    before = service.metrics().get(name, 0)
    with service.client() as client:
        answer = ask(client, max_tokens=limit, stop=stop).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == limit
    assert service.metrics()[name] == before + 1


def test_the_beginning_of_a_stop_string_is_held_back() -> None:
    tokenizer = target().tokenizer
    text = AnswerText(tokenizer, ["dog and cat", "xyz"])
    assert text.add(tokenizer("the dog and").input_ids, ended=False) == "the "
    assert text.add(tokenizer(" a do").input_ids, ended=False) == "dog and a "
    assert text.add(tokenizer("g and cat, then").input_ids, ended=False) == ""
    assert text.stopped
    assert text.add(tokenizer("more").input_ids, ended=True) == ""
    never = AnswerText(tokenizer, ["dog and cat"])
    assert never.add(tokenizer("the dog").input_ids, ended=True) == "the dog"


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, 400, "response_format"),
        ({"logprobs": 3}, 400, "logprobs"),
        ({"top_logprobs": 3}, 400, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
        ({"top_p": 0}, 400, "top_p"),
        ({"n": 1000}, 400, "n"),
        ({"n": True}, 400, "n"),
        ({"seed": 2**70}, 400, "seed"),
        ({"stop": ["a"] * (MOST_STOPS + 1)}, 400, "stop"),
        ({"stop": "a" * (LONGEST_STOP + 1)}, 400, "stop"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 5000}, 400, "max_tokens"),
        ({"max_completion_tokens": 510}, 400, "max_completion_tokens"),
        ({"messages": []}, 400, "messages"),
        ({"messages": None}, 400, "messages"),
        ({"messages": asked("far too long " * 500)}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, None),
        ({"model": "gpt"}, 404, "model"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_request_is_refused_by_name(
    service: Running, fields: dict[str, Any], status: int, param: str | None
) -> None:
    with service.client() as client:
        body = json.dumps(chat(QUESTION, max_tokens=4) | fields)
        headers = {"content-type": "application/json"}
        answer = client.post(CHAT, content=body, headers=headers)
    error = answer.json()["error"]
    assert answer.status_code == status, error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if param is not None:
        assert error["param"] == param
    assert service.batcher.held == 0


def test_malformed_and_oversized_bodies(service: Running) -> None:
    with service.client() as client:

        def status(content: bytes, kind: str = "application/json") -> int:
            path, headers = CHAT, {"content-type": kind}
            answer = client.post(path, content=content, headers=headers)
            assert answer.json()["error"]["message"]
            return answer.status_code

        assert status(b"") == 400
        assert status(b"{") == 400
        assert status(b"[1]") == 400
        assert status(b"[" * 100_000) == 400
        assert status(b'{"temperature": NaN}') == 400
        assert status(b"\xff\xfe{}") == 400
        assert status(b"{}", "text/plain") == 415
        assert status(b'"' + b"a" * (3 << 20) + b'"') == 413
        assert client.get(CHAT).status_code == 405
        missing = client.get("/v2")
        assert missing.status_code == 404
        assert "error" in missing.json()


def test_each_key_is_for_what_it_opens() -> None:
    keys: Any = {"options": {"guard": Guard(key="secret", admin_key="other")}}
    with serving(target(), **keys) as running, running.client() as client:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            for path in ("/v1/models", "/metrics", "/admin/settings", "/nowhere"):
                answer = client.get(path, headers=headers)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
        assert client.get("/health").status_code == 200
        for path, key, status in (
            ("/admin/settings", "secret", 401),
            ("/admin/settings", "other", 200),
            ("/v1/models", "other", 401),
            ("/v1/models", "secret", 200),
        ):
            for scheme in ("Bearer", "bearer"):
                answer = client.get(path, headers={"authorization": f"{scheme} {key}"})
                assert answer.status_code == status, (path, key)


# --- limits, hang-ups and the end -----------------------------------------------------------------


def test_a_full_service_says_when_to_come_again(endless: Any) -> None:
    with serving(endless, max_rows=1, max_waiting=1) as running, running.client() as client:
        held = Held(running)
        with ThreadPoolExecutor() as pool:
            first, second = (pool.submit(ask, client, max_tokens=8) for _ in range(2))
            until(lambda: running.batcher.held == 2)
            full = ask(client, max_tokens=8)
            assert full.status_code == 503
            assert int(full.headers["retry-after"]) >= 1
            assert full.json()["error"]["code"] == "full"
            assert ask(client, n=3).status_code == 503
            held.release()
            assert text_of(first.result()) == text_of(second.result())
        running.until_idle()
        metrics = running.metrics()
        assert metrics['draftsmith:request_failure_total{reason="full"}'] == 2
        assert metrics['draftsmith:request_success_total{finished_reason="length"}'] == 2


def test_texts_without_memory_and_too_long_a_queue_say_when_to_come_again(
    endless: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = len(prompt_ids(asked(QUESTION), endless.tokenizer))
    limits: Any = {"max_rows": 2, "row_tokens": 0, "held_tokens": 2 * tokens + 1}
    with serving(endless, **limits) as running, running.client() as client:
        held = Held(running)
        monkeypatch.setattr("decode.model.memory.free_bytes", lambda device: 0)
        with ThreadPoolExecutor() as pool:
            alone = pool.submit(ask, client, max_tokens=9)
            assert alone.result().status_code == 503
            assert alone.result().json()["error"]["code"] == "memory"
            assert alone.result().headers["x-should-retry"] == "false"  # no text will end
            monkeypatch.undo()
            first = pool.submit(ask, client, max_tokens=9)
            assert held.waits.wait(60)
            monkeypatch.setattr("decode.model.memory.free_bytes", lambda device: 0)
            # Many texts of one prompt hold its tokens once.
            others = [pool.submit(ask, client, max_tokens=300, n=4)]
            until(lambda: running.batcher.held == 5)
            others += [pool.submit(ask, client, max_tokens=300)]
            until(lambda: running.batcher.held == 6)
            full = ask(client, max_tokens=9)
            assert full.status_code == 503
            assert f"have {2 * tokens} tokens" in full.json()["error"]["message"]
            assert int(full.headers["retry-after"]) >= 1
            held.release()
            for other in others:
                assert other.result().status_code == 503
                assert other.result().json()["error"]["code"] == "memory"
                assert int(other.result().headers["retry-after"]) >= 1
            assert first.result().status_code == 200


def test_running_texts_go_on_while_a_long_prompt_is_read(endless: Any) -> None:
    long = "The drafter proposes tokens. " * 12
    limits: Any = {"max_rows": 3, "prefill_tokens": 8}
    with serving(endless, **limits) as running, running.client() as client:
        decoding: Any = running.batcher._decoding
        memory = decoding.decoder.lm.slots.allocated
        assert memory[0] == 3
        step, steps = decoding.step, []

        def counted(*arguments: Any) -> None:
            steps.append((len(decoding.rows), len(decoding.waiting)))
            step(*arguments)

        decoding.step = counted
        held = Held(running)
        with ThreadPoolExecutor() as pool:
            first = pool.submit(ask, client, max_tokens=LONG)
            assert held.waits.wait(60)
            second = pool.submit(ask, client, long, max_tokens=8, n=2)
            until(lambda: running.batcher.held == 3)
            held.release()
            for answer, text, limit in ((first, QUESTION, LONG), (second, long, 8)):
                expected = words(alone(endless, asked(text), limit))
                for choice in answer.result().json()["choices"]:
                    assert choice["message"]["content"] == expected
        assert steps.count((1, 2)) > 8  # two texts of the prompt wait, which is read once
        assert (3, 0) in steps
        assert decoding.decoder.lm.slots.allocated == memory


def test_prompts_reuse_what_they_share_with_earlier_texts(monkeypatch: Any) -> None:
    """The next turn of a chat; the metric counts it, and no text changes. Hidden states that the
    drafter reads are kept too."""
    hits = "draftsmith:prefix_cache_hits_total"
    reads_states = NgramDrafter()
    reads_states.captured_layers = (0,)
    for size, least, drafter in ((None, 30, None), (None, 30, reads_states), (0, 0, None)):
        options = {"prefix_cache_bytes": size}
        with serving(target(), drafter, options=options) as running, running.client() as client:
            messages = asked(QUESTION)
            for _ in range(2):
                body = {"model": MODEL, "messages": messages, "max_tokens": 16}
                text = text_of(client.post(CHAT, json=body))
                assert text == words(alone(target(), messages, 16))
                said = {"role": "assistant", "content": text}
                messages = [*messages, said, *asked("Why?")]
            counts = running.metrics()
            assert counts[hits] >= least
            assert (counts[hits] > 0) == (size is None)
            queries = counts["draftsmith:prefix_cache_queries_total"]
            assert queries == (0 if size == 0 else counts["draftsmith:prompt_tokens_total"])
    monkeypatch.setattr("draftsmith.serve.server.prefix_cache", lambda *_: None)
    with (
        pytest.raises(UserError, match="a prefix cache of 9 bytes would not be used"),
        serving(target(), options={"prefix_cache_bytes": 9}),
    ):
        pass


def test_texts_that_take_too_long_are_refused(endless: Any) -> None:
    with serving(endless, max_rows=1) as running, running.client() as client:
        batcher, held = running.batcher, Held(running)
        with ThreadPoolExecutor() as pool:
            running_one = pool.submit(ask, client, max_tokens=LONG)
            assert held.waits.wait(60)
            waiting_one = pool.submit(ask, client, max_tokens=LONG)
            until(lambda: batcher.held == 2)
            batcher.bounds = replace(batcher.bounds, max_wait=1e-9, max_seconds=1e-9)
            held.release()
            assert running_one.result().status_code == 504
            assert running_one.result().headers["x-should-retry"] == "false"
            assert "retry-after" not in running_one.result().headers
            assert waiting_one.result().status_code == 429
            assert int(waiting_one.result().headers["retry-after"]) >= 1
        running.until_idle()
        assert len(running.batcher._decoding.rows) == 0


def test_complete_texts_are_kept_when_another_takes_too_long(endless: Any) -> None:
    with serving(endless, max_rows=1) as running, running.client() as client:
        batcher: Any = running.batcher
        hand_out = batcher._hand_out

        def overrun_in_the_second_text(news: Any) -> None:
            hand_out(news)
            if running.texts()[1].tokens:
                batcher.bounds = replace(batcher.bounds, max_seconds=1e-9)

        batcher._hand_out = overrun_in_the_second_text
        answer = ask(client, n=2, max_tokens=LONG, logprobs=True).json()
        whole, cut = answer["choices"]
        text = words(alone(endless, asked(QUESTION), LONG))
        assert whole["message"]["content"] == text
        assert text.startswith(cut["message"]["content"])
        tokens = [len(choice["logprobs"]["content"]) for choice in (whole, cut)]
        assert tokens[0] == LONG > tokens[1] > 0
        assert answer["usage"]["completion_tokens"] == sum(tokens)
        assert [choice["finish_reason"] for choice in (whole, cut)] == ["length", "length"]
        assert answer["draftsmith"]["error"]["code"] == "overran"
        running.until_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_row(endless: Any, stream: bool) -> None:
    with serving(endless) as running, running.client() as client:
        held = Held(running)
        body = chat(QUESTION, max_tokens=400, stream=stream, n=2)
        line = HTTPConnection(running.url.removeprefix("http://"))
        line.request("POST", CHAT, json.dumps(body), {"content-type": "application/json"})
        assert held.waits.wait(60)
        line.close()
        until(lambda: running.requests[0].cancelled)
        held.release()
        running.until_idle()
        assert len(running.batcher._decoding.rows) == 0
        # The pass that was due when the client went away is the last.
        assert all(len(choice.tokens) <= 1 + 4 for choice in running.texts())
        assert running.batcher._decoding.outputs == {}
        assert ask(client, max_tokens=3).status_code == 200


def test_after_sigterm_running_texts_end_and_others_are_refused(endless: Any) -> None:
    with serving(endless, max_rows=1) as running, running.client() as client:
        expected = ask(client, max_tokens=LONG).json()
        held = Held(running)
        with ThreadPoolExecutor() as pool:
            first = pool.submit(ask, client, max_tokens=LONG)
            until(lambda: running.metrics()["draftsmith:num_requests_running"] == 1)
            waits = pool.submit(ask, client)
            until(lambda: running.batcher.held == 2)
            running.server.handle_exit(signal.SIGTERM, None)
            refused = ask(client)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "draining"
            assert client.get("/health").status_code == 503
            held.release()
            assert waits.result().status_code == 503
            assert first.result().json()["choices"] == expected["choices"]
        until(lambda: not running.batcher.alive)


def test_draining_ends_in_time(endless: Any) -> None:
    with serving(endless, drain_seconds=0.3) as running, running.client() as client:
        held = Held(running)
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(ask, client, max_tokens=400)
            until(lambda: running.batcher.held == 1)
            running.server.handle_exit(signal.SIGTERM, None)
            threading.Event().wait(0.4)
            held.release()
            assert answer.result().status_code == 503
        until(lambda: not running.batcher.alive)


def test_an_error_in_the_loop_ends_its_texts_only(endless: Any) -> None:
    with serving(endless) as running, running.client() as client:
        batcher: Any = running.batcher
        held = Held(running)
        broken = begin(client)
        batcher._decoding.step = lambda *_: 1 / 0
        held.release()
        *_, last = events(broken.iter_lines())
        assert "division" in last["error"]["message"]
        running.until_idle()
        expected = alone(endless, asked(QUESTION), 8)
        assert text_of(ask(client, max_tokens=8)) == words(expected)


@pytest.mark.parametrize("late", [False, True])
def test_a_pass_that_fails_ends_only_the_text_that_fails_alone(
    endless: Any, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows which row is to blame. All others get the text that they have alone. late: the
    pass has given its tokens."""
    step = Decoding.step

    def breaks(self: Decoding, *args: Any, **options: Any) -> None:
        texts = self.rows.contexts
        to_blame = (texts.tokens[:, :2] == bad[0]).any(1)
        if (to_blame & (texts.lengths > 40)).any():
            if late:
                step(self, *args, **options)
            raise RuntimeError("an illegal instruction")
        step(self, *args, **options)

    bad = endless.tokenizer("#", add_special_tokens=False).input_ids
    monkeypatch.setattr(Decoding, "step", breaks)
    with serving(endless) as running, running.client() as client, ThreadPoolExecutor() as pool:
        held = Held(running)
        post = functools.partial(client.post, "/v1/completions")
        bodies = [
            {"model": MODEL, "prompt": text, "max_tokens": 80, "temperature": 0.0}
            for text in ("abc", "to be or not to be", "# and so on", "Hello")
        ]
        answers = [pool.submit(post, json=body) for body in bodies]
        until(lambda: running.batcher.held == 4)
        held.release()
        statuses = [answer.result().status_code for answer in answers]
        assert statuses == [200, 200, 500, 200]
        for body, answer in zip(bodies, answers, strict=True):
            if body["prompt"] != "# and so on":
                expected = words(alone(endless, body["prompt"], 80))
                assert answer.result().json()["choices"][0]["text"] == expected


def test_a_text_that_ends_early_has_the_text_of_its_tokens(
    endless: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what the failed pass added, but what was held back."""
    step, expected = Decoding.step, words(alone(endless, "abc", 40))
    with serving(endless, max_rows=1) as running, running.client() as client:

        def breaks(self: Decoding, *args: Any) -> None:
            step(self, *args)
            if any(len(choice.tokens) >= 4 for choice in running.texts()[1:]):
                raise RuntimeError("an illegal instruction")

        monkeypatch.setattr(Decoding, "step", breaks)
        body = {"model": MODEL, "prompt": "abc", "max_tokens": 40, "temperature": 0.0, "n": 2}
        # All of the text may be the beginning of this stop string.
        answer = client.post("/v1/completions", json=body | {"stop": f"{expected}@"}).json()
        assert "illegal" in answer["draftsmith"]["error"]["message"]
        whole, cut = (choice["text"] for choice in answer["choices"])
        assert whole == expected
        assert cut == words(running.texts()[1].tokens)
        assert 0 < len(cut) < len(whole)


@pytest.mark.parametrize("refused", [False, True])
def test_a_text_that_is_not_read_keeps_what_was_received(
    refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """refused: the batcher ends the request while its parts wait; else there are too many."""
    monkeypatch.setattr("draftsmith.serve.running.UNREAD_EVENTS", 2)
    tokenizer = target().tokenizer

    async def collected() -> tuple[list[str], Any]:
        submitted = list[DecodeRequest]()
        batcher: Any = SimpleNamespace(submit=submitted.append, cancel=lambda request: None)
        job = Job([[5, 6]], 20, Sampling(), texts=2)
        read: Any = SimpleNamespace(job=job, asked=SimpleNamespace(stream=False))
        running = RunningRequest(batcher, read, lambda bits: 1)
        answer: Any = SimpleNamespace(error=None)
        working = asyncio.create_task(running._collected(answer))
        (request,), choice = submitted, running.choices[1]
        for piece in (Piece(0, "done", "stop"), Piece(1, "one ", None)):
            request.deliver(piece)
            for _ in range(5):  # until it is received
                await asyncio.sleep(0)
        for text in ("two ", "three ", "four ", "five "):
            request.deliver(Piece(1, text, None))
        if refused:
            request.cancelled = True
            request.deliver(Refusal("overran", "too late"))
        else:
            request.deliver(Piece(1, "six ", None))
            choice.begin(tokenizer, TokenBytes(tokenizer))
            assert choice.text is not None
            choice.text.cut(tokenizer("seven", add_special_tokens=False).input_ids)
        return [piece.text for piece in await asyncio.wait_for(working, 60)], answer.error

    texts, error = asyncio.run(collected())
    assert texts == ["done", "one two three four five " if refused else "one two "]
    assert error["code"] == ("overran" if refused else "unread")


@pytest.mark.parametrize(
    ("made", "method", "fields"),
    [(TextStream, "add", {}), (TokenBytes, "_read", {"logprobs": 2, "n": 2})],
)
def test_an_error_in_the_text_of_an_answer_ends_its_request_only(
    endless: Any, made: type, method: str, fields: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a text begins, and when it gets tokens."""

    def breaks(*arguments: Any) -> None:
        raise IndexError("piece id is out of range")

    with serving(endless) as running, running.client() as client:
        post = functools.partial(client.post, "/v1/completions")
        body = {"model": MODEL, "prompt": "abc", "max_tokens": 4, "temperature": 0.0}
        with monkeypatch.context() as patch:
            patch.setattr(made, method, breaks)
            failed = post(json=body | fields)
        assert failed.status_code == 500
        assert "out of range" in failed.json()["error"]["message"]
        running.until_idle()
        text = post(json=body).json()["choices"][0]["text"]
        assert text == words(alone(endless, "abc", 4))


def test_accepted_texts_are_delivered_and_rows_are_shared_by_request(endless: Any) -> None:
    """Texts that wait behind those of their own request are not late, and a request of many texts
    does not hold up one that comes later."""
    with serving(endless, max_rows=2) as running, running.client() as client:
        ended: list[str] = []

        def post(name: str, **fields: Any) -> Any:
            answer = client.post("/v1/completions", json={"model": MODEL, **fields})
            ended.append(name)
            return answer.json()

        held = Held(running)
        with ThreadPoolExecutor() as pool:
            prompts = [f"{number} is a number" for number in range(9)]
            many = pool.submit(post, "many", prompt=prompts, max_tokens=20, temperature=0.0)
            until(lambda: running.batcher.held == 9)
            assert held.waits.wait(60)
            one = pool.submit(post, "one", prompt="abc", max_tokens=4)
            until(lambda: running.batcher.held == 10)
            running.requests[0].arrived -= 100  # longer ago than any text may wait
            held.release()
            texts = [choice["text"] for choice in many.result()["choices"]]
            assert one.result()["choices"][0]["finish_reason"] == "length"
        assert ended == ["one", "many"]
        assert texts == [words(alone(endless, prompt, 20)) for prompt in prompts]


@pytest.mark.parametrize("positions", [131_072, UNLIMITED_POSITIONS])
def test_a_text_takes_the_memory_that_it_uses(positions: int) -> None:
    """A long context, or a target without a limit: a request that names none gets its answer, and
    memory for that. Memory of a long text is given back."""
    wide = tiny_target(max_positions=4096)
    wide.model.config.max_position_embeddings = positions
    with serving(wide, row_tokens=0) as running, running.client() as client:
        lm = running.batcher.decoder.lm
        largest, decodings = list[int](), list[Decoding]()

        def look(waiting: int) -> None:
            largest.append(lm.slots.allocated[1])
            decodings.append(running.batcher._decoding)

        running.batcher.on_waiting = look
        body = {"model": MODEL, "prompt": "abc", "stop": "e", "n": 2}
        assert client.post("/v1/completions", json=body).status_code == 200
        assert max(largest) < 1000
        body = {"model": MODEL, "prompt": "a" * 700, "max_tokens": 4}
        assert client.post("/v1/completions", json=body).status_code == 200
        assert largest[-1] > 700
        until(lambda: running.batcher._decoding is not decodings[-1])
        assert lm.slots.allocated[1] < 100


def test_a_decode_that_dies_is_an_error_of_the_process(
    endless: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*arguments: Any) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(RequestBatcher, "_begin_anew", dies)
    monkeypatch.setattr(Decoding, "step", lambda self: 1 / 0)

    def run() -> None:
        with serving(endless) as running, running.client() as client:
            answer = client.post("/v1/completions", json={"model": MODEL, "prompt": "a"})
            assert answer.status_code == 503
            until(lambda: not running.batcher.alive)

    with pytest.raises(UserError, match=r"the decode has failed: CUDA error"):
        run()


def test_the_texts_of_a_request_that_fail_in_one_pass_are_one_refusal() -> None:
    broken = tiny_target(max_positions=512, tie=False)
    with torch.no_grad():
        (at,) = broken.tokenizer("~", add_special_tokens=False).input_ids
        broken.model.get_input_embeddings().weight[at] = math.nan
    with serving(broken) as running, running.client() as client:
        post = functools.partial(client.post, "/v1/completions")
        failed = post(json={"model": MODEL, "prompt": "a~", "n": 3, "max_tokens": 4})
        assert failed.status_code == 500
        assert "NaN" in failed.json()["error"]["message"]
        running.until_idle()
        assert post(json={"model": MODEL, "prompt": "a", "max_tokens": 4}).status_code == 200
        assert running.metrics()['draftsmith:request_failure_total{reason="failed"}'] == 1
    with serving(broken, max_rows=1) as running, running.client() as client:
        body = {"model": MODEL, "prompt": ["a", "a~"], "max_tokens": 4}
        answer = client.post("/v1/completions", json=body).json()
        whole, failed = answer["choices"]
        assert whole["text"] == words(alone(broken, "a", 4))
        assert (failed["text"], failed["finish_reason"]) == ("", "length")
        assert "NaN" in answer["draftsmith"]["error"]["message"]


def test_a_prompt_that_breaks_the_decode_leaves_no_row_of_a_client_that_has_gone(
    endless: Any,
) -> None:
    with serving(endless) as running, running.client() as client:
        batcher: Any = running.batcher
        held = Held(running)
        begun = begin(client)
        (gone,) = running.requests
        assert held.waits.wait(60)  # it has been admitted

        read = batcher._decoding.read

        def breaks(*args: Any) -> int:
            # The client goes away after the batcher has looked for such clients.
            gone.cancelled, batcher._decoding.read = True, read
            raise RuntimeError("no memory")

        batcher._decoding.read = breaks
        with ThreadPoolExecutor() as pool:
            both = [pool.submit(ask, client, max_tokens=4) for _ in range(2)]
            until(lambda: batcher.held == 3)
            held.release()
            assert sorted(answer.result().status_code for answer in both) == [200, 500]
        begun.close()
        running.until_idle()


# --- many at once -------------------------------------------------------------------------------


def test_many_clients_join_and_hang_up(sampled: Running) -> None:
    """Every text is the one that the loop gives alone, and nothing is left behind."""
    threads = threading.active_count()
    dice = random.Random(0)
    jobs = [
        (f"{QUESTION} {number}" * dice.randint(1, 3), dice.randint(1, 40), number % 3)
        for number in range(20)
    ]

    def client(job: tuple[str, int, int]) -> str | None:
        text, limit, kind = job
        body = chat(text, max_tokens=limit, seed=limit, stream=kind > 0)
        with sampled.client() as http:
            if kind == 0:
                return text_of(http.post(CHAT, json=body))
            pieces = []
            body |= {"max_tokens": 300} if kind == 2 else {}
            with http.stream("POST", CHAT, json=body) as stream:
                for number, line in enumerate(stream.iter_lines()):
                    if kind == 2 and number > 6:
                        return None  # hangs up
                    if line.startswith("data: {"):
                        (choice,) = json.loads(line[6:])["choices"]
                        pieces.append(choice["delta"].get("content", ""))
            return "".join(pieces)

    before, known = sampled.metrics(), len(sampled.requests)
    with ThreadPoolExecutor(20) as pool:
        texts = list(pool.map(client, jobs))
    sampled.until_idle()
    for (text, limit, kind), got in zip(jobs, texts, strict=True):
        if kind < 2:
            assert got == words(alone(target(), asked(text), limit, SAMPLED, seed=limit)), text
    batcher: Any = sampled.batcher
    assert batcher._decoding.outputs == {}
    assert len(batcher._decoding.rows) == 0
    assert batcher._decoding.steps == []
    until(lambda: threading.active_count() <= threads)
    answers = [choice for request in sampled.requests[known:] for choice in request.choices]
    assert len(answers) == 20
    after = sampled.metrics()

    def counted(name: str) -> float:
        return sum(
            value - before.get(series, 0)
            for series, value in after.items()
            if series.partition("{")[0] == f"draftsmith:{name}_total"
        )

    for name, total in {
        "generation_tokens": sum(len(choice.tokens) for choice in answers),
        "prompt_tokens": sum(len(choice.prompt) for choice in answers if choice.tokens),
        "spec_decode_num_draft_tokens": sum(choice.drafted for choice in answers),
        "spec_decode_num_accepted_tokens": sum(choice.accepted for choice in answers),
        "spec_decode_num_accepted_tokens_per_pos": sum(choice.accepted for choice in answers),
        "request_success": sum(choice.reason is not None for choice in answers),
        "request_failure": 0,
    }.items():
        assert counted(name) == total, name
    assert after["draftsmith:num_requests_running"] == after["draftsmith:num_requests_waiting"] == 0
