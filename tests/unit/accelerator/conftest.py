"""Every test starts in a process that has no Accelerator yet."""

import pytest

from tests.states import forget_states


@pytest.fixture(autouse=True)
def fresh_states():
    forget_states()
    yield
    forget_states()
