"""What the documents list is what there is: their tables against the registries."""

import re
from pathlib import Path

from decode.rules import RULES
from draftsmith.export.formats.readers import READERS, up_to
from tests.controls import CONTROLS, enumerated, learning_controls
from tools import reference
from tools.kinds import BEGIN, END

ROOT = Path(__file__).parent.parent
NAME = re.compile(r"`([a-z_]+)`")


def table(page: str, title: str) -> dict[str, list[str]]:
    """Rows of the tables below a heading of a page, by the name in backticks that they begin with;
    their other cells. The heading is the page's title or one of its sections."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    lines = re.split(rf"^##? {title}\n", text, flags=re.MULTILINE)[1].split("\n## ")[0].splitlines()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"
    ]
    return {name[1]: row[1:] for row in rows if (name := NAME.fullmatch(row[0]))}


def test_the_table_of_rules_lists_what_is_registered() -> None:
    assert sorted(table("decoding.md", "Rules")) == sorted(RULES)


def test_the_table_of_rules_says_what_they_judge() -> None:
    for name, (judges, text, _) in table("decoding.md", "Rules").items():
        rule = RULES[name]
        expected = "chains" if not rule.trees else "any tree"
        if rule.trees and not rule.judges(True, "mixed"):
            expected = "chains; trees whose siblings are independent draws from one distribution"
        assert judges == expected, name
        assert ("**lossy**" in text) == (not rule.lossless), name
        assert ("also when greedy" in text) == (not rule.exact_when_greedy), name


def test_the_page_of_papers_names_real_files_and_every_paper_that_is_cited() -> None:
    page = (ROOT / "docs" / "reference" / "papers.md").read_text("utf-8")
    packages = ("decode", "distill", "heads", "train", "draftsmith", "tests")
    files = [path for name in packages for path in (ROOT / name).rglob("*.py")]
    named = set(re.findall(r"`([\w/]+\.py)`", page))
    assert named
    for name in named:
        assert any(path.as_posix().endswith(f"/{name}") for path in files), name
    sources = [path for path in files if path.relative_to(ROOT).parts[0] != "tests"]
    paper = re.compile(r"(?<![\d.])\d{4}\.\d{5}(?!\d)")
    cited = {
        number
        for path in [*sources, *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/results").glob("*.md")]
        for number in paper.findall(path.read_text("utf-8"))
    }
    assert cited <= set(paper.findall(page))


def test_each_row_of_the_page_of_papers_is_complete_and_its_tests_exist() -> None:
    page = (ROOT / "docs" / "reference" / "papers.md").read_text("utf-8")
    tables = re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)
    assert len(tables) > 5
    for header, _, *rows in (table.splitlines() for table in tables):
        assert header == "| method (paper) | file | command or setting | test | what differs |"
        for row in rows:
            cells = row.strip("|").split("|")
            assert len(cells) == header.count("|") - 1, row
            assert all(cell.strip() for cell in cells), row
        assert len({row.split("|")[1] for row in rows}) == len(rows), "a method is there twice"
    for file, name in re.findall(r"`(\w+\.py)::(\w+)`", page):
        assert f"def {name}(" in (ROOT / "tests" / file).read_text("utf-8"), name


def test_the_tables_of_controls_have_all_of_them() -> None:
    section = (
        (ROOT / "docs" / "results" / "lossless.md")
        .read_text("utf-8")
        .split("## Tests that find errors\n")[1]
    )
    rows = [line.split("|")[1].strip() for line in section.splitlines() if line[:2] == "| "]
    named = [control.name for control in (*CONTROLS, *learning_controls())]
    assert [row for row in rows if not row.startswith("error")] == [*named, *enumerated()]


# What must stand in the section of a table of figures, or before the first section.
STATED = {
    "command": re.compile(r"`(?:python -m |draftsmith |make )|^(?:python -m |draftsmith )", re.M),
    "machine": re.compile(r"EPYC|Xeon|do not depend on the machine"),
    "date": re.compile(r"(?:September|October|November|December) 2026|2026-\d\d-\d\d"),
}
NOT_MEASURED = re.compile(r"calculated|cited|claim|not recorded")


def test_every_figure_stands_with_its_command_machine_and_date() -> None:
    missing = []
    for page in (ROOT / "docs" / "results").glob("*.md"):
        opening, *sections = re.split(r"^## ", page.read_text("utf-8"), flags=re.MULTILINE)
        for section in sections or [""]:
            tables = re.findall(r"(?:^\|.*\n)+", section or opening, re.MULTILINE)
            if NOT_MEASURED.search(section) or not re.search(r"\d\.\d", "".join(tables)):
                continue
            missing += [
                f"{page.name}, {section.splitlines()[0] if section else 'all'}: no {what}"
                for what, stated in STATED.items()
                if not stated.search(opening + section)
            ]
    assert not missing


def test_pages_leave_the_last_release_that_reads_a_layout_to_the_table() -> None:
    limits = {up_to(layout, engine) for layout in READERS for engine in READERS[layout]} - {""}
    assert limits
    pages = {ROOT / "docs" / name for name in reference.PAGES}  # there may be old ones
    for page in {ROOT / "README.md", *(ROOT / "docs").rglob("*.md")} - pages:
        if page.name != "readers.md":
            written, _, rest = page.read_text("utf-8").partition(BEGIN)
            said = " ".join((written + rest.partition(END)[2]).split())
            assert not [limit for limit in limits if limit.strip() in said], page


def test_every_finding_says_what_it_shows_and_is_in_the_table() -> None:
    scripts = list((ROOT / "findings").glob("*.sh"))
    page = (ROOT / "findings" / "README.md").read_text("utf-8")
    assert set(re.findall(r"\((\w+\.sh)\)", page)) == {path.name for path in scripts}
    for path in scripts:
        head = path.read_text("utf-8").split("\nset -euo pipefail\n")[0]
        for word in ("Versions", "Behaviour", "Guess", "Seen"):
            assert f"\n# {word}: " in head or f"\n# {word}:\n" in head, (path.name, word)
