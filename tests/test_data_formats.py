"""Data as people have it: formats by their columns, splits that are missing, duplicates."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from decode.base.errors import UserError
from tests.test_data import tokenizer_with
from tests.tiny import write_rows
from train.data.chat_tokens import prompt_tokens, to_samples
from train.data.read import Example, data_fingerprint, read_examples
from train.data.splits import Duplicates, split_off, without_duplicates, without_refused
from train.data.template import written

CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
    ],
}
TOOLS = [
    {"role": "user", "content": [{"type": "text", "text": "see "}, {"type": "text", "text": "x"}]},
    CALL,
    {"role": "tool", "tool_call_id": "c1", "content": "blue"},
    {"role": "assistant", "content": "it is blue"},
]
ROWS: list[dict[str, Any]] = [
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"instruction": "do", "input": "this", "output": "done", "text": "### all of it"},
    {"instruction": "do", "input": "", "output": "done"},
    {"messages": TOOLS, "tools": [{"type": "function"}]},
    {"prompt": "p", "completion": "c", "system": "s"},
]


PART = {"type": "text", "text": "hm"}
USER = {"role": "user", "content": "a"}


def turns(example: Example) -> list[tuple[str, str]]:
    return [(m["role"], m["content"]) for m in example.messages or ()]


@pytest.mark.parametrize("wrap", ["lines", "object", "lines in .json"])
def test_the_columns_say_what_a_row_is(tmp_path: Path, wrap: str) -> None:
    lines = "\n".join(map(json.dumps, ROWS))
    whole = json.dumps({"version": 1, "data": ROWS})
    path = tmp_path / ("rows.jsonl" if wrap == "lines" else "rows.json")
    path.write_text(whole if wrap == "object" else lines, "utf-8")
    examples, _ = read_examples(str(path))
    assert [turns(e) for e in examples] == [
        [("user", "a"), ("assistant", "b")],
        [("user", "do\n\nthis"), ("assistant", "done")],
        [("user", "do"), ("assistant", "done")],
        [("user", "see x"), ("assistant", ""), ("tool", "blue"), ("assistant", "it is blue")],
        [("system", "s"), ("user", "p"), ("assistant", "c")],
    ]
    assert examples[3].messages is not None
    # As chat templates expect it.
    function = {"name": "look", "arguments": {"at": "x"}}
    assert examples[3].messages[1]["tool_calls"][0]["function"] == function


def test_a_file_has_the_same_numbers_and_codes_by_either_name(tmp_path: Path) -> None:
    """Lines are counted from 1, in .json too, and UTF-16 is refused in all."""
    good, bad = json.dumps(ROWS[0]), '{"prompt": 4}'
    for name in ("rows.json", "rows.jsonl"):
        path = tmp_path / name
        for text, number in ((bad, 1), (f"{good}\n{bad}", 2)):
            path.write_text(text, "utf-8")
            with pytest.raises(UserError, match=rf"{name}:{number}: prompt is 4"):
                read_examples(str(path))
        path.write_text(f"{good}\n{good}", "utf-16")
        with pytest.raises(UserError, match=r"is UTF-16 or UTF-32; expected UTF-8"):
            read_examples(str(path))


def rows_of(path: Path, *rows: Any, **settings: Any) -> list[Example]:
    write_rows(path, rows)
    return list(read_examples(str(path), **settings)[0])


def test_older_names_and_fields_of_other_programs(tmp_path: Path) -> None:
    """Turns of SlimOrca, of OpenAI's answers, of its functions before tools, and of ShareGPT."""
    look = {"name": "look", "arguments": '{"at": "x"}'}
    old = [
        {"role": "user", "content": "see x"},
        {"role": "assistant", "content": None, "function_call": look},
        {"role": "function", "name": "look", "content": "blue"},
        {"role": "assistant", "content": "it is blue", "annotations": [], "refusal": None},
    ]
    shared = [
        {"from": "human", "value": "see x", "weight": 0},
        {"from": "function_call", "value": json.dumps(look)},
        {"from": "observation", "value": "blue"},
        {"from": "gpt", "value": "it is blue", "weight": 1.0},
    ]
    openai, sharegpt = rows_of(
        tmp_path / "rows.jsonl", {"messages": old, "functions": [look]}, {"conversations": shared}
    )
    call = {"function": {"name": "look", "arguments": {"at": "x"}}}
    assert openai.messages == (
        {"role": "user", "content": "see x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "look", "content": "blue"},
        {"role": "assistant", "content": "it is blue"},
    )
    assert openai.tools == ({"type": "function", "function": look},)
    assert sharegpt.messages is not None
    assert [{k: v for k, v in m.items() if k != "name"} for m in openai.messages] == list(
        sharegpt.messages
    )


def test_definitions_of_tools_are_rendered(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"a": {"b": 1}}}}
    row = {"prompt": "see", "response": "b"}
    plain, listed, text = rows_of(
        tmp_path / "rows.jsonl", row, row | {"tools": [tool]}, row | {"tools": json.dumps([tool])}
    )
    assert (plain.tools, listed.tools, text.tools) == ((), (tool,), (tool,))
    writes = tokenizer_with(
        "{% if tools %}{{ tools[0] | tojson }}{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    )
    written = json.dumps(tool)
    for example in (listed, text):
        [sample] = to_samples(example, writes)
        assert writes.decode(sample.tokens).startswith(written)
        assert writes.decode(prompt_tokens(example, writes)).startswith(written)
    assert "look" not in writes.decode(to_samples(plain, writes)[0].tokens)
    # The hash of data without tools stays what it was.
    assert data_fingerprint([plain]) != data_fingerprint([replace(plain, tools=(tool,))])


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_kept_or_dropped(tmp_path: Path, name: str) -> None:
    asked = {"role": "user", "content": "a"}
    fields = {"messages": [asked, {"role": "assistant", "content": "b", name: "hm"}]}
    tags = {"messages": [asked, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"}]}
    path = tmp_path / "rows.jsonl"
    for field in ("reasoning_content", "thinking"):  # of the template
        written = with_template(
            "<|im_start|>{{ m.role }}\n{% if m.FIELD %}<think>{{ m.FIELD }}</think>{% endif %}"
            "{{ m.content }}<|im_end|>".replace("FIELD", field)
        )
        texts = [written.decode(to_samples(e, written)[0].tokens) for e in rows_of(path, fields)]
        assert "<think>hm</think>b<|im_end|>" in texts[0]
    parts = {"messages": [asked, {"role": "assistant", "content": "b", name: [PART, PART]}]}
    kept = rows_of(path, parts)[0].messages
    assert kept is not None
    assert kept[1]["reasoning_content"] == "hmhm"
    other = {"messages": [asked, {"role": "assistant", "content": "b", name: {"text": "hm"}}]}
    with pytest.raises(UserError, match=rf"messages\[1\].{name} is .*; expected text"):
        rows_of(path, other)
    dropped = rows_of(path, fields, tags, parts, other, reasoning="drop")
    assert [turns(e) for e in dropped] == [[("user", "a"), ("assistant", "b")]] * 4
    assert all(name not in (e.messages or ())[-1] for e in dropped)
    assert turns(rows_of(path, tags)[0])[1] == ("assistant", tags["messages"][1]["content"])
    # Not without a word, if the template has no place for it.
    with pytest.raises(UserError, match=r"rows.jsonl:1: .*data\.reasoning: drop"):
        to_samples(rows_of(path, fields)[0], with_template("{{ m.content }}"))


@pytest.mark.parametrize(
    ("answer", "rest"),
    [
        ("hm\n</think>\n\nb", "b"),  # the prompt opened it
        ("[THINK]hm[/THINK]b", "b"),
        ("<thinking>hm</thinking><think>hm</think> b", "b"),
        ("<|begin_of_thought|>hm<|end_of_thought|>b", "b"),
        ("b <think>hm</think>", "b <think>hm</think>"),
        ("b</b>", "b</b>"),
        *((text, None) for text in ("<think>hm</think>", "<think>hm, it was cut", "hm</think>")),
    ],
)
def test_reasoning_in_an_answer_is_dropped(tmp_path: Path, answer: str, rest: str | None) -> None:
    row = {"prompt": "a", "response": answer}
    path = tmp_path / "rows.jsonl"
    if rest is None:
        with pytest.raises(UserError, match="is reasoning without an answer"):
            rows_of(path, row, reasoning="drop")
    else:
        assert turns(rows_of(path, row, reasoning="drop")[0])[1] == ("assistant", rest)


def test_only_nulls_of_a_table_are_missing_arguments(tmp_path: Path, data_sets: Any) -> None:
    def row(name: str, **arguments: Any) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        return {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]}

    rows = [row("add", a=0, b={"x": 1}), row("look", city="x", near=None)]
    data_sets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    write_rows(tmp_path / "rows.jsonl", rows)
    for name, second in (("parquet", {"city": "x"}), ("jsonl", {"city": "x", "near": None})):
        examples, _ = read_examples(str(tmp_path / f"rows.{name}"))
        calls = [(e.messages or ())[1]["tool_calls"][0]["function"]["arguments"] for e in examples]
        assert calls == [{"a": 0, "b": {"x": 1}}, second]
    # Definitions of tools too are as they were written.
    tool = {"type": "function", "function": {"name": "look", "default": None}}
    [example] = rows_of(tmp_path / "tools.jsonl", {"prompt": "p", "tools": [tool]})
    assert example.tools == (tool,)


@pytest.mark.parametrize("form", ["arrow", "numpy", "pandas"])
def test_columns_that_are_not_read_are_not_decoded(
    tmp_path: Path, data_sets: Any, form: str
) -> None:
    """The sound is no sound, and a format of the saved data set is of no matter."""
    rows = [{"messages": [USER], "id": 1.0, "sound": {"path": "none.wav", "bytes": b"x"}}]
    data = data_sets.Dataset.from_list(rows).cast_column("sound", data_sets.Audio())
    data.with_format(form).save_to_disk(tmp_path / "saved")
    data.to_parquet(tmp_path / "rows.parquet")
    for name in ("saved", "rows.parquet"):
        examples, _ = read_examples(str(tmp_path / name))
        assert turns(examples[0]) == [("user", "a")]
        assert examples[0].id == "1"
    pictures = data.rename_column("sound", "prompt").select_columns("prompt")
    pictures.to_parquet(tmp_path / "pictures.parquet")
    with pytest.raises(UserError, match=r"pictures\.parquet:0: prompt is .*expected text"):
        read_examples(str(tmp_path / "pictures.parquet"))


def test_what_cannot_be_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}
    for messages, message in (
        ([picture], r'content\[0\] is .*expected \{"type": "text"'),
        ([TOOLS[0], CALL | {"tool_calls": [{"name": "look"}]}], r"tool_calls\[0\] is .*expected"),
        ([TOOLS[0], CALL | {"tool_calls": None}], r"expected role and content, or from and value"),
    ):
        path.write_text(json.dumps({"messages": messages}), "utf-8")
        with pytest.raises(UserError, match=message):
            read_examples(str(path))


def with_template(text: str) -> PreTrainedTokenizerFast:
    return tokenizer_with("{% for m in messages %}" + text + "{% endfor %}")


def test_tool_messages_are_kept_only_if_the_template_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_rows(path, ROWS)
    examples, _ = read_examples(str(path))
    ignores = "<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>"
    writes = ignores.replace(
        "<|im_end|>",
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>",
    )
    refuses = "{% if m['role'] == 'tool' %}{{ raise_exception('no') }}{% endif %}" + writes
    for template, taken in ((ignores, False), (writes, True), (refuses, False)):
        forms = [written(e, with_template(template)) for e in examples]
        assert [form is not None for form in forms] == [True, True, True, taken, True]
    # DeepSeek's: a call only where content is null, and its arguments as text.
    wants = (
        "{% if m.content is none %}{% for c in m.tool_calls %}"
        "{{ '<call>' + c.function.name + ' ARGUMENTS' }}{% endfor %}{% else %}{{ m.content }}"
        "{% endif %}<|im_end|>"
    )
    for arguments in ("' + c.function.arguments + '", "' ~ c.function.arguments ~ '"):
        asks = with_template(wants.replace("ARGUMENTS", arguments))
        [sample] = to_samples(examples[3], asks)
        written_text = asks.decode(sample.tokens)
        assert '<call>look {"at": "x"}<|im_end|>blue' in written_text
        assert prompt_tokens(examples[3], asks) == sample.tokens[: -len("it is blue") - 1]
    # How many may be left out is bounded.
    ignoring = with_template(ignores)
    assert len(without_refused(examples, lambda: ignoring, "train", 0.2)) == 4
    with pytest.raises(UserError, match=r"1 of 5 rows of train have tool .* at most 10\.00%"):
        without_refused(examples, lambda: ignoring, "train", 0.1)
    # The call is what the assistant wrote, so it is learnt.
    writing = with_template(writes)
    [sample] = to_samples(examples[3], writing)
    learnt = [t for t, scored in zip(sample.tokens, sample.mask, strict=True) if scored]
    assert '"arguments"' in writing.decode(learnt)
    assert "see x" not in writing.decode(learnt)


# --- splits --------------------------------------------------------------------------------------


def rows(*prompts: str) -> list[Example]:
    return [
        Example(f"r{i}", ({"role": "user", "content": prompt},), prompt, None, None, f"r:{i}")
        for i, prompt in enumerate(prompts)
    ]


def test_what_is_split_off_has_no_text_and_is_never_more_than_a_tenth() -> None:
    train = [*rows(*(f"question {i % 50}" for i in range(100)))]
    text = Example("t", None, None, "plain", None, "t:1")
    splits = split_off([*train, text], ["test", "dev"], count=4, seed=0)
    assert [len(splits[name]) for name in ("train", "test", "dev")] == [85, 8, 8]
    assert text in splits["train"]
    assert len(split_off(train, ["test"], count=40, seed=0)["test"]) == 2 * 5
    with pytest.raises(UserError, match=r"data\.test is left out, and train has 9 diff"):
        split_off(rows(*map(str, range(9))), ["test"], count=4, seed=0)


def test_what_repeats_a_held_out_prompt_is_left_out_of_train() -> None:
    words = [f"w{i}" for i in range(40)]
    long = " ".join(words)
    held_out = rows("Why is the sky blue?", long)
    near = " ".join([*words[:30], *(f"x{i}" for i in range(10))])
    apart = " ".join([*words[:14], *(f"x{i}" for i in range(26))])
    inside = " ".join(words[5:25])
    train = rows("why is the sky BLUE", "Why is the sea blue?", long.upper(), near, apart, inside)
    kept, lost = without_duplicates(train, held_out)
    assert [e.id for e in kept] == ["r1", "r4"]
    assert lost == Duplicates(exact=2, near=2)
    assert without_duplicates(train, [])[0] == train
    # An instruction that many prompts have is none of what is their own.
    asked = [f"{long} item {n} says {n * 7} and {n * 11}" for n in range(9)]
    kept, lost = without_duplicates(rows(*asked[:8], asked[8].upper()), rows(asked[8]))
    assert ([e.prompt for e in kept], lost) == (asked[:8], Duplicates(exact=1, near=0))
    with pytest.raises(UserError, match="all 2 rows of train repeat prompts of dev or test"):
        without_duplicates(held_out, held_out)
