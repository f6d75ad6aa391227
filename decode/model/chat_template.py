"""Arguments of a chat template, such as Qwen3's `enable_thinking`, that hold for a whole target.

They become defaults inside the template itself. So every place that renders messages uses them,
here and wherever the tokenizer is saved, and a call that gives an argument still overrides it.
"""

import re
from collections.abc import Mapping
from typing import Any

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
