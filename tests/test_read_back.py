"""What a tokenizer or a template does to a text is said once a kind, with the first row."""

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import normalizers

from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer
from train.data.read import Example
from train.data.read_back import say_changes


def row(question: str, answer: str, number: int = 0) -> Example:
    turns = ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
    return Example(str(number), turns, question, None, None, f"rows.jsonl:{number + 1}")


def text_row(text: str) -> Example:
    return Example("t", None, None, text, None, "texts.jsonl:1")


def said(tokenizer: Any, *examples: Example) -> list[str]:
    lines: list[str] = []
    say_changes({"train": examples}, tokenizer, None, lines.append)
    return lines


def normalised(normalizer: Any) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizer
    return tokenizer


def with_template(change: Callable[[str], str]) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = change(CHAT_TEMPLATE)
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        (tiny_tokenizer(), None),
        (normalised(normalizers.Lowercase()), "capitals become small"),
        (normalised(normalizers.NFKC()), "characters are normalised"),
        (normalised(normalizers.Replace("  ", " ")), "blanks and line breaks are others"),
        (
            with_template(
                lambda text: text.replace(
                    "message['content']", "message['content'].replace('ﬁ', '')"
                )
            ),
            "does not come back",
        ),
    ],
)
def test_what_is_changed_is_said(tokenizer: Any, expected: str | None) -> None:
    rows = [row("What  is ﬁve?", "A number", 0), row("And  six ﬁt?", "Another Number", 1)]
    lines = said(tokenizer, *rows)
    assert len(lines) == (expected is not None)
    if expected is not None:
        assert expected in lines[0]
        assert "2 of the first 2 rows of train" in lines[0]
        assert "rows.jsonl:1" in lines[0]


def test_two_beginnings_and_special_tokens_in_questions() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_bos_token = True
    bos = tokenizer.bos_token
    assert tokenizer(f"{bos}x").input_ids[:2] == [tokenizer.bos_token_id] * 2
    [line] = said(tokenizer, text_row(f"{bos}The quick brown fox"))
    assert "texts begin with two tokens" in line
    [line] = said(tiny_tokenizer(), row(f"What is {tiny_tokenizer().eos_token}?", "A mark"))
    assert "a user's text has a special token" in line
