"""The texts of a run as tokens: the examples of its data, and the answers of generate stages."""

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from decode.base.artifact import MANIFEST, verify_directory, write_directory
from decode.base.errors import UserError
from decode.loop.rows import prompt_problem
from train.data.chat_tokens import Sample, prompt_tokens, to_samples
from train.data.read import Example, content_keys, id_key, id_keys, select
from train.data.self_prompts import read_prompts
from train.data.stored_samples import StoredSamples
from train.data.text_files import Share, Texts
from train.data.turns import TURN, turn
from train.settings.text_settings import stages_of

PART = "part-"
ANSWERS = "answers.jsonl"  # in a part
SELF_PROMPTS = "prompts"  # the directory of prompts that the target wrote
SHARE_PARTS = 256  # parts of answers that one part of a text holds


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

    def prompts(self, examples: Iterable[Example]) -> list[list[int]]:
        """The token ids of each example's prompt."""
        return [self.prompt(example) for example in examples]

    def prompt(self, example: Example) -> list[int]:
        """The token ids of an example's prompt."""
        if (known := self.texts.prompt(example)) is not None:
            return known
        return self._made_prompt(example)

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
        asks = np.fromiter((e.messages is not None for e in examples), bool, len(examples))
        if not asks.any():
            raise UserError(
                f"stage {stage}: the {split} split has no prompts to answer, only text; add rows "
                "with prompt or messages"
            )
        return select(examples, np.flatnonzero(asks))

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
        return read_prompts(directory) if directory.exists() else []

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
        shares: list[Share] = []
        splits = {name: _ById(examples) for name, examples in self.examples.items()}
        stages = stages_of(text)
        for stage in stages:
            parts = answer_parts(self.stages[stage])
            asked = splits | {SELF_PROMPTS: _ById(self.self_prompts(stage))}
            shares += [
                partial(self._answered, stage, parts[first : first + SHARE_PARTS], asked)
                for first in range(0, max(1, len(parts)), SHARE_PARTS)
            ]
        return self.texts.stored(self._key("answers", self.examples.values(), stages), shares)

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

    def answered(self, example: Example, stage: str, number: int, answer: list[int]) -> Sample:
        """The sample of an example with the answer of this number of a generate stage, as token
        ids. They are never decoded to text and encoded again, because that can change the ids."""
        prompt = self.prompt(example)
        mask = [False] * len(prompt) + [True] * len(answer)
        mask[:1] = [False] * len(mask[:1])
        sample = Sample(f"{example.id}#{stage}-{number}", [*prompt, *answer], mask)
        return sample if self.start is None else sample.under_encoder(self.start)

    def _answered(
        self, stage: str, parts: Sequence[Path], asked: Mapping[str, "_ById"], _: dict[str, Any]
    ) -> Iterator[Sample]:
        for part in parts:
            # Ids are unique in one split only. Parts of earlier versions do not name theirs.
            split = verify_directory(part, deep=False).get("split")
            places = asked if split is None else {split: asked[split]}
            for answer in answers_of(part):
                example = _find(answer["id"], places, part)
                yield self.answered(example, stage, answer["sample"], answer["tokens"])

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
