"""The house stays simple: imports run one way and in no circle, and a step opens few lines.

`docs/reference/structure.md` has the files of each step. `tests/test_reference.py` checks the page.
"""

import ast
import re
from collections import Counter
from collections.abc import Callable
from pathlib import PurePosixPath

import pytest

from decode.base.install_command import install_command
from tools.imports import PACKAGES, ROOT, arrows_up, circles, outward_imports, tracked
from tools.structure import (
    copies_of_a_text,
    count_lines,
    repeated_names,
    walk_of_a_decode_step,
    walk_of_a_distillation_step,
    walk_of_a_heads_step,
)

# `accelerate launch -m train` is a command: it starts the command line's own `train`.
OUTWARD = {
    ("train.__main__", "draftsmith.cli.main"),
}


def test_imports_run_from_the_outer_packages_to_the_inner_ones() -> None:
    assert outward_imports() <= OUTWARD


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles() == []


def test_no_folder_has_a_name_that_tools_take_for_build_output() -> None:
    folders = {part for file in tracked(*PACKAGES) for part in PurePosixPath(file).parent.parts}
    assert not folders & {"target", "parts"}


def test_few_files_have_the_name_of_another_one() -> None:
    assert len(repeated_names()) <= 2


# Each file that drafts node by node has its own subclass of `decode.shapes.Growth`.
OFTEN = {"_Growth"}


def test_no_two_classes_have_one_name() -> None:
    """A reader who searches for a class finds it alone."""
    trees = [ast.parse((ROOT / file).read_text("utf-8")) for file in tracked(*PACKAGES)]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    counts = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert {name for name, count in counts.items() if count > 1} == OFTEN


def test_rooms_of_a_package_use_each_other_one_way() -> None:
    up = {package: arrows_up(package) for package in PACKAGES}
    assert up.pop("decode") <= 2
    assert not any(up.values()), up


@pytest.mark.parametrize(
    ("walk", "most"),
    [
        (walk_of_a_decode_step, 5400),
        (walk_of_a_distillation_step, 2685),
        (walk_of_a_heads_step, 3915),
    ],
)
def test_a_reader_of_a_typical_step_opens_few_lines(
    walk: Callable[[], list[str]], most: int
) -> None:
    assert count_lines(walk()) <= most


@pytest.mark.usefixtures("fresh_accelerate")
def test_a_run_keeps_a_text_once_as_text_and_once_as_tokens() -> None:
    assert copies_of_a_text() == 2


def _opens_text(call: ast.Call) -> bool:
    """Whether a call reads or writes text without an encoding, as far as its own words say it."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    if "encoding" in named:
        return False
    if name in ("run", "Popen", "check_output"):
        return bool(named.keys() & {"text", "universal_newlines"})
    if name in ("read_text", "write_text"):
        return len(call.args) == (name == "write_text")
    if name not in ("open", "fdopen"):
        return False
    values = [x.value for x in [*call.args, *named.values()] if isinstance(x, ast.Constant)]
    # Without a mode only the built-in one is known to open a file.
    without = isinstance(call.func, ast.Name) and len(call.args) == 1 and "mode" not in named
    return without or any(re.fullmatch(r"[rwax][t+]*", str(value)) for value in values)


def test_text_files_and_texts_of_programs_have_an_encoding() -> None:
    """Else it is the system's. The linter sees this only where it knows the type of a path."""
    for file in tracked(*PACKAGES, "benchmarks", "docs", "findings", "tests", "tools"):
        text = (ROOT / file).read_text("utf-8")
        calls = re.search(r"open\(|_text\(|\brun\(|Popen\(|check_output\(", text)
        for node in ast.walk(ast.parse(text)) if calls else ():
            if isinstance(node, ast.Call):
                assert not _opens_text(node), f"{file}:{node.lineno}"


def test_one_function_puts_a_home_into_a_path() -> None:
    """That of pathlib raises RuntimeError for a user that there is not."""
    files = [
        file for file in tracked(*PACKAGES) if "expanduser" in (ROOT / file).read_text("utf-8")
    ]
    assert files == ["decode/base/paths.py"]


def test_no_message_installs_draftsmith_from_an_index() -> None:
    """The name may be another one's there."""
    pages = [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "configs").rglob("*.yaml"),
    ]
    code = [ROOT / file for file in tracked(*PACKAGES, "benchmarks")]
    for file in (*pages, *code):
        # A command in a paragraph may go on in its next line.
        text = re.sub(r"(`[^`\n]+)\n([^`\n]+`)", r"\1 \2", file.read_text(encoding="utf-8"))
        assert not re.search(r"pip install [^\n]*(?<![-/*.\w])draftsmith(?![-\w/])", text), file


def test_an_extra_is_installed_by_its_packages() -> None:
    for extra in ("serve", "structured", "gguf", "plots"):
        command = install_command(extra)
        assert re.fullmatch(r'pip install( "[\w-]+[<>=][^"]*")+', command), command
