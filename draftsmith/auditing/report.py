"""The report of an audit: a table for the terminal, JSON, a page, and JUnit's XML for CI."""

import json
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from decode.base.artifact import write_file
from draftsmith.auditing.findings import Audit, Finding, Judgement

if TYPE_CHECKING:
    from rich.table import Table

_SAID = {
    Judgement.EQUAL: "equal: nothing was found that chance or rounding does not explain",
    Judgement.WRONG: "wrong: the server's text is not the target's",
    Judgement.UNJUDGED: "not judged: a question could not be answered",
}
_COLOURS = {Judgement.EQUAL: "green", Judgement.WRONG: "red", Judgement.UNJUDGED: "yellow"}


def headline(found: Audit) -> str:
    """The verdict in a sentence, with what it rests on."""
    rests = [x for x in found.findings if x.verdict is found.verdict]
    if found.verdict is Judgement.EQUAL or not rests:
        return _SAID[found.verdict]
    return f"{_SAID[found.verdict]} ({', '.join(f'{x.group} {x.name}' for x in rests)})"


def terminal_table(found: Audit) -> "Table":
    """The findings, a row each."""
    from rich.table import Table
    from rich.text import Text

    title = f"{found.subject['url']} beside {found.subject['target']}"
    table = Table(title=Text(title), show_lines=True)
    for name in ("", "verdict", "p", "found", "would have seen"):
        table.add_column(name)
    for finding in found.findings:
        verdict = Text(str(finding.verdict), style=_COLOURS[finding.verdict])
        name, p = f"{finding.group}: {finding.name}", written_p(finding)
        # Text, because a string is read as markup.
        row = (Text(name), verdict, Text(p), Text(finding.detail), Text(finding.sees))
        table.add_row(*row)
    return table


def written_p(finding: Finding) -> str:
    """The p-value for people; empty for what is no test."""
    if finding.p is None:
        return ""
    return f"{finding.p:.2g}" if finding.p >= 1e-12 else "< 1e-12"


def write_json(found: Audit, path: Path) -> None:
    write_file(path, json.dumps(found.to_dict(), indent=2))


def write_page(found: Audit, path: Path) -> None:
    """One self-contained page, which loads nothing from elsewhere."""
    from train.report.report_files import template

    page = template("audit.html.j2", Path(__file__).parent)
    rows = [(finding, written_p(finding)) for finding in found.findings]
    said = {"found": found, "headline": headline(found), "rows": rows}
    # Without plots there are no colours of plots.
    write_file(path, page.render(said, light="", dark=""))


def write_junit(found: Audit, path: Path) -> None:
    """Each finding as a test case: wrong ones are failures, those not judged are skipped."""
    count = dict.fromkeys(Judgement, 0)
    suite = ElementTree.Element("testsuite", name="draftsmith audit")
    for finding in found.findings:
        count[finding.verdict] += 1
        case = ElementTree.SubElement(suite, "testcase", classname=finding.group, name=finding.name)
        if finding.verdict is Judgement.WRONG:
            ElementTree.SubElement(case, "failure", message=finding.detail)
        elif finding.verdict is Judgement.UNJUDGED:
            ElementTree.SubElement(case, "skipped", message=finding.detail)
        else:
            ElementTree.SubElement(case, "system-out").text = finding.detail
    suite.set("tests", str(len(found.findings)))
    suite.set("failures", str(count[Judgement.WRONG]))
    suite.set("skipped", str(count[Judgement.UNJUDGED]))
    suite.set("time", str(found.subject["seconds"]))
    write_file(path, ElementTree.tostring(suite, encoding="unicode", xml_declaration=True))
