"""Arguments of a chat template that hold for a whole target, and the form of its messages."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from decode.base.errors import UserError
from decode.model.chat_template import set_template_args
from decode.model.loading import load_target
from decode.text import prompt_ids
from draftsmith.cli.command import Loading
from tests.tiny import CHAT_TEMPLATE, save_tiny, tiny_tokenizer
from train.data.chat_tokens import prompt_tokens
from train.data.read import Example

# As Qwen3's: an empty thought begins the answer if thinking is switched off.
THINKS = (
    "{%- macro thought() %}{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think></think>' }}{% endif %}{% endmacro %}"
    + CHAT_TEMPLATE.replace("assistant\n' }}", "assistant\n' }}{{ thought() }}")
)
MESSAGES = ({"role": "user", "content": "the dog"},)
EXAMPLE = Example("one", MESSAGES, "the dog", None, None, "rows.jsonl:1")


def tokenizer_with(template: Any, **args: Any) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    set_template_args(tokenizer, args)
    return tokenizer


def test_every_prompt_and_text_is_rendered_with_them(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(THINKS, enable_thinking=False)
    prompt = prompt_ids(MESSAGES, tokenizer)
    assert tokenizer.decode(prompt).endswith("assistant\n<think></think>")
    assert prompt_tokens(EXAMPLE, tokenizer) == prompt
    without = prompt_ids(MESSAGES, tokenizer_with(THINKS))
    assert len(without) < len(prompt)
    # A call says more than the default, and a saved tokenizer keeps it.
    said = tokenizer.apply_chat_template(
        list(MESSAGES), add_generation_prompt=True, enable_thinking=True, return_dict=False
    )
    assert said == without
    tokenizer.save_pretrained(tmp_path)
    assert prompt_ids(MESSAGES, AutoTokenizer.from_pretrained(tmp_path)) == prompt


@pytest.mark.parametrize(
    "value", [True, None, -3, 0.5, "", 'a "quoted" %} {{ é \\n text\n', [1, "two"], {"a": [None]}]
)
def test_values_of_every_kind_arrive_as_they_are(value: Any) -> None:
    tokenizer = tokenizer_with("{{ value | tojson }}", value=value)
    default = tokenizer.apply_chat_template(list(MESSAGES), tokenize=False)
    assert default == tokenizer.apply_chat_template(list(MESSAGES), tokenize=False, value=value)


def test_all_templates_of_a_tokenizer_get_them() -> None:
    templates = {"default": THINKS, "tools": CHAT_TEMPLATE}
    tokenizer = tokenizer_with(templates, enable_thinking=False)
    assert prompt_ids(MESSAGES, tokenizer) == (
        prompt_ids(MESSAGES, tokenizer_with(THINKS, enable_thinking=False))
    )


@pytest.mark.parametrize(
    ("template", "args", "message"),
    [
        (CHAT_TEMPLATE, {"enable_thinking": False}, "sets enable_thinking, but .* does not read"),
        (THINKS, {"enable-thinking": False}, "sets enable-thinking, but"),
        (None, {"enable_thinking": False}, "has no chat template"),
    ],
)
def test_arguments_that_would_do_nothing_are_refused(
    template: Any, args: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        tokenizer_with(template, **args)


def test_targets_are_loaded_with_them(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path)
    tokenizer_with(THINKS).save_pretrained(directory)
    target = load_target(str(directory), chat_template_args={"enable_thinking": False})
    loading = Loading(target=str(directory), chat_template_args='{"enable_thinking": false}')
    wanted = prompt_ids(MESSAGES, tokenizer_with(THINKS, enable_thinking=False))
    for loaded in (target, loading.load()):
        assert prompt_ids(MESSAGES, loaded.tokenizer) == wanted
    for text in ("{", "3"):
        with pytest.raises(UserError, match="expected a JSON object"):
            Loading(target=str(directory), chat_template_args=text).load()


def test_a_template_that_reads_parts_gets_them() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    )
    question = [{"role": "user", "content": "what is it"}]
    assert tokenizer.decode(prompt_ids(question, tokenizer)) == "what is it"
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert tokenizer.decode(prompt_ids(question, tokenizer)) == "what is it"
