"""Imports run one way: train → heads → distill → decode."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Each may import those after it, and itself.
LAYERS = ("train", "heads", "distill", "decode")


def imported(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """(line, top-level package) of all imports, inside functions and type checks too.

    package: what a relative import starts from, 'decode.rules' for decode/rules/exact.py.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            full = [*(above if node.level else []), *(node.module or "").split(".")]
            yield node.lineno, full[0]
        elif isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            first = node.args[0]
            if name in ("import_module", "__import__") and isinstance(first, ast.Constant):
                yield node.lineno, str(first.value).split(".")[0]


def violations(source: str, path: Path, allowed: set[str]) -> list[str]:
    package = ".".join(path.parent.parts)
    ours = {*LAYERS, "tests", "benchmarks"}
    return [
        f"{path}:{line} imports {name}"
        for line, name in imported(ast.parse(source), package)
        if name in ours - allowed
    ]


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_run_one_way(layer: str) -> None:
    files = sorted((ROOT / layer).rglob("*.py"))
    allowed = set(LAYERS[LAYERS.index(layer) :])
    found = [
        line
        for file in files
        for line in violations(file.read_text(), file.relative_to(ROOT), allowed)
    ]
    assert found == []


def test_every_package_has_its_layer() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {pattern.rstrip("*") for pattern in patterns} <= set(LAYERS)
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages - {"tests", "benchmarks"} <= set(LAYERS)
    assert packages >= {"train", "distill", "decode"}


@pytest.mark.parametrize(
    "source",
    [
        "import train",
        "import numpy, distill.losses",
        "from train.config import Config",
        "def f():\n    from heads import x",
        "if TYPE_CHECKING:\n    import train.run as run",
        "from ...train import x",
        "importlib.import_module('distill.output')",
        "from tests.tiny import tiny_model",
    ],
)
def test_a_wrong_import_is_found(source: str) -> None:
    assert len(violations(source, Path("decode/rules/new.py"), {"decode"})) == 1


@pytest.mark.parametrize(
    "source", ["import decode", "from . import x", "from ..kv import y", "import training"]
)
def test_a_right_import_is_not(source: str) -> None:
    assert violations(source, Path("decode/rules/new.py"), {"decode"}) == []
