"""`python -m common.accelerator launch`: real launches of small scripts, and every refusal in one line."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from common.accelerator.commands import launch
from common.accelerator.commands.accelerate_cli import main
from common.accelerator.commands.config import ClusterConfig, ConfigError
from common.processes import free_port

ROOT = Path(__file__).parents[3]
LEVEL = ROOT / "03_accelerate"
NO_GPU = pytest.mark.skipif(torch.cuda.device_count() > 0, reason="shows what a machine without GPUs says")

# Each rank writes what it sees; RANK is absent in a world of one.
SHOW = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES",
         "TORCHELASTIC_RESTART_COUNT")
seen = {k: v for k, v in os.environ.items() if k in names or k.startswith("ACCELERATE_")}
with open(f"{sys.argv[1]}/{os.environ.get('RANK', 'alone')}.json", "w") as file:
    json.dump({**seen, "argv": sys.argv[2:], "main": __name__}, file)
"""


@pytest.fixture(autouse=True)
def no_default_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)  # a launch that is refused has already set its variables
    yield
    os.environ.clear()
    os.environ.update(before)


def script(folder: Path, text: str = SHOW) -> str:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def start(*arguments, **kwargs) -> subprocess.Popen:
    command = [sys.executable, "-m", "common.accelerator", "launch", *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=-1, stderr=-1, text=True, start_new_session=True, **kwargs)


def finish(process: subprocess.Popen, timeout: float = 200) -> subprocess.CompletedProcess:
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run(*arguments, **kwargs) -> subprocess.CompletedProcess:
    return finish(start(*arguments, **kwargs))


def seen(folder: Path) -> dict:
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def refused(capsys, *arguments) -> str:
    """The one line on stderr of a launch that must not start."""
    try:
        code = main(["launch", *map(str, arguments)])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    assert code == 2 and captured.out == "" and captured.err.count("\n") == 1, captured
    return captured.err


@pytest.mark.slow
def test_two_processes_from_the_shipped_file(tmp_path):
    result = run("--config_file", LEVEL / "two_processes.yaml", script(tmp_path), tmp_path, "--lr", "1", "--", "-x")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    ranks = seen(tmp_path)
    assert sorted(ranks) == ["0", "1"]
    assert {rank["WORLD_SIZE"] for rank in ranks.values()} == {"2"}
    assert {rank["ACCELERATE_USE_CPU"] for rank in ranks.values()} == {"true"}
    assert {rank["ACCELERATE_MIXED_PRECISION"] for rank in ranks.values()} == {"no"}
    assert {rank["OMP_NUM_THREADS"] for rank in ranks.values()} == {str(max(1, len(os.sched_getaffinity(0)) // 2))}
    assert ranks["1"]["argv"] == ["--lr", "1", "--", "-x"]


@pytest.mark.slow
def test_flags_win_over_the_file_and_reach_the_script(tmp_path):
    flags = ["--num_processes", "3", "--mixed-precision", "bf16", "--gradient_accumulation_steps", "4", "--debug"]
    flags += ["--num_cpu_threads_per_process", "2"]
    result = run("--config_file", LEVEL / "two_processes.yaml", *flags, script(tmp_path), tmp_path)
    assert result.returncode == 0, result.stderr
    ranks = seen(tmp_path)
    assert sorted(ranks) == ["0", "1", "2"]
    for rank in ranks.values():
        assert rank["ACCELERATE_MIXED_PRECISION"] == "bf16"
        assert rank["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "4"
        assert rank["ACCELERATE_DEBUG_MODE"] == "1"
        assert rank["OMP_NUM_THREADS"] == "2"


@pytest.mark.slow
def test_a_world_of_one_is_the_script_itself(tmp_path):
    """Left-over ranks of an outer job are not taken for this one's, and the exit code is the script's."""
    path = script(tmp_path, SHOW + "raise SystemExit(7)")
    outer = {**os.environ, "WORLD_SIZE": "4", "RANK": "3", "OMP_NUM_THREADS": "1"}
    result = run("--cpu", path, tmp_path, env=outer)
    assert (result.returncode, result.stdout, result.stderr) == (7, "", "")
    assert list(seen(tmp_path)) == ["alone"]
    alone = seen(tmp_path)["alone"]
    assert "WORLD_SIZE" not in alone and "TORCHELASTIC_RESTART_COUNT" not in alone
    assert alone["ACCELERATE_USE_CPU"] == "true"


@pytest.mark.slow
def test_a_module_is_launched_as_the_default_file_says(tmp_path):
    folder = tmp_path / "hf" / "accelerate"
    folder.mkdir(parents=True)
    (folder / "default_config.yaml").write_text("num_processes: 2\nuse_cpu: true\ndistributed_type: MULTI_CPU\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "tool.py").write_text(SHOW)
    paths = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert run("-m", "package.tool", tmp_path, "-m", env=paths).returncode == 0
    assert sorted(seen(tmp_path)) == ["0", "1"]
    assert seen(tmp_path)["1"]["argv"] == ["-m"]


@pytest.mark.slow
def test_two_jobs_at_once_do_not_collide(tmp_path):
    jobs = []
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        path = script(tmp_path / name, SHOW + "import time; time.sleep(1)")
        jobs.append(start("--config_file", LEVEL / "two_processes.yaml", path, tmp_path / name))
    results = [finish(job) for job in jobs]
    assert [result.returncode for result in results] == [0, 0, 0], results
    ports = {seen(tmp_path / name)["0"]["MASTER_PORT"] for name in ("a", "b", "c")}
    assert len(ports) == 3


@pytest.mark.slow
def test_a_port_of_ones_own(tmp_path, capsys):
    import socket

    port = free_port()
    flags = ["--cpu", "--num_processes", 2, "--main_process_port", port]
    assert run(*flags, script(tmp_path), tmp_path).returncode == 0
    assert seen(tmp_path)["0"]["MASTER_PORT"] == str(port)
    with socket.socket() as other:
        other.bind(("", port))
        other.listen()
        result = run(*flags, script(tmp_path), tmp_path)
        assert result.returncode == 0, result.stderr
        assert (
            result.stderr == f"launch: main_process_port {port} is already in use: the processes meet at a free one\n"
        )
        assert seen(tmp_path)["0"]["MASTER_PORT"] != str(port)
        flags += ["--num_machines", 2, "--main_process_ip", "127.0.0.1"]
        assert f"main_process_port {port} is in use on this machine" in refused(capsys, *flags, script(tmp_path))


@pytest.mark.parametrize(
    "backend", [pytest.param("static", marks=pytest.mark.long), pytest.param("c10d", marks=pytest.mark.slow)]
)
def test_two_machines_meet(tmp_path, backend):
    port = free_port()
    flags = ["--cpu", "--num_machines", 2, "--num_processes", 4, "--main_process_ip", "127.0.0.1"]
    flags += ["--main_process_port", port, "--rdzv_backend", backend]
    machines = [start(*flags, "--machine_rank", rank, script(tmp_path), tmp_path) for rank in (1, 0)]
    results = [finish(machine) for machine in machines]
    assert [result.returncode for result in results] == [0, 0], results
    assert sorted(seen(tmp_path)) == ["0", "1", "2", "3"]
    assert {rank["WORLD_SIZE"] for rank in seen(tmp_path).values()} == {"4"}


FAILS = """
import os, sys, signal, time
if os.environ["RANK"] == "1":
    {}
time.sleep(300)
"""


@pytest.mark.slow
def test_a_failing_rank_shows_its_own_traceback_and_ends_the_job(tmp_path):
    begun = time.monotonic()
    path = script(tmp_path, FAILS.format("raise ValueError('the reason')"))
    result = finish(start("--cpu", "--num_processes", 2, path), timeout=280)
    assert time.monotonic() - begun < 250
    assert result.returncode == 1
    assert result.stderr.count("ValueError: the reason") == 1
    assert re.search(r"rank +: 1 .*\n +exitcode +: 1 ", result.stderr)


@pytest.mark.slow
def test_a_killed_rank_is_named_with_its_signal(tmp_path):
    path = script(tmp_path, FAILS.format("os.kill(os.getpid(), signal.SIGKILL)"))
    result = run("--cpu", "--num_processes", 2, path)
    assert result.returncode == 1
    assert re.search(r"rank +: 1 .*\n +exitcode +: -9 .*SIGKILL", result.stderr)
    result = run("--quiet", "--cpu", "--num_processes", 2, path)
    assert result.returncode == 1
    assert "SIGKILL" not in result.stderr


@pytest.mark.slow
def test_a_program_that_is_no_script(tmp_path):
    assert run("--cpu", "--no_python", "true").returncode == 0
    result = run("--cpu", "--no_python", "no-such-program")
    assert result.returncode == 2
    assert "cannot execute no-such-program: No such file" in result.stderr


@pytest.mark.slow
def test_record_hands_the_error_on_to_an_outer_launcher(tmp_path):
    path = script(
        tmp_path,
        """
        from torch.distributed.elastic.multiprocessing.errors import record
        @record
        def main():
            raise ValueError("the reason")
        main()
        """,
    )
    outer = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    assert run("--cpu", "--num_processes", 2, path, env=outer).returncode == 1
    assert "the reason" in json.loads((tmp_path / "error.json").read_text())["message"]["message"]


@pytest.mark.slow
def test_restarts(tmp_path):
    """The first attempt dies, the second runs through; also in a world of one."""
    text = SHOW + 'raise SystemExit(int(os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"))'
    assert run("--cpu", "--max_restarts", 2, script(tmp_path, text), tmp_path).returncode == 0
    assert {name: rank["TORCHELASTIC_RESTART_COUNT"] for name, rank in seen(tmp_path).items()} == {"0": "1"}


@pytest.mark.parametrize(
    "fixed", [pytest.param(False, marks=pytest.mark.long), pytest.param(True, marks=pytest.mark.slow)]
)
def test_restarts_of_a_process_group(fixed, tmp_path):
    """torchrun's store outlives an attempt; the second one is not misled by it, on a free port and on a fixed one."""
    text = """
    import os, torch, torch.distributed as dist
    from common.accelerator import PartialState
    state, ones = PartialState(), torch.ones(1)
    dist.all_reduce(ones)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and state.process_index == 1:
        os._exit(1)
    dist.all_reduce(ones)
    os.write(1, f"sum={ones.item()} ".encode())
    state.destroy_process_group()
    """
    flags = ["--cpu", "--num_processes", 2, "--max_restarts", 1]
    port = free_port() if fixed else 0
    paths = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = run(*flags, "--main_process_port", port, script(tmp_path, text), env=paths)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["sum=4.0", "sum=4.0"]


@pytest.mark.slow
def test_sigterm_reaches_the_ranks_and_ends_the_launcher(tmp_path):
    path = script(
        tmp_path,
        """
        import os, pathlib, signal, sys, time
        def leave(number, frame):
            pathlib.Path(sys.argv[1], "left" + os.environ["RANK"]).touch()
            sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
        pathlib.Path(sys.argv[1], "ready" + os.environ["RANK"]).touch()
        time.sleep(300)
        """,
    )
    job = start("--cpu", "--num_processes", 2, path, tmp_path)
    deadline = time.monotonic() + 200
    while len(list(tmp_path.glob("ready*"))) < 2:
        assert job.poll() is None and time.monotonic() < deadline, finish(job, timeout=1)
        time.sleep(0.05)
    job.terminate()
    result = finish(job)
    assert result.returncode == 128 + signal.SIGTERM
    assert len(list(tmp_path.glob("left*"))) == 2
    assert "launch: stopped by SIGTERM" in result.stderr and "Traceback" not in result.stderr


@NO_GPU
def test_without_the_gpus_it_says_so_and_how_to_go_on(tmp_path, capsys):
    message = refused(capsys, "--config_file", LEVEL / "multi_gpu_fp16.yaml", script(tmp_path))
    assert "needs 2 GPUs on this machine, which has 0: add --cpu to run on the CPU" in message


@pytest.mark.slow
def test_the_multi_gpu_file_runs_on_the_cpu_when_told_to(tmp_path):
    result = run("--config_file", LEVEL / "multi_gpu_fp16.yaml", "--cpu", script(tmp_path), tmp_path)
    assert result.returncode == 0, result.stderr
    assert {rank["ACCELERATE_MIXED_PRECISION"] for rank in seen(tmp_path).values()} == {"fp16"}
    assert len(seen(tmp_path)) == 2


@NO_GPU
def test_gpu_ids_need_gpus(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "among gpu_ids 0,1" in refused(capsys, "--num_processes", 2, "--gpu_ids", "0,1", script(tmp_path))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--num_proceses", "2", "x.py"], "unknown argument --num_proceses; did you mean '--num_processes'?"),
        (["--use_deepspeed", "x.py"], "unknown argument --use_deepspeed"),
        (["--fsdp_version=2", "x.py"], "unknown argument --fsdp_version"),
        (["--num_processes", "two", "x.py"], "invalid int value: 'two'"),
        (["--num_processes", "0", "x.py"], "num_processes must be at least 1"),
        (["--mixed_precision", "fp8", "x.py"], "mixed_precision 'fp8' is not supported"),
        (["--gradient_accumulation_steps", "0", "x.py"], "--gradient_accumulation_steps must be at least 1"),
        (["--max_restarts", "-1", "x.py"], "--max_restarts must be at least 0, not -1"),
        (["--module", "--no_python", "x.py"], "--module and --no_python cannot be used together"),
        (["--num_machines", "2", "x.py"], "2 machines need main_process_ip and main_process_port"),
        (["--cpu", "--multi_gpu", "x.py"], "--cpu and --multi_gpu exclude each other"),
        (["--gpu_ids", "a", "x.py"], "--gpu_ids must be 'all' or distinct device numbers"),
        (["--cpu", "nowhere.py"], "no such script: nowhere.py"),
        (
            ["--config_file", "nowhere.yaml", "x.py"],
            "nowhere.yaml: no such file; `python -m common.accelerator config`",
        ),
        ([], "the following arguments are required: training_script"),
    ],
)
def test_refusals_are_one_line(capsys, arguments, message):
    assert message in refused(capsys, *arguments)


def test_an_option_is_listed_in_one_spelling():
    help_text = launch.launch_command_parser().format_help()
    assert help_text.count("--num_machines") == 2 and "--num-machines" not in help_text  # in the usage and in the list


def test_an_open_number_of_processes_must_be_given(tmp_path, capsys):
    path = tmp_path / "slurm.yaml"
    path.write_text("num_processes: -1\ndistributed_type: MULTI_CPU\n")
    assert "pass --num_processes" in refused(capsys, "--config_file", path, script(tmp_path))


def arguments(*flags):
    return launch.launch_command_parser().parse_args([*flags, "x.py"])


def with_settings(config: ClusterConfig, *flags):
    """The flags and, under them, the settings of a file: what a launcher gets."""
    args = arguments(*flags)
    vars(args).update(vars(launch.merge(config, args)))
    return args


def test_zero_on_the_command_line_wins_over_the_file():
    file = ClusterConfig(num_machines=2, machine_rank=1, main_process_ip="h", main_process_port=5, num_processes=2)
    assert launch.merge(file, arguments("--machine_rank", "0")).machine_rank == 0
    with pytest.raises(ConfigError, match="need main_process_ip and main_process_port"):
        launch.merge(file, arguments("--main_process_port", "0"))


def test_more_processes_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    launch.check_devices(ClusterConfig("MULTI_GPU", num_processes=2))
    launch.check_devices(ClusterConfig("MULTI_GPU", num_processes=4, num_machines=2))
    launch.check_devices(ClusterConfig(num_processes=3))  # nobody asked for a GPU each: they share
    with pytest.raises(ConfigError, match=r"needs 3 GPUs .* has 2: .* or --num_processes 2 for fewer"):
        launch.check_devices(ClusterConfig("MULTI_GPU", num_processes=3))
    assert launch.count_processes(ClusterConfig(num_machines=3)) == 6
    assert launch.count_processes(ClusterConfig(use_cpu=True)) == 1


def test_what_torchrun_is_told():
    config = ClusterConfig(
        num_processes=8, num_machines=2, machine_rank=1, main_process_ip="10.0.0.1", main_process_port=29501,
        rdzv_backend="c10d",
    )  # fmt: skip
    told = torchrun_options(config, "--max_restarts", "3", "--rdzv_conf", "timeout=9")
    assert (told.nnodes, told.nproc_per_node, told.max_restarts) == ("2", "4", 3)
    assert (told.rdzv_backend, told.rdzv_endpoint) == ("c10d", "10.0.0.1:29501")
    assert told.rdzv_conf == "is_host=0,timeout=9"
    told = torchrun_options(dataclasses.replace(config, rdzv_backend="static"))
    assert (told.rdzv_backend, told.node_rank, told.rdzv_conf) == ("static", 1, "")


def torchrun_options(config: ClusterConfig, *flags):
    """What torchrun itself is asked to do."""
    from torch.distributed import run

    asked = mock.Mock()
    with mock.patch.object(run, "run", asked):
        launch.multi_gpu_launcher(with_settings(config, *flags))
    return asked.call_args.args[0]


def test_torchruns_own_flags_reach_torchrun(tmp_path):
    flags = ["--tee", "3", "--log_dir", str(tmp_path), "--role", "trainer", "--monitor_interval", "0.5"]
    told = torchrun_options(ClusterConfig(num_processes=2, use_cpu=True), *flags)
    assert (told.tee, told.log_dir, told.role, told.monitor_interval) == ("3", str(tmp_path), "trainer", 0.5)
    assert told.standalone and told.training_script == "x.py"


def test_without_a_flag_torchrun_does_as_it_does_by_itself():
    from torch.distributed import run

    by_itself = vars(run.parse_args(["--standalone", "--nnodes=1", "--nproc-per-node=2", "x.py"]))
    told = vars(torchrun_options(ClusterConfig(num_processes=2, use_cpu=True)))
    assert told == by_itself
