"""Each command of docs/results/benchmarks.md, in its smallest form. A contestant that is installed
and breaks ends a command with an error."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest

from benchmarks.speculators import missing_library
from tests.export import SHAPE, require_environment
from tests.test_target import write_gguf
from tests.tiny import save_tiny
from tools.reference import ROOT

PAGE = ROOT / "docs" / "results" / "benchmarks.md"
TINY = ["--target", "TINY", "--dtype", "float32"]
# By command: the options of the shortest run. TINY: a target. GGUF: the same as a file, which
# llama.cpp needs. DRAFTER: a smaller one.
SMALL = {
    "decode": [
        *("--target", "GGUF", "--dtype", "float32", "--quick"),
        *("--drafter", "DRAFTER", "--heads", "ngram"),
    ],
    "drafters": [*TINY, "--quick", "--minutes", "0"],
    "structured": [*TINY, "--quick", "--prompts", "1", "--drafter", "grammar+ngram"],
    "serve": [*TINY, "--quick", "--clients", "1", "--others", "none"],
    "data": ["--conversations", "100", "--ranks", "2"],
    "distill": ["--quick"],
    "heads": ["--quick", "--arms", "eagle1", "--minutes", "0.05", "--prompts", "4", "--timed", "1"],
    "speculators": ["--quick", "--length", "16"],
    "mtp": ["--quick"],
    "device": ["--quick"],
    "forecast": [
        *("--quick", "--target", "TINY", "--kind", "medusa"),
        *("--rows", "100", "--draft-vocabulary", "100"),
    ],
    "first_steps": ["--quick"],
}
# What a command compares with. `make test-thorough` installs it.
MISSING = {
    "distill": lambda: None if find_spec("trl") else "TRL is not installed",
    "speculators": missing_library,
}


def cited() -> set[str]:
    page = PAGE.read_text(encoding="utf-8").partition("## Answered once")[0]
    return set(re.findall(r"python -m benchmarks\.(\w+)", page))


def test_every_command_of_the_page_is_here() -> None:
    assert cited() == {*SMALL}


def test_a_page_says_where_a_command_is_that_is_gone() -> None:
    """The page of benchmarks names the commit for each of them."""
    table = PAGE.read_text(encoding="utf-8").partition("## Answered once")[2]
    gone = set(re.findall(r"python -m benchmarks\.([a-z]\w*)", table))
    assert gone.isdisjoint(cited())
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        first: dict[str, int] = {}
        for found in re.finditer(r"python -m benchmarks\.([a-z]\w*)", text):
            first.setdefault(found[1], found.start())
        for name, place in first.items():
            if page == PAGE or name in cited():
                continue
            assert name in gone, f"{page}: {name}"
            near = text[max(0, place - 200) : place + 400]
            assert "#answered-once" in near, f"{page}: {name} has no commit"


Figures = Mapping[str, Any]


@pytest.fixture(scope="module")
def figures_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Figures]:
    """Runs a command in its smallest form, once with the same options, and returns its figures."""

    @cache
    def run(name: str, *more: str) -> Figures:
        place = tmp_path_factory.mktemp(name)
        places = {"TINY": place / "target", "DRAFTER": place / "drafter", "GGUF": place / "t.gguf"}
        save_tiny(places["TINY"], max_positions=512, **SHAPE)
        save_tiny(places["DRAFTER"], layers=1, max_positions=512, **SHAPE)
        write_gguf(places["GGUF"], max_positions=512, **SHAPE)
        options = [str(places.get(word, word)) for word in (*SMALL[name], *more)]
        file = place / "figures.json"
        command = [sys.executable, "-m", f"benchmarks.{name}", *options, "--json", str(file)]
        code = ROOT / "benchmarks" / name
        source = code / "__main__.py" if code.is_dir() else code.with_suffix(".py")
        if "RunsOption" in source.read_text(encoding="utf-8"):
            command += ["--runs", str(place / "runs")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        figures: Figures = json.loads(file.read_text(encoding="utf-8"))
        return figures

    return run


def left_out(figures: Figures) -> dict[str, str]:
    """The contestants that took part in no setting of a command, with the first reason."""
    contests = figures.get("contests", [])
    took_part = {name for contest in contests for name in contest["contestants"]}
    reasons: dict[str, str] = {}
    for one in (figures, *contests):
        reasons = one.get("unable", {}) | reasons
    return {name: why for name, why in reasons.items() if name not in took_part}


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SMALL)
def test_a_command_runs_in_its_smallest_form(name: str, figures_of: Callable[..., Figures]) -> None:
    if name in MISSING:
        require_environment(MISSING[name](), "make test-thorough")
    figures = figures_of(name)
    assert figures
    assert {why for why in left_out(figures).values() if "not installed" not in why} == set()
