"""Figures on the structure of this repository, and the files that three typical steps enter.

    python -m tests.structure [--json FILE]

Everything is about the Python files that git tracks, without those in tests/.
"""

import argparse
import ast
import io
import json
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from statistics import median
from types import FrameType
from typing import Any

from decode.drafters.small_lm import SmallLMDrafter
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder, Decoding
from tests.stages import DRAFTER, make_stage, run_stage, stage_context
from tests.tiny import tiny_llama, tiny_target
from tests.training import Lines

ROOT = Path(__file__).resolve().parent.parent
SMALL = 60  # lines; a file with fewer is small
# Tokens of Python that are no code.
_NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
)


def source_files() -> list[str]:
    """The tracked Python files outside tests/, as paths from the root, sorted."""
    listed = subprocess.run(
        ["git", "ls-files", "--", "*.py"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    return sorted(
        file for file in listed if not file.startswith("tests/") and (ROOT / file).exists()
    )


def count_lines(file: str) -> int:
    """All lines of a file of the repository."""
    return len((ROOT / file).read_text().splitlines())


def code_lines(source: str) -> int:
    """Lines with code: not those that are blank, or hold only comments or docstrings.

    >>> code_lines('"A module."\\n\\nx = 1  # one\\n# two\\n')
    1
    """
    numbers: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            numbers.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and _is_text(first.value):
                numbers.difference_update(range(first.lineno, (first.end_lineno or 0) + 1))
    lines = source.splitlines()
    return sum(bool(lines[number - 1].strip()) for number in numbers)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def counts() -> dict[str, Any]:
    """Figures on the files: how many there are, how long they are, where they are, and which base
    names (without .py) occur more than once."""
    files = source_files()
    lengths = [count_lines(file) for file in files]
    folders = Counter(str(PurePosixPath(file).parent) for file in files)
    names = Counter(PurePosixPath(file).stem for file in files)
    del names["__init__"]
    return {
        "files": len(files),
        "median_lines": median(lengths),
        f"files_under_{SMALL}_lines": sum(length < SMALL for length in lengths),
        "code_lines": sum(code_lines((ROOT / file).read_text()) for file in files),
        "files_by_folder": dict(folders.most_common()),
        "repeated_names": {name: n for name, n in names.most_common() if n > 1},
    }


class _Walk:
    """Collects the files that are executed between `start` and `stop`, in the order of first
    entry."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self._known = {str(ROOT / file): file for file in source_files()}

    def start(self) -> None:
        sys.setprofile(self._event)

    def stop(self) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, argument: object) -> None:
        # Each file is looked up once; all later events in it are dropped here.
        file = self._known.pop(frame.f_code.co_filename, None)
        if file is not None:
            self.files.append(file)


def walk_of_a_decode_step() -> list[str]:
    """The files of one sampled step of a chain drafted by a small LM: drafting, verification and
    commit. It is the second step of its text, so nothing is prepared in it."""
    drafter = SmallLMDrafter(tiny_llama(layers=1, seed=1))
    decoder = Decoder(tiny_llama(), drafter, sampling=Sampling(temperature=1.0))
    decoding = Decoding(decoder, [[5, 6, 7, 8]], max_new_tokens=64)
    decoding.step()
    walk = _Walk()
    walk.start()
    decoding.step()
    walk.stop()
    return walk.files


class _WatchedSteps(Lines):
    """Watches the second optimizer step of a training, between two updates of its progress bar."""

    def __init__(self) -> None:
        super().__init__()
        self.walk = _Walk()
        self._updates = 0
        self._training = False

    @contextmanager
    def bar(self, what: str, total: int) -> Iterator[Any]:
        self._training = what == "training"
        yield self

    def update(self, done: int, note: str = "", what: str | None = None) -> None:
        """Called before the first step, and after each step."""
        self._updates += self._training
        if self._updates == 2:
            self.walk.start()
        elif self._updates == 3:
            self.walk.stop()


def walk_of_a_distillation_step() -> list[str]:
    """The files of one step of a `distill` stage with its defaults: batch, signal of the live
    target, loss, backward and optimizer step."""
    return _walk_of_a_training_step("distill", 2, DRAFTER)


def walk_of_a_heads_step() -> list[str]:
    """The files of one step of a `heads` stage that trains EAGLE-3 on the live target's hidden
    states and its distribution: batch, states, the unrolled steps, loss, backward and optimizer
    step."""
    settings = {"heads": {"type": "eagle3", "steps": 2}, "losses": {"forward_kl": 1.0}}
    return _walk_of_a_training_step("heads", 7, settings)


def _walk_of_a_training_step(kind: str, layers: int, settings: dict[str, Any]) -> list[str]:
    """The second step of a training. layers: of the target."""
    loop = {"max_steps": 3, "tokens_per_batch": 60, "save_every": 100, "log_every": 100}
    reporter = _WatchedSteps()
    with tempfile.TemporaryDirectory() as directory:
        context = stage_context(Path(directory), tiny_target(layers=layers))
        context.reporter = reporter
        run_stage(context, make_stage(kind, kind, **(settings | {"loop": loop})))
    return reporter.walk.files


def _walk_in_lines(title: str, files: list[str]) -> str:
    total = sum(count_lines(file) for file in files)
    rows = [f"{number:3}  {file}" for number, file in enumerate(files, 1)]
    return "\n".join([f"{title}: {len(files)} files of {total} lines", *rows])


def main() -> None:
    """Prints the figures and the walks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write all of it to this file")
    options = parser.parse_args()
    figures = counts()
    walks = {
        "decode_step": walk_of_a_decode_step(),
        "distillation_step": walk_of_a_distillation_step(),
        "heads_step": walk_of_a_heads_step(),
    }
    for name, value in figures.items():
        words = name.replace("_", " ")
        if isinstance(value, dict):
            print(f"{words}: {', '.join(f'{key} {n}' for key, n in value.items())}")
        else:
            print(f"{words}: {value}")
    print()
    print(_walk_in_lines("one sampled step of a chain drafted by a small LM", walks["decode_step"]))
    print()
    print(_walk_in_lines("one step of a distillation", walks["distillation_step"]))
    print()
    print(_walk_in_lines("one step of a training of heads", walks["heads_step"]))
    if options.json is not None:
        lines = {name: sum(map(count_lines, files)) for name, files in walks.items()}
        stored = figures | {"walks": walks, "lines_of_walks": lines}
        options.json.write_text(json.dumps(stored, indent=2) + "\n")


if __name__ == "__main__":
    main()
