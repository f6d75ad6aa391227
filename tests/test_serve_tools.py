"""Tools over HTTP: forced calls, calls that a text has, histories with calls, and refusals."""

import copy
import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from tokenizers import AddedToken

from decode.model.loading import Target
from draftsmith.net.api_error import ApiError
from draftsmith.serve.openai.known_fields import parse
from draftsmith.serve.openai.messages import read_items, read_messages
from draftsmith.serve.openai.openai_requests import CHAT
from draftsmith.serve.openai.tools import Calls, CallText, Thought
from tests.service import MODEL, Running, chat, serving, streamed
from tests.tiny import as_target, tiny_target

WRITTEN = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% for call in m.tool_calls or [] %}{{ '<tool_call>\n' }}{{ call.function | tojson }}"
    "{{ '\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {
    "hermes": "{{ tools | tojson }}<tool_call>\n{'name': 'arguments'}" + WRITTEN,
    "mistral": "{{ tools | tojson }}[TOOL_CALLS] [" + WRITTEN.replace("<tool_call>", ""),
    "llama": '{{ tools | tojson }}{"name": "x", "parameters": {}}'
    + WRITTEN.replace("<tool_call>", ""),
    "glm": "{{ tools | tojson }}<tool_call>{function-name}\n<arg_key>" + WRITTEN,
}
PLACE = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Rome", "Oslo"]}},
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in (("weather", PLACE), ("now", NOTHING))
]


FLAT: list[Any] = [{"type": "function", "strict": True, **tool["function"]} for tool in TOOLS]


def target(kind: str) -> Target:
    made = tiny_target(max_positions=1024)
    tokenizer = copy.deepcopy(made.tokenizer)
    tokenizer.chat_template = TEMPLATES.get(kind, tokenizer.chat_template)
    return dataclasses.replace(made, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def service() -> Iterator[Running]:
    with serving(target("hermes")) as running:
        yield running


def require_fitting(call: Any) -> None:
    given = json.loads(call.arguments)
    if call.name == "now":
        assert given == {}
    else:
        assert call.name == "weather"
        assert given["city"] in ("Rome", "Oslo")
        assert given["days"] in (1, 2)
        assert len(given) == 2


@pytest.mark.parametrize("choice", ["required", "weather"])
def test_the_openai_client_gets_forced_calls_whole_and_streamed(
    service: Running, choice: str
) -> None:
    forced: Any = choice
    if choice == "weather":
        forced = {"type": "function", "function": {"name": choice}}
    asked: dict[str, Any] = {
        "model": MODEL, "messages": [{"role": "user", "content": "Rome?"}], "tools": TOOLS,
        "tool_choice": forced, "parallel_tool_calls": False, "temperature": 1, "seed": 3,
        "max_tokens": 100,
    }  # fmt: skip
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none") as client:
        (answer,) = client.chat.completions.create(**asked).choices
        assert answer.finish_reason == "tool_calls"
        (call,) = answer.message.tool_calls
        assert answer.message.content is None
        require_fitting(call.function)
        assert choice in ("required", call.function.name)
        chunks = list(client.chat.completions.create(**asked, stream=True))
        deltas = [x for chunk in chunks for x in chunk.choices[0].delta.tool_calls or []]
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        assert not any(chunk.choices[0].delta.content for chunk in chunks)
        assert "".join(x.function.arguments for x in deltas) == call.function.arguments
        assert (deltas[0].function.name, deltas[0].index) == (call.function.name, 0)
        history = [*asked["messages"], answer.message.model_dump(exclude_none=True)]
        history += [{"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
        asked |= {"messages": history, "tool_choice": "auto", "max_tokens": 4}
        (last,) = client.chat.completions.create(**asked).choices
        assert last.message.content
        assert last.message.tool_calls is None


@pytest.mark.parametrize("kind", ["mistral", "llama"])
def test_other_formats_are_forced_too(kind: str) -> None:
    with serving(target(kind)) as running, running.client() as client:
        fields = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 200, "temperature": 1}
        body = chat("a", **fields, parallel_tool_calls=False, seed=1)
        (choice,) = client.post("/v1/chat/completions", json=body).json()["choices"]
        assert choice["finish_reason"] == "tool_calls", choice
        (call,) = choice["message"]["tool_calls"]
        require_fitting(
            openai.types.chat.chat_completion_message_function_tool_call.Function(
                **call["function"]
            )
        )


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("kind", ["hermes", "mistral"])
def test_calls_are_forced_and_read_where_their_marks_are_tokens(kind: str, special: bool) -> None:
    """As of Qwen and Hermes, whose marks are added tokens, and of Mistral, whose mark is a special
    one and so no part of the text that clients see."""
    made = tiny_target(max_positions=1024)
    tokenizer, model = copy.deepcopy(made.tokenizer), copy.deepcopy(made.model)
    marks = ["[TOOL_CALLS]"] if kind == "mistral" else ["<tool_call>", "</tool_call>"]
    tokens = [AddedToken(mark, special=special, normalized=False) for mark in marks]
    tokenizer.add_tokens(tokens, special_tokens=special)
    tokenizer.chat_template = TEMPLATES[kind]
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    ids = [f"<[{tokenizer.convert_tokens_to_ids(mark)}]>" for mark in marks]
    written = f"{json.dumps('Hm. ')} {ids[0]} {json.dumps('[' + ROME + ']')} {' '.join(ids[1:])}"
    if not special:
        written = json.dumps(f"Hm. {marks[0]}[{ROME}]{''.join(marks[1:])}")
    fields: dict[str, Any] = {"tools": TOOLS, "max_tokens": 200, "logprobs": True}
    with serving(as_target(model, tokenizer, MODEL)) as running, running.client() as client:
        for asked, content, name in (
            ({"tool_choice": "required", "parallel_tool_calls": False, "seed": 1}, None, None),
            ({"guided_grammar": f"start: {written}"}, "Hm.", "weather"),
        ):
            body = chat("a", **fields, **asked)
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            (choice,) = answer.json()["choices"]
            assert choice["finish_reason"] == "tool_calls", choice
            assert choice["message"]["content"] == content
            (call,) = choice["message"]["tool_calls"]
            require_fitting(SimpleNamespace(**call["function"]))
            assert call["function"]["name"] == (name or call["function"]["name"])
            deltas = [x["choices"][0]["delta"] for x in streamed(client, body)]
            said = "".join(delta.get("content") or "" for delta in deltas)
            assert said == (content or "")
            (again,) = (x["function"] for delta in deltas for x in delta.get("tool_calls", []))
            assert again == call["function"]


ROME = '{"name": "weather", "arguments": {"city": "Rome", "days": 1}}'
NOW = '{"name": "now", "arguments": {}}'
OTHER = '{"name": "other", "arguments": {}}'


MARKED = json.dumps({"city": 'say "<tool_call>{</tool_call>" [TOOL_CALLS][ é \u2028 \\n'})
THOUGHT = f"<think>A <tool_call> has a name: <tool_call>{NOW}</tool_call>.</think>"


def hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


@pytest.mark.parametrize(
    ("kind", "text", "content", "names"),
    [
        ("hermes", f"Hm.\n{hermes(ROME)}", "Hm.", ["weather"]),
        ("hermes", f"{hermes(ROME)}\n<tool_call>{NOW}</tool_call>", "", ["weather", "now"]),
        ("hermes", "<tool_call>\n" + ROME[:20], None, []),
        ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>', None, []),
        ("hermes", "plain { text", None, []),
        # Text behind, between, and a call that the limit cuts.
        ("hermes", f"{hermes(ROME)}\nI have asked.", "I have asked.", ["weather"]),
        ("hermes", f"A.\n{hermes(ROME)}\nB.\n{hermes(NOW)} C. ", "A.\nB. C. ",
         ["weather", "now"]),
        ("hermes", f"{hermes(ROME)}\n<tool_call>\n" + NOW[:12],
         "<tool_call>\n" + NOW[:12], ["weather"]),
        ("hermes", f"<tool_call>{ROME}", "", ["weather"]),
        ("hermes", f"<tool_call>\n[{ROME}, {NOW}]\n</tool_call>", "", ["weather", "now"]),
        ("hermes", f"<tool_call>\n{ROME}\n{NOW}\n</tool_call>", "", ["weather", "now"]),
        # Marks that are no calls: mentioned, in reasoning, of a function that is not there.
        ("hermes", f"I write <tool_call> and {{}}. {hermes(NOW)}", "I write <tool_call> and {}.",
         ["now"]),
        ("hermes", f"{THOUGHT}\n{hermes(ROME)}", THOUGHT, ["weather"]),
        ("hermes", f"{THOUGHT}\nNo call.", None, []),
        ("hermes", f"<think>Not closed: <tool_call> {hermes(NOW)}",
         "<think>Not closed: <tool_call>", ["now"]),
        ("hermes", hermes(NOW.replace("now", "no"), NOW), hermes(NOW.replace("now", "no")),
         ["now"]),
        ("hermes", f'<tool_call>{{"a": {NOW}}}</tool_call>', None, []),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>', None, []),
        ("hermes", '<tool_call>{"name": 1, "arguments": {}}</tool_call>{"name": {}}', None, []),
        # Behind a mark a name is enough.
        ("hermes", hermes('{"name": "now"}', '{"name": "now", "arguments": null}'), "",
         ["now", "now"]),
        ("mistral", f'[TOOL_CALLS][{{"name": "now"}}, {ROME}]', "", ["now", "weather"]),
        ("llama", '<|python_tag|>{"name": "now"}', "", ["now"]),
        ("llama", '{"name": "now"}', None, []),
        ("mistral", f"[TOOL_CALLS][{ROME}, {NOW}]", "", ["weather", "now"]),
        ("mistral", f"[{NOW}]", "", ["now"]),
        # Calls behind one that is none, in one list.
        ("mistral", f"[TOOL_CALLS] [{OTHER}, {NOW}]", f"[TOOL_CALLS] [{OTHER},", ["now"]),
        ("mistral", f"A [TOOL_CALLS][{NOW}, {OTHER}, {ROME}] B", f"A, {OTHER}, B",
         ["now", "weather"]),
        ("mistral", f"[TOOL_CALLS][{OTHER}] B [TOOL_CALLS][{OTHER}, {OTHER}", None, []),
        ("hermes", f"<tool_call>[{OTHER}, {NOW}]</tool_call>", f"<tool_call>[{OTHER},", ["now"]),
        ("mistral", f" [TOOL_CALLS] [{NOW}]", "", ["now"]),
        ("mistral", f"[TOOL_CALLS][TOOL_CALLS] [{NOW}]", "[TOOL_CALLS]", ["now"]),
        ("mistral", f"[TOOL_CALLS][{OTHER}][TOOL_CALLS][{NOW}]", f"[TOOL_CALLS][{OTHER}]",
         ["now"]),
        ("mistral", "[1, 2]", None, []),
        ("mistral", f"Yes. [TOOL_CALLS] [{ROME}] Done.", "Yes. Done.", ["weather"]),
        ("mistral", f"[TOOL_CALLS][{ROME}, " + NOW[:9], ", " + NOW[:9], ["weather"]),
        ("mistral", f"The mark is [TOOL_CALLS]. [TOOL_CALLS]{NOW}", "The mark is [TOOL_CALLS].",
         ["now"]),
        ("llama", ROME.replace("arguments", "parameters"), "", ["weather"]),
        ("llama", '{"a": 1}', None, []),
        ("llama", f"Here: {ROME}; {NOW} Is {{that}} {{\"a\": 1}} it?",
         'Here: Is {that} {"a": 1} it?', ["weather", "now"]),
        ("llama", f"<|python_tag|>{ROME};{NOW[:-1]}", f";{NOW[:-1]}", ["weather"]),
        ("llama", f"[{ROME}, {NOW}]", "", ["weather", "now"]),
    ],
)  # fmt: skip
def test_calls_in_a_text(kind: str, text: str, content: str | None, names: list[str]) -> None:
    reads = Calls(target(kind).tokenizer, TOOLS, "auto", True)
    found, calls = reads.read(text, [], [])
    assert found == (text if content is None else content)
    assert [name for name, _ in calls] == names
    one = Calls(target(kind).tokenizer, TOOLS, "auto", False)
    assert [name for name, _ in one.read(text, [], [])[1]] == names[:1]
    in_parts(reads, text, [1] * len(text))


def in_parts(reads: Calls, text: str, sizes: Sequence[int]) -> tuple[str, list[tuple[str, str]]]:
    """What a client gets of a text that comes in parts of these sizes. It is the whole answer."""
    content, grown, begin = "", CallText(reads, []), 0
    for size in sizes:
        content += grown.add(text[begin : begin + size])
        begin += size
    rest, calls = grown.end("", [])
    assert (content + rest, calls) == reads.read(text, [], [])
    return content + rest, calls


def test_arguments_arrive_as_they_are_written() -> None:
    """A number, an escape and a blank stay; JSON in a string is the arguments, as some models
    write them."""
    reads = Calls(target("hermes").tokenizer, TOOLS, "auto", True)
    for written, arguments in (
        ('{ "a":1.50,  "b": 1e400, "c": "\\u00e9" }', None),
        (f'{{"a": {5000 * "9"}}}', None),
        (MARKED, None),
        (json.dumps(MARKED), MARKED),
        ('"hello"', None),
        ("[1]", None),
        ("null", "{}"),
    ):
        for key in ("arguments", "parameters"):
            call = f'{{"{key}": {written}, "id": [1, {{}}], "name": "now"}}'
            text = f"a {hermes(call)} b"
            assert reads.read(text, [], []) == ("a b", [("now", arguments or written)])
    both = '{"arguments": null, "parameters": {"a": 1}, "name": "now"}'
    assert reads.read(hermes(both), [], []) == ("", [("now", '{"a": 1}')])


@pytest.mark.parametrize("kind", ["hermes", "mistral", "llama"])
@pytest.mark.parametrize("nested", ['{"a":[', '{"a":', "[{", "<tool_call>"])
def test_a_long_call_in_tiny_pieces_is_read_a_few_times(
    kind: str, nested: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Calls(target(kind).tokenizer, TOOLS, "auto", True)
    begin = '{"name": "now", "arguments": {"x": '
    mark = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS][", "llama": ""}[kind]
    long = (mark + begin + nested * 4000)[:18_000]
    read, of_text = [], Calls.certain

    def certain(self: Calls, text: str, begin: int) -> int:
        read.append(len(text) - begin)
        return of_text(self, text, begin)

    monkeypatch.setattr(Calls, "certain", certain)
    grown = CallText(reads, [])
    assert "".join(map(grown.add, long)) == ""
    assert sum(read) < 16 * len(long)
    assert grown.end("", []) == (long, [])


@pytest.mark.parametrize("begun", [False, True], ids=["in the answer", "in the prompt"])
def test_a_long_thought_in_tiny_pieces_is_searched_once(begun: bool) -> None:
    """Its end may come in parts. Later marks of an end are text, and so are those without one."""

    class Watched(str):
        def find(self, *given: Any) -> int:
            searched.append(len(self) - int(given[1]))
            return super().find(*given)

    thought = Thought(begun)
    text = ("" if begun else "<think>") + 2000 * "hm </thin " + "</think> x </think> y"
    ends = {}
    searched: list[int] = []
    for end in range(len(text) + 1):
        ends[end] = thought.end(Watched(text[:end]))
    assert sum(searched) < 10 * len(text)
    end = text.index("</think>") + len("</think>")
    assert set(ends.values()) == {0, end}
    assert min(at for at, known in ends.items() if known) == end
    other = Thought(False)
    assert [other.end(text) for text in ("a </think>", "a </think> b </think>")] == [0, 0]


@pytest.mark.parametrize("kind", ["hermes", "mistral", "llama"])
def test_calls_of_any_content_arrive_whole_in_any_parts(kind: str) -> None:
    reads, random = Calls(target(kind).tokenizer, TOOLS, "auto", True), Random(0)
    signs = [*'{}[]",:;\\\n é\u2028😀<>/', "<tool_call>", "</tool_call>", "[TOOL_CALLS]",
             "<|python_tag|>", "</think>", '{"name": "now"', "word"]  # fmt: skip
    before, opens, closes, between, after = {
        "hermes": ("", "<tool_call>", "</tool_call>", "\n", ""),
        "mistral": ("[TOOL_CALLS][", "", "", ", ", "]"),
        "llama": ("<|python_tag|>", "", "", "; ", ""),
    }[kind]

    def value(depth: int) -> Any:
        kinds = ["text", "number", "list", "object"][: 4 if depth else 2]
        match random.choice(kinds):
            case "text":
                return "".join(random.choices(signs, k=random.randrange(8)))
            case "number":
                return random.choice([1.5, -3, True, None])
            case "list":
                return [value(depth - 1) for _ in range(random.randrange(3))]
        return {str(value(0)): value(depth - 1) for _ in range(random.randrange(3))}

    for _ in range(150):
        calls = [
            (random.choice(["now", "weather"]), {str(value(0)): value(2)})
            for _ in range(random.randrange(1, 4))
        ]
        ascii_only, indent = random.random() < 0.5, random.choice([None, 1])
        texts = [
            json.dumps({"name": name, "arguments": x}, ensure_ascii=ascii_only, indent=indent)
            for name, x in calls
        ]
        written = between.join(f"{opens}{text}{closes}" for text in texts)
        ahead = random.choice(["", "Well, < [ and so on: ", "<think>I may <tool_call></think>\n"])
        behind = random.choice(["", " That is all.", "\n{1} <tool_call> ["])
        text = f"{ahead}{before}{written}{after}{behind}"
        sizes = [random.randrange(1, 9) for _ in text]
        content, found = in_parts(reads, text, sizes)
        assert [(name, json.loads(x)) for name, x in found] == calls, text
        assert content == (f"{ahead.rstrip()}{behind}" if ahead else behind.lstrip()), text


@pytest.mark.parametrize("mark", ["<tool_call>", "[TOOL_CALLS]"])
def test_reasoning_that_the_prompt_begins_has_no_calls(mark: str) -> None:
    kind = "hermes" if mark == "<tool_call>" else "mistral"
    known = target(kind).tokenizer
    reads = Calls(known, TOOLS, "auto", True)
    text = f"I could write {mark}{NOW}</think>{mark}{ROME}"
    for prompt, names in (("<|im_start|>assistant\n<think>\n", ["weather"]),
                          ("<|im_start|>assistant\n", ["now", "weather"])):  # fmt: skip
        _, calls = reads.read(text, known(prompt).input_ids, [])
        assert [name for name, _ in calls] == names


@pytest.mark.parametrize("route", ["chat", "responses"])
def test_calls_that_a_target_writes_itself_are_read_out_of_its_text(
    service: Running, route: str
) -> None:
    """The text comes first in a stream, and two calls come with its end, with what follows them."""
    text = f"Hm, 7.\n<tool_call>\n{ROME}\n</tool_call>\n<tool_call>\n{NOW}\n</tool_call>\nOk."
    forced = {"extra_body": {"guided_choice": [text]}}
    names, arguments = ["weather", "now"], [{"city": "Rome", "days": 1}, {}]
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none") as client:
        if route == "chat":
            asked: Any = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS, **forced}
            chunks = [*client.chat.completions.create(model=MODEL, stream=True, **asked)]
            deltas = [chunk.choices[0].delta for chunk in chunks]
            calls = [x.function for delta in deltas for x in delta.tool_calls or []]
            assert "".join(delta.content or "" for delta in deltas) == "Hm, 7.\nOk."
            assert chunks[-1].choices[0].finish_reason == "tool_calls"
        else:
            asked = {"input": "a", "tools": FLAT, **forced}
            asked |= {"include": ["message.output_text.logprobs"]}
            events = [*client.responses.create(model=MODEL, stream=True, **asked)]
            output = events[-1].response.output
            said, *calls = output
            assert [x.type for x in output] == ["message", "function_call", "function_call"]
            assert said.content[0].text == "Hm, 7.\nOk."
            assert "".join(x.token for x in said.content[0].logprobs) == "Hm, 7.\n"
            deltas = [x for x in events if x.type == "response.output_text.delta"]
            assert "".join(x.delta for x in deltas) == "Hm, 7.\nOk."
            done = [x for x in events if x.type == "response.output_item.done"]
            assert [x.item for x in done] == output
            assert [x.output_index for x in done] == [0, 1, 2]
            whole = client.responses.create(model=MODEL, **asked).output
            assert [x.type for x in whole] == [x.type for x in output]
    assert [call.name for call in calls] == names
    assert [json.loads(call.arguments) for call in calls] == arguments


def test_the_openai_client_gets_forced_calls_of_responses(service: Running) -> None:
    asked: dict[str, Any] = {
        "model": MODEL, "input": [{"role": "user", "content": "Rome?"}], "tools": FLAT,
        "tool_choice": {"type": "function", "name": "weather"}, "parallel_tool_calls": False,
        "temperature": 1, "max_output_tokens": 100, "extra_body": {"seed": 3},
    }  # fmt: skip
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none") as client:
        answer = client.responses.create(**asked)
        (call,) = answer.output
        require_fitting(call)
        assert (call.type, call.name, answer.status) == ("function_call", "weather", "completed")
        assert answer.tool_choice.name == "weather"
        assert [tool.name for tool in answer.tools] == ["weather", "now"]
        events = [*client.responses.create(**asked, stream=True)]
        kinds = [x.type.removeprefix("response.") for x in events]
        assert kinds == [
            "created", "in_progress", "output_item.added", "function_call_arguments.delta",
            "function_call_arguments.done", "output_item.done", "completed",
        ]  # fmt: skip
        assert events[3].delta == call.arguments
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        history = [*asked["input"], call.model_dump(exclude_none=True), output]
        asked |= {"input": history, "tool_choice": "auto", "max_output_tokens": 4}
        (last,) = client.responses.create(**asked).output
        assert last.type == "message"


def test_items_of_calls_are_messages_of_a_chat() -> None:
    call = {"type": "function_call", "call_id": "a", "name": "now", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "a", "output": "noon"}
    said = {"type": "message", "role": "assistant", "content": "Hm."}
    messages = read_items([{"role": "user", "content": "q"}, said, call, call, output, call])
    assert [x["role"] for x in messages] == ["user", "assistant", "tool", "assistant"]
    assert [len(x.get("tool_calls", ())) for x in messages] == [0, 2, 0, 1]
    assert messages[2] == {"role": "tool", "content": "noon", "tool_call_id": "a"}
    with pytest.raises(ApiError, match=r"input\.0\.tool_call_id is missing"):
        read_items([{"type": "function_call_output", "output": "noon"}])


def test_arguments_in_a_history_are_json_or_an_object() -> None:
    given: list[Any] = ['{"city": "Rome"}', {"city": "Rome"}, "", {}]
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": x}}
             for x in given]  # fmt: skip
    said = {"role": "assistant", "content": None, "tool_calls": calls}
    (read,) = read_messages([said])
    found = [call["function"]["arguments"] for call in read["tool_calls"]]
    assert found == [{"city": "Rome"}, {"city": "Rome"}, {}, {}]
    items = [{"type": "function_call", "call_id": "a", "name": "f", "arguments": x} for x in given]
    assert read_items(items)[0]["tool_calls"] == read["tool_calls"]


def test_transformers_reads_what_its_templates_describe() -> None:
    known = target("hermes").tokenizer
    for unknown in (TEMPLATES["glm"], TEMPLATES["hermes"].replace("<tool_call>", "<call>")):
        known.chat_template = unknown
        with pytest.raises(ApiError, match="not in a format of calls"):
            Calls(known, TOOLS, "auto", True)
    known.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {"open_pattern": r"\s*<call>", "close": "</call>", "repeats": True,
                           "content": "json",
                           "transform": {"type": "function", "function": "{content}"}},
            "content": {"close_pattern": r"<\|im_end\|>", "content": "text"},
        },
    }  # fmt: skip
    reads = Calls(known, TOOLS, "auto", True)
    text = "Hm. <call>" + ROME + "</call>"
    prompt, tokens = (known(x).input_ids for x in ("<|im_start|>assistant\n", text))
    content, calls = reads.read(text, prompt, tokens)
    assert (content.strip(), [name for name, _ in calls]) == ("Hm.", ["weather"])


def test_a_template_without_tools_is_one_clear_error() -> None:
    with serving(target("plain")) as running, running.client() as client:
        for fields in (
            {"tools": TOOLS},
            {"messages": [{"role": "tool", "content": "1", "tool_call_id": "a"}]},
        ):
            answer = client.post("/v1/chat/completions", json=chat("a") | fields)
            assert answer.status_code == 400
            assert "knows no tools" in answer.json()["error"]["message"]
        none = chat("a", tools=TOOLS, tool_choice="none", max_tokens=2)
        assert client.post("/v1/chat/completions", json=none).status_code == 200


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tools": [1]}, "tools.0 is 1; expected a function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tool_choice": "required"}, "but tools has none"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
         'tool_choice asks for "x", but tools has weather, now'),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "leave other formats"),
        ({"messages": [{"role": "tool", "content": "1"}]}, "messages.0.tool_call_id is missing"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            {"id": "a", "function": {"name": "f", "arguments": "{"}}]}]}, "expected JSON"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            {"id": "a", "function": {"name": "f", "arguments": [1]}}]}]},
         "messages.0.tool_calls.0.function.arguments is a list of 1; expected JSON as text, or an"),
    ],
)  # fmt: skip
def test_what_cannot_be_called_is_refused(fields: dict[str, Any], said: str) -> None:
    body = json.dumps(chat("a") | fields).encode()
    with pytest.raises(ApiError, match=re.escape(said)):
        parse(CHAT, body)
