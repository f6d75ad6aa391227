"""What the parts of a generate stage answer, and by which settings.

The rows of a part are known by their prompts' token ids. So answers are found again if the data was
mended or shortened, or dealt out to parts of another size, and answers of other settings are never
mixed with them.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import numpy as np

from decode.base.artifact import remove_directory, verify_directory
from decode.base.errors import UserError
from train.data.corpus import PART, answer_parts, answers_of
from train.data.read import Example, select
from train.engines.answers.journal import Journal, open_journals
from train.engines.answers.protocols import Answer

Job = tuple[Example, int]  # a prompt, and the number of its answer


class Jobs(Sequence[Job]):
    """All answers to the first prompt, then all to the second, and so on: answers to one prompt,
    made together, read it once. Prompts are read when they are asked for.

    samples: answers to each prompt. numbers: those of the jobs, counted over all answers.
    """

    def __init__(self, examples: Sequence[Example], samples: int, numbers: range) -> None:
        self.examples, self.samples, self._numbers = examples, samples, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Job]:
        rows = np.asarray(self._numbers) // self.samples
        for number, example in zip(self._numbers, select(self.examples, rows), strict=True):
            yield example, number % self.samples

    @overload
    def __getitem__(self, index: int) -> Job: ...

    @overload
    def __getitem__(self, index: slice) -> "Jobs": ...

    def __getitem__(self, index: int | slice) -> "Job | Jobs":
        if isinstance(index, slice):
            return Jobs(self.examples, self.samples, self._numbers[index])
        row, sample = divmod(self._numbers[index], self.samples)
        return self.examples[row], sample


@dataclass
class AnswerPart:
    """A part of a generate stage. jobs: the example and the number of the answer of each row. keys:
    of each row by its number; a key names the prompt and the number of the answer. meta: what the
    part's manifest says of it. answers: those so far, by row number."""

    directory: Path
    jobs: Jobs
    keys: Mapping[int, str]
    meta: dict[str, Any]
    answers: dict[int, Answer] = field(default_factory=dict)

    @property
    def journal(self) -> Journal:
        return Journal(self.directory)


def prompt_key(prompt: Sequence[int], schema: str | None = None) -> str:
    """Names a prompt by its token ids, and by the JSON Schema of its answer if it has one."""
    said = np.asarray(prompt, np.int64).tobytes() + (schema or "").encode()
    return hashlib.blake2b(said, digest_size=8).hexdigest()


def part_meta(keys: Iterable[str], made_by: Mapping[str, Any], split: str) -> dict[str, Any]:
    """What a part's manifest says of it. keys: the keys of its rows. split: whose prompts it
    answers."""
    rows = hashlib.sha256(" ".join(keys).encode()).hexdigest()
    return {"rows": rows, "made_by": made_by, "split": split}


def take_over(directory: Path, parts: Sequence[AnswerPart], made_by: Mapping[str, Any]) -> int:
    """Put the answers of stored parts and journals that have other rows than `parts` where the new
    parts find them: in their journals. Returns how many stored parts were taken apart.

    Answers to prompts that `parts` do not have are lost. Raises UserError for a stored part that
    other settings made; then nothing is changed.
    """
    stale = [path for path in answer_parts(directory) if not _fits(path, parts, made_by)]
    found = defaultdict[str, list[Answer]](list)
    for path in stale:
        for key, answer in _answers(path):
            found[key].append(answer)
    keys = {row: key for part in parts for row, key in part.keys.items()}
    for journal in open_journals(directory):
        for row, key, answer in journal.entries():
            if key and keys.get(row) != key:
                found[key].append(answer)
    for part in parts if found else ():
        if part.directory in stale or not part.directory.exists():
            known = part.journal.read(part.keys)
            for row, key in part.keys.items():
                if row not in known and found[key]:
                    part.journal.add(row, found[key].pop(0), key)
    for path in stale:
        remove_directory(path)
    return len(stale)


def _fits(path: Path, parts: Sequence[AnswerPart], made_by: Mapping[str, Any]) -> bool:
    """Whether a stored part has the rows that it should have. Raises UserError for other settings,
    and for other rows of a part that does not know its prompts."""
    meta = verify_directory(path)
    number = int(path.name.removeprefix(PART))
    part = parts[number] if number < len(parts) else None
    if "made_by" not in meta:  # of an earlier version
        asked = {(example.id, sample) for example, sample in part.jobs} if part else set()
        if all((answer["id"], answer["sample"]) in asked for answer in answers_of(path)):
            return True
        raise UserError(
            f"{path} is of an earlier version and answers other prompts than it should now; set "
            f"data and settings back, or delete {path.parent} to make all answers again"
        )
    if meta["made_by"] != made_by:
        changed = [key for key, value in made_by.items() if meta["made_by"].get(key) != value]
        raise UserError(
            f"the answers in {path} were made with another {', '.join(changed)}; set it back, or "
            f"delete {path.parent} to make all answers again"
        )
    return part is not None and meta["rows"] == part.meta["rows"]


def _answers(part: Path) -> Iterator[tuple[str, Answer]]:
    """The key and the answer of each row of a part that has an answer."""
    for answer in answers_of(part):
        yield answer["key"], Answer(answer["tokens"], answer.get("finish_reason", ""))
