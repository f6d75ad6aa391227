"""Converts an example to token ids and a loss mask, which marks the tokens of the responses.

The tokenizer's chat template formats the conversation. This module does not know the markers of any
template: it finds the turns by asking the tokenizer.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from decode.base.errors import UserError
from train.data.read import Example
from train.data.row_kinds import REASONING
from train.data.template import (
    Messages,
    encode,
    has_template,
    reasoning_field,
    render,
    render_messages,
    text_with_blocks,
    written,
)

GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


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

    def cut(self, length: int) -> "Sample":
        """The first `length` tokens."""
        return replace(self, tokens=self.tokens[:length], mask=self.mask[:length])

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
    example: Example,
    tokenizer: PreTrainedTokenizerBase,
    system: str | None = None,
    *,
    encoder: bool = False,
) -> list[int]:
    """The prompt's token ids: the conversation up to its last unanswered user message.

    A final assistant message is removed: it is the reference answer. `system` is added in front
    unless the conversation has a system message. Without a chat template, the prompt is the plain
    text with the special tokens that the tokenizer puts before it (bos). An encoder also reads
    those that it puts after it.

    Raises UserError if there is nothing to answer, if the template refuses the conversation, or if
    a conversation or a system message needs a chat template and there is none.
    """
    if example.messages is None:
        raise UserError(
            f"{example.source}: the row has text, but no prompt to answer; expected prompt or "
            f"messages."
        )
    if not has_template(tokenizer):
        return _plain_prompt(example, tokenizer, system, encoder)
    example = written(example, tokenizer) or example
    messages = _with_system(example.messages or (), system)
    if messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if messages[-1]["role"] not in ("user", "tool"):
        raise UserError(
            f"{example.source}: the message to answer is from {messages[-1]['role']}; expected a "
            f"message from user or tool."
        )
    return render(messages, tokenizer, example, add_generation_prompt=True)


def to_samples(
    example: Example,
    tokenizer: PreTrainedTokenizerBase,
    system: str | None = None,
    *,
    encoder: bool = False,
    ends: Container[int] = (),
) -> list[Sample]:
    """The samples with an example's own responses, to train on.

    They are one sample: the complete conversation, with a mask that is True on every assistant
    turn. If the template changes a turn when later messages follow (many leave out earlier
    reasoning), each assistant turn is a sample of its own, after the messages before it, as the
    target reads them when it answers. Without a chat template, the tokens are the prompt, the
    answer and eos. For a `text` example the mask is True on all tokens but the first.

    ends: the target's EOS ids. If no special token closes a turn, but the next turn begins with one
    of them, the target ends its turn with it (GLM), and it belongs to the response.

    Raises UserError as prompt_tokens does, if the turns cannot be found in the template's output,
    and if the template cannot write reasoning that the example has.
    """
    if example.text is not None:
        return [_sample(example, [], list(tokenizer(example.text)["input_ids"]))]
    assert example.messages is not None
    thinks = any(REASONING[0] in message for message in example.messages)
    if thinks and reasoning_field(tokenizer) is None:
        raise UserError(
            f"{example.source}: the answer has reasoning in a field of its own, which the "
            "tokenizer's chat template does not write. Set data.reasoning: drop to train without "
            "it, or choose a target that reasons"
        )
    if not has_template(tokenizer):
        prompt = _plain_prompt(example, tokenizer, system, encoder)
        answer = example.messages[1:]
        if not answer:
            return [_sample(example, prompt, [])]
        ids = tokenizer(answer[0]["content"], add_special_tokens=False)["input_ids"]
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        return [_sample(example, prompt, [*ids, *end])]
    example = written(example, tokenizer) or example
    messages = _with_system(example.messages or (), system)
    # Templates mark the turns only for fast tokenizers: the marks are character positions.
    template = tokenizer.get_chat_template(tools=list(example.tools) or None)
    if tokenizer.is_fast and GENERATION_BLOCK.search(template):
        tokens, mask = _mask_by_blocks(messages, tokenizer, example, ends)
        mask[0] = False
        return [Sample(example.id, tokens, mask)]
    return _samples_by_prefixes(messages, tokenizer, example, ends)


def user_prefix(tokenizer: PreTrainedTokenizerBase, system: str | None = None) -> list[int]:
    """The token ids of the chat template up to the place of the first user message.

    Raises UserError if the template changes the message, so that its place is not known, or refuses
    it.
    """
    mark = "draftsmith-message"
    messages = _with_system([{"role": "user", "content": mark}], system)
    example = Example("", tuple(messages), None, None, None, "self_prompts")
    rendered = render_messages(messages, tokenizer, example)
    before, place, _ = rendered.partition(mark)
    if not place:
        raise UserError(
            "the chat template does not contain the user's message as it is, so the target cannot "
            "write one; leave self_prompts out"
        )
    return list(tokenizer(before, add_special_tokens=False)["input_ids"])


def _sample(example: Example, prompt: list[int], response: list[int]) -> Sample:
    tokens = prompt + response
    mask = [False] * len(prompt) + [True] * len(response)
    if mask:
        mask[0] = False
    return Sample(example.id, tokens, mask)


def _plain_prompt(
    example: Example, tokenizer: PreTrainedTokenizerBase, system: str | None, encoder: bool
) -> list[int]:
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
    tokens = list(tokenizer(example.prompt)["input_ids"])
    if encoder:
        return tokens
    # Some tokenizers end every text with eos or [SEP]. The answer goes on with the text.
    text = list(tokenizer(example.prompt, add_special_tokens=False)["input_ids"])
    ends = range(len(text), len(tokens) + 1)
    return next((tokens[:end] for end in ends if tokens[end - len(text) : end] == text), tokens)


def _with_system(messages: Messages, system: str | None) -> Messages:
    if system is None or messages[0]["role"] in ("system", "developer"):
        return messages
    return [{"role": "system", "content": system}, *messages]


def _mask_by_blocks(
    messages: Messages, tokenizer: PreTrainedTokenizerBase, example: Example, ends: Container[int]
) -> tuple[list[int], list[bool]]:
    """The tokens and the mask for a template that marks the responses with {% generation %} blocks.

    Templates disagree on whether the end-of-turn token and the newline after it are inside the
    block. Here the end-of-turn token always is, and what comes after it never is.
    """
    text, blocks = text_with_blocks(messages, tokenizer, example)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    tokens = list(encoded["input_ids"])
    mask = _inside(encoded["offset_mapping"], blocks)
    starts = [t for t in range(len(mask)) if mask[t] and not (t and mask[t - 1])]
    contents = [m["content"] or "" for m in messages if m["role"] == "assistant"]
    if len(contents) != len(starts):  # the template does not mark each answer once
        contents = [""] * len(starts)
    for start, content in zip(starts, contents, strict=True):
        end = next((t for t in range(start, len(mask)) if not mask[t]), len(mask))
        closed = _closed_end(tokens[:end], start, content, tokenizer)
        if closed is not None:
            mask[closed:end] = [False] * (end - closed)
        elif end < len(tokens) and _is_special(tokens[end], tokenizer):
            mask[end] = True
        elif end == len(tokens):
            follow = _next_turn(messages, tokenizer, example, ends)
            tokens, mask = tokens + follow, mask + [True] * len(follow)
    return tokens, mask


def _inside(chars: Sequence[tuple[int, int]], blocks: Sequence[tuple[int, int]]) -> list[bool]:
    """The tokens with a character in one of the blocks. A character may have several tokens (an
    emoji), or none (a blank, with tokenizers that drop them). chars: the beginning and end of each
    token in the text."""
    mask = [False] * len(chars)
    begins, ends = [begin for begin, _ in chars], [end for _, end in chars]
    for begin, end in blocks:
        first, last = bisect_right(ends, begin), bisect_left(begins, end)
        mask[first:last] = [True] * max(last - first, 0)
    return mask


def _samples_by_prefixes(
    messages: Messages, tokenizer: PreTrainedTokenizerBase, example: Example, ends: Container[int]
) -> list[Sample]:
    """The samples for other templates. An assistant turn is everything that the template adds to
    the prompt of that turn.

    With prompt = template(messages[:i], add_generation_prompt=True) and
    answered = template(messages[:i + 1]), the turn is answered[len(prompt):], cut after its
    end-of-turn token. If the complete conversation begins with the same ids for each turn, it is
    the only sample. Else a mask on it would be on the wrong tokens, so each turn is one.
    """
    # The last answer's text is that of the whole conversation: a long one is tokenised once.
    whole = render_messages(messages, tokenizer, example)
    tokens = encode(whole, tokenizer)
    mask = [False] * len(tokens)
    turns: list[Sample] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(messages[:i], tokenizer, example, add_generation_prompt=True)
        last = i == len(messages) - 1
        text = whole if last else render_messages(messages[: i + 1], tokenizer, example)
        answered = tokens if text == whole else encode(text, tokenizer)
        start = _response_start(prompt, answered, tokenizer)
        if start is None:
            raise UserError(
                f"{example.source}: cannot find the assistant's tokens of messages[{i}]: the "
                "template changes the prompt when a reply follows (templates that strip or add "
                "reasoning do this). Expected a chat template that only appends. Give the "
                "tokenizer one with {% generation %} blocks, or let the target generate the "
                "responses"
            )
        end = _closed_end(answered, start, message["content"] or "", tokenizer)
        if end is None:
            answered = answered + _next_turn(messages[: i + 1], tokenizer, example, ends)
            end = len(answered)
        name = f"{example.id}#turn-{i}"
        turns.append(Sample(name, answered[:end], [start <= t > 0 for t in range(end)]))
        if last:
            tokens, mask = tokens + answered[len(tokens) :], mask + [False] * (end - len(tokens))
        mask[start:end] = [True] * (end - start)
    if any(tokens[: len(turn.tokens)] != turn.tokens for turn in turns):
        return turns
    mask[0] = False
    return [Sample(example.id, tokens, mask)]


def _next_turn(
    messages: Messages, tokenizer: PreTrainedTokenizerBase, example: Example, ends: Container[int]
) -> list[int]:
    """The id of `ends` with which the chat template begins the turn after the last message, if it
    does so. Else it is empty."""
    said = "next"
    try:
        tokens = render([*messages, {"role": "user", "content": said}], tokenizer, example)
    except UserError:
        return []
    last = next((t for t in reversed(range(len(tokens))) if tokens[t] in ends), None)
    if last is None or tokenizer.decode(tokens[last + 1 :]).strip() != said:
        return []
    answered = (messages[-1]["content"] or "").strip()
    follows = tokenizer.decode(tokens[:last]).rstrip().endswith(answered[-20:])
    return [tokens[last]] if follows else []


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


def _closed_end(
    tokens: list[int], start: int, content: str, tokenizer: PreTrainedTokenizerBase
) -> int | None:
    """The end (exclusive) of the last response in `tokens`, which starts at `start`.

    `tokens` ends in a tail of special and blank tokens. The first special token of the tail closes
    the response. The rest of the tail (a newline, the end of the text) is not part of the response.
    None for a tail without a special token: nothing closes the response.
    """
    special = [t for t in _tail(tokens, start, tokenizer) if _is_special(tokens[t], tokenizer)]
    if not special:
        return None
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
