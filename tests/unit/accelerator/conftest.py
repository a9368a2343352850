"""Every test starts in a process that has no Accelerator yet."""

import pytest

from common.accelerator.state import AcceleratorState, GradientState


def forget_states() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def fresh_states():
    forget_states()
    yield
    forget_states()
