"""Fixtures that make hundreds of tiny trainings quick."""

import gc

import pytest

from tests.peers import import_or_skip

pytest.register_assert_rewrite("tests.unit.trainer.both")


@pytest.fixture(autouse=True)
def quick(one_thread, monkeypatch):
    # Every training begins by freeing memory; going through all objects of a test session takes longer than training.
    monkeypatch.setattr(gc, "collect", lambda *args: 0)


@pytest.fixture
def transformers(monkeypatch):
    """The library, which must not look for anything on the network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    library = import_or_skip("transformers")
    library.logging.set_verbosity_error()
    return library
