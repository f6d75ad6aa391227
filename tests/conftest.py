"""Fixtures that several test files share."""

import pytest
from accelerate.state import AcceleratorState, GradientState, PartialState


@pytest.fixture
def fresh_accelerate():
    """accelerate keeps its state in the process; the next test begins without."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
