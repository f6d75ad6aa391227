"""The texts of a run as tokens: the examples of its data, and the answers of generate stages."""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from decode.base.artifact import MANIFEST, verify_directory
from decode.base.errors import UserError
from decode.loop.rows import prompt_problem
from train.data.answer_files import answer_files, answer_parts, answers_of
from train.data.chat_tokens import Sample, prompt_tokens, to_samples
from train.data.read import Example, asks, content_keys, id_key, id_keys, select
from train.data.self_prompts import read_self_prompts
from train.data.stored_samples import StoredSamples
from train.data.text_files import MakePart, Texts
from train.data.turns import TURN, turn
from train.settings.text_settings import stages_of

SELF_PROMPTS = "prompts"  # the directory of prompts that the target wrote
PART_FILES = 16  # files of answers that one part of a text holds


@dataclass
class Corpus:
    """A run's texts, written with the target's tokenizer and chat template.

    examples: by split. system: a system message for every conversation that has none. stages: the
    directories of stages by name, with the answers of generate stages. start: the token that the
    decoder starts with, if the target has an encoder. ends: the target's EOS ids. texts: makes each
    text once.
    """

    examples: dict[str, Sequence[Example]]
    tokenizer: PreTrainedTokenizerBase
    system: str | None
    stages: Mapping[str, Path]
    start: int | None = None
    ends: Collection[int] = ()
    texts: Texts = field(default_factory=Texts)

    def prompts(self, examples: Sequence[Example]) -> list[list[int]]:
        """The token ids of each example's prompt."""
        return list(self.each_prompt(examples))

    def each_prompt(self, examples: Sequence[Example]) -> Iterator[list[int]]:
        """`prompts`, one after the other. Those that were made before are found without a look at
        the rows."""
        for row, content in enumerate(content_keys(examples)):
            yield self.texts.prompt(content) or self._made_prompt(examples[row])

    def _made_prompt(self, example: Example) -> list[int]:
        encoder = self.start is not None
        return prompt_tokens(example, self.tokenizer, self.system, encoder=encoder)

    def answerable(self, split: str, stage: str) -> Sequence[Example]:
        """The examples of a split that have a prompt. Raises UserError with the name of the stage
        that needs them if there are none."""
        if split not in self.examples:
            raise UserError(
                f"stage {stage} needs the prompts of split {split}, but data has no such split; "
                f"set data.{split}, or name another split"
            )
        examples = self.asked(split)
        rows = np.flatnonzero(asks(examples))
        if not len(rows):
            raise UserError(
                f"stage {stage}: the {split} split has no prompts to answer, only text; add rows "
                "with prompt or messages"
            )
        return select(examples, rows)

    def asked(self, split: str) -> Sequence[Example]:
        """The examples of a split without those whose prompts cannot be answered; see
        `askable`."""
        return self.askable(self.examples[split], f"prompts of {split}")

    def askable(self, examples: Sequence[Example], what: str) -> Sequence[Example]:
        """The examples without those whose prompts cannot be answered. Their prompts are kept. All
        ranks call this together. what: names them in messages. Raises UserError for too many that
        cannot."""

        def prompt(example: Example) -> list[int]:
            tokens = self._made_prompt(example)
            found = prompt_problem(tokens, self.texts.positions, self.texts.vocab_size)
            if found:
                raise UserError(f"the prompt {found}")
            return tokens

        key = self._key("prompts", [examples])
        return select(examples, self.texts.prompts(key, what, examples, prompt))

    def self_prompts(self, stage: str) -> Sequence[Example]:
        """The prompts that the target wrote in a generate stage. Empty if it wrote none."""
        directory = self.stages[stage] / SELF_PROMPTS
        return read_self_prompts(directory) if directory.exists() else []

    def samples(self, text: str | list[str], split: str = "train") -> StoredSamples:
        """All samples of a text: `data` for a split's own responses, or generate stages. All ranks
        call this together.

        Raises UserError if a part of a stage's answers is damaged, for too many rows that cannot be
        trained on, and as `Sample.under_encoder`.
        """
        if text == "data":
            examples = self.examples[split]
            key = self._key("responses", [examples])
            return self.texts.rows(key, f"responses of {split}", examples, self._own)[0]
        parts: list[MakePart] = []
        splits = {name: _ById(examples) for name, examples in self.examples.items()}
        stages = stages_of(text)
        for stage in stages:
            files = answer_files(self.stages[stage])
            asked = splits | {SELF_PROMPTS: _ById(self.self_prompts(stage))}
            parts += [
                partial(self._answered, stage, files[first : first + PART_FILES], asked)
                for first in range(0, max(1, len(files)), PART_FILES)
            ]
        return self.texts.stored(self._key("answer files", self.examples.values(), stages), parts)

    def _own(self, example: Example) -> Iterator[Sample]:
        """The samples of an example with its own responses."""
        if self.start is not None and example.text is not None:
            raise UserError(
                f"{example.source}: the row has text without a prompt, but the target has "
                "an encoder, which reads prompts; give rows with prompt and response"
            )
        for sample in to_samples(
            example, self.tokenizer, self.system, encoder=self.start is not None, ends=self.ends
        ):
            yield sample if self.start is None else sample.under_encoder(self.start)

    def answered(
        self, name: str, prompt: list[int], stage: str, number: int, answer: list[int]
    ) -> Sample:
        """The sample of the example with this id and prompt, and the answer of this number of a
        generate stage, as token ids. They are never decoded to text and encoded again, because that
        can change the ids."""
        mask = [False] * len(prompt) + [True] * len(answer)
        mask[:1] = [False] * len(mask[:1])
        sample = Sample(f"{name}#{stage}-{number}", [*prompt, *answer], mask)
        return sample if self.start is None else sample.under_encoder(self.start)

    def _answered(
        self, stage: str, files: Sequence[Path], asked: Mapping[str, "_ById"], _: dict[str, Any]
    ) -> Iterator[Sample]:
        for file in files:
            # Ids are unique in one split only. Parts of earlier versions do not name theirs.
            split = verify_directory(file.parent, deep=False).get("split")
            places = asked if split is None else {split: asked[split]}
            for answer in answers_of(file):
                name, number, tokens = answer["id"], answer["sample"], answer["tokens"]
                [prompt] = self.prompts(_find(name, places, file.parent))
                yield self.answered(name, prompt, stage, number, tokens)

    def _key(self, kind: str, rows: Iterable[Sequence[Example]], stages: Sequence[str] = ()) -> str:
        """A hash of what decides a text. stages: whose answers to the rows it has."""
        made_by = [kind, stages, self.system, self.start, str(self.tokenizer.chat_template)]
        digest = hashlib.sha256(json.dumps([*made_by, self.texts.tokenizer]).encode())
        for examples in rows:
            digest.update(id_keys(examples).tobytes() + content_keys(examples).tobytes() + b"\n")
        for stage in stages:
            for part in answer_parts(self.stages[stage]):
                digest.update((part / MANIFEST).read_bytes())
        return digest.hexdigest()[:16]


class _ById:
    """Finds examples by id."""

    def __init__(self, examples: Sequence[Example]) -> None:
        keys = id_keys(examples)
        self._examples, self._order = examples, np.argsort(keys)
        self._keys = keys[self._order]

    def find(self, name: str) -> Sequence[Example]:
        """The example with this id, also an earlier turn of one. Empty: there is none."""
        key = np.uint64(id_key(name))  # which no other id of these examples has
        place = np.searchsorted(self._keys, key)
        if place < len(self._keys) and self._keys[place] == key:
            return select(self._examples, self._order[place : place + 1])
        chat, mark, messages = name.rpartition(TURN)
        if mark and messages.isdecimal():
            return [turn(whole, int(messages)) for whole in self.find(chat)]
        return []


def _find(name: str, places: Mapping[str, _ById], part: Path) -> Sequence[Example]:
    """The example that an answer of a part answers. Raises UserError unless one of the places has
    it."""
    found = [examples for place in places.values() if (examples := place.find(name))]
    if len(found) != 1:
        raise UserError(
            f"{part} answers the prompt {name!r}, which is in {len(found)} of "
            f"{', '.join(places)}; expected one. Delete the directory of its stage to make all "
            "answers again"
        )
    return found[0]
