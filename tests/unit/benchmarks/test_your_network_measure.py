"""A step of a network of somebody else's, at each level: who takes part, what is refused, and what is found."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from benchmarks.your_network import __main__ as program
from benchmarks.your_network import measure
from benchmarks.your_network.measure import Row
from common.errors import UserError


@pytest.fixture
def tiny(written):
    return written(
        "def build(): return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))\n"
        "def batch(n): return torch.randn(n, 64), torch.zeros(n, dtype=torch.long)\n"
    )


def test_level_00_has_one_device_and_data_parallel_several():
    rows = measure.rows_of(["02", "01", "00"], [1, 2])
    assert rows == [Row("00", 1), Row("01", 2), Row("02", 1), Row("02", 2)]


@pytest.mark.parametrize("gpus, cores, devices, share", [(0, 8, 2, 4), (0, 8, 3, 2), (4, 8, 2, None)])
def test_a_device_is_a_gpu_or_an_equal_part_of_the_cores(gpus, cores, devices, share, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(measure, "available_cores", lambda: cores)
    assert measure.cores_per_device(devices) == share


@pytest.mark.parametrize("gpus, cores, devices", [(0, 8, 16), (1, 8, 2)])
def test_more_devices_than_there_are_are_refused(gpus, cores, devices, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(measure, "available_cores", lambda: cores)
    with pytest.raises(UserError):
        measure.cores_per_device(devices)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--batch", "3"], "3 samples cannot be divided among 2 devices"),
        (["--level", "01", "--devices", "1"], "level 01 needs more than one device"),
        (["--level", "05"], "invalid choice: '05'"),
    ],
)
def test_what_cannot_be_measured_is_one_line(flags, message, tiny, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(measure, "available_cores", lambda: 2)
    with pytest.raises(SystemExit) as end:
        program.main(["measure", tiny, *flags])
    assert end.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_a_network_that_fails_is_one_line(written, capsys):
    path = written(
        "def build(): return nn.Linear(5, 5)\n"
        "def batch(n): return torch.zeros(n, 4), torch.zeros(n, dtype=torch.long)\n"
    )
    with pytest.raises(UserError):
        program.main(["measure", path, "--batch", "8", "--level", "00", "--devices", "1"])
    (error,) = capsys.readouterr().err.splitlines()
    assert "the forward of mine:build failed: RuntimeError" in error


@pytest.mark.slow
def test_ctrl_c_ends_in_one_line(tiny):
    command = [sys.executable, "-m", "benchmarks.your_network", "measure", tiny, "--batch", "8", "--rounds", "10000"]
    without_gpus = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(command, env=without_gpus, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert "10000 rounds" in process.stdout.readline()
    os.kill(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=240)  # the server of the ranks may still be importing torch
    assert process.returncode == 1
    assert [line for line in error.splitlines() if "it/s" not in line and "%|" not in line] == ["interrupted"]


@pytest.mark.slow
def test_all_levels_are_measured_in_turns(texts_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    kept = tmp_path / "answer.json"
    program.main(["measure", texts_file, "--batch", "8", "--rounds", "1", "--json", str(kept)])
    printed = capsys.readouterr().out
    rows = {row["name"]: row for row in json.loads(kept.read_text())["measure"]}
    assert list(rows) == ["00 raw loop, 1", "01 DataParallel, 2", "02 DDP, 1", "02 DDP, 2"]
    for row in rows.values():
        assert row["seconds"] > 0
    assert max(map(len, printed.splitlines()[2:])) <= 80
