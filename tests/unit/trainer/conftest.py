"""Fixtures that make hundreds of tiny trainings quick."""

import gc

import pytest

pytest.register_assert_rewrite("tests.unit.trainer.both")


@pytest.fixture(autouse=True)
def quick(one_thread, monkeypatch):
    # Every training begins by freeing memory; going through all objects of a test session takes longer than training.
    monkeypatch.setattr(gc, "collect", lambda *args: 0)
