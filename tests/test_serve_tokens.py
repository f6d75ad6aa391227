"""What the service says about single tokens: log-probabilities, and who drafted them."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch

from decode.drafters.lookup.ngram import NgramDrafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.draw.logprobs import TokenLogprob
from decode.settings import DecodeSettings
from decode.shapes.static import Static
from decode.text import prompt_ids
from decode.text_stream import decode
from decode.trace import drafted_tokens
from decode.verification import Verification
from draftsmith.serve.batching.answer_tokens import AnswerTokens, NewTokens, TokenBytes
from draftsmith.serve.openai.answers import written
from tests.service import (
    CHAT,
    MODEL,
    QUESTION,
    Running,
    alone,
    ask,
    asked,
    chat,
    serving,
    streamed,
    target,
    text_in,
    words,
)
from tests.tiny import EOS_ID, tiny_model

SAID = asked(QUESTION)


@pytest.fixture(scope="module")
def client(service: Running) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none") as opened:
        yield opened


def log_p_of(prompt: Any, limit: int) -> tuple[list[int], torch.Tensor]:
    """The tokens of an answer, and float32 [T, V]: the target's log-probabilities at each, from one
    plain forward."""
    tokens = alone(target(), prompt, limit)
    ids = prompt_ids(prompt, target().tokenizer)
    with torch.inference_mode():
        logits = target().model(torch.tensor([[*ids, *tokens]])).logits[0, len(ids) - 1 : -1]
    return tokens, logits.float().log_softmax(-1)


def spelt(token: int) -> str:
    return written(TokenBytes(target().tokenizer)[token])


def test_chat_gives_the_log_probabilities_of_the_target(client: Any, service: Running) -> None:
    tokens, expected = log_p_of(SAID, 40)
    options: Any = {
        "model": MODEL,
        "messages": SAID,
        "max_tokens": 40,
        "logprobs": True,
        "top_logprobs": 3,
    }
    answer = client.chat.completions.create(**options).choices[0]
    entries = answer.logprobs.content
    assert [entry.token for entry in entries] == [spelt(token) for token in tokens]
    special = target().tokenizer.all_special_tokens
    assert any(entry.token in special for entry in entries)
    text = b"".join(bytes(entry.bytes) for entry in entries if entry.token not in special)
    assert text.decode(errors="replace") == answer.message.content
    for place, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(expected[place, tokens[place]].item(), abs=1e-4)
        best = expected[place].topk(3)
        assert [top.token for top in entry.top_logprobs] == [
            spelt(x) for x in best.indices.tolist()
        ]
        of_best = [top.logprob for top in entry.top_logprobs]
        assert of_best == pytest.approx(best.values.tolist(), abs=1e-4)

    parts = []
    with client.chat.completions.create(**options, stream=True) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                parts += choice.logprobs.content if choice.logprobs else []
    # Prompts that were read before are read in other pieces, which rounds otherwise.
    values = pytest.approx([x.logprob for x in entries], abs=1e-4)
    assert [x.token for x in parts] == [x.token for x in entries]
    assert [x.logprob for x in parts] == values
    assert all(len(x.top_logprobs) == 3 for x in parts)

    choices = client.chat.completions.create(**options | {"top_logprobs": 0, "n": 2}).choices
    for choice in choices:
        assert [x.logprob for x in choice.logprobs.content] == values
        assert all(x.top_logprobs == [] for x in choice.logprobs.content)
    service.until_idle()
    assert service.batcher._decoding.logprobs == {}


@pytest.mark.parametrize("count", [0, 4])
def test_completions_give_them_with_offsets(client: Any, count: int) -> None:
    prompts = ["The dog", "She sells"]
    options: Any = {"model": MODEL, "prompt": prompts, "max_tokens": 24, "logprobs": count}
    done = client.completions.create(**options)
    pieces: dict[int, list[Any]] = {0: [], 1: []}
    with client.completions.create(**options, stream=True) as stream:
        for chunk in stream:
            pieces[chunk.choices[0].index].append(chunk.choices[0].logprobs)
    for choice, prompt in zip(done.choices, prompts, strict=True):
        given = choice.logprobs
        tokens, expected = log_p_of(prompt, 24)
        assert given.tokens == [spelt(token) for token in tokens]
        of_tokens = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert given.token_logprobs == pytest.approx(of_tokens.tolist(), abs=1e-4)
        for place, best in enumerate(given.top_logprobs):
            assert count <= len(best) <= count + 1
            assert best[given.tokens[place]] == given.token_logprobs[place]
        for start, end, token in zip(
            given.text_offset, [*given.text_offset[1:], None], given.tokens, strict=True
        ):
            # A token completes a character that others have begun.
            assert choice.text[start:end].endswith(token) or token.startswith("bytes:")
        for name in ("tokens", "token_logprobs", "text_offset"):
            parts = [value for piece in pieces[choice.index] for value in getattr(piece, name)]
            whole = getattr(given, name)
            assert parts == (pytest.approx(whole, abs=1e-4) if name == "token_logprobs" else whole)


def test_token_ids_are_those_of_the_decode_whole_and_in_a_stream(service: Running) -> None:
    ids = prompt_ids(SAID, target().tokenizer)
    body = {"model": MODEL, "max_tokens": 24, "temperature": 0, "return_token_ids": True}
    with service.client() as http:
        texts = http.post("/v1/completions", json={**body, "prompt": ids, "n": 2}).json()["choices"]
        chatted = http.post(CHAT, json={**body, "messages": SAID}).json()
        parts = streamed(http, {**body, "messages": SAID})
    expected = alone(target(), SAID, 24)
    for choice in (*texts, *chatted["choices"]):
        assert choice["token_ids"] == expected
        assert choice["prompt_token_ids"] == ids
    pieces = [part["choices"][0].get("token_ids", []) for part in parts]
    assert len([piece for piece in pieces if piece]) > 1
    assert [token for piece in pieces for token in piece] == expected


def test_a_stop_string_cuts_text_and_entries(client: Any, service: Running) -> None:
    text = words(alone(target(), SAID, 40))
    stop = text[21:24]
    body = chat(QUESTION, max_tokens=40, stop=["never said", stop], logprobs=True)
    done = client.chat.completions.create(**body)
    (answer,) = done.choices
    assert answer.message.content == text[: text.index(stop)]
    assert answer.finish_reason == "stop"
    assert done.usage.completion_tokens < 40
    with service.client() as http:
        assert text_in(streamed(http, body)) == answer.message.content
    raw = [bytes(entry.bytes) for entry in answer.logprobs.content]
    assert b"".join(raw).decode(errors="replace").startswith(answer.message.content)
    assert not b"".join(raw[:-1]).decode(errors="replace").startswith(answer.message.content)
    service.until_idle()
    assert service.batcher._decoding.logprobs == {}


def test_the_texts_of_tokens_add_up_to_the_answer() -> None:
    """Also where one character has several tokens, and where the text ends inside of one."""
    tokenizer = target().tokenizer
    token_bytes = TokenBytes(tokenizer)
    ids = [*tokenizer("the dog né 日").input_ids, EOS_ID, *tokenizer("日x日").input_ids[:-1]]
    text = decode(tokenizer, ids)
    assert text.endswith("x�")
    tokens = AnswerTokens(tokenizer, token_bytes)
    taken: list[Any] = []
    for begin in range(0, len(ids), 2):
        ended = begin + 2 >= len(ids)
        entries = [TokenLogprob(token, -1.0, ()) for token in ids[begin : begin + 2]]
        reason = "length" if ended else None
        tokens.add(NewTokens(ids[begin : begin + 2], reason, entries))
        end = len(text) if ended else max(len(text) - 9, 0)
        taken += tokens.take(end, ended=ended)
    assert "".join(token.text for token in taken) == text
    raw = b"".join(token.raw for token in taken if not token.special)
    assert raw.decode(errors="replace") == text
    assert len(taken) == len(ids)
    places = [token.start for token in taken]
    assert places == sorted(places)


@pytest.mark.parametrize("tree", [False, True])
def test_a_trace_says_what_was_drafted(tree: bool) -> None:
    """The expected one is made from the verdicts on all nodes of each pass, without a service."""
    small = tiny_model("llama", max_positions=512, layers=1)
    shape = Static(widths=[3, 2, 1])
    drafter = SmallLMDrafter(small, shape=shape) if tree else NgramDrafter(1, 2)
    settings, tokenizer = DecodeSettings(gamma=3), target().tokenizer
    expected: list[tuple[str, list[str]]] = [("target", [])]

    def observe(step: Verification) -> None:
        nodes = drafted_tokens(step)[0]
        at, rejected = -1, []
        for node in nodes:
            if node.verdict == "accepted":
                expected.append(("draft", []))
                at = node.node
        below = {at}
        for node in nodes:
            if node.parent in below:
                below.add(node.node)
                rejected.append(token_bytes[node.token].decode(errors="replace"))
        expected.append(("target", rejected))

    token_bytes = TokenBytes(tokenizer)
    decoder = settings.decoder(target(), drafter)[0]
    decoder.observers.append(observe)
    tokens = decoder.decode([prompt_ids(SAID, tokenizer)], 40).outputs[0]
    visible = [x for x, token in zip(expected, tokens, strict=False) if token not in (0, 1, 2)]
    assert any(origin == "draft" for origin, _ in visible)
    assert any(rejected for _, rejected in visible)

    with serving(target(), drafter, settings) as running, running.client() as http:
        body = chat(QUESTION, max_tokens=40, draftsmith={"trace": True})
        (choice,) = http.post(CHAT, json=body).json()["choices"]
        chunks = streamed(http, body)
        plain = ask(http, max_tokens=2).json()
    traced = choice["draftsmith"]["tokens"]
    assert "".join(token["text"] for token in traced) == choice["message"]["content"]
    assert [token["origin"] for token in traced] == [origin for origin, _ in visible]
    # What was drafted past the end of the text is not judged.
    assert [token["rejected"] for token in traced][:-1] == [x for _, x in visible][:-1]
    pieces = [chunk["choices"][0].get("draftsmith", {"tokens": []}) for chunk in chunks]
    assert [token for piece in pieces for token in piece["tokens"]] == traced
    assert "draftsmith" not in plain["choices"][0]
