"""The texts of a run as tokens: the examples of its data, and the answers of generate stages."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from decode.artifact import verify_directory, write_directory
from decode.errors import UserError
from train.data.chat import Sample, prompt_tokens, to_sample
from train.data.read import Example
from train.data.self_prompts import read_prompts

PART = "part-"
ANSWERS = "answers.jsonl"  # in a part
SELF_PROMPTS = "prompts"  # the directory of prompts that the target wrote


@dataclass
class Corpus:
    """A run's texts, written with the target's tokenizer and chat template.

    examples: by split. system: a system message for every conversation that has none. stages: the
    directories of stages by name, with the answers of generate stages. start: the token that the
    decoder starts with, if the target has an encoder.
    """

    examples: dict[str, list[Example]]
    tokenizer: PreTrainedTokenizerBase
    system: str | None
    stages: Mapping[str, Path]
    start: int | None = None

    def prompts(self, examples: Iterable[Example]) -> list[list[int]]:
        """The token ids of each example's prompt."""
        return [prompt_tokens(example, self.tokenizer, self.system) for example in examples]

    def answerable(self, split: str, stage: str) -> list[Example]:
        """The examples of a split that have a prompt. Raises UserError with the name of the stage
        that needs them if there are none."""
        if split not in self.examples:
            raise UserError(
                f"stage {stage} needs the prompts of split {split}, but data has no such split; "
                f"set data.{split}, or name another split"
            )
        examples = [e for e in self.examples[split] if e.messages is not None]
        if not examples:
            raise UserError(
                f"stage {stage}: the {split} split has no prompts to answer, only text; add rows "
                "with prompt or messages"
            )
        return examples

    def self_prompts(self, stage: str) -> list[Example]:
        """The prompts that the target wrote in a generate stage. Empty if it wrote none."""
        directory = self.stages[stage] / SELF_PROMPTS
        return read_prompts(directory) if directory.exists() else []

    def samples(self, text: str | list[str], split: str = "train") -> list[Sample]:
        """All samples of a text: `data` for a split's own responses, or generate stages.

        Raises UserError if a part of a stage's answers is damaged, and as `Sample.under_encoder`.
        """
        samples = self._samples(text, split)
        if self.start is None:
            return samples
        for example in self.examples[split] if text == "data" else ():
            if example.text is not None:
                raise UserError(
                    f"{example.source}: the row has text without a prompt, but the target has an "
                    "encoder, which reads prompts; give rows with prompt and response"
                )
        return [sample.under_encoder(self.start) for sample in samples]

    def _samples(self, text: str | list[str], split: str) -> list[Sample]:
        if text == "data":
            return [to_sample(e, self.tokenizer, system=self.system) for e in self.examples[split]]
        by_id = {e.id: e for examples in self.examples.values() for e in examples}
        samples = []
        for stage in stages_of(text):
            by_id |= {e.id: e for e in self.self_prompts(stage)}
            for answer in read_answers(self.stages[stage]):
                example = by_id[answer["id"]]
                sample = to_sample(example, self.tokenizer, answer["tokens"], self.system)
                name = f"{sample.id}#{stage}-{answer['sample']}"
                samples.append(Sample(name, sample.tokens, sample.mask))
        return samples


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


def read_answers(directory: Path) -> list[dict[str, Any]]:
    """All answers of a generate stage: {"id", "sample", "tokens"}, in order.

    Raises UserError (CorruptArtifact) with the name of a damaged part.
    """
    answers = []
    for part in answer_parts(directory):
        verify_directory(part)
        answers += [json.loads(line) for line in (part / ANSWERS).read_text().splitlines()]
    return answers


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
