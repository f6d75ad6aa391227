"""README is short and true, and no link of any page is dead, anchors included."""

import json
import posixpath
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tools import reference
from tools.imports import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")
FOLDERS = ("docs", "findings", "configs")
# The site's build makes these, so others may link to them.
MADE = {f"docs/{name}": make for name, make in reference.PAGES.items()}
FOUND = {
    path.relative_to(ROOT).as_posix()
    for folder in FOLDERS
    for kind in ("*.md", "*.ipynb")
    for path in (ROOT / folder).rglob(kind)
}
# Of the manual; it had 4,320.
LINES = 3200
PAGES = sorted({*FOUND, "README.md", "CONTRIBUTING.md"} - {*MADE})


def test_readme_is_read_in_five_minutes() -> None:
    assert len(README.split()) <= 1000
    assert len(LINK.findall(README)) <= 25


@cache
def results() -> str:
    return "\n".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "results").glob("*.md")
    )


def test_figures_of_readme_are_those_of_the_results() -> None:
    """Those with a unit or a sign; sizes of models and versions are no figures."""
    figures = set(re.findall(r"\d+\.\d+×|\d+ min \d+ s|0\.\d{3}|\b\d{2,3}\.\d\b", README))
    assert len(figures) >= 8
    assert not {figure for figure in figures if figure not in results()}


def test_speeds_of_the_manual_are_those_of_the_results() -> None:
    """But for formulas, and where they are a bound or an example of what is printed."""
    written = {"1.54×", "1.00×", "1.60×", "59.8 tokens/s"}
    for path in (ROOT / "docs").glob("*.md"):
        text = path.read_text(encoding="utf-8")
        figures = set(re.findall(r"\d+\.\d+×|\d+ min \d+ s|[\d.]+ tokens/s\b", text))
        assert not {x for x in figures - written if x not in results()}, path.name


def test_the_manual_does_not_grow() -> None:
    """Its pages without those that are generated, the reference and the results. What is said twice
    is linked, and what was tried belongs to the results."""
    pages = [path for path in (ROOT / "docs").glob("*.md") if f"docs/{path.name}" not in MADE]
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in pages) <= LINES


@cache
def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as code hosts make them."""
    text = MADE[page]() if page in MADE else (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    found: dict[str, int] = {}
    made = set(re.findall(r'id="([^"]+)"', text))
    for heading in re.findall(r"^#{1,6} (.+)$", text, re.MULTILINE):
        words = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", words.strip().lower()).replace(" ", "-")
        count = found[slug] = found.get(slug, -1) + 1
        made.add(f"{slug}-{count}" if count else slug)
    return made


def dead_links(page: str) -> Iterator[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    if page.endswith(".ipynb"):
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(x["source"]) for x in cells if x["cell_type"] == "markdown")
    # Links may have code in their words.
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    for target in [*LINK.findall(text), *PICTURE.findall(text)]:
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
        if not (file in MADE or (ROOT / file).exists()) or (
            anchor and file.endswith(".md") and anchor not in anchors(file)
        ):
            yield target


@pytest.mark.parametrize("page", PAGES)
def test_no_link_is_dead(page: str) -> None:
    assert not list(dead_links(page))


def test_a_dead_link_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.md").write_text(
        "# One `b`: two\n[x](#one-b-two) [y](#one) [z](b.md) [w](https://x)", "utf-8"
    )
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert list(dead_links("a.md")) == ["#one", "b.md"]
