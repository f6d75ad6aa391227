"""Generated files under git are current, and the pages of the site can be made."""

import re
from pathlib import Path

import pytest

from tools.pairings import ELSEWHERE, UNPAIRED, unpaired
from tools.reference import FILES, PAGES, ROOT, cli_reference
from train.run.config import RunConfig
from train.settings.schema import json_schema


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_generated_file_is_current(file: Path) -> None:
    assert file.read_text(encoding="utf-8") == FILES[file](), (
        "run `python -m tools.reference --write`"
    )


@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_the_reference_is_made(name: str) -> None:
    """No table in it is empty."""
    page = PAGES[name]()
    assert page.startswith("# ")
    tables = re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)
    assert tables
    assert all(len(table.splitlines()) > 2 for table in tables)


def test_every_drafter_shape_and_lossless_rule_is_in_a_joint_test_or_has_a_reason() -> None:
    drafters, shapes, rules = unpaired()
    assert set(drafters) == set(UNPAIRED)
    assert not shapes
    assert not rules
    for test in ELSEWHERE:
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / "tests" / file).read_text("utf-8"), test


# Commands without `--json`, and why.
WITHOUT_JSON = {
    "quickstart": "writes report.json into its run",
    "train": "writes report.json into its run",
    "init": "prints a config",
    "watch": "shows the files of a run",
    "serve": "has its figures at /metrics",
    "verify-server": "its edges have the figures",
    "record": "counts nothing",
    "audit-models": "writes models",
    "merge": "writes a drafter",
}


def test_every_command_that_prints_figures_writes_them_as_json() -> None:
    sections = re.split(r"^## draftsmith ", cli_reference(), flags=re.MULTILINE)[1:]
    without = {text.split("\n")[0] for text in sections if "| `--json` |" not in text}
    # Those that write a report have the option for their plan.
    assert without | {"quickstart", "train"} == set(WITHOUT_JSON)


def test_every_setting_is_described() -> None:
    schema = json_schema(RunConfig)
    for name, part in [("", schema), *schema["$defs"].items()]:
        for key, field in part["properties"].items():
            assert "description" in field or "const" in field or "$ref" in field, f"{name}.{key}"
