"""Pages of the documentation that name code, and what the site makes of pages."""

import ast
import importlib.util
import json
import re
import runpy
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import draftsmith
from benchmarks.first_steps import PAGE, readme_python, walk
from draftsmith.cli.main import app
from tests.tiny import save_tiny
from tools.notebook import NOTEBOOK, run_notebook
from tools.reference import PAGES
from train.report.drafter_table import COLUMNS, DETAILS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text("utf-8")


def literals(tree: ast.AST) -> Iterator[str]:
    """The text of every string, with `…` where it has a value."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            parts = (v.value if isinstance(v, ast.Constant) else "…" for v in node.values)
            yield "".join(map(str, parts))


@cache
def messages() -> str:
    """All strings of the code, one after the other."""
    names = ("decode", "draftsmith", "heads", "train")
    files = [file for name in names for file in (ROOT / name).rglob("*.py")]
    return "\n".join(
        text for file in files for text in literals(ast.parse(file.read_text("utf-8")))
    )


QUOTED = re.findall(r"^> `(.+)`$", (DOCS / "troubleshooting.md").read_text("utf-8"), re.MULTILINE)


def test_the_page_of_errors_has_many() -> None:
    assert 15 <= len(QUOTED) == len(set(QUOTED))


@pytest.mark.parametrize("quoted", QUOTED)
def test_a_quoted_error_is_one_of_the_code(quoted: str) -> None:
    parts = [part.strip() for part in quoted.split("…")]
    assert max(map(len, parts)) >= 10, "quote enough to find it"
    # A value of the message may be a text of its own, as the problem with a config's key is.
    missing = [part for part in parts if len(part) > 3 and part not in messages()]
    assert not missing


def test_the_drawings_are_those_of_the_script() -> None:
    """And its figures are those that the page states."""
    drawings = runpy.run_path(str(DOCS / "drawings.py"))
    for name, draw in drawings["DRAWINGS"].items():
        assert (DOCS / name).read_text("utf-8") == draw(), "run `python docs/drawings.py`"
    assert round(drawings["tokens_per_step"](0.6, 4), 2) == 2.31
    assert round(drawings["speedup"](0.6, 4, 0.1), 2) == 1.54
    for gamma, cost in ((4, 0.1), (8, 0.02)):
        even = drawings["break_even"](gamma, cost)
        assert drawings["speedup"](even, gamma, cost) == pytest.approx(1)
    crossing = [drawings["speedup"](0.5705, gamma, 0.1) for gamma in (2, 4)]
    assert crossing[0] == pytest.approx(crossing[1], rel=1e-3)


# Commands of the README that benchmarks/first_steps.py does not run, and why.
NOT_WALKED = {
    "make quickstart": "it takes long; the gate trains its config in small, from the wheel",
}


def simple_commands(shell: str) -> set[str]:
    """The commands of a script, without comments, and those joined by && and | apart."""
    lines = re.sub(r"(^|\s)#.*", "", shell.replace("\\\n", " "), flags=re.MULTILINE).splitlines()
    parts = [part for line in lines for part in re.split(r"&&|\|", line)]
    return {" ".join(part.split()) for part in parts} - {""}


def test_the_walk_of_a_new_user_has_the_commands_of_the_readme() -> None:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
    shell = [text for language, text in blocks if not language]
    written = {command for text in shell for command in simple_commands(text)}
    steps = walk(PAGE.read_text("utf-8"), "python3")
    walked = {command for _, line in steps for command in simple_commands(line)}
    assert written - walked == set(NOT_WALKED)


def test_commands_of_the_pages_have_the_options_that_there_are() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    seen = 0
    for page in (ROOT / "README.md", *DOCS.glob("*.md")):
        text = page.read_text("utf-8")
        blocks = re.findall(r"^```\w*\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
        lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
        for name, rest in re.findall(r"(?m)^(?:.*\| )?draftsmith (\w\S*)(.*)", "\n".join(lines)):
            assert name in commands, page
            known = {x for one in commands[name].params for x in (*one.opts, *one.secondary_opts)}
            asked = [x for x in shlex.split(rest, comments=True) if x.startswith("--")]
            assert not [x for x in asked if x.partition("=")[0] not in known], (page, name)
            seen += len(asked)
    assert seen > 150


def test_the_python_of_the_readme_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a tiny model, which is its own drafter."""
    tiny = str(save_tiny(tmp_path / "tiny"))
    code, names = re.subn(r'"embedded:[\w-]+"', repr(tiny), readme_python())
    assert names == 2
    (tmp_path / "first.py").write_text(code, "utf-8")
    runpy.run_path(str(tmp_path / "first.py"))
    assert float(capsys.readouterr().out.split()[-1]) > 1


def test_every_figure_of_a_report_is_explained() -> None:
    page = (DOCS / "concepts.md").read_text("utf-8")
    names = [name for name in (*COLUMNS, *DETAILS) if name not in ("stage", "drafter")]
    missing = [name for name in names if name.partition(",")[0] not in page]
    assert not missing


def test_every_public_name_is_on_the_page_of_python() -> None:
    page = (DOCS / "reference" / "python.md").read_text("utf-8")
    assert set(re.findall(r"^::: draftsmith\.(\w+)$", page, re.MULTILINE)) == set(
        draftsmith.__all__
    )


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml without the tags that mkdocs itself resolves."""


_Loader.add_multi_constructor("!", lambda loader, suffix, node: None)
_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def test_every_page_is_in_the_navigation() -> None:
    def pages(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        entries = entry.values() if isinstance(entry, dict) else entry
        return [page for inner in entries for page in pages(inner)]

    nav = pages(yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), Loader=_Loader)["nav"])
    files = {str(file.relative_to(DOCS)) for file in DOCS.rglob("*.md")}
    # The others are made by the build.
    assert sorted(nav) == sorted(files | {"notebook.md", *PAGES})


def site_hooks() -> Any:
    spec = importlib.util.spec_from_file_location("site_hooks", DOCS / "site_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("source", "text", "expected"),
    [
        (
            "a.md",
            "[c](../configs/quickstart.yaml)",
            "[c](https://x/y/blob/main/configs/quickstart.yaml)",
        ),
        ("reference/a.md", "[c](../../configs/)", "[c](https://x/y/tree/main/configs)"),
        ("reference/a.md", "[p](../papers.md#rules)", "[p](../papers.md#rules)"),
        ("a.md", "```\n[c](../configs)\n```", "```\n[c](../configs)\n```"),
        ("a.md", "![i](step.svg) [b](https://z)", "![i](step.svg) [b](https://z)"),
    ],
)
def test_links_into_the_repository_get_its_address(source: str, text: str, expected: str) -> None:
    hooks = site_hooks()
    assert hooks.with_repository_links(text, source, "https://x/y/") == (expected, [])
    assert "../configs/" not in hooks.with_repository_links(text, source, "")[0]
    assert hooks.with_repository_links("[n](../none.yaml)", "a.md", None) == ("n", ["../none.yaml"])


@pytest.mark.thorough
def test_the_notebook_runs_on_a_tiny_model(tmp_path: Path) -> None:
    save_tiny(tmp_path / "target", "llama")
    notebook = json.loads(NOTEBOOK.read_text("utf-8"))
    outputs = run_notebook(
        notebook,
        tmp_path,
        TARGET=str(tmp_path / "target"),
        PROMPTS=20,
        NEW_TOKENS=6,
        EPOCHS=1,
    )
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    kinds = [[output["output_type"] for output in found] for found in outputs]
    # The stored outputs are of the same kinds: they were written by the same cells.
    assert kinds == [[output["output_type"] for output in cell["outputs"]] for cell in code]
    assert kinds[-1] == ["display_data"]
    assert "eagle1" in "".join(outputs[3][0]["text"])
    page = site_hooks().notebook_page(notebook)
    assert page.startswith("# A first drafter")
    assert all("".join(cell["source"]) in page for cell in code)
    assert page.count("data:image/png;base64,") == 1


def test_an_error_in_the_notebook_is_found(tmp_path: Path) -> None:
    cells = [{"cell_type": "code", "source": [text]} for text in ("a = 1", "assert a == 1")]
    assert run_notebook({"cells": cells}, tmp_path) == [[], []]
    with pytest.raises(AssertionError, match="assert a == 1"):
        run_notebook({"cells": cells}, tmp_path, a=2)
