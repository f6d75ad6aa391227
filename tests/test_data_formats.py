"""Data as people have it: formats by their columns, splits that are missing, duplicates."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from decode.errors import UserError
from tests.test_data import tokenizer_with
from train.data.chat import takes_tools, to_sample
from train.data.read import Example, read_examples
from train.data.splits import Duplicates, split_off, without_duplicates

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


def turns(example: Example) -> list[tuple[str, str]]:
    return [(m["role"], m["content"]) for m in example.messages or ()]


@pytest.mark.parametrize("wrap", ["lines", "array", "object", "lines in .json"])
def test_the_columns_say_what_a_row_is(tmp_path: Path, wrap: str) -> None:
    lines = "\n".join(map(json.dumps, ROWS))
    text = {"array": json.dumps(ROWS), "object": json.dumps({"version": 1, "data": ROWS})}
    path = tmp_path / ("rows.jsonl" if wrap == "lines" else "rows.json")
    path.write_text(text.get(wrap, lines))
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


def test_tables_and_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()
    (tmp_path / "rows.csv").write_text('instruction,input,output\ndo,,"done, all"\n')
    examples, _ = read_examples(str(tmp_path / "rows.csv"))
    assert turns(examples[0]) == [("user", "do"), ("assistant", "done, all")]
    datasets.Dataset.from_list(ROWS[:1]).to_parquet(tmp_path / "rows.parquet")
    examples, _ = read_examples(str(tmp_path / "rows.parquet"))
    assert turns(examples[0]) == [("user", "a"), ("assistant", "b")]
    (tmp_path / "book.txt").write_text("\none\ntwo\n\n\nthree\n")
    examples, _ = read_examples(str(tmp_path / "book.txt"))
    assert [(e.id, e.text) for e in examples] == [
        ("book.txt:2", "one\ntwo"),
        ("book.txt:6", "three"),
    ]


def test_what_cannot_be_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}
    for messages, message in (
        ([picture], r'content\[0\] is .*expected \{"type": "text"'),
        ([TOOLS[0], CALL | {"tool_calls": [{"name": "look"}]}], r"tool_calls\[0\] is .*expected"),
        ([TOOLS[0], CALL | {"tool_calls": None}], r"expected role and content, or from and value"),
    ):
        path.write_text(json.dumps({"messages": messages}))
        with pytest.raises(UserError, match=message):
            read_examples(str(path))


def with_template(text: str) -> PreTrainedTokenizerFast:
    return tokenizer_with("{% for m in messages %}" + text + "{% endfor %}")


def test_tool_messages_are_kept_only_if_the_template_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    examples, _ = read_examples(str(path))
    ignores = "<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>"
    writes = ignores.replace(
        "<|im_end|>",
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>",
    )
    refuses = "{% if m['role'] == 'tool' %}{{ raise_exception('no') }}{% endif %}" + writes
    for template, taken in ((ignores, False), (writes, True), (refuses, False)):
        taking = [takes_tools(e, with_template(template)) for e in examples]
        assert taking == [True, True, True, taken, True]
    # The call is what the assistant wrote, so it is learnt.
    written = with_template(writes)
    sample = to_sample(examples[3], written)
    learnt = [t for t, scored in zip(sample.tokens, sample.mask, strict=True) if scored]
    assert '"arguments"' in written.decode(learnt)
    assert "see x" not in written.decode(learnt)


# --- splits --------------------------------------------------------------------------------------


def rows(*prompts: str) -> list[Example]:
    return [
        Example(f"r{i}", ({"role": "user", "content": prompt},), prompt, None, None, f"r:{i}")
        for i, prompt in enumerate(prompts)
    ]


def test_what_is_split_off_follows_the_prompt_and_the_seed() -> None:
    train = [*rows(*(f"question {i % 50}" for i in range(100)))]
    text = Example("t", None, None, "plain", None, "t:1")

    def prompts(split: list[Example]) -> set[str | None]:
        return {example.prompt for example in split}

    splits = split_off([*train, text], ["test", "dev"], count=4, seed=0)
    assert [len(splits[name]) for name in ("train", "test", "dev")] == [85, 8, 8]
    assert not prompts(splits["train"]) & prompts(splits["test"]) | prompts(splits["dev"]) & (
        prompts(splits["test"])
    )
    assert text in splits["train"]
    again = split_off(train[::-1], ["test"], count=4, seed=0)
    assert prompts(again["test"]) == prompts(splits["test"])
    assert prompts(split_off(train, ["test"], count=4, seed=1)["test"]) != prompts(again["test"])
    # Never more than a tenth.
    assert len(prompts(split_off(train, ["test"], count=40, seed=0)["test"])) == 5
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
    with pytest.raises(UserError, match="all 2 rows of train repeat prompts of dev or test"):
        without_duplicates(held_out, held_out)
