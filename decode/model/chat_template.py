"""The chat template of a target: arguments that hold for all its texts, and the form of messages.

Arguments, such as Qwen3's `enable_thinking`, become defaults inside the template itself. So every
place that renders messages uses them, here and wherever the tokenizer is saved, and a call that
gives an argument still overrides it.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from decode.base.errors import UserError

_NAME = re.compile(r"[A-Za-z_]\w*")


def set_template_args(tokenizer: Any, args: Mapping[str, Any]) -> None:
    """Make `args`, JSON values by name, the defaults of the tokenizer's chat template.

    Raises UserError if there is no template, or if it does not read an argument.
    """
    if not args:
        return
    templates = tokenizer.chat_template
    if not templates:
        raise UserError(
            f"chat_template_args sets {', '.join(args)}, but the tokenizer has no chat template; "
            "leave chat_template_args out"
        )
    named = templates if isinstance(templates, dict) else {"": templates}
    for name in args:
        if not _NAME.fullmatch(name) or not any(
            re.search(rf"\b{name}\b", template) for template in named.values()
        ):
            raise UserError(
                f"chat_template_args sets {name}, but the target's chat template does not read it; "
                "leave it out, or check its name"
            )
    # Jinja reads Python's literals.
    defaults = "".join(
        f"{{%- if {name} is not defined %}}{{%- set {name} = {value!a} %}}{{%- endif %}}"
        for name, value in args.items()
    )
    with_defaults = {key: defaults + template for key, template in named.items()}
    tokenizer.chat_template = with_defaults if isinstance(templates, dict) else with_defaults[""]


def as_read(
    messages: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, tools: Any = None
) -> list[Any]:
    """The messages, with contents in the form that the chat template reads: text, or lists of
    parts. Templates of models that see often read parts only, and leave text out without a word.
    """
    marks = tuple(
        sorted((k, v) for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str))
    )
    if not _reads_parts_only(tokenizer.get_chat_template(tools=tools), marks):
        return list(messages)
    return [_in_parts(message) for message in messages]


@lru_cache(maxsize=64)
def _reads_parts_only(template: str, marks: tuple[tuple[str, Any], ...]) -> bool:
    message = {"role": "user", "content": "anything"}
    written = []
    for written_as in (message, _in_parts(message)):
        try:
            [text], _ = render_jinja_template([[written_as]], chat_template=template, **dict(marks))
        except Exception:  # a template is a program of others
            return False
        written.append(text)
    return message["content"] not in written[0] and message["content"] in written[1]


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(message.get("content"), str):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}
