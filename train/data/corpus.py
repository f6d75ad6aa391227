"""The texts of a run as tokens: the examples of its data, and the answers of generate stages."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from decode.artifact import MANIFEST, verify_directory, write_directory
from decode.errors import UserError
from train.data.chat import Sample, prompt_tokens, to_sample, to_samples
from train.data.read import Example, id_key, id_keys, select
from train.data.self_prompts import read_prompts

PART = "part-"
ANSWERS = "answers.jsonl"  # in a part
SELF_PROMPTS = "prompts"  # the directory of prompts that the target wrote
SHARE_EXAMPLES, SHARE_PARTS = 16_384, 256  # how much of a text is one share


@dataclass
class Corpus:
    """A run's texts, written with the target's tokenizer and chat template.

    examples: by split. system: a system message for every conversation that has none. stages: the
    directories of stages by name, with the answers of generate stages. start: the token that the
    decoder starts with, if the target has an encoder.
    """

    examples: dict[str, Sequence[Example]]
    tokenizer: PreTrainedTokenizerBase
    system: str | None
    stages: Mapping[str, Path]
    start: int | None = None

    def prompts(self, examples: Iterable[Example]) -> list[list[int]]:
        """The token ids of each example's prompt."""
        return [prompt_tokens(example, self.tokenizer, self.system) for example in examples]

    def answerable(self, split: str, stage: str) -> Sequence[Example]:
        """The examples of a split that have a prompt. Raises UserError with the name of the stage
        that needs them if there are none."""
        if split not in self.examples:
            raise UserError(
                f"stage {stage} needs the prompts of split {split}, but data has no such split; "
                f"set data.{split}, or name another split"
            )
        examples = self.examples[split]
        asks = np.fromiter((e.messages is not None for e in examples), bool, len(examples))
        if not asks.any():
            raise UserError(
                f"stage {stage}: the {split} split has no prompts to answer, only text; add rows "
                "with prompt or messages"
            )
        return select(examples, np.flatnonzero(asks))

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
            examples = self.examples[split]
            firsts = range(0, len(examples), SHARE_EXAMPLES)
            return [
                partial(self.samples_of, examples[first : first + SHARE_EXAMPLES])
                for first in firsts
            ]
        shares: list[Callable[[], Iterator[Sample]]] = []
        stages = stages_of(text)
        examples_by_id = _ById([*self.examples.values(), *map(self.self_prompts, stages)])
        for stage in stages:
            parts = answer_parts(self.stages[stage])
            shares += [
                partial(self._answered, stage, parts[first : first + SHARE_PARTS], examples_by_id)
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
            for sample in to_samples(example, self.tokenizer, self.system):
                yield sample if self.start is None else sample.under_encoder(self.start)

    def _answered(self, stage: str, parts: Sequence[Path], examples: "_ById") -> Iterator[Sample]:
        for answer in chain.from_iterable(map(_answers_of, parts)):
            example = examples[answer["id"]]
            sample = to_sample(example, self.tokenizer, answer["tokens"], self.system)
            name = f"{sample.id}#{stage}-{answer['sample']}"
            sample = Sample(name, sample.tokens, sample.mask)
            yield sample if self.start is None else sample.under_encoder(self.start)

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
    """Finds examples by id. A later sequence takes the place of an earlier one."""

    def __init__(self, sequences: Iterable[Sequence[Example]]) -> None:
        self._sorted = []
        for examples in sequences:
            keys = id_keys(examples)
            order = np.argsort(keys)
            self._sorted.append((examples, keys[order], order))

    def __getitem__(self, name: str) -> Example:
        key = np.uint64(id_key(name))
        for examples, keys, order in reversed(self._sorted):
            first, end = np.searchsorted(keys, key, "left"), np.searchsorted(keys, key, "right")
            for place in range(first, end):
                example = examples[int(order[place])]
                if example.id == name:
                    return example
        raise KeyError(name)


def stages_of(text: str | list[str]) -> list[str]:
    """The generate stages whose answers are the text. Empty for the data's own responses."""
    return [] if text == "data" else [text] if isinstance(text, str) else text


def write_answers(
    directory: Path,
    answers: Iterable[Mapping[str, Any]],
    meta: dict[str, Any] | None = None,
    add_files: Callable[[Path], None] = lambda path: None,
) -> None:
    """Write a part, completely or not at all: a line per answer, {"id", "sample", "tokens"} and
    what else is known of it. meta: of the part; see `unusable_answers`. add_files: writes other
    files into the directory that it gets."""

    def fill(path: Path) -> None:
        lines = (json.dumps(answer) + "\n" for answer in answers)
        (path / ANSWERS).write_text("".join(lines))
        add_files(path)

    write_directory(directory, fill, meta=meta)


def read_answers(directory: Path) -> Iterator[dict[str, Any]]:
    """All answers of a generate stage: {"id", "sample", "tokens"}, in order.

    Raises UserError (CorruptArtifact) with the name of a damaged part.
    """
    return chain.from_iterable(map(_answers_of, answer_parts(directory)))


def _answers_of(part: Path) -> Iterator[dict[str, Any]]:
    verify_directory(part)
    with (part / ANSWERS).open() as lines:
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
