"""What scripts written for Accelerate ask of its state and launchers, answered as it answers."""

import pytest

from common.accelerator import Accelerator, notebook_launcher
from common.accelerator.state import DistributedType, is_initialized


def test_a_script_can_ask_whether_there_is_a_state_before_it_reads_one():
    assert not is_initialized()
    Accelerator(cpu=True)
    assert is_initialized()


def test_a_script_can_compare_with_every_distributed_type_of_accelerate():
    theirs = pytest.importorskip("accelerate").DistributedType
    assert {kind.name: kind.value for kind in theirs} == {kind.name: kind.value for kind in DistributedType}
    assert {str(kind) for kind in theirs} == {str(kind) for kind in DistributedType}


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_a_notebook_may_name_the_meeting_that_its_launcher_uses_anyway(backend, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    runs = []
    notebook_launcher(runs.append, ("ran",), num_processes=1, rdzv_backend=backend)
    assert runs == ["ran"]
