"""Every test starts in a process that has no Accelerator yet."""

import importlib

import pytest

from tests.peers import import_or_skip
from tests.states import OURS, THEIRS, forget_states


@pytest.fixture(autouse=True)
def fresh_states():
    forget_states()
    yield
    forget_states()


@pytest.fixture
def utils_of_both():
    """The `utils` of our library and of the original, each with a state."""
    import_or_skip("accelerate")
    utils = []
    for library in (OURS, THEIRS):
        importlib.import_module(f"{library}.state").PartialState(cpu=True)
        utils.append(importlib.import_module(f"{library}.utils"))
    return utils
