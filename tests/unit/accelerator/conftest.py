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
def libraries():
    return [importlib.import_module(OURS), import_or_skip(THEIRS)]


@pytest.fixture
def utils_of_both(libraries):
    for library in libraries:
        library.PartialState(cpu=True)
    return [library.utils for library in libraries]
