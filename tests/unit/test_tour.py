"""The tour says what the levels then do, whatever the machine has."""

import shlex
from dataclasses import replace

import pytest

from common import ladder
from common.args import parse_args
from common.data.mnist import MNIST_FILES
from common.ladder import tour
from common.ladder.__main__ import main
from common.machine import fit_to_machine

LAPTOP = tour.Machine(cores=2, gpus=(), data_dir="data", mnist=False)
ONE_GPU = replace(LAPTOP, cores=16, gpus=("H200",), mnist=True)
MACHINES = {
    "two cores": LAPTOP,
    "three GPUs": replace(ONE_GPU, gpus=("RTX A6000",) * 3),
    "eight GPUs": replace(ONE_GPU, gpus=("NVIDIA H100 80GB HBM3",) * 8, data_dir="/a/long/path/" + "to/" * 10),
}


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_the_commands_that_it_shows_are_accepted(machine, monkeypatch):
    greeting = tour.text(machine).splitlines()
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(machine.gpus))
    for level in ladder.levels():
        assert tour.command(level, machine) in greeting
        *_, flags = tour.command(level, machine).partition("train.py")
        if level in ladder.DISTRIBUTED:
            for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
                monkeypatch.setenv(name, str(machine.processes))
            for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
                monkeypatch.setenv(name, "0")
        args = fit_to_machine(parse_args(str(ladder.script(level)), shlex.split(flags)))
        assert args.max_steps == 100
        assert level not in ladder.DISTRIBUTED or args.batch_size % machine.processes == 0


def test_it_finds_this_machine(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("MNIST_ROOT", str(tmp_path))
    assert tour.look().mnist is False
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in MNIST_FILES:
        (raw / name).touch()
    found = tour.look()
    assert found.mnist and found.cores >= 1
    main([])
    assert capsys.readouterr().out == tour.text(found)
