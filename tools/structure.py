"""The structure of the product: its figures beside their aims, and the files of three steps.

    python -m tools.structure

prints the table. `docs/reference/structure.md` has the map of the folders and the three walks.
"""

import ast
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path, PurePosixPath
from types import FrameType
from typing import Any
from unittest.mock import patch

from decode.drafters.small_lm import SmallLMDrafter
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder, Decoding
from decode.model.forward import few_rows
from tests.imports import PACKAGES, ROOT, arrows_up, circles, outward_imports, rooms, tracked
from tests.service import chat, serving, streamed, target
from tests.stages import DRAFTER, make_stage, run_stage, stage_context
from tests.tiny import tiny_llama, tiny_target
from tests.training import Lines
from tools.markdown import table


def count_lines(files: list[str] | tuple[str, ...]) -> int:
    """All lines of some files of the repository."""
    return sum(len((ROOT / file).read_text("utf-8").splitlines()) for file in files)


def repeated_names() -> list[str]:
    """Base names of files that occur more than once in the product, without `__init__` and
    `__main__`."""
    names = Counter(PurePosixPath(file).stem for file in tracked(*PACKAGES))
    return sorted(name for name, n in names.items() if n > 1 and not name.startswith("__"))


class _Walk:
    """Collects the files that are executed between `start` and `stop`, in the order of first
    entry."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self._known = {str(ROOT / file): file for file in tracked(*PACKAGES)}

    def start(self) -> None:
        sys.setprofile(self._event)

    def stop(self) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, argument: object) -> None:
        # Each file is looked up once; all later events in it are dropped here.
        file = self._known.pop(frame.f_code.co_filename, None)
        if file is not None:
            self.files.append(file)


@cache
def walk_of_a_decode_step() -> list[str]:
    """The files of one sampled step of a chain drafted by a small LM: drafting, verification and
    commit. It is the second step of its text, so nothing is prepared in it. Layers in C++ depend on
    the machine, so they are left out."""
    with patch.object(few_rows, "library", lambda _: None):
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


@cache
def walk_of_a_distillation_step() -> list[str]:
    """The files of one step of a `distill` stage with its defaults: batch, signal of the live
    target, loss, backward and optimizer step."""
    return _walk_of_a_training_step("distill", 2, DRAFTER)


@cache
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


WALKS: dict[str, Callable[[], list[str]]] = {
    "one sampled step of a chain of a small LM, without the layers in C++": walk_of_a_decode_step,
    "one step of a distillation": walk_of_a_distillation_step,
    "one step of a training of EAGLE-3": walk_of_a_heads_step,
}


def chat_of_six_tokens() -> tuple[int, int]:
    """The files that one streamed chat with a served target enters, in all threads, and how often a
    call of the product's is followed by one in another file. It is the third chat of its server."""
    known = {str(ROOT / file): file for file in tracked(*PACKAGES)}
    entered: dict[int, list[str]] = {}
    counting = False

    def event(frame: FrameType, kind: str, argument: object) -> None:
        file = known.get(frame.f_code.co_filename) if counting and kind == "call" else None
        if file is not None:
            entered.setdefault(threading.get_ident(), []).append(file)

    threading.setprofile(event)  # of the threads that start from here on
    try:
        with serving(target()) as running, running.client() as client:
            for number in range(3):
                counting = number == 2
                asked = chat("What does it say?", max_tokens=6, ignore_eos=True, temperature=0)
                streamed(client, asked)
            counting = False
    finally:
        threading.setprofile(None)
    threads = entered.values()
    changes = sum(one != other for files in threads for one, other in pairwise(files))
    return len(set().union(*threads)), changes


def purpose(file: str) -> str:
    """What a file is for: the first sentence of its docstring, or the docstring's first paragraph
    if that has no end of a sentence."""
    text = ast.get_docstring(ast.parse((ROOT / file).read_text("utf-8"))) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    sentence, end, _ = paragraph.partition(". ")
    return (sentence + end).strip()


def structure_reference() -> str:
    """The page: a table of the files of every folder, and the walks."""
    lines = [
        "# Where things are",
        "",
        "Generated by `python -m tools.reference --pages` from the files' docstrings and from a",
        "trace of three steps. Imports run one way: "
        + " → ".join(f"`{package}`" for package in reversed(PACKAGES))
        + ".",
    ]
    for title, walk in WALKS.items():
        files = walk()
        rows = [[str(number), f"`{file}`", purpose(file)] for number, file in enumerate(files, 1)]
        hundreds = round(count_lines(files), -2)
        lines += ["", f"## Walk: {title}", ""]
        lines += [
            f"{len(files)} files of about {hundreds:,} lines, in the order of first entry.",
            "",
        ]
        lines += table(["", "file", "purpose"], rows)
    folders: dict[str, list[str]] = {}
    for package in PACKAGES:
        for file in tracked(package):
            folders.setdefault(str(PurePosixPath(file).parent), []).append(file)
    for folder, files in folders.items():
        lines += ["", f"## {folder}", ""]
        rows = []
        for file in files:
            if file.endswith("/__init__.py"):
                lines += [purpose(file), ""]
            else:
                rows.append([f"`{PurePosixPath(file).name}`", purpose(file)])
        lines += table(["file", "purpose"], rows) if rows else []
    return "\n".join(lines).rstrip() + "\n"


def figures() -> list[list[str]]:
    """The table's rows: what is counted, its value, and the aim."""
    product = [
        [f"lines of {package}/", f"{count_lines(tracked(package)):,}", ""] for package in PACKAGES
    ]
    aims = ("≤ 3,600", "", "≤ 3,000")
    opened = [
        [f"lines opened for {title}", f"{count_lines(walk()):,}", aim]
        for (title, walk), aim in zip(WALKS.items(), aims, strict=True)
    ]
    up = {"decode": "≤ 2", "train": "0", "draftsmith": "0", "heads": "0", "distill": "0"}
    arrows = [
        [f"arrows up between rooms of {package}/", str(arrows_up(package)), up[package]]
        for package in PACKAGES
    ]
    files, changes = chat_of_six_tokens()
    return [
        ["lines of the product", f"{count_lines(tracked(*PACKAGES)):,}", "≤ 69,000"],
        *product,
        ["lines of tests/", f"{count_lines(tracked('tests')):,}", "≤ 44,000"],
        ["lines of benchmarks/", f"{count_lines(tracked('benchmarks')):,}", "≤ 6,500"],
        *opened,
        ["files of a chat of six tokens", str(files), "≤ 35"],
        ["changes of file in it", f"about {round(changes, -1):,}", "≤ 500"],
        ["rooms of train/", str(len(rooms("train"))), "≤ 10"],
        *arrows,
        ["imports from an inner package to an outer one", str(len(outward_imports())), "1"],
        ["circles between modules", str(len(circles())), "0"],
        ["base names used twice", str(len(repeated_names())), "≤ 8"],
    ]


if __name__ == "__main__":
    print("\n".join(table(["figure", "now", "aim"], figures())))
    print(f"\nused twice: {', '.join(repeated_names())}")
