"""What all test files share."""

import gc
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.model.loading import Target
from tests.stages import stage_context
from tests.tiny import VOCAB, tiny_target
from tests.training import begin_anew
from train.base.stage import StageInputs

pytest_plugins = ["tests.skips"]

# No test cuts the power, and waiting for a disk that others use too takes long.
os.fsync = lambda fd: None


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


@pytest.fixture(scope="session")
def seven(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A target that vLLM can run too, of the fewest layers in which EAGLE-3 has three to read."""
    from tests.export import save_target

    return save_target(tmp_path_factory.mktemp("seven") / "target", layers=7)


@pytest.fixture(scope="session")
def spare(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """As `seven`, with ids that are no tokens, for masks."""
    from tests.export import save_target

    return save_target(tmp_path_factory.mktemp("spare") / "target", layers=7, vocab=VOCAB + 4)


@pytest.fixture(scope="session")
def endless() -> Target:
    """A target whose texts go on to their limit."""
    return replace(tiny_target(max_positions=512), eos_token_ids=())


@pytest.fixture(scope="module")
def service() -> Iterator[Any]:
    """A service over a tiny model."""
    from tests.service import serving, target  # takes a second to import

    with serving(target()) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from tests.browser import open_browser

    with open_browser() as opened:
        yield opened


@pytest.fixture
def context(tmp_path: Path, target: Target) -> StageInputs:
    """What a stage of a run with this target is given."""
    return stage_context(tmp_path, target)


@pytest.fixture
def data_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The library `datasets` with a cache of the test's own, without network and progress bars."""
    import datasets  # takes a second to import

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    return datasets


@pytest.fixture
def plots() -> None:
    """For tests that look at the plots of a report."""


@pytest.fixture(autouse=True)
def undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other reports have none: to draw them takes longer than to train a tiny model."""
    if "plots" not in request.fixturenames:
        monkeypatch.setattr("train.report.plots.can_plot", lambda: False)


@pytest.fixture
def unjudged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run trains, and neither measures its drafters nor makes a report."""
    for name in ("baselines", "drafter", "combined"):
        monkeypatch.setattr(f"train.run.run.RunEvaluation.{name}", lambda *arguments: None)
    monkeypatch.setattr("train.run.run.make_report", lambda directory: {})


@pytest.fixture
def fresh_accelerate():
    """accelerate keeps its state in the process; the next test begins without."""
    yield
    begin_anew()
