"""Rows to examples, examples to masked tokens, samples to batches."""

import json
import random
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from decode.base.errors import UserError
from train.data.batches import Batches, RankText, bucket_batches, collate, padding_share
from train.data.chat_tokens import Sample, prompt_tokens, to_samples, user_prefix
from train.data.corpus import Corpus
from train.data.read import Example, data_fingerprint, read_examples
from train.data.sources import SourceName
from train.data.stored_samples import StoredSamples
from train.data.template import set_moment
from train.data.text_files import require_kept, write_samples

# --- read ----------------------------------------------------------------------------------------


def write(path: Path, *rows: object) -> str:
    """A .jsonl file: bytes as they are, anything else as JSON."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return str(path)


def test_every_kind_of_row(tmp_path: Path) -> None:
    chat: list[dict[str, str]] = [
        {"role": "system", "content": ""},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    source = write(
        tmp_path / "rows.jsonl",
        b'\xef\xbb\xbf{"prompt": "hi", "task": "greet"}',
        b"",
        {"prompt": "hi", "reference": "ho", "id": 7},
        {"prompt": "hi", "response": "hey", "reference": "ho", "kind": "x", "id": "seven"},
        {"messages": [m | {"name": None} for m in chat], "prompt": "ignored: messages say more"},
        {"text": "once", "prompt": None},
    )
    examples, report = read_examples(source)
    user = {"role": "user", "content": "hi"}
    assert list(examples) == [
        Example("rows.jsonl:1", (user,), "hi", None, "greet", f"{source}:1"),
        Example(
            "7", (user, {"role": "assistant", "content": "ho"}), "hi", None, None, f"{source}:3"
        ),
        Example(
            "seven", (user, {"role": "assistant", "content": "hey"}), "hi", None, "x", f"{source}:4"
        ),
        Example(
            "rows.jsonl:5",
            tuple(chat),
            None,
            None,
            None,
            f"{source}:5",
        ),
        Example("rows.jsonl:6", None, None, "once", None, f"{source}:6"),
    ]
    assert str(report) == "5 read = 5 kept + 0 dropped"
    assert [e.id for e in read_examples(source, limit=2)[0]] == ["rows.jsonl:1", "7"]


USER = {"role": "user", "content": "a"}


def called(arguments: str) -> dict[str, object]:
    """A message with a tool call."""
    function = {"name": "look", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


BAD_ROWS = {
    "broken JSON": (b'{"prompt": "hi"', "broken JSON .*expected one JSON object"),
    "nested": (b"[" * 100_000, "broken JSON"),
    "not an object": (b'["hi"]', r'found \["hi"\]; expected one JSON object'),
    "not UTF-8": (b'{"prompt": "\xff"}', "byte 0xff at column 13 is not UTF-8"),
    "lone surrogate": (b'{"prompt": "\\ud800"}', r"prompt contains the lone surrogate \\ud800"),
    "no known field": (
        {"promt": "hi"},
        '\n  found "promt" .*Did you mean "prompt".*\n  expected {"messages"',
    ),
    "question and answer": (
        {"question": "hi", "answer": "ho"},
        '\n  found "question", "answer"'
        '\n  rename "question" to "prompt" and "answer" to "response"\n  expected {"messages"',
    ),
    "query and response": (
        {"query": "hi", "response": "ho"},
        '\n  found "query", "response"\n  rename "query" to "prompt"\n',
    ),
    "input and output": (
        {"id": "1", "input": "hi", "output": "ho"},
        '\n  found "id", "input", "output"'
        '\n  rename "input" to "prompt" and "output" to "response"\n',
    ),
    "an answer alone": ({"answer": "ho"}, '\n  found "answer"\n  expected'),
    "no fields": ({}, '\n  found no fields\n  expected .*"conversations".*"instruction".*"text"'),
    "wrong type": ({"prompt": 3}, "prompt is 3; expected text"),
    "answer of a wrong type": ({"prompt": "hi", "response": ["x"]}, r'response is \["x"\]'),
    "id of a wrong type": ({"prompt": "hi", "id": True}, "id is true; expected text or"),
    "kind of a wrong type": ({"prompt": "hi", "kind": 1}, "kind is 1; expected text"),
    "empty prompt": ({"prompt": " \n"}, "prompt is empty; expected text"),
    "messages as text": ({"messages": "hi"}, 'messages is "hi"; expected a list of role and'),
    "no messages": ({"messages": []}, r"messages is \[\]; expected a list"),
    "other keys": (
        {"messages": [{"speaker": "human", "value": "hi"}]},
        r'messages\[0\] has "speaker", "value"; expected role and content, or from and value',
    ),
    "no content": (
        {"messages": [USER, {"role": "assistant", "content": None}]},
        r'messages\[1\] has "role", "content": null; expected role and content',
    ),
    "unknown role": ({"messages": [{"role": "gpt", "content": "x"}]}, 'role "gpt"; expected sys'),
    "content of parts": (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        r"messages\[0\]\.content\[0\] is \{.*expected \{\"type\": \"text\"",
    ),
    "assistant first": (
        {"messages": [{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]},
        "roles are assistant, user; expected a user message",
    ),
    **{
        f"arguments {arguments[:12]!r}": ({"messages": [USER, called(arguments)]}, found)
        for arguments, found in {
            "[" * 100_000: r"arguments is no JSON \(.*recursion",
            '{"a":' * 90 + "1" + "}" * 90: "arguments is nested more than 50 levels deep",
            '"5"': r'messages\[1\]\.tool_calls\[0\]\.function\.arguments is "5"; expected an obj',
            "[1,2]": r"arguments is \[1, 2\]; expected an object",
            "7": "arguments is 7; expected an object",
            '{"a": NaN}': "arguments cannot be written as JSON",
            '{"a": "\\ud800"}': "arguments contains the lone surrogate",
        }.items()
    },
    "tools of a wrong type": ({"prompt": "hi", "tools": "{}"}, r"tools is \{\}; expected a list"),
    "nobody asks": ({"messages": [{"role": "system", "content": "x"}]}, "roles are system; expec"),
}


@pytest.mark.parametrize(("row", "found"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_stops_or_is_counted(tmp_path: Path, row: object, found: str) -> None:
    good: list[object] = [{"prompt": f"hi {i}"} for i in range(9)]
    source = write(tmp_path / "rows.jsonl", *good[:4], row, *good[4:])
    with pytest.raises(UserError, match=rf"rows\.jsonl:5: .*{found}"):
        read_examples(source)
    examples, report = read_examples(source, on_bad="skip", max_bad_rate=0.1)
    assert [e.prompt for e in examples] == [f"hi {i}" for i in range(9)]
    assert (report.read, report.kept, report.dropped.total()) == (10, 9, 1)
    assert str(report).startswith("10 read = 9 kept + 1 dropped (")
    assert report.problems[0].startswith(f"{source}:5: ")
    with pytest.raises(UserError, match=r"1 of 10 rows are bad, more than the 9\.00%.*jsonl:5"):
        read_examples(source, on_bad="skip", max_bad_rate=0.09)


def test_sources_that_give_nothing(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", {"prompt": "hi"})
    cases = {
        "trian.jsonl": r'no such file .*Did you mean "train\.jsonl"',
        "./nowhere": "no such file or directory",
        "rows.parquet": "no such file ",
        "notes.tab": r'ending in "\.tab" \(this one begins with "q\\ta"\); expected \.jsonl',
        "sheet.xlsx": r'ending in "\.xlsx" \(this one begins with bytes that are no text\)',
        "broken.json": r"broken JSON .*expected an array of objects, or one object per line",
        "empty.jsonl": "no usable row in empty.jsonl: 0 read = 0 kept",
    }
    (tmp_path / "notes.tab").write_text("q\ta\n", "utf-8")
    (tmp_path / "sheet.xlsx").write_bytes(b"PK\x03\x04\xff")
    (tmp_path / "broken.json").write_text('[{"prompt": "hi"}', "utf-8")
    (tmp_path / "empty.jsonl").write_text("\n\n", "utf-8")
    for source, found in cases.items():
        with pytest.raises(UserError, match=found):
            read_examples(source, base_dir=tmp_path)
    with pytest.raises(UserError, match=r"a \.jsonl file has no splits"):
        read_examples("train.jsonl@train", base_dir=tmp_path)
    write(tmp_path / "bad.jsonl", {})
    with pytest.raises(UserError, match=r"no usable row .*1 read = 0 kept"):
        read_examples("bad.jsonl", base_dir=tmp_path, on_bad="skip", max_bad_rate=1.0)


def test_an_at_sign_names_a_split_unless_it_is_in_a_path(tmp_path: Path) -> None:
    inside = tmp_path / "me@host"
    inside.mkdir()
    parse = SourceName.parse
    assert parse("org/name@train") == ("org/name", None, "train")
    assert parse("org/name:part@train[:9]") == ("org/name", "part", "train[:9]")
    assert parse("org/name:part") == ("org/name", "part", None)
    assert parse(f"{inside}@test[:9]") == (str(inside), None, "test[:9]")
    for path in (inside, inside / "none.jsonl", tmp_path / "rows.jsonl"):
        assert parse(str(path)) == (str(path), None, None)


def test_rows_with_one_id(tmp_path: Path) -> None:
    """In one file the second is a bad row; in several files the ids name their files."""
    for folder, row in {"a": "1", "b": "2"}.items():
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "x.jsonl", {"prompt": row}, {"prompt": row, "id": "same"})
    files = ["a/x.jsonl", "b/x.jsonl"]
    examples, _ = read_examples(files, base_dir=tmp_path)
    assert [e.id for e in examples] == [
        *("a/x.jsonl:1", "a/x.jsonl#same", "b/x.jsonl:1", "b/x.jsonl#same")
    ]
    assert [e.id for e in examples] == [examples[row].id for row in range(4)]
    # Where nothing clashes, ids stay as they are.
    examples, _ = read_examples(files, base_dir=tmp_path / "a" / "..", limit=3)
    assert [e.id for e in examples] == ["a/x.jsonl:1", "same", "b/x.jsonl:1"]
    twice = write(tmp_path / "twice.jsonl", *({"prompt": f"p{i}", "id": i // 2} for i in range(4)))
    with pytest.raises(UserError, match=r'twice\.jsonl:2: the id "0" is also the id of .*:1; exp'):
        read_examples(twice)
    examples, report = read_examples(twice, on_bad="skip", max_bad_rate=0.5)
    assert [e.id for e in examples] == ["0", "1"]
    assert report.dropped == {"repeated id": 2}


@pytest.mark.parametrize("again", ["a/x.jsonl", "./a/x.jsonl", "a/../a/x.jsonl"])
def test_a_file_is_named_once(tmp_path: Path, again: str) -> None:
    (tmp_path / "a").mkdir()
    write(tmp_path / "a" / "x.jsonl", {"prompt": "p"})
    with pytest.raises(UserError, match="is named twice; expected each source once"):
        read_examples(["a/x.jsonl", again], base_dir=tmp_path)


def test_fingerprint_follows_content_and_order_but_not_the_place(tmp_path: Path) -> None:
    def of(folder: str, *rows: object) -> str:
        (tmp_path / folder).mkdir()
        return data_fingerprint(read_examples(write(tmp_path / folder / "x.jsonl", *rows))[0])

    a, b = {"prompt": "a", "id": "a"}, {"prompt": "b", "id": "b", "response": "r"}
    base = of("base", a, b)
    assert of("moved", a, b) == base
    changed = [
        of("swapped", b, a),
        of("shorter", a),
        of("edited", a, b | {"response": "R"}),
        of("renamed", a, b | {"id": "c"}),
        of("as text", {"text": "a", "id": "a"}, b),
        of("other text", {"text": "A", "id": "a"}, b),
        of("of a kind", a | {"kind": "k"}, b),
    ]
    assert len({base, *changed}) == 1 + len(changed)


def test_data_sets(tmp_path: Path, data_sets: Any) -> None:
    rows = [{"prompt": "a", "text": None}, {"prompt": None, "text": "b"}]
    train = data_sets.Dataset.from_list(rows)
    train.save_to_disk(tmp_path / "one")
    both = data_sets.DatasetDict({"train": train, "test": train.select([1])})
    both.save_to_disk(tmp_path / "both")
    train.to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "train.jsonl", *rows)
    (tmp_path / "broken").mkdir()
    write(tmp_path / "broken" / "train.jsonl", b"{")

    cases = {
        ("one", None): ["one:0", "one:1"],
        ("both", "test"): ["both[test]:0"],
        ("rows.parquet", None): ["rows.parquet:0", "rows.parquet:1"],
        ("folder", None): ["folder/train.jsonl:1", "folder/train.jsonl:2"],
        ("folder", "train[1:]"): ["folder/train.jsonl:2"],
    }
    for (name, split), sources in cases.items():
        source = name + (f"@{split}" if split else "")
        examples, _ = read_examples(source, base_dir=tmp_path)
        assert [e.source for e in examples] == sources
        assert [e.id for e in examples] == sources
        assert [e.prompt or e.text for e in examples] == ["a", "b"][-len(sources) :]
        # Absolute paths must not enter the ids: the data may move.
        again, _ = read_examples(str(tmp_path / source))
        assert data_fingerprint(again) == data_fingerprint(examples)
    # Each entry of a list may name its split.
    examples, _ = read_examples(["both@train", "both@test"], base_dir=tmp_path)
    assert [e.id for e in examples] == ["both[train]:0", "both[train]:1", "both[test]:0"]

    errors = {
        "both": "both: no split is named; expected one of train, test. Write both@SPLIT",
        "both@tset": 'no split "tset"; expected one of train, test.*Did you mean "test"',
        "broken": "broken/train.jsonl:1: broken JSON",
        "folder@valid": 'folder: no split "valid"; expected one of train. Write folder@SPLIT',
        "folder@valid[:1]": 'folder: has no split "valid',
        "folder:part": "folder: cannot be read: .*part",
        "both:part@train": 'both: names the subset "part", but a saved data set has none',
        "rows.parquet:part": 'rows.parquet:part: names the subset "part", but a .parquet file',
        "no/such-data-set": "no/such-data-set: neither a file .* nor a data set",
    }
    for source, found in errors.items():
        with pytest.raises(UserError, match=found):
            read_examples(source, base_dir=tmp_path)


# --- chat ----------------------------------------------------------------------------------------

SPECIAL = [
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "<call>",
]
FOR, END = "{% for m in messages %}", "{% endfor %}"
IF_PROMPT, END_IF = "{% if add_generation_prompt %}", "{% endif %}"
CHATML_PROMPT = IF_PROMPT + "{{ '<|im_start|>assistant\n' }}" + END_IF

# name -> (the template, the end-of-turn token, whether a system message is accepted)
TEMPLATES = {
    "chatml": (
        FOR
        + "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
        + END
        + CHATML_PROMPT,
        "<|im_end|>",
        True,
    ),
    "llama3": (
        "{{ bos_token }}"
        + FOR
        + "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
        + "{{ m['content'] | trim + '<|eot_id|>' }}"
        + END
        + IF_PROMPT
        + "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
        + END_IF,
        "<|eot_id|>",
        True,
    ),
    "gemma": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
        + "{{ raise_exception('System role not supported') }}{% endif %}"
        + FOR
        + "{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
        + "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}"
        + END
        + IF_PROMPT
        + "{{ '<start_of_turn>model\n' }}"
        + END_IF,
        "<end_of_turn>",
        False,
    ),
    "mistral": (
        "{{ bos_token }}"
        + FOR
        + "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
        + "{% elif m['role'] == 'assistant' %}{{ m['content'] + eos_token }}"
        + "{% else %}{{ raise_exception('Only user and assistant') }}{% endif %}"
        + END,
        "</s>",
        False,
    ),
    # Ends the whole text, though not each turn, with a second special token.
    "phi3": (
        FOR
        + "{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}"
        + END
        + "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}"
        + "{% else %}{{ '<|endoftext|>' }}{% endif %}",
        "<|end|>",
        True,
    ),
    "blocks around the end": (
        FOR
        + "{% if m['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
        + "{% generation %}{{ m['content'] + '<|im_end|>\n' }}{% endgeneration %}"
        + "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
        + END_IF
        + END
        + CHATML_PROMPT,
        "<|im_end|>",
        True,
    ),
    "blocks before the end": (
        FOR
        + "{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
        + "{%- generation -%}{{ m['content'] }}{%- endgeneration -%}"
        + "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}"
        + END
        + CHATML_PROMPT,
        "<|im_end|>",
        True,
    ),
    # The block has the end of the text too, which the target does not write after each turn.
    "blocks around two ends": (
        FOR
        + "{{ '<|' + m['role'] + '|>\n' }}{% if m['role'] == 'assistant' %}"
        + "{% generation %}{{ m['content'] + '<|end|>\n' }}"
        + "{% if loop.last %}{{ '<|endoftext|>' }}{% endif %}{% endgeneration %}"
        + "{% else %}{{ m['content'] + '<|end|>\n' }}{% endif %}"
        + END
        + "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
        "<|end|>",
        True,
    ),
    # No end-of-turn token: the line break is all there is to say that the turn is over.
    "plain lines": (
        FOR
        + "{{ m['role'] + ': ' + m['content'] + '\n' }}"
        + END
        + IF_PROMPT
        + "{{ 'assistant:' }}"
        + END_IF,
        "\n",
        True,
    ),
}

# As GLM's: a turn ends where the next one begins, and the target writes that token.
GLM = (
    FOR
    + "{{ '<|' + m['role'] + '|>\n' }}{% if m['role'] == 'assistant' %}"
    + "BEGIN{{ m['content'] | trim }}END{% else %}{{ m['content'] }}{% endif %}"
    + END
    + "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)

# What a reasoning model's template does: the thinking of turns that are over is taken out.
STRIPS = (
    FOR
    + "{% set c = m['content'] %}{% if not loop.last %}{% set c = c.split('</think>')[-1] %}"
    + "{% endif %}{{ '<|im_start|>' + m['role'] + '\n' + c + '<|im_end|>\n' }}"
    + END
    + CHATML_PROMPT
)
# And another: the prompt opens the thinking that the finished conversation does not show.
OPENS = TEMPLATES["chatml"][0].replace("assistant\n", "assistant\n<think>\n")


def tokenizer_with(template: str | None) -> PreTrainedTokenizerFast:
    """A token for every byte, for two newlines (they can meet where turns do), and the specials."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("Ċ", "Ċ"), ("h", "i")]
    for pair in merges:
        vocab["".join(pair)] = len(vocab)
    backend = Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing("<s> $0", special_tokens=[("<s>", bos)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = template
    return tokenizer


def example(*contents: str, system: str | None = None) -> Example:
    """User and assistant by turns, the user first."""
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": content}
        for i, content in enumerate(contents)
    ]
    prompt = contents[0] if len(contents) <= 2 else None
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return Example("x", tuple(messages), prompt, None, None, "rows.jsonl:1")


def masked(sample: Sample, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The text of every run of masked tokens."""
    assert len(sample.tokens) == len(sample.mask)
    runs: list[list[int]] = []
    for t, (token, on) in enumerate(zip(sample.tokens, sample.mask, strict=True)):
        if on:
            if not (t and sample.mask[t - 1]):
                runs.append([])
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize(("template", "end", "takes_system"), TEMPLATES.values(), ids=TEMPLATES)
def test_the_mask_is_exactly_the_responses(template: str, end: str, takes_system: bool) -> None:
    tokenizer = tokenizer_with(template)
    answers = ["Grüß dich 🙂", "two\n\nparagraphs", "x"]
    turns = ["hi", answers[0], "and [brackets]?\n", answers[1], "c", answers[2]]
    for system in (None, "Be brief.") if takes_system else (None,):
        for n in (1, 2, 3):
            case = example(*turns[: 2 * n], system=system)
            [sample] = to_samples(case, tokenizer)
            # "plain lines" opens the reply with the blank that its prompt leaves out.
            lead = " " if end == "\n" else ""
            assert masked(sample, tokenizer) == [lead + answer + end for answer in answers[:n]]
            whole = tokenizer.apply_chat_template(list(case.messages or ()), return_dict=True)
            assert sample.tokens == whole["input_ids"]
            # The prompt is what stands before the last response, so training and use agree.
            prompt = prompt_tokens(case, tokenizer)
            assert sample.tokens[: len(prompt)] == prompt
            assert sample.mask[len(prompt)]
            assert not sample.mask[len(prompt) - 1]


@pytest.mark.parametrize(
    ("begin", "end"),
    [("", ""), ("{% generation %}", "{% endgeneration %}")],
    ids=["plain", "blocks"],
)
def test_a_turn_may_end_with_the_role_of_the_next(begin: str, end: str) -> None:
    tokenizer = tokenizer_with(GLM.replace("BEGIN", begin).replace("END", end))
    user = tokenizer.convert_tokens_to_ids("<|user|>")
    case = example("hi", "one", "b", " two ")
    [sample] = to_samples(case, tokenizer, ends={user})
    assert masked(sample, tokenizer) == ["one<|user|>", "two<|user|>"]
    assert sample.tokens[:-1] == tokenizer.apply_chat_template(
        list(case.messages or ()), return_dict=False
    )
    # Other targets do not write it.
    [sample] = to_samples(case, tokenizer)
    assert masked(sample, tokenizer)[-1] == "two"


def test_generated_ids_are_kept_as_they_are() -> None:
    tokenizer = tokenizer_with(TEMPLATES["chatml"][0])
    newline = tokenizer.convert_tokens_to_ids("Ċ")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    # Two newline tokens: text and back would make them one, as would joining to the prompt.
    response = [newline, newline, end]
    assert tokenizer(tokenizer.decode(response), add_special_tokens=False)["input_ids"] != response
    case = example("a", "an earlier answer", "b", "the reference, which is replaced")
    prompt = prompt_tokens(case, tokenizer, system="Be brief.")
    sample = Corpus({}, tokenizer, None, {}).answered("a", prompt, "answers", 0, response)
    assert sample.tokens == prompt + response
    assert sample.mask == [False] * len(prompt) + [True] * 3
    assert tokenizer.decode(prompt) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na<|im_end|>\n"
        "<|im_start|>assistant\nan earlier answer<|im_end|>\n<|im_start|>user\nb<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    own = example("a", system="Mine.")
    assert prompt_tokens(own, tokenizer, system="Be brief.") == prompt_tokens(own, tokenizer)


def test_a_token_across_the_border_is_not_the_response() -> None:
    tokenizer = tokenizer_with(TEMPLATES["chatml"][0])
    # The prompt ends in a newline and the answer opens with one: they merge into one token.
    [sample] = to_samples(example("a", "\nb", "c", "d"), tokenizer)
    assert masked(sample, tokenizer) == ["b<|im_end|>", "d<|im_end|>"]


def test_special_tokens_of_the_response_itself_do_not_close_it() -> None:
    tokenizer = tokenizer_with(TEMPLATES["phi3"][0])
    [sample] = to_samples(example("a", "b<call>", "c", "d<call>\n<call>"), tokenizer)
    assert masked(sample, tokenizer) == ["b<call><|end|>", "d<call>\n<call><|end|>"]


def test_turns_that_the_template_changes_are_samples_of_their_own() -> None:
    thinking = ("a", "<think>hm</think>b", "c", "<think>so</think>d")
    strips = tokenizer_with(STRIPS)
    assert masked(to_samples(example(*thinking[:2]), strips)[0], strips) == [
        "<think>hm</think>b<|im_end|>"
    ]
    samples = to_samples(example(*thinking), strips)
    assert [sample.id for sample in samples] == ["x#turn-1", "x#turn-3"]
    assert [masked(sample, strips) for sample in samples] == [
        ["<think>hm</think>b<|im_end|>"],
        ["<think>so</think>d<|im_end|>"],
    ]
    # As the target reads it when it answers: without the earlier reasoning.
    prompt = prompt_tokens(example(*thinking), strips)
    assert samples[1].tokens[: len(prompt)] == prompt
    assert "hm" not in strips.decode(prompt)


@pytest.mark.parametrize("end", ["", "\n", " ", "\n\n"])
def test_a_block_may_end_in_what_has_no_token(end: str) -> None:
    """As with tokenizers that drop blanks, such as BERT's."""
    words = [
        "[UNK]",
        "<|im_start|>",
        "<|im_end|>",
        "user",
        "assistant",
        "the",
        "sky",
        "why",
        "blue",
        "light",
    ]
    core = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.add_special_tokens(words[1:3])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATES["blocks before the end"][0].replace("{%- end", "{% end")
    asked = example("the sky", "blue light" + end, "why", "light" + end)
    [sample] = to_samples(asked, tokenizer, ends=(2,))
    assert masked(sample, tokenizer) == ["blue light <|im_end|>", "light <|im_end|>"]


PARTS = (
    FOR
    + "{{ '<|im_start|>' + m['role'] + '\n' }}{% for part in m['content'] %}"
    + "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
    + "{{ '<|im_end|>\n' }}"
    + END
    + CHATML_PROMPT
)


def test_a_template_may_read_contents_as_parts() -> None:
    asked = example("why", "because", "so", "it is")
    parts, plain = tokenizer_with(PARTS), tokenizer_with(TEMPLATES["chatml"][0])
    assert to_samples(asked, parts) == to_samples(asked, plain)
    assert prompt_tokens(asked, parts) == prompt_tokens(asked, plain)
    assert user_prefix(parts) == user_prefix(plain)
    # One that writes no text of an answer, in no form.
    mute = tokenizer_with(PARTS.replace("part['text']", "''"))
    with pytest.raises(UserError, match=r"leaves out the text of message 0 \(user: \"why\"\)"):
        to_samples(asked, mute)


def test_a_template_writes_the_moment_of_the_run() -> None:
    template = "{{ strftime_now('%d %b %Y, %-d %B %H:%M') }}|" + TEMPLATES["chatml"][0]
    inside = "{% macro day() %}{{ strftime_now('%Y') | int + 1 }}{% endmacro %}{{ day() }}|"
    tokenizer = tokenizer_with(inside + template)
    set_moment(tokenizer, datetime(2024, 2, 3, 4, 5, 6))
    text = tokenizer.decode(prompt_tokens(example("why"), tokenizer))
    assert text.startswith("2025|03 Feb 2024, 3 February 04:05|<|im_start|>user\nwhy")
    assert tokenizer.chat_template == inside + template  # what is saved has no date


def test_templates_that_refuse() -> None:
    with pytest.raises(UserError, match=r"messages\[1\].*changes the prompt when a reply follows"):
        to_samples(example("a", "b"), tokenizer_with(OPENS))
    # What the message advises: the target's own tokens need no telling apart.
    with pytest.raises(UserError, match=r"rows\.jsonl:1: .*template refuses the roles system, us"):
        prompt_tokens(example("a"), tokenizer_with(TEMPLATES["gemma"][0]), system="Be brief.")
    adds_nothing = tokenizer_with(FOR + "{{ m['content'] + none }}" + END)
    with pytest.raises(UserError, match=r"rows\.jsonl:1: .*refuses the roles user \(TypeError"):
        prompt_tokens(example("a"), adds_nothing)


def test_without_a_chat_template() -> None:
    tokenizer = tokenizer_with(None)
    prompt = prompt_tokens(example("Once"), tokenizer)
    assert tokenizer.decode(prompt) == "<s>Once"
    [sample] = to_samples(example("Once", " upon"), tokenizer)
    assert sample.tokens[: len(prompt)] == prompt
    assert masked(sample, tokenizer) == [" upon</s>"]
    # A tokenizer that ends every text: the answer goes on with the prompt, but an encoder reads it.
    ending = tokenizer_with(None)
    pairs = [(token, ending.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    ending.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $0 </s>", special_tokens=pairs
    )
    assert prompt_tokens(example("Once"), ending) == prompt
    assert to_samples(example("Once", " upon"), ending) == [sample]
    assert prompt_tokens(example("Once"), ending, encoder=True) == [*prompt, pairs[1][1]]
    text = Example("x", None, None, "Once upon", None, "rows.jsonl:1")
    assert masked(to_samples(text, tokenizer)[0], tokenizer) == ["Once upon"]
    assert to_samples(text, tokenizer)[0].mask[:2] == [False, True]
    with pytest.raises(UserError, match="text, but no prompt to answer"):
        prompt_tokens(text, tokenizer)
    with pytest.raises(UserError, match="no chat template to format it"):
        to_samples(example("a", "b", "c", "d"), tokenizer)
    with pytest.raises(UserError, match="a system message is set"):
        prompt_tokens(example("a"), tokenizer, system="Be brief.")


# --- batches -------------------------------------------------------------------------------------


def sample_of(length: int, prompt: int, name: str = "x") -> Sample:
    return Sample(name, list(range(length)), [t >= prompt for t in range(length)])


def test_samples_that_can_be_trained_on_are_counted(tmp_path: Path) -> None:
    samples = [sample_of(4, 2, "fits"), sample_of(9, 2, "long"), sample_of(9, 7, "all prompt")]
    samples.append(sample_of(3, 3, "no answer"))
    write_samples(tmp_path, 0, samples)
    stored = StoredSamples(tmp_path, 1)
    kept = stored.fitting(5)
    assert [(s.id, s.tokens, s.mask) for s in kept] == [
        ("fits", [0, 1, 2, 3], [False, False, True, True]),
        ("long", [0, 1, 2, 3, 4], [False, False, True, True, True]),
    ]
    assert [(len(s.tokens), sum(s.mask)) for s in kept] == [
        *zip(kept.lengths, kept.predicted, strict=True)
    ]
    assert [(list(t), list(m)) for _, t, m in kept.texts(0, 2)] == [
        (s.tokens, s.mask) for s in kept
    ]
    nothing_left = {"too long": 0, "no response tokens": 2}
    assert kept.counts == {"read": 4, "kept": 2, "truncated": 1, **nothing_left}
    kept = stored.fitting(5, "drop")
    assert [s.id for s in kept] == ["fits"]
    assert kept.counts == {
        "read": 4,
        "kept": 1,
        "truncated": 0,
        "too long": 2,
        "no response tokens": 1,
    }
    assert list(stored) == samples
    with pytest.raises(UserError, match=r"4 read, 0 kept \(no response tokens: 4\).*length of 2"):
        require_kept(stored.fitting(2).counts, 2)
    write_samples(tmp_path / "none", 0, [])
    with pytest.raises(UserError, match="no sample to train on: 0 read"):
        require_kept(StoredSamples(tmp_path / "none", 1).fitting(5).counts, 5)


def realistic(n: int = 3000) -> list[int]:
    """Lengths of chat data: a heavy tail, cut at the maximum length."""
    draw = random.Random(0)
    return [min(2048, 20 + round(draw.lognormvariate(5.5, 0.8))) for _ in range(n)]


def test_batches_hold_every_sample_once_and_little_padding() -> None:
    lengths = realistic()
    batches = bucket_batches(lengths, tokens_per_batch=8192, seed=1, epoch=0)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    padded = [max(lengths[i] for i in batch) * len(batch) for batch in batches]
    assert max(padded) <= 8192
    # Full as well as tight: the budget would be wasted by batches of one.
    assert sum(padded) / len(padded) > 0.9 * 8192
    assert padding_share(batches, lengths) < 0.05
    # The measure itself: in the order of the data the same batches are mostly padding.
    unsorted = [list(range(i, i + 10)) for i in range(0, len(lengths), 10)]
    assert padding_share(unsorted, lengths) > 0.3
    assert padding_share([[0, 1]], [1, 3]) == pytest.approx(1 / 3)
    # Short and long batches are mixed: no drift from short to long over the epoch.
    half = len(batches) // 2
    mean = [sum(map(len, part)) / half for part in (batches[:half], batches[half:])]
    assert 0.7 < mean[0] / mean[1] < 1.4


def test_a_sample_over_the_budget_is_alone() -> None:
    lengths = [50, 3, 3, 60, 10]
    batches = bucket_batches(lengths, tokens_per_batch=10, seed=0, epoch=0)
    assert sorted(map(sorted, batches)) == [[0], [1, 2], [3], [4]]
    with pytest.raises(UserError, match="tokens_per_batch is 0"):
        bucket_batches(lengths, tokens_per_batch=0, seed=0, epoch=0)


def test_order_is_a_function_of_seed_and_epoch() -> None:
    lengths = realistic(1500)

    def trace(seed: int, epoch: int) -> list[list[int]]:
        batches = Batches(lengths, tokens_per_batch=8192, seed=seed, epoch=epoch)
        return [batches.batch(i) for i in range(len(batches))]

    base = trace(5, 2)
    for another in (trace(5, 3), trace(6, 2)):
        assert another != base
        # Not only another order of the same batches: other samples meet in them.
        same = {frozenset(b) for b in base} & {frozenset(b) for b in another}
        assert len(same) < len(base) / 4


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_deal_out_the_same_global_batches(world: int) -> None:
    lengths = [*realistic(50), 5000]
    batches = Batches(lengths, tokens_per_batch=1024, seed=0, epoch=0)
    samples = [sample_of(1, 1, str(row)) for row in range(len(lengths))]
    texts = [RankText(0, samples, batches, rank, world) for rank in range(world)]
    for i in range(len(batches)):
        rows = [[int(name) for name in text.ids(i)] for text in texts]
        assert rows[0] == batches.batch(i)[::world]
        assert sorted(r for part in rows for r in part) == sorted(batches.batch(i))
    assert {len(text) for text in texts} == {len(batches)}


def test_collate_pads_on_the_right() -> None:
    batch = collate([sample_of(3, 1, "a"), sample_of(2, 1, "b")], pad_id=9)
    assert batch["input_ids"].tolist() == [[0, 1, 2], [0, 1, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["loss_mask"].tolist() == [[False, True, True], [False, True, False]]
    assert batch["ids"] == ["a", "b"]
    empty = collate([], pad_id=9)
    assert empty["input_ids"].shape == empty["attention_mask"].shape == (1, 2)
    assert not empty["loss_mask"].any()
    assert empty["ids"] == []
    for made in (batch, empty):
        assert made["input_ids"].dtype == made["attention_mask"].dtype == torch.int64
        assert made["loss_mask"].dtype == torch.bool
