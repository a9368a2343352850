"""Every test starts in a process that has no Accelerator yet."""

import pytest

from common.accelerator.state import GradientState, PartialState


@pytest.fixture(autouse=True)
def fresh_states():
    yield
    PartialState._reset_state()
    GradientState._reset_state()
