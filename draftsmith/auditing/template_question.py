"""Does a server make the tokens of a message that the target's chat template makes?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from decode.model.loading import Target
from decode.text import prompt_ids
from train.data.chat_tokens import has_template


@dataclass(frozen=True)
class TemplateQuestion:
    """body: for `/v1/chat/completions`. expected: the token ids of its message."""

    target: Target
    body: dict[str, Any]
    expected: list[int]

    @classmethod
    def of(
        cls, target: Target, prompt: Sequence[int], model: str | None
    ) -> "TemplateQuestion | None":
        """A question with the text of a prompt as its message. None: the target has no template."""
        if not has_template(target.tokenizer):
            return None
        text = target.tokenizer.decode(prompt, skip_special_tokens=True).strip()
        messages = [{"role": "user", "content": text or "?"}]
        body = {
            "model": model, "messages": messages, "max_tokens": 1, "temperature": 0,
            "return_token_ids": True,
        }  # fmt: skip
        return cls(target, body, prompt_ids(messages, target.tokenizer))

    def fault(self, ids: Sequence[int] | None, count: int | None) -> str | None:
        """How a server's prompt differs, of which it says the token ids, or only their number.
        None: it does not."""
        if ids == self.expected or (ids is None and count == len(self.expected)):
            return None
        return (
            f"the server makes {count} tokens of a message, and the target's template "
            f"{len(self.expected)}: {self.target.tokenizer.decode(self.expected)!r}"
        )


def prompt_of(reply: Mapping[str, Any]) -> tuple[list[int] | None, int | None]:
    """The prompt's token ids and their number, where an answer says them."""
    ids = reply.get("prompt_token_ids") or reply["choices"][0].get("prompt_token_ids")
    return ids, (reply.get("usage") or {}).get("prompt_tokens")
