"""What makes hundreds of tiny trainings quick."""

import gc

import pytest
import torch


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    # Several threads only get in each other's way on networks as small as these.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    # Every training begins by freeing memory; going through all objects of a test session takes longer than training.
    monkeypatch.setattr(gc, "collect", lambda *args: 0)
    yield
    torch.set_num_threads(before)
