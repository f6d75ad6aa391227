"""The texts of a run as tokens: the examples of its data, and the answers of generate stages."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from decode.base.artifact import MANIFEST, verify_directory, write_directory
from decode.base.errors import UserError
from train.data.chat_tokens import Sample, prompt_tokens, to_sample, to_samples
from train.data.read import Example, id_key, id_keys, select
from train.data.self_prompts import read_prompts
from train.data.stored_samples import sizes
from train.data.turns import TURN, turn
from train.data.usable_rows import UsableRows
from train.settings.text_settings import stages_of

PART = "part-"
ANSWERS = "answers.jsonl"  # in a part
SELF_PROMPTS = "prompts"  # the directory of prompts that the target wrote
SHARE_EXAMPLES, SHARE_PARTS = 16_384, 256  # how much of a text is one share


@dataclass
class Corpus:
    """A run's texts, written with the target's tokenizer and chat template.

    examples: by split. system: a system message for every conversation that has none. stages: the
    directories of stages by name, with the answers of generate stages. start: the token that the
    decoder starts with, if the target has an encoder. ends: the target's EOS ids. usable: finds the
    rows that can be used. None: all can.
    """

    examples: dict[str, Sequence[Example]]
    tokenizer: PreTrainedTokenizerBase
    system: str | None
    stages: Mapping[str, Path]
    start: int | None = None
    ends: Collection[int] = ()
    usable: UsableRows | None = None

    def prompts(self, examples: Iterable[Example]) -> list[list[int]]:
        """The token ids of each example's prompt."""
        return [self.prompt(example) for example in examples]

    def prompt(self, example: Example) -> list[int]:
        """The token ids of an example's prompt."""
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
        asks = np.fromiter((e.messages is not None for e in examples), bool, len(examples))
        if not asks.any():
            raise UserError(
                f"stage {stage}: the {split} split has no prompts to answer, only text; add rows "
                "with prompt or messages"
            )
        return select(examples, np.flatnonzero(asks))

    def asked(self, split: str) -> Sequence[Example]:
        """The examples of a split without those whose prompts cannot be answered. All ranks call
        this together. Raises UserError for too many of them."""
        examples = self.examples[split]
        return self.usable.asked(split, examples, self.prompt) if self.usable else examples

    def trained_on(self, split: str) -> Sequence[Example]:
        """The examples of a split without those whose own responses cannot be trained on. All ranks
        call this together. Raises UserError for too many of them."""
        examples = self.examples[split]
        return self.usable.trained_on(split, examples, self.samples_of) if self.usable else examples

    def sizes(self, split: str) -> np.ndarray:
        """int32 [n, 2]: the tokens of each sample of a split's own responses, and how many a
        loss predicts, in no order. All ranks call this together."""
        examples = self.trained_on(split)
        if self.usable:
            return self.usable.sizes(split)
        return np.stack(sizes(list(self.samples_of(examples))), axis=1)

    def self_prompts(self, stage: str) -> Sequence[Example]:
        """The prompts that the target wrote in a generate stage. Empty if it wrote none."""
        directory = self.stages[stage] / SELF_PROMPTS
        return read_prompts(directory) if directory.exists() else []

    def samples(self, text: str | list[str], split: str = "train") -> list[Sample]:
        """All samples of a short text, in memory: `data` for a split's own responses, or generate
        stages.

        Raises UserError if a part of a stage's answers is damaged, and as `Sample.under_encoder`.
        """
        return [sample for share in self.shares(text, split) for sample in share()]

    def shares(
        self, text: str | list[str], split: str = "train"
    ) -> list[Callable[[], Iterator[Sample]]]:
        """The samples of `samples` in at least one share, so that each rank can make some of
        them."""
        if text == "data":
            examples = self.trained_on(split)
            return [
                partial(self.samples_of, examples[first : first + SHARE_EXAMPLES])
                for first in range(0, len(examples), SHARE_EXAMPLES)
            ]
        shares: list[Callable[[], Iterator[Sample]]] = []
        splits = {name: _ById(examples) for name, examples in self.examples.items()}
        for stage in stages_of(text):
            parts = answer_parts(self.stages[stage])
            asked = splits | {SELF_PROMPTS: _ById(self.self_prompts(stage))}
            shares += [
                partial(self._answered, stage, parts[first : first + SHARE_PARTS], asked)
                for first in range(0, max(1, len(parts)), SHARE_PARTS)
            ]
        return shares

    def samples_of(self, examples: Iterable[Example]) -> Iterator[Sample]:
        """The samples of examples with their own responses."""
        for example in examples:
            if self.start is not None and example.text is not None:
                raise UserError(
                    f"{example.source}: the row has text without a prompt, but the target has "
                    "an encoder, which reads prompts; give rows with prompt and response"
                )
            for sample in to_samples(
                example, self.tokenizer, self.system, encoder=self.start is not None, ends=self.ends
            ):
                yield sample if self.start is None else sample.under_encoder(self.start)

    def answered(self, example: Example, stage: str, number: int, answer: list[int]) -> Sample:
        """The sample of an example with the answer of this number of a generate stage, as token
        ids."""
        encoder = self.start is not None
        sample = to_sample(example, self.tokenizer, answer, self.system, encoder=encoder)
        sample = replace(sample, id=f"{sample.id}#{stage}-{number}")
        return sample if self.start is None else sample.under_encoder(self.start)

    def _answered(
        self, stage: str, parts: Sequence[Path], asked: Mapping[str, "_ById"]
    ) -> Iterator[Sample]:
        for part in parts:
            # Ids are unique in one split only. Parts of earlier versions do not name theirs.
            split = verify_directory(part, deep=False).get("split")
            places = asked if split is None else {split: asked[split]}
            for answer in answers_of(part):
                example = _find(answer["id"], places, part)
                yield self.answered(example, stage, answer["sample"], answer["tokens"])

    def sha256(self, text: str | list[str], split: str = "train") -> str:
        """A hash of what decides the samples of a text, but not of the rows' content: a run's data
        cannot change."""
        digest = hashlib.sha256()
        made_by = [text, split, self.system, self.start, str(self.tokenizer.chat_template)]
        digest.update(json.dumps(made_by).encode())
        for examples in self.examples.values():
            digest.update(id_keys(examples).tobytes() + b"\n")
        for stage in stages_of(text):
            for part in answer_parts(self.stages[stage]):
                digest.update((part / MANIFEST).read_bytes())
        return digest.hexdigest()


class _ById:
    """Finds examples by id."""

    def __init__(self, examples: Sequence[Example]) -> None:
        keys = id_keys(examples)
        self._examples, self._order = examples, np.argsort(keys)
        self._keys = keys[self._order]

    def find(self, name: str) -> Example | None:
        """The example with this id, also an earlier turn of one. None: there is none."""
        key = np.uint64(id_key(name))
        first, end = (np.searchsorted(self._keys, key, side) for side in ("left", "right"))
        found = (self._examples[int(self._order[place])] for place in range(first, end))
        example = next((example for example in found if example.id == name), None)
        chat, mark, messages = name.rpartition(TURN)
        if example is None and mark and messages.isdecimal() and (whole := self.find(chat)):
            return turn(whole, int(messages))
        return example


def _find(name: str, places: Mapping[str, _ById], part: Path) -> Example:
    """The example that an answer of a part answers. Raises UserError unless one of the places has
    it."""
    found = [example for place in places.values() if (example := place.find(name)) is not None]
    if len(found) != 1:
        raise UserError(
            f"{part} answers the prompt {name!r}, which is in {len(found)} of "
            f"{', '.join(places)}; expected one. Delete the directory of its stage to make all "
            "answers again"
        )
    return found[0]


def write_answers(
    directory: Path,
    answers: Iterable[Mapping[str, Any]],
    meta: dict[str, Any] | None = None,
) -> None:
    """Write a part, completely or not at all: a line per answer, {"id", "sample", "tokens"} and
    what else is known of it. meta: the manifest of the part; see `unusable_answers`."""

    def fill(path: Path) -> None:
        (path / ANSWERS).write_text(
            "".join(json.dumps(answer) + "\n" for answer in answers), encoding="utf-8"
        )

    write_directory(directory, fill, meta=meta)


def read_answers(directory: Path) -> Iterator[dict[str, Any]]:
    """All answers of a generate stage: {"id", "sample", "tokens"}, in order.

    Raises UserError (CorruptArtifact) with the name of a damaged part.
    """
    return chain.from_iterable(map(answers_of, answer_parts(directory)))


def answers_of(part: Path) -> Iterator[dict[str, Any]]:
    """The answers of one part, as `read_answers`."""
    verify_directory(part)
    with (part / ANSWERS).open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def unusable_answers(directory: Path) -> tuple[Counter[str], int]:
    """Of a generate stage with a server: how many answers were left out for which reason, and how
    many others have the ids of their text, because the server returned none."""
    left_out: Counter[str] = Counter()
    retokenized = 0
    for part in answer_parts(directory):
        meta = verify_directory(part, deep=False)
        left_out.update(meta.get("left_out", {}))
        retokenized += meta.get("retokenized", 0)
    return left_out, retokenized


def answer_parts(directory: Path) -> list[Path]:
    """The parts of a generate stage, in order."""
    return sorted(directory.glob(f"{PART}*"), key=lambda path: int(path.name.removeprefix(PART)))
