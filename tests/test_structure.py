"""The house stays simple: imports run one way and in no circle, and a step opens few lines.

`docs/reference/structure.md` has the files of each step. `tests/test_reference.py` checks the page.
"""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

import pytest

from decode.base.install_command import install_command
from tests.imports import PACKAGES, ROOT, arrows_up, circles, outward_imports, tracked
from tests.structure import (
    count_lines,
    repeated_names,
    walk_of_a_decode_step,
    walk_of_a_distillation_step,
    walk_of_a_heads_step,
)

# `accelerate launch -m train` is a command: it starts the command line's own `train`.
OUTWARD = {
    ("train.__main__", "draftsmith.cli.train"),
}


def test_imports_run_from_the_outer_packages_to_the_inner_ones() -> None:
    assert outward_imports() <= OUTWARD


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles() == []


def test_no_folder_has_a_name_that_tools_take_for_build_output() -> None:
    folders = {part for file in tracked(*PACKAGES) for part in PurePosixPath(file).parent.parts}
    assert not folders & {"target", "parts"}


def test_few_files_have_the_name_of_another_one() -> None:
    assert len(repeated_names()) <= 8


def test_rooms_of_a_package_use_each_other_one_way() -> None:
    up = {package: arrows_up(package) for package in PACKAGES}
    assert up.pop("decode") <= 2
    assert not any(up.values()), up


@pytest.mark.parametrize(
    ("walk", "most"),
    [
        (walk_of_a_decode_step, 4900),
        (walk_of_a_distillation_step, 2243),
        (walk_of_a_heads_step, 3769),
    ],
)
def test_a_reader_of_a_typical_step_opens_few_lines(
    walk: Callable[[], list[str]], most: int
) -> None:
    assert count_lines(walk()) <= most


def _calls(name: str) -> Iterator[tuple[str, ast.Call]]:
    """The calls of methods of this name in the packages, each with its place."""
    for file in tracked(*PACKAGES):
        for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == name:
                yield f"{file}:{node.lineno}", node


def test_text_files_have_an_encoding() -> None:
    """Else it is the system's. The linter sees this only where it knows the type of a path."""
    for name, arguments in (("read_text", 0), ("write_text", 1)):
        for place, call in _calls(name):
            named = {keyword.arg for keyword in call.keywords}
            assert len(call.args) > arguments or "encoding" in named, place


def test_no_message_installs_draftsmith_from_an_index() -> None:
    """The name may be another one's there."""
    pages = [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "configs").rglob("*.yaml"),
    ]
    code = [ROOT / file for file in tracked(*PACKAGES, "benchmarks")]
    for file in (*pages, *code):
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"pip install [^\n]*(?<![-/*.\w])draftsmith(?![-\w/])", text), file


def test_an_extra_is_installed_by_its_packages() -> None:
    for extra in ("serve", "structured", "gguf", "plots"):
        command = install_command(extra)
        assert re.fullmatch(r'pip install( "[\w-]+[<>=][^"]*")+', command), command
