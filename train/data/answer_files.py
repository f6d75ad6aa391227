"""The answers of a generate stage.

    answers-RANK.jsonl   an answer a line, appended as it comes. One process writes to a file.
    part-0/              all answers in the order of their rows, when all have come

A key finds an answer. It names the prompt by its token ids, the schema of its answer, and the
number of the answer among those to this prompt. So a start asks for what no file answers, also if
the data was mended, or has more or fewer rows. Answers of other settings are never mixed with them.

Earlier versions wrote several parts, and open-part-N.jsonl in place of answers-RANK.jsonl. They are
read in the same way.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from decode.base.artifact import remove_directory, verify_directory, write_directory
from decode.base.errors import UserError
from train.data.read import Example, id_key, select, values

PART = "part-"
BLOCK = 1024  # answers of a file of a part
Place = tuple[Path, int]  # a file, and where a line of it begins


def prompt_key(prompt: Sequence[int], schema: str | None = None) -> str:
    """Names a prompt by its token ids, and by the JSON Schema of its answer if it has one."""
    said = np.asarray(prompt, np.int64).tobytes() + (schema or "").encode()
    return hashlib.blake2b(said, digest_size=8).hexdigest()


def draw_number(key: str) -> int:
    """The number of the draws of an answer with this key, below 2⁶³: its row in the data does not
    matter."""
    prompt, _, number = key.rpartition("-")
    return (int(prompt, 16) + int(number)) % 2**63


class AnswerFiles:
    """The answers that a stage asks for, and those that its directory has.

    All answers to the first prompt come first, then all to the second, and so on: answers to one
    prompt, made together, read it once. Their numbers are their places in this order.

    samples: answers to each prompt. prompts: the `prompt_key` of each example. made_by: the
    settings that decide what is answered to a prompt, as JSON values. rank: of this process, which
    appends to a file of its own.
    """

    def __init__(
        self,
        directory: Path,
        examples: Sequence[Example],
        samples: int,
        prompts: Iterable[str],
        made_by: Mapping[str, Any],
        rank: int = 0,
    ) -> None:
        self.directory, self.examples, self.samples = directory, examples, samples
        self._made_by, self._path = made_by, directory / f"answers-{rank}.jsonl"
        self.keys = list[str]()
        before = Counter[str]()
        for prompt in prompts:  # equal ones have answers of their own
            self.keys += (f"{prompt}-{before[prompt] + sample}" for sample in range(samples))
            before[prompt] += samples

    def examples_of(self, numbers: Sequence[int]) -> Sequence[Example]:
        """The example of each of these answers. Prompts are read when they are asked for."""
        return select(self.examples, np.asarray(numbers, np.int64) // self.samples)

    def _rows(self) -> list[tuple[str, int, str]]:
        """The id of its example, the sample and the key of each answer."""
        samples, names = self.samples, values(self.examples, "id")
        return [(names[n // samples], n % samples, key) for n, key in enumerate(self.keys)]

    def missing(self) -> list[int] | None:
        """The numbers of the answers that no file has. None: the part of all is whole, and there is
        nothing else. Raises UserError as `_find`."""
        parts, meta = answer_parts(self.directory), dict[str, Any]()
        if [part.name for part in parts] == [f"{PART}0"] and not self._appended():
            meta = verify_directory(parts[0])
        is_same = meta.get("made_by") == self._made_by and meta.get("rows") == _hash(self._rows())
        if is_same and "tokens" in meta:  # earlier versions did not count
            return None
        places = self._find()
        return [number for number, key in enumerate(self.keys) if key not in places]

    def _find(self) -> dict[str, Place]:
        """Where the answer to each key is. One process calls this, while none appends.

        A last line that a kill cut short is removed. Raises UserError for a damaged line, for a
        damaged part (CorruptArtifact), and for answers of other settings or of a version without
        keys.
        """
        for part in answer_parts(self.directory):
            self._require_same_settings(part, verify_directory(part).get("made_by"))
        places = dict[str, Place]()
        for path in (*answer_files(self.directory), *self._appended()):
            begin = 0
            with path.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    if not line.endswith(b"\n"):
                        os.truncate(path, begin)
                        break
                    entry = _entry(line, f"{path}:{number}")
                    if "made_by" in entry:
                        self._require_same_settings(path, entry["made_by"])
                    elif not entry.get("left_out"):  # of an earlier version
                        places.setdefault(entry["key"], (path, begin))
                    begin += len(line)
        return places

    def _appended(self) -> list[Path]:
        return [
            path
            for name in ("answers-*.jsonl", "open-*.jsonl")
            for path in sorted(self.directory.glob(name))
        ]

    def _require_same_settings(self, path: Path, made_by: Mapping[str, Any] | None) -> None:
        if made_by is None:
            raise UserError(
                f"{path} is of an earlier version, which did not write which prompts it answers; "
                f"delete {path.parent} to make all answers again"
            )
        changed = [name for name in made_by if made_by[name] != self._made_by.get(name)]
        if changed:
            raise UserError(
                f"the answers in {path} were made with another {', '.join(changed)}; set it back, "
                f"or delete {path.parent} to make all answers again"
            )

    def add(self, answers: Mapping[int, Mapping[str, Any]]) -> None:
        """Append answers by number, all of them or none: {"tokens"} and what else is known of each.
        Raises UserError if the file cannot be written."""
        lines = [{"key": self.keys[number], **answer} for number, answer in answers.items()]
        try:
            # Opened each time: a kill leaves nothing in a buffer.
            with open(self._path, "ab", buffering=0) as file:
                size = file.seek(0, os.SEEK_END)
                rest = _lines(lines if size else [{"made_by": self._made_by}, *lines])
                try:
                    while rest:
                        rest = rest[file.write(rest) :]
                except OSError:
                    file.truncate(size)  # else the next answer would go on in a line cut short
                    raise
        except OSError as error:
            raise UserError(f"cannot write {self._path}: {error.strerror}") from error

    def finish(self, split: str, left_out: Mapping[str, int], ends: Container[int]) -> None:
        """Write the part of all answers, then delete all other files. One process calls this, while
        none appends. split: whose prompts are answered. left_out: how many answers are missing for
        which reason. ends: the ids that end a text."""
        places, rows = self._find(), self._rows()
        found = [row for row in rows if row[2] in places]
        firsts = range(0, len(found), BLOCK)
        meta: dict[str, Any] = {"rows": _hash(rows), "made_by": self._made_by, "split": split}
        meta |= {"left_out": left_out, "files": len(firsts), "answers": len(found)}
        meta |= {"prompts": len({id_key(name) for name, *_ in found})}
        meta |= dict.fromkeys(("tokens", "cut_at_limit", "retokenized"), 0)

        def fill(directory: Path) -> None:
            for number, first in enumerate(firsts):
                answers: list[dict[str, Any]] = [
                    _read(*places[key]) | {"id": name, "sample": sample}
                    for name, sample, key in found[first : first + BLOCK]
                ]
                meta["retokenized"] += sum(x.get("retokenized", False) for x in answers)
                meta["tokens"] += sum(len(x["tokens"]) for x in answers)
                meta["cut_at_limit"] += sum(x["tokens"][-1] not in ends for x in answers)
                (directory / f"{number}.jsonl").write_bytes(_lines(answers))

        write_directory(self.directory / f"{PART}0", fill, meta=meta)
        for part in answer_parts(self.directory)[1:]:
            remove_directory(part)
        for path in self._appended():
            path.unlink()


def _hash(rows: Iterable[Any]) -> str:
    return hashlib.sha256(_lines(rows)).hexdigest()


def _lines(values: Iterable[Any]) -> bytes:
    return "".join(json.dumps(value) + "\n" for value in values).encode()


def _entry(line: bytes, place: str) -> dict[str, Any]:
    try:
        entry: dict[str, Any] = json.loads(line)
        if "made_by" in entry or entry.get("left_out") or (entry["key"] and entry["tokens"]):
            return entry
        raise ValueError("it has no key or no tokens")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{place} is damaged ({error!r}); delete this line, and its answer is made again"
        ) from error


def _read(path: Path, begin: int) -> dict[str, Any]:
    with path.open("rb") as file:
        file.seek(begin)
        answer: dict[str, Any] = json.loads(file.readline())
    return answer


def answer_parts(directory: Path) -> list[Path]:
    """The parts of a generate stage, in order: one, or several of an earlier version."""
    return sorted(directory.glob(f"{PART}*"), key=lambda path: int(path.name.removeprefix(PART)))


def answer_files(directory: Path) -> list[Path]:
    """The files of the parts, in order. Raises UserError (CorruptArtifact) for a part that lacks
    one."""
    files = list[Path]()
    for part in answer_parts(directory):
        count = verify_directory(part, deep=False).get("files")
        names = ["answers.jsonl"] if count is None else [f"{n}.jsonl" for n in range(count)]
        files += (part / name for name in names)
    return files


def read_answers(directory: Path) -> Iterator[dict[str, Any]]:
    """All answers of a finished generate stage: {"id", "sample", "tokens"}, in order.

    Raises UserError (CorruptArtifact) with the name of a damaged part.
    """
    return chain.from_iterable(map(answers_of, answer_files(directory)))


def answers_of(file: Path) -> Iterator[dict[str, Any]]:
    """The answers of one file of a part, as `read_answers`."""
    verify_directory(file.parent, deep=[file.name])
    with file.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def answer_counts(directory: Path) -> dict[str, Any]:
    """Of a finished stage: how many prompts, answers, tokens, and answers without an end there are
    ("cut_at_limit"), how many were left out for which reason ("left_out"), and how many have the
    ids of their text, because a server returned none ("retokenized")."""
    return verify_directory(directory / f"{PART}0", deep=False)
