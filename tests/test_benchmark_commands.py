"""Each command of docs/results/benchmarks.md, in its smallest form. A contestant that is installed
and breaks ends a command with an error."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.speculators import missing_library
from tests.export import require_environment
from tests.reference import ROOT
from tests.tiny import save_tiny

PAGE = ROOT / "docs" / "results" / "benchmarks.md"
TINY = ["--target", "TINY", "--dtype", "float32"]
# By command: the options of the shortest run. TINY: a target. DRAFTER: a smaller one.
SMALL = {
    "decode": [*TINY, "--quick", "--drafter", "DRAFTER"],
    "drafters": [*TINY, "--quick", "--minutes", "0"],
    "structured": [*TINY, "--quick", "--prompts", "1", "--drafter", "grammar+ngram"],
    "serve": [*TINY, "--quick", "--clients", "1"],
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
# It needs vLLM: tests/test_serve_8b.py runs it.
IN_AN_ENGINE = {"serve_8b"}


def cited() -> set[str]:
    page = PAGE.read_text(encoding="utf-8").partition("## Answered once")[0]
    return set(re.findall(r"python -m benchmarks\.(\w+)", page))


def test_every_command_of_the_page_is_here() -> None:
    assert cited() == {*SMALL} | IN_AN_ENGINE


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
            assert "#answered-once" in near, f"{page}: {name} has no tag"


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SMALL)
def test_a_command_runs_in_its_smallest_form(name: str, tmp_path: Path) -> None:
    if name in MISSING:
        require_environment(MISSING[name](), "make test-thorough")
    places = {"TINY": tmp_path / "target", "DRAFTER": tmp_path / "drafter"}
    save_tiny(places["TINY"], max_positions=512)
    save_tiny(places["DRAFTER"], layers=1, max_positions=512)
    options = [str(places.get(word, word)) for word in SMALL[name]]
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", *options, "--json", str(file)]
    place = ROOT / "benchmarks" / name
    source = place / "__main__.py" if place.is_dir() else place.with_suffix(".py")
    if "RunsOption" in source.read_text(encoding="utf-8"):
        command += ["--runs", str(tmp_path / "runs")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert json.loads(file.read_text(encoding="utf-8"))
