"""Says what the tokenizer and the chat template change in the first rows of a run.

The rows are written as they are trained on and asked, and decoded again. A text that does not come
back was changed on the way: blanks that a template's tags or a tokenizer drop, letters that it
makes small, characters that it normalises, a turn that a template leaves out. Nothing is refused:
some templates change texts by intention.
"""

import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from decode.base.errors import UserError
from train.data.chat_tokens import prompt_tokens, to_samples
from train.data.read import Example

ROWS = 8  # of each split
LONGEST = 50_000  # characters of a row; longer ones take seconds and are left out
EXCERPT = 40  # characters

# Ways to write a text in which two that differ can be the same, with words for the difference.
_FORMS: dict[str, Callable[[str], str]] = {
    "blanks and line breaks are others": lambda text: "".join(text.split()),
    "capitals become small letters": lambda text: "".join(text.split()).lower(),
    "characters are normalised": lambda text: _bare("".join(text.split())),
}


def say_changes(
    splits: Mapping[str, Sequence[Example]],
    tokenizer: PreTrainedTokenizerBase,
    system: str | None,
    say: Callable[[str], None],
) -> None:
    """Calls `say` with a line for each kind of change in the first rows of each split: how many
    rows have it, and the first one with the text before and after."""
    for split, examples in splits.items():
        found: dict[str, list[str]] = {}
        first = [row for row in examples[:ROWS] if sum(len(x) for _, x in _texts(row)) < LONGEST]
        for example in first:
            for kind, detail in dict(_changes(example, tokenizer, system)).items():
                found.setdefault(kind, []).append(f"{example.source}: {detail}")
        for kind, places in found.items():
            say(f"{kind} in {len(places)} of the first {len(first)} rows of {split}. {places[0]}")


def _changes(
    example: Example, tokenizer: PreTrainedTokenizerBase, system: str | None
) -> Iterator[tuple[str, str]]:
    try:
        ids = [sample.tokens for sample in to_samples(example, tokenizer, system)]
        if not ids:
            ids = [prompt_tokens(example, tokenizer, system)]
    except UserError:  # said where the row is needed
        return
    bos = tokenizer.bos_token_id
    for begun in ids:
        if bos is not None and begun[:2] == [bos, bos]:
            yield "texts begin with two tokens for the beginning", repr(tokenizer.bos_token)
    back = "\n".join(tokenizer.decode(text, clean_up_tokenization_spaces=False) for text in ids)
    for role, text in _texts(example):
        for special in tokenizer.all_special_tokens if role == "user" else ():
            if special in text:
                yield "a user's text has a special token, which is read as one", repr(special)
        if text.strip() not in back:
            yield _kind(text, back), f"the {role}'s {_excerpt(text)} comes back as another text"


def _texts(example: Example) -> Iterator[tuple[str, str]]:
    """The role and the text of each turn that is written."""
    if example.messages is None:
        yield "row", example.text or ""
        return
    for message in example.messages:
        if isinstance(message["content"], str):
            yield message["role"], message["content"]


def _kind(text: str, back: str) -> str:
    for kind, form in _FORMS.items():
        if form(text) in form(back):
            return kind
    return "a turn's text does not come back from its tokens"


def _bare(text: str) -> str:
    """Without marks, and compatible characters as one."""
    parts = unicodedata.normalize("NFKD", text.casefold())
    return "".join(part for part in parts if not unicodedata.combining(part))


def _excerpt(text: str) -> str:
    return repr(text[:EXCERPT] + "…" * (len(text) > EXCERPT))
