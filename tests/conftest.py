"""What all test files share."""

import gc
from pathlib import Path

import pytest
import torch

from decode.model.loading import Target
from tests.stages import stage_context
from tests.tiny import tiny_target
from tests.training import begin_anew
from train.base.stage import StageInputs


def pytest_collection_finish() -> None:
    """What was imported stays. Each training ends with a full garbage collection, which need not
    look at half a million objects every time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several workers with several threads each hold each other up, tenfold on two cores. Runs and
    benchmarks would set the number of threads of the process, and so of the tests after them."""
    torch.set_num_threads(1)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws the same numbers in every run, alone and beside others."""
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def target() -> Target:
    """For files that need no target of their own."""
    return tiny_target()


@pytest.fixture
def context(tmp_path: Path, target: Target) -> StageInputs:
    """What a stage of a run with this target is given."""
    return stage_context(tmp_path, target)


@pytest.fixture
def plots() -> None:
    """For tests that look at the plots of a report."""


@pytest.fixture(autouse=True)
def undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other reports have none: to draw them takes longer than to train a tiny model."""
    if "plots" not in request.fixturenames:
        monkeypatch.setattr("train.report.plots.can_plot", lambda: False)


@pytest.fixture
def fresh_accelerate():
    """accelerate keeps its state in the process; the next test begins without."""
    yield
    begin_anew()
