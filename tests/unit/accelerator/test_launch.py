"""`python -m common.accelerator launch`: what is started, real launches of small scripts, refusals in one line."""

import json
import os
import socket
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed.run import parse_args as torchrun_options

from common import ladder
from common.accelerator.commands import launch
from common.accelerator.commands.accelerate_cli import main
from common.accelerator.commands.config.config_args import ClusterConfig, ConfigError
from common.launch import free_port
from tests.jobs import launcher, run_all_to_end, run_to_end

LEVEL = ladder.ROOT / "03_accelerate"

SCRIPTS = Path(__file__).parent / "launched"
NOTE = SCRIPTS / "note_environment.py"


@pytest.fixture(autouse=True)
def no_default_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def launch_command(*arguments) -> list[str]:
    return [sys.executable, "-m", "common.accelerator", "launch", *map(str, arguments)]


def read_notes(folder: Path) -> dict:
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def refusal(capsys, *arguments) -> str:
    try:
        code = main(["launch", *map(str, arguments)])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    assert code == 2 and captured.out == "" and captured.err.count("\n") == 1, captured
    return captured.err


def launched(*flags):
    """The command, without Python, and the environment of the program that a launch makes of this process."""
    error = RuntimeError("this process has been replaced")
    with mock.patch.object(os, "execvpe", side_effect=error) as execute, pytest.raises(RuntimeError, match="replaced"):
        main(["launch", *map(str, flags)])
    _, command, environment = execute.call_args.args
    return command[1:], environment


@pytest.mark.slow
def test_a_world_of_one_is_the_script_itself(tmp_path):
    """Left-over ranks of an outer job are not taken for this one's, and the exit code is the script's."""
    outer = {"WORLD_SIZE": "4", "RANK": "3", "OMP_NUM_THREADS": "1"}
    result = run_to_end(launch_command("--cpu", NOTE, tmp_path), **outer, EXIT_CODE="7")
    assert (result.returncode, result.stdout, result.stderr) == (7, "", "")
    notes = read_notes(tmp_path)
    assert list(notes) == ["alone"]
    assert "WORLD_SIZE" not in notes["alone"] and notes["alone"]["ACCELERATE_USE_CPU"] == "true"


def test_flags_win_over_the_file_and_reach_the_script():
    flags = ["--num_processes", "3", "--mixed-precision", "bf16", "--gradient_accumulation_steps", "4"]
    flags += ["--num_cpu_threads_per_process", "2"]
    command, environment = launched("--config_file", LEVEL / "two_processes.yaml", *flags, __file__, "--lr=1")
    assert command == ["-m", "torch.distributed.run", "--nproc-per-node=3", "--standalone", "--", __file__, "--lr=1"]
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert environment["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "4"
    assert environment["OMP_NUM_THREADS"] == environment["ACCELERATE_CPU_THREADS"] == "2"


def test_modules_and_programs_are_launched_as_the_default_file_says(tmp_path):
    folder = tmp_path / "hf" / "accelerate"
    folder.mkdir(parents=True)
    (folder / "default_config.yaml").write_text("num_processes: 2\nuse_cpu: true\ndistributed_type: MULTI_CPU\n")
    command, _ = launched("-m", "package.tool", "-m")
    assert command[-4:] == ["--module", "--", "package.tool", "-m"] and "--nproc-per-node=2" in command
    assert launched("--no_python", "true")[0][-3:] == ["--no-python", "--", "true"]
    assert launched("--num_processes=1", "-m", "package.tool")[0] == ["-m", "package.tool"]


OF_THE_SCRIPT = ["--log", "x", "--r=16", "--node", "3", "--num_processes", "7", "-m", "-t", "--no-python", "--", "-h"]


@pytest.mark.parametrize("how", [[], ["-m"], ["--no_python"]])
@pytest.mark.parametrize("processes", [1, 2])
def test_flags_behind_the_script_are_the_scripts(how, processes):
    command, _ = launched("--cpu", "--num_processes", processes, *how, __file__, *OF_THE_SCRIPT)
    if processes > 1:
        options = torchrun_options(command[2:])
        assert (options.module, options.no_python) == ("-m" in how, "--no_python" in how)
        command = [options.training_script, *options.training_script_args]
    assert command[-len(OF_THE_SCRIPT) :] == OF_THE_SCRIPT


@pytest.mark.parametrize(
    ("backend", "more"), [("c10d", ["--rdzv-conf=is_host=0,timeout=9"]), ("static", ["--rdzv-conf=timeout=9"])]
)
def test_several_machines_meet_at_the_first(backend, more):
    flags = ["--cpu", "--num_processes=8", "--num_machines=2", "--machine_rank=1", "--main_process_ip=10.0.0.1"]
    flags += ["--main_process_port=29501", f"--rdzv_backend={backend}", "--rdzv_conf=timeout=9"]
    command, _ = launched(*flags, __file__)
    assert command[2:-2] == [
        "--nproc-per-node=4", "--nnodes=2", "--node-rank=1", f"--rdzv-backend={backend}",
        "--rdzv-endpoint=10.0.0.1:29501", *more,
    ]  # fmt: skip


def test_a_port_that_is_asked_for_is_taken_unless_it_is_in_use(capsys):
    port = free_port()
    flags = ["--cpu", "--num_processes", 2, "--main_process_port", port]
    assert f"--rdzv-endpoint=127.0.0.1:{port}" in launched(*flags, __file__)[0]
    with socket.socket() as other:
        other.bind(("", port))
        other.listen()
        assert f"main_process_port {port} is in use on this machine" in refusal(capsys, *flags, __file__)


@pytest.mark.slow
def test_two_jobs_at_once_do_not_collide(tmp_path):
    commands = {}
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        commands[name] = launch_command("--config_file", LEVEL / "two_processes.yaml", NOTE, tmp_path / name)
    results = run_all_to_end(commands)
    assert [result.returncode for result in results.values()] == [0, 0], results
    ports = {read_notes(tmp_path / name)["0"]["MASTER_PORT"] for name in commands}
    assert len(ports) == 2


@pytest.mark.parametrize(
    "fixed", [pytest.param(False, marks=pytest.mark.long), pytest.param(True, marks=pytest.mark.slow)]
)
def test_a_restarted_group_is_not_misled_by_the_first_ones_store(fixed):
    """torchrun's store outlives an attempt; the second one is not misled by it, on a free port and on a fixed one."""
    port = str(free_port() if fixed else 0)
    result = run_to_end(launcher("--main_process_port", port, str(SCRIPTS / "fail_once.py"), restarts=1))
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["sum=4.0", "sum=4.0"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--num_proceses", "2", "x.py"], "unrecognized arguments: --num_proceses"),
        (["--fsdp_version=2", "x.py"], "settings of FSDP need distributed_type FSDP, or --use_fsdp"),
        (["--use_fsdp", "--cpu", __file__], "FSDP of version 1 is out of scope: fsdp_version must be 2"),
        (["--num_processes", "0", "x.py"], "num_processes must be at least 1"),
        (["--gradient_accumulation_steps", "0", "x.py"], "must be a whole number of at least 1, not '0'"),
        (["--module", "--no_python", "x.py"], "--module and --no_python cannot be used together"),
        (["--cpu", "--multi_gpu", "x.py"], "--cpu and --multi_gpu exclude each other"),
        (["--cpu", "nowhere.py"], "no such script: nowhere.py"),
        (["--cpu", "--no_python", "no-such-program"], "cannot execute no-such-program: No such file"),
        (["--config_file", "nowhere.yaml", "x.py"], "No such file or directory: 'nowhere.yaml'"),
    ],
)
def test_refusals_are_one_line(capsys, arguments, message):
    assert message in refusal(capsys, *arguments)


def test_an_open_number_of_processes_must_be_given(tmp_path, capsys):
    path = tmp_path / "slurm.yaml"
    path.write_text("num_processes: -1\ndistributed_type: MULTI_CPU\n")
    assert "pass --num_processes" in refusal(capsys, "--config_file", path, __file__)


def test_more_processes_than_gpus_are_refused_unless_they_may_share(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    launch.check_devices(ClusterConfig("MULTI_GPU", num_processes=2))
    launch.check_devices(ClusterConfig("MULTI_GPU", num_processes=4, num_machines=2))
    launch.check_devices(ClusterConfig(num_processes=3))  # nobody asked for a GPU each: they share
    with pytest.raises(ConfigError, match="needs 3 GPUs on this machine, which has 2 among gpu_ids 0,1"):
        launch.check_devices(ClusterConfig("MULTI_GPU", num_processes=3, gpu_ids="0,1"))
    assert launch.count_processes(ClusterConfig(num_machines=3)) == 6
    assert launch.count_processes(ClusterConfig(use_cpu=True)) == 1
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    file = ["--config_file", LEVEL / "multi_gpu_fp16.yaml"]
    assert "needs 2 GPUs on this machine, which has 0: add --cpu" in refusal(capsys, *file, __file__)
    command, environment = launched(*file, "--cpu", __file__)
    assert "--nproc-per-node=2" in command and environment["ACCELERATE_MIXED_PRECISION"] == "fp16"
