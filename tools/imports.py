"""The imports of the product, read from its source: which module uses which, and what is wrong.

Every import counts: those inside functions, and those for types only (`TYPE_CHECKING`). A package
that gathers the modules of its own folder (its `__init__.py` imports them to register them) does
not depend on them.
"""

import ast
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# From the inside to the outside: a package imports only those before it.
PACKAGES = ("decode", "distill", "heads", "train", "draftsmith")


@cache
def tracked(*folders: str) -> tuple[str, ...]:
    """The tracked Python files of these folders, as paths from the root, sorted."""
    command = ["git", "ls-files", "--", *(f"{folder}/*.py" for folder in folders)]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, encoding="utf-8")
    return tuple(sorted(file for file in listed.stdout.splitlines() if (ROOT / file).exists()))


def module_name(file: str) -> str:
    """
    >>> module_name("decode/rules/__init__.py"), module_name("decode/rules/block.py")
    ('decode.rules', 'decode.rules.block')
    """
    return file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


@cache
def imports() -> dict[str, set[str]]:
    """The modules of the product that each of its modules imports."""
    files = {module_name(file): file for file in tracked(*PACKAGES)}
    return {name: set(_imported(name, file, set(files))) for name, file in files.items()}


def _imported(module: str, file: str, known: set[str]) -> Iterator[str]:
    own_folder = f"{module}." if file.endswith("/__init__.py") else "no folder"
    for node in ast.walk(ast.parse((ROOT / file).read_text("utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else node.module for name in full]
        for name in names:
            if name in known and name != module and not name.startswith(own_folder):
                yield name


def outward_imports() -> set[tuple[str, str]]:
    """Imports from an inner package to an outer one, as (module, imported module)."""

    def floor(module: str) -> int:
        return PACKAGES.index(module.partition(".")[0])

    return {
        (module, name)
        for module, names in imports().items()
        for name in names
        if floor(name) > floor(module)
    }


def circles() -> list[frozenset[str]]:
    """Modules that import each other, directly or through others of the same set."""
    return [group for group in _groups(imports()) if len(group) > 1]


def _groups(arrows: Mapping[str, set[str]]) -> list[frozenset[str]]:
    """The strongly connected sets of a graph."""
    reached = {start: _reached(start, arrows) for start in arrows}
    return list(
        dict.fromkeys(
            frozenset(other for other in reached[start] if start in reached[other])
            for start in arrows
        )
    )


def _reached(start: str, arrows: Mapping[str, set[str]]) -> set[str]:
    found, open_ones = {start}, [start]
    while open_ones:
        new = arrows[open_ones.pop()] - found
        found |= new
        open_ones.extend(new)
    return found


def room(module: str, package: str) -> str:
    """The first-level folder of a package that a module lies in; a file that lies in none is its
    own room."""
    name = module.removeprefix(package).lstrip(".").partition(".")[0]
    return name or "__init__"


def rooms(package: str) -> list[str]:
    """The first-level folders of a package that have Python files."""
    paths = (file.split("/") for file in tracked(package))
    return sorted({parts[1] for parts in paths if len(parts) > 2})


def arrows_up(package: str) -> int:
    """How many arrows between rooms lie against the best order of the rooms, in which a room uses
    only those before it. Zero says that no rooms use each other in a circle."""
    modules = {name for name in imports() if name.partition(".")[0] == package}
    arrows: dict[str, set[str]] = {room(name, package): set() for name in modules}
    for name in modules:
        here = room(name, package)
        arrows[here] |= {room(other, package) for other in imports()[name] & modules} - {here}
    return sum(_fewest_up(group, arrows) for group in _groups(arrows))


def _fewest_up(group: frozenset[str], arrows: Mapping[str, set[str]]) -> int:
    """The fewest arrows up in any order of a few rooms: the best order of each subset is the best
    order of all but its last room, and then that room."""
    fewest = {frozenset[str](): 0}
    for size in range(1, len(group) + 1):
        for chosen in map(frozenset, combinations(group, size)):
            fewest[chosen] = min(
                fewest[chosen - {last}] + sum(last in arrows[lower] for lower in chosen - {last})
                for last in chosen
            )
    return fewest[group]
