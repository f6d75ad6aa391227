"""The gate's rule for skips, in a small run of tests under pytest-xdist and without."""

import pytest

from tools.reference import ROOT

pytest_plugins = ["pytester"]


@pytest.fixture(autouse=True)
def the_plugin_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


TESTS = """
import pytest

def test_one(): pytest.skip("no browser; install it with: apt-get install chromium")
def test_two(): pytest.skip("this CPU has no products in bfloat16")
@pytest.mark.skipif(True, reason="needs a tool")
def test_three(): pass
@pytest.mark.xfail(reason="known")
def test_four(): assert False
@pytest.fixture
def nothing(): pytest.skip("no tool for a fixture")
def test_five(nothing): pass
def test_six(): pass
"""
MODULE = "import pytest\npytest.importorskip('no_such_package_here')"


@pytest.mark.parametrize(("gate", "workers"), [(True, "1"), (False, "0")])
def test_a_skip_in_the_gate_is_a_failure_unless_it_is_allowed(
    gate: bool, workers: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSMITH_NO_SKIPS", "1" if gate else "0")
    pytester.makeini("[pytest]\nmarkers =\n    engine: x\n")
    pytester.makepyfile(TESTS)
    options = ("-p", "tests.skips", "-n", workers, "-m", "not engine", "-p", "no:cacheprovider")
    done = pytester.runpytest_subprocess(*options)
    done.stdout.fnmatch_lines(["left out: tests in inference engines: make engine-NAME*"])
    if gate:
        done.assert_outcomes(failed=1, errors=2, passed=1, skipped=1, xfailed=1)
        done.stdout.fnmatch_lines(["*a skip is a failure here*apt-get install chromium*"])
        done.stdout.fnmatch_lines(["allowed: 1 with *CPU*"])
    else:
        done.assert_outcomes(skipped=4, passed=1, xfailed=1)
        done.stdout.fnmatch_lines(["1 skipped; to run: apt-get install chromium"])


def test_a_module_that_is_skipped_fails_the_gate_too(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSMITH_NO_SKIPS", "1")
    pytester.makepyfile(MODULE)
    done = pytester.runpytest_subprocess("-p", "tests.skips", "-p", "no:cacheprovider")
    assert done.ret != 0
    done.stdout.fnmatch_lines(["*a skip is a failure here*no_such_package_here*"])
