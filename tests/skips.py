"""What a run of tests says of tests that it did not run.

The end of a run names what was skipped and what the marks left out, with what installs it. In the
gate (`DRAFTSMITH_NO_SKIPS=1`) a skip is a failure, unless its reason is in ALLOWED. This works in
each process of pytest-xdist: a failure is made where the test runs.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

SWITCH = "DRAFTSMITH_NO_SKIPS"

# The skips that the gate allows: a pattern of the reason, and why no installation can help.
ALLOWED = {
    r"this CPU\b": "the test is about instructions that other processors have",
    r"make engine-llama\b": "llama.cpp compiles for 10 minutes and more on two cores",
    r"make engine-openvino\b": "1.6 GB more; run before a release",
    r"make engine-speculators\b": "1.5 GB more; run before a release",
}
# The marks that a command leaves out, with the command that runs them.
LEFT_OUT = {
    "engine": "tests in inference engines: make engine-NAME, then make test-engines",
    "client": "clients that others make: make test-clients",
    "quantised": "targets that torchao quantised: make test-quantised",
    "thorough": "longer tests: make test-thorough",
}
INSTALL = re.compile(r"install it with: (.+)")


def allowed(reason: str) -> bool:
    """Whether the gate lets a test go that was skipped for this reason."""
    return any(re.search(pattern, reason) for pattern in ALLOWED)


def forbid(report: Any) -> None:
    """Make a failure of a skip that is not allowed. An expected failure is no skip."""
    if os.environ.get(SWITCH) != "1" or not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = reason_of(report)
    if not allowed(reason):
        report.outcome = "failed"
        report.longrepr = f"a skip is a failure here ({SWITCH}=1): {reason}"


def reason_of(report: Any) -> str:
    """Why a test was skipped."""
    place = report.longrepr
    text = place[2] if isinstance(place, tuple) else str(place)
    return str(text).removeprefix("Skipped: ").strip()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[Any]:
    report = yield
    forbid(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Iterator[Any]:
    report = yield
    forbid(report)
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """What was not run, and what to do to run it."""
    skipped = Counter(map(reason_of, terminalreporter.stats.get("skipped", [])))
    marks = [mark for mark in LEFT_OUT if f"not {mark}" in (config.option.markexpr or "")]
    if not skipped and not marks:
        return
    terminalreporter.section("not run")
    for reason, count in sorted(skipped.items()):
        found = INSTALL.search(reason)
        says = f"; to run: {found[1]}" if found else f": {reason}"
        terminalreporter.line(f"{count} skipped{says}")
    for mark in marks:
        terminalreporter.line(f"left out: {LEFT_OUT[mark]}")
    if os.environ.get(SWITCH) == "1":
        for pattern, why in ALLOWED.items():
            count = sum(n for reason, n in skipped.items() if re.search(pattern, reason))
            terminalreporter.line(f"allowed: {count} with /{pattern}/: {why}")
