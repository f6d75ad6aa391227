"""Imports run one way, train → heads → distill → decode; pyproject.toml names what is imported."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
# Each may import those after it, and itself.
LAYERS = ("train", "heads", "distill", "decode")
# A package of configs and prompts, without code.
DATA = "configs"
# The package of the public names.
NAMES = "draftsmith"


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
    ours = {*LAYERS, "tests", "tools", "benchmarks"}
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
        for line in violations(file.read_text("utf-8"), file.relative_to(ROOT), allowed)
    ]
    assert found == []


def test_every_package_has_its_layer() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    patterns = config["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {pattern.rstrip("*") for pattern in patterns} == {*LAYERS, DATA, NAMES}
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages - {"tests", "tools", "benchmarks", DATA, NAMES} <= set(LAYERS)
    assert packages >= {"train", "distill", "decode"}


@pytest.mark.parametrize(
    "source",
    [
        "import train",
        "import numpy, distill.losses",
        "from train.run.config import Config",
        "def f():\n    from heads import x",
        "if TYPE_CHECKING:\n    import train.run.run as run",
        "from ...train import x",
        "importlib.import_module('distill.teacher.teacher_signal')",
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


# --- what pyproject.toml declares -----------------------------------------------------------------

# Run by the Python of an inference engine's own environment, which `make engine-NAME` installs.
CHILDREN = {
    "tools/peers_child.py",
    "tests/speculators_child.py",
    "benchmarks/shared/grammar_child.py",
    "benchmarks/shared/openvino_decode_child.py",
    "benchmarks/shared/speculators_child.py",
    "draftsmith/export/engines/library_server.py",
    "train/engines/states/vllm_connector.py",
}
# Extras that a part of the repository needs beside the dependencies.
EXTRAS = {
    "decode": ["gguf", "structured"],
    "train": ["deepspeed", "gguf", "plots", "serve"],
    "benchmarks": ["benchmarks", "plots", "serve"],
    "tests": ["deepspeed", "dev", "gguf", "plots", "serve", "tensorboard"],
    "tools": ["dev", "gguf", "serve"],
}


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return found


def declared(*extras: str) -> dict[str, Requirement]:
    """The requirements by canonical name, with those of some extras."""
    lists = [project()["dependencies"], *(project()["optional-dependencies"][e] for e in extras)]
    requirements = [Requirement(line) for lines in lists for line in lines]
    return {canonicalize_name(requirement.name): requirement for requirement in requirements}


installed = cache(packages_distributions)


def distribution(package: str) -> str:
    """Who brings a top-level package; its own name where it is not installed."""
    return canonicalize_name(installed().get(package, [package])[0])


@cache
def third_party(file: Path) -> set[str]:
    """The distributions that a file imports from."""
    names = {
        name
        for _, name in imported(
            ast.parse(file.read_text(encoding="utf-8")), ".".join(file.parent.parts)
        )
    }
    ours = {*LAYERS, DATA, NAMES, "tests", "tools", "benchmarks", *sys.stdlib_module_names}
    return {distribution(name) for name in names - ours}


@pytest.mark.parametrize("part", [*LAYERS, "benchmarks", "tests", "tools"])
def test_what_is_imported_is_declared(part: str) -> None:
    known = {*declared(*EXTRAS.get(part, []))}
    missing = {
        (str(file.relative_to(ROOT)), name)
        for file in sorted((ROOT / part).rglob("*.py"))
        for name in third_party(file) - known
        if str(file.relative_to(ROOT)) not in CHILDREN and file.parent != ROOT / "tests/clients"
    }
    assert missing == set()


def test_what_is_declared_is_used() -> None:
    files = [file for layer in (*LAYERS, NAMES) for file in (ROOT / layer).rglob("*.py")]
    used = {name for file in files for name in third_party(file)}
    assert {*declared()} <= used


def test_lower_bounds_are_those_that_are_tried() -> None:
    """`make test-lowest` installs constraints-lowest.txt; each bound is in it."""
    lines = (ROOT / "constraints-lowest.txt").read_text("utf-8").splitlines()
    pins = {
        canonicalize_name(name): Version(version)
        for name, version in (line.split("==") for line in lines if re.match(r"[\w.-]+==", line))
    }
    extras = ("deepspeed", "gguf", "plots", "serve", "structured", "tensorboard")
    bounds = {
        name: [Version(part.version) for part in requirement.specifier if part.operator == ">="]
        for name, requirement in declared(*extras).items()
    }
    assert all(len(found) == 1 for found in bounds.values())
    assert bounds == {name: [pins[name]] for name in bounds}


def test_the_licence_is_shipped() -> None:
    assert project()["license"] == "Apache-2.0"
    assert project()["license-files"] == ["LICENSE"]
    text = (ROOT / "LICENSE").read_text("utf-8")
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
