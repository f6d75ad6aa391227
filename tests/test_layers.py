"""pyproject.toml names what is imported, and the product imports no test, tool or benchmark."""

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

from tools.imports import PACKAGES, ROOT

# A package of configs and prompts, without code.
DATA = "configs"
# Beside the product.
OTHERS = ("benchmarks", "tests", "tools")


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


def test_every_package_is_one_of_the_product_or_beside_it() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    patterns = config["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {pattern.rstrip("*") for pattern in patterns} == {*PACKAGES, DATA}
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == {*PACKAGES, DATA, *OTHERS}


# Run by the Python of an inference engine's own environment, which `make engine-NAME` installs.
CHILDREN = {
    "tools/peers_child.py",
    "tools/speculators_child.py",
    "benchmarks/shared/speculators_child.py",
    "draftsmith/export/engine_kinds/library_server.py",
    "train/engines/states/vllm_connector.py",
}
# Extras that a part of the repository needs beside the dependencies.
EXTRAS = {
    "decode": ["gguf", "structured"],
    "draftsmith": ["gguf", "serve"],
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
    ours = {*PACKAGES, DATA, *sys.stdlib_module_names}
    if file.relative_to(ROOT).parts[0] in OTHERS:
        ours |= {*OTHERS}
    return {distribution(name) for name in names - ours}


@pytest.mark.parametrize("part", [*PACKAGES, *OTHERS])
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
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
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
