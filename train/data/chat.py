"""Converts an example to token ids and a loss mask, which marks the tokens of the responses.

The tokenizer's chat template formats the conversation. This module does not know the markers of any
template: it finds the turns by asking the tokenizer.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from decode.errors import UserError
from train.data.read import Example
from train.data.rows import REASONING, Message

GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")

Messages = Sequence[Message]


@dataclass(frozen=True)
class Sample:
    """Token ids and the loss mask, both of length T.

    mask[t] is True if tokens[t] belongs to a response, including its end-of-turn token. The loss
    predicts these tokens from the tokens before them. mask[0] is always False, because nothing
    comes before tokens[0]. source: for a target with an encoder, what the encoder reads; the tokens
    are then those of the decoder.
    """

    id: str
    tokens: list[int]
    mask: list[bool]
    source: list[int] = field(default_factory=list)

    def under_encoder(self, start: int) -> "Sample":
        """The same prompt and response for a target with an encoder: the encoder reads the prompt,
        and the decoder's text is its start token and the response. Raises UserError for a text that
        is not one prompt and one response after it."""
        length = len(self.mask) - sum(self.mask)
        if any(self.mask[:length]):
            raise UserError(
                f"sample {self.id} is not one prompt with one response after it, which a target "
                "with an encoder needs; give rows with prompt and response"
            )
        source, response = self.tokens[:length], self.tokens[length:]
        mask = [False] + [True] * len(response)
        return replace(self, tokens=[start, *response], mask=mask, source=source)


def prompt_tokens(
    example: Example, tokenizer: PreTrainedTokenizerBase, system: str | None = None
) -> list[int]:
    """The prompt's token ids: the conversation up to its last unanswered user message.

    A final assistant message is removed: it is the reference answer. `system` is added in front
    unless the conversation has a system message. Without a chat template, the prompt is the plain
    text with the special tokens (bos) that the tokenizer adds.

    Raises UserError if there is nothing to answer, if the template refuses the conversation, or if
    a conversation or a system message needs a chat template and there is none.
    """
    if example.messages is None:
        raise UserError(
            f"{example.source}: the row has text, but no prompt to answer; expected prompt or "
            f"messages."
        )
    if not has_template(tokenizer):
        return _plain(_plain_prompt(example, system), tokenizer)
    messages = _with_system(example.messages, system)
    if messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if messages[-1]["role"] not in ("user", "tool"):
        raise UserError(
            f"{example.source}: the message to answer is from {messages[-1]['role']}; expected a "
            f"message from user or tool."
        )
    return _render(messages, tokenizer, example, add_generation_prompt=True)


def to_sample(
    example: Example,
    tokenizer: PreTrainedTokenizerBase,
    response_tokens: Sequence[int],
    system: str | None = None,
) -> Sample:
    """The sample with a response that the target generated, to train on.

    The tokens are prompt_tokens + `response_tokens`, and the mask is True only on those ids. They
    are never decoded to text and encoded again, because that can change the ids. `system` must be
    the same as for the prompt. Raises UserError as prompt_tokens does.
    """
    prompt = prompt_tokens(example, tokenizer, system)
    return _sample(example, prompt, list(response_tokens))


def to_samples(
    example: Example, tokenizer: PreTrainedTokenizerBase, system: str | None = None
) -> list[Sample]:
    """The samples with an example's own responses, to train on.

    They are one sample: the complete conversation, with a mask that is True on every assistant
    turn. If the template changes a turn when later messages follow (many leave out earlier
    reasoning), each assistant turn is a sample of its own, after the messages before it, as the
    target reads them when it answers. Without a chat template, the tokens are the prompt, the
    answer and eos. For a `text` example the mask is True on all tokens but the first.

    Raises UserError as prompt_tokens does, if the turns cannot be found in the template's output,
    and if the template cannot write reasoning that the example has.
    """
    if example.text is not None:
        return [_sample(example, [], _plain(example.text, tokenizer))]
    assert example.messages is not None
    thinks = any(REASONING[0] in message for message in example.messages)
    if thinks and _reasoning_field(tokenizer) is None:
        raise UserError(
            f"{example.source}: the answer has reasoning in a field of its own, which the "
            "tokenizer's chat template does not write. Set data.reasoning: drop to train without "
            "it, or choose a target that reasons"
        )
    if not has_template(tokenizer):
        prompt = _plain(_plain_prompt(example, system), tokenizer)
        answer = example.messages[1:]
        if not answer:
            return [_sample(example, prompt, [])]
        ids = tokenizer(answer[0]["content"], add_special_tokens=False)["input_ids"]
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        return [_sample(example, prompt, [*ids, *end])]
    messages = _with_system(example.messages, system)
    # Templates mark the turns only for fast tokenizers: the marks are character positions.
    template = tokenizer.get_chat_template(tools=list(example.tools) or None)
    if tokenizer.is_fast and GENERATION_BLOCK.search(template):
        tokens, mask = _mask_by_blocks(messages, tokenizer, example)
        mask[0] = False
        return [Sample(example.id, tokens, mask)]
    return _samples_by_prefixes(messages, tokenizer, example)


def user_prefix(tokenizer: PreTrainedTokenizerBase, system: str | None = None) -> list[int]:
    """The token ids of the chat template up to the place of the first user message.

    Raises UserError if the template changes the message, so that its place is not known, or refuses
    it.
    """
    mark = "draftsmith-message"
    messages = _with_system([{"role": "user", "content": mark}], system)
    example = Example("", tuple(messages), None, None, None, "self_prompts")
    rendered = str(_apply(messages, tokenizer, example, tokenize=False))
    before, place, _ = rendered.partition(mark)
    if not place:
        raise UserError(
            "the chat template does not contain the user's message as it is, so the target cannot "
            "write one; leave self_prompts out"
        )
    return list(tokenizer(before, add_special_tokens=False)["input_ids"])


def tool_messages(example: Example) -> list[Message]:
    """The messages of a conversation that call a tool, or that a tool answered."""
    return [m for m in example.messages or () if m["role"] == "tool" or "tool_calls" in m]


def takes_tools(example: Example, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template writes the tool calls and the tools' answers of a conversation.
    True without any. Many templates leave them out without an error, or refuse them."""
    uses = tool_messages(example)
    if not uses:
        return True
    if not has_template(tokenizer):
        return False
    try:
        text = str(_apply(example.messages or (), tokenizer, example, tokenize=False))
    except UserError:
        return False
    names = [call["function"]["name"] for m in uses for call in m.get("tool_calls", ())]
    answers = [m["content"].strip() for m in uses if m["role"] == "tool"]
    # A template may write an answer as JSON, so its first word stands for it.
    return all(part in text for part in [*names, *(a.split()[0] for a in answers if a)])


def has_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer has a chat template. A base model's tokenizer usually has none."""
    return bool(tokenizer.chat_template)


def _sample(example: Example, prompt: list[int], response: list[int]) -> Sample:
    tokens = prompt + response
    mask = [False] * len(prompt) + [True] * len(response)
    if mask:
        mask[0] = False
    return Sample(example.id, tokens, mask)


def _plain(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return list(tokenizer(text)["input_ids"])


def _plain_prompt(example: Example, system: str | None) -> str:
    if example.prompt is None:
        raise UserError(
            f"{example.source}: the row is a conversation, but the tokenizer has no chat template "
            f"to format it. Give the tokenizer a chat_template, or use prompt or text rows."
        )
    if system is not None:
        raise UserError(
            "a system message is set, but the tokenizer has no chat template to format it. Leave "
            "the system message out, or give the tokenizer a chat_template."
        )
    return example.prompt


def _with_system(messages: Messages, system: str | None) -> Messages:
    if system is None or messages[0]["role"] in ("system", "developer"):
        return messages
    return [{"role": "system", "content": system}, *messages]


def _reasoning_field(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The field from which the chat template reads an assistant's reasoning. None: from none."""
    templates = tokenizer.chat_template or ""
    text = "".join(templates.values()) if isinstance(templates, dict) else templates
    return next((name for name in REASONING if re.search(rf"[.'\"]{name}\b", text)), None)


def _apply(
    messages: Messages, tokenizer: PreTrainedTokenizerBase, example: Example, **options: Any
) -> Any:
    """What the chat template makes of messages, with the example's tools. Raises UserError if it
    fails: a template is a program of others, and raises what it likes."""
    name = _reasoning_field(tokenizer)
    if name and name != REASONING[0]:
        messages = [{name if k == REASONING[0] else k: v for k, v in m.items()} for m in messages]
    tools = list(example.tools) or None
    try:
        return tokenizer.apply_chat_template(list(messages), tools=tools, **options)
    except Exception as error:
        raise UserError(
            f"{example.source}: the tokenizer's chat template refuses the roles "
            f"{', '.join(m['role'] for m in messages)} ({type(error).__name__}: {error})"
        ) from error


def _render(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    example: Example,
    add_generation_prompt: bool = False,
) -> list[int]:
    options = {"add_generation_prompt": add_generation_prompt, "return_dict": True}
    return list(_apply(messages, tokenizer, example, **options)["input_ids"])


def _mask_by_blocks(
    messages: Messages, tokenizer: PreTrainedTokenizerBase, example: Example
) -> tuple[list[int], list[bool]]:
    """The tokens and the mask for a template that marks the responses with {% generation %} blocks.

    Templates disagree on whether the end-of-turn token and the newline after it are inside the
    block. Here the end-of-turn token always is, and the newline never is.
    """
    encoded = _apply(
        messages,
        tokenizer,
        example,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True},
    )
    tokens = list(encoded["input_ids"])
    mask = [bool(marked) for marked in encoded["assistant_masks"]]
    chars = encoded["offset_mapping"]
    starts = [t for t in range(len(mask)) if mask[t] and not (t and mask[t - 1])]
    for start in starts:
        end = next((t for t in range(start, len(mask)) if not mask[t]), len(mask))
        # transformers ends a block at the first token of its last character, but an emoji can have
        # several tokens.
        while end < len(mask) and chars[end][0] < chars[end - 1][1]:
            mask[end] = True
            end += 1
        closing = [
            t for t in _tail(tokens[:end], start, tokenizer) if _is_special(tokens[t], tokenizer)
        ]
        if closing:
            mask[closing[-1] + 1 : end] = [False] * (end - closing[-1] - 1)
        elif end < len(tokens) and _is_special(tokens[end], tokenizer):
            mask[end] = True
    return tokens, mask


def _samples_by_prefixes(
    messages: Messages, tokenizer: PreTrainedTokenizerBase, example: Example
) -> list[Sample]:
    """The samples for other templates. An assistant turn is everything that the template adds to
    the prompt of that turn.

    With prompt = template(messages[:i], add_generation_prompt=True) and
    answered = template(messages[:i + 1]), the turn is answered[len(prompt):], cut after its
    end-of-turn token. If the complete conversation begins with the same ids for each turn, it is
    the only sample. Else a mask on it would be on the wrong tokens, so each turn is one.
    """
    tokens = _render(messages, tokenizer, example)
    mask = [False] * len(tokens)
    turns: list[Sample] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = _render(messages[:i], tokenizer, example, add_generation_prompt=True)
        answered = _render(messages[: i + 1], tokenizer, example)
        start = _response_start(prompt, answered, tokenizer)
        if start is None:
            raise UserError(
                f"{example.source}: cannot find the assistant's tokens of messages[{i}]: the "
                "template changes the prompt when a reply follows (templates that strip or add "
                "reasoning do this). Expected a chat template that only appends. Give the "
                "tokenizer one with {% generation %} blocks, or let the target generate the "
                "responses"
            )
        end = _response_end(answered, start, message["content"], tokenizer)
        name = f"{example.id}#turn-{i}"
        turns.append(Sample(name, answered[:end], [start <= t > 0 for t in range(end)]))
        mask[start:end] = [True] * (end - start)
    if any(tokens[: len(turn.tokens)] != turn.tokens for turn in turns):
        return turns
    mask[0] = False
    return [Sample(example.id, tokens, mask)]


def _response_start(
    prompt: list[int], answered: list[int], tokenizer: PreTrainedTokenizerBase
) -> int | None:
    """The index in `answered` where the response starts, or None if `answered` does not continue
    `prompt`.

    The prompt's last newline can merge with a newline at the start of the response into one token.
    That token also belongs to the prompt, and the model never writes it. The response then starts
    after it.
    """
    start = 0
    while start < min(len(prompt), len(answered)) and prompt[start] == answered[start]:
        start += 1
    rest = tokenizer.decode(prompt[start:])
    end, written = start, ""
    while len(written) < len(rest) and rest.startswith(written) and end < len(answered):
        end += 1
        written = tokenizer.decode(answered[start:end])
    return end if written.startswith(rest) else None


def _response_end(
    tokens: list[int], start: int, content: str, tokenizer: PreTrainedTokenizerBase
) -> int:
    """The end (exclusive) of the last response in `tokens`, which starts at `start`.

    `tokens` ends in a tail of special and blank tokens. The first special token of the tail closes
    the response. The rest of the tail (a newline, the end of the text) is not part of the response.
    A tail without a special token is kept, because nothing else then marks the end of the turn.
    """
    special = [t for t in _tail(tokens, start, tokenizer) if _is_special(tokens[t], tokenizer)]
    if not special:
        return len(tokens)
    in_content = 0
    if len(special) > 1:
        # The reply's text may itself end in special tokens. These do not close it.
        ids = list(tokenizer(content, add_special_tokens=False)["input_ids"])
        in_content = sum(_is_special(ids[t], tokenizer) for t in _tail(ids, 0, tokenizer))
    return special[min(in_content, len(special) - 1)] + 1


def _tail(tokens: list[int], start: int, tokenizer: PreTrainedTokenizerBase) -> range:
    """The positions, from `start` on, of the special and blank tokens at the end of `tokens`."""
    first = len(tokens)
    while first > start and (
        _is_special(tokens[first - 1], tokenizer) or not tokenizer.decode(tokens[first - 1]).strip()
    ):
        first -= 1
    return range(first, len(tokens))


def _is_special(token: int, tokenizer: PreTrainedTokenizerBase) -> bool:
    # Ask the decoder, because `all_special_ids` lacks the end-of-turn tokens of some models.
    return tokenizer.decode(token, skip_special_tokens=True) == "" != tokenizer.decode(token)
