"""A step of a network of somebody else's, at each level: who takes part, what is refused, and what is found."""

import signal
import sys

import pytest
import torch

from benchmarks.your_network import __main__ as program
from benchmarks.your_network import measure
from benchmarks.your_network.errors import StepFailed
from benchmarks.your_network.strategies import settings_for
from common.errors import UserError
from tests.jobs import job
from tests.unit.benchmarks.example_networks import SENTENCES_SPEC


def test_a_device_is_a_gpu_or_an_equal_part_of_the_cores(monkeypatch):
    monkeypatch.setattr(measure, "available_cores", lambda: 8)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert [measure.cores_per_device(devices) for devices in (2, 3)] == [4, 2]
    with pytest.raises(UserError, match="16 devices need more"):
        measure.cores_per_device(16)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert measure.cores_per_device(2) is None
    with pytest.raises(UserError, match="2 GPUs, not 3"):
        measure.cores_per_device(3)


def fail_on(strategy):
    """A `seconds_of_step` that cannot train the network with this strategy."""

    def seconds_of_step(setting, work, steps):
        if setting.strategy == strategy:
            raise StepFailed(f"{setting.name} cannot train: no scores")
        return 0.5

    return seconds_of_step


def test_what_cannot_train_the_network_is_left_out_unless_it_is_one_device(monkeypatch, capsys):
    settings = settings_for(64, [1, 2], ("DataParallel", "DDP"))
    monkeypatch.setattr(measure, "seconds_of_step", fail_on("DataParallel"))
    assert list(measure.try_settings(settings, None)) == [("one device", 1), ("DDP", 2)]
    assert capsys.readouterr().out == "DataParallel, 2 cannot train: no scores\n"
    monkeypatch.setattr(measure, "seconds_of_step", fail_on("one device"))
    with pytest.raises(StepFailed):
        measure.try_settings(settings, None)


@pytest.mark.slow
def test_ctrl_c_ends_in_one_line():
    command = [sys.executable, "-m", "benchmarks.your_network", "measure", SENTENCES_SPEC, "--rounds", "10000"]
    with job(command, CUDA_VISIBLE_DEVICES="") as measuring:
        measuring.wait_for(lambda: "10000 rounds" in measuring.out)
        measuring.processes[0].send_signal(signal.SIGINT)
        assert measuring.end() == [1]
        errors = [line for line in measuring.err.splitlines() if "it/s" not in line and "%|" not in line]
        assert errors == ["interrupted"]


@pytest.mark.slow
def test_all_ways_are_measured_in_turns(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    samples = program.main(["measure", SENTENCES_SPEC, "--batch", "8", "--rounds", "1"])
    printed = capsys.readouterr().out
    assert "1 round of" in printed and "interval: of the median (0%)" in printed
    assert list(samples) == ["one device", "DataParallel, 2", "DDP, 2"]
    for (seconds,) in samples.values():
        assert seconds > 0
    assert max(map(len, printed.splitlines()[2:])) <= 80
