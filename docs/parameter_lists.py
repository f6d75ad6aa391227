"""Makes lists of the lines in which docstrings name parameters (`gamma: the depth of a draft`)."""

import re
from typing import Any

from griffe import Extension, Object

_ITEM = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*): (.*)")


class ParameterLists(Extension):
    """mkdocstrings calls it for every object that it reads."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_lists(obj.docstring.value)


def with_lists(text: str) -> str:
    """The text with a Markdown list where lines name parameters. An item ends at a blank line, at
    the next item, and where a sentence says what is raised."""
    lines: list[str] = []
    inside = fenced = False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        item = None if fenced else _ITEM.fullmatch(line)
        if item:
            lines += [*([] if inside else [""]), f"- `{item[1]}`: {item[2]}"]
            inside = True
        elif inside and line.startswith(("Raises", "Returns")):
            lines += ["", line]
            inside = False
        else:
            inside = inside and bool(line)
            lines.append(f"    {line.strip()}" if inside else line)
    return "\n".join(lines)
