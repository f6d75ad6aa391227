"""Prompts behind notes that their answers do not need, for measurements at longer contexts."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from decode.model.loading import Target
from train.data.chat_tokens import prompt_tokens
from train.data.read import Example, read_examples

NotesOption = Annotated[Path, typer.Option(help="prompts that the notes are made of")]


def notes_of(target: Target, file: Path) -> list[int]:
    """The tokens of the notes: those of all prompts of a file."""
    text = "\n".join(" ".join(row.user_texts()) for row in read_examples(str(file))[0])
    ids: list[int] = target.tokenizer(text, add_special_tokens=False).input_ids
    return ids


def behind_notes(
    target: Target, example: Example, notes: Sequence[int], count: int, answer: int = 0
) -> list[int]:
    """The tokens of a prompt's last question behind `count` tokens of notes. notes: their tokens,
    which are repeated if they are too few. The notes are shorter where the target has no
    positions for all of them, and for an answer of `answer` tokens."""
    behind = example
    if count:
        repeated = list(notes) * (count // len(notes) + 1)
        cut = target.tokenizer.decode(repeated[:count])
        content = f"My notes:\n{cut}\n\n{example.user_texts()[-1]}"
        message = {"role": "user", "content": content}
        behind = replace(example, messages=(message,), prompt=content)
    tokens = prompt_tokens(behind, target.tokenizer)
    over = len(tokens) + answer - target.max_positions
    if over <= 0 or not count:
        return tokens
    return behind_notes(target, example, notes, max(count - over, 0), answer)
