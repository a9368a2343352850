"""Flags: defaults, and every wrong one answered by a single line."""

import shlex
from datetime import timedelta

import pytest
import torch

from common import ladder
from common.accelerator.state import AcceleratorState
from common.args import parse_args
from common.checkpoints.schedule import CheckpointInterval
from common.errors import UserError
from common.launch import rank_variables
from common.levels import ONE_PROCESS
from common.settings import fit_to_machine
from common.start import prepare_process
from tests.levels import FULL, SHORT

pytestmark = pytest.mark.usefixtures("one_thread")  # The start of a run changes the number.

DEFAULTS = {
    "epochs": 1,
    "batch_size": 64,
    "lr": 1e-3,
    "seed": 42,
    "dataset": "auto",
    "data_dir": "data",
    "data": "host",
    "device": "auto",
    "num_workers": 0,
    "max_steps": None,
    "train_samples": None,
    "eval_samples": None,
    "no_dropout": False,
    "warm_up_steps": 10,
    "dtype": torch.float32,
    "allocator": "keep",
    "cores_per_device": None,
    "replicas": None,  # as many as there are GPUs
    "timeout": None,
    "tensor": 1,
    "mixed_precision": "no",
    "gradient_accumulation_steps": 1,
    "checkpoint_dir": None,
    "checkpoint_every": None,
    "save": None,
    "json": None,
}


@pytest.fixture
def torchrun(monkeypatch):
    """`torchrun(processes, rank)` gives this process the environment of a rank."""

    def start(processes: int = 2, rank: int = 0) -> None:
        for name, value in rank_variables(rank, processes, port=1).items():
            monkeypatch.setenv(name, value)

    return start


@pytest.fixture
def gpus(monkeypatch):
    """`gpus(n)`: the driver says that there are n. Whoever asks the CUDA runtime, and so starts it, fails.

    Once started it cannot be used in forked processes, as a notebook's are.
    """
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)

    def runtime():
        raise AssertionError("the CUDA runtime has been asked")

    def pretend(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
        monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: count)
        monkeypatch.setattr(torch.cuda, "_cached_device_count", None)
        monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", runtime, raising=False)

    return pretend


def parse(command: str):
    """The flags of a command such as "00_single_gpu --epochs 2"."""
    script, *argv = shlex.split(command)
    path = script if "/" in script else f"{script}/train"
    return parse_args(f"/anywhere/{path}.py", argv)


def fit(command: str):
    return fit_to_machine(parse(command))


def start(command: str):
    return prepare_process(parse(f"{command} --allocator system"))  # This process keeps its own allocator.


def refusal(step, command: str) -> str:
    with pytest.raises(UserError) as caught:
        step(command)
    return str(caught.value)


@pytest.mark.parametrize("level", ladder.SCRIPTS)
def test_defaults_are_the_contract(level, monkeypatch):
    monkeypatch.delenv("MNIST_ROOT", raising=False)
    expected = DEFAULTS | {"level": ladder.level_of(level), "script": level}
    if level not in ONE_PROCESS:
        expected["timeout"] = timedelta(seconds=300)
    if level == ladder.MESH:
        expected["tensor"] = 2
    if level in ladder.WITH_CHECKPOINTS:
        expected["checkpoint_every"] = CheckpointInterval(steps=100)
        expected |= {"mixed_precision": None, "gradient_accumulation_steps": None}  # the launcher's, or no and 1
    assert vars(parse(level)) == expected


def test_mnist_root_is_where_the_data_are_by_default(monkeypatch):
    monkeypatch.setenv("MNIST_ROOT", "/elsewhere")
    assert parse(FULL).data_dir == "/elsewhere"
    assert parse(f"{FULL} --data-dir here").data_dir == "here"


WRONG_VALUES = {
    "00_single_gpu --epochs 0": "argument --epochs: must be a whole number of at least 1, not '0'",
    "00_single_gpu --seed -1": "argument --seed: must be a whole number from 0 to 4000000000, not '-1'",
    "00_single_gpu --save /no/such/folder/w.pt": "argument --save: '/no/such/folder/w.pt' cannot be written: "
    "it must be a file in a folder that exists",
    "00_single_gpu --batch 64": "unknown argument --batch; 00_single_gpu/train.py --help lists the flags",
    "00_single_gpu --data device --num-workers 1": "argument --data: on the device there is nothing for "
    "loader workers to do; leave --num-workers out",
    "00_single_gpu --device mps": "argument --device: 'mps' is not auto, cpu or cuda; "
    "CUDA_VISIBLE_DEVICES says which GPUs to use",
    "00_single_gpu --replicas": "--replicas belongs to 01_data_parallel, not to 00_single_gpu",
    "02_ddp_raw": "02_ddp_raw needs torchrun: torchrun --standalone --nproc-per-node 2 02_ddp_raw/train.py",
    "03_accelerate --mixed-precision=bf16": "--mixed-precision belongs to 03_accelerate/train_full "
    "and 04_trainer/train_full, not to 03_accelerate",
    f"{FULL} --checkpoint-dir ''": "argument --checkpoint-dir: must name a folder",
    f"{FULL} --checkpoint-dir {__file__}/a": f"argument --checkpoint-dir: nothing can be written to '{__file__}/a'",
    f"{FULL} --checkpoint-every 1m": "argument --checkpoint-every: must be a whole number of steps, "
    "or of seconds as in 60s, from 1 to 999999999, not '1m'",
}


@pytest.mark.parametrize("command", WRONG_VALUES)
def test_a_wrong_value_is_one_clear_line(command, capsys):
    message = refusal(start, command)
    assert message == WRONG_VALUES[command]
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == f"error: {message}\n"


@pytest.mark.parametrize("given, meant", [("a/../b", "{here}/b"), ("~/c", "{here}/home/c"), ("{here}/d", "{here}/d")])
def test_the_folder_of_checkpoints_is_an_absolute_path(given, meant, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", f"{tmp_path}/home")
    args = parse(f"{FULL} --checkpoint-dir {given.format(here=tmp_path)}")
    assert args.checkpoint_dir == meant.format(here=tmp_path)


def test_without_a_gpu_the_device_is_the_cpu(gpus):
    gpus(0)
    assert fit("00_single_gpu").device == torch.device("cpu")
    message = "argument --device: 'cuda' cannot be used here (torch finds no GPU); try --device cpu"
    assert refusal(fit, "00_single_gpu --device cuda") == message


@pytest.mark.parametrize("level", ONE_PROCESS)
def test_one_process_chooses_among_the_gpus(level, gpus):
    gpus(2)
    assert fit(level).device == fit(f"{level} --device cuda").device == torch.device("cuda", 0)
    assert fit(f"{level} --device cuda:1").device == torch.device("cuda", 1)
    message = "argument --device: 'cuda:2' cannot be used here (GPUs 0 to 1 are visible)"
    assert refusal(fit, f"{level} --device cuda:2") == message


@pytest.mark.parametrize("level", ladder.DISTRIBUTED)
def test_a_rank_does_not_choose_its_gpu(level, gpus, torchrun):
    gpus(2)
    torchrun()
    assert fit(level).device == torch.device("cuda")
    message = "argument --device: 'cuda:1': each process takes the GPU of its local rank; "
    message += "to choose among them set CUDA_VISIBLE_DEVICES=1"
    assert refusal(fit, f"{level} --device cuda:1") == message


def test_level_02_needs_a_gpu_for_each_rank_or_none(gpus, torchrun):
    torchrun(processes=4)
    gpus(2)
    message = "4 processes need as many GPUs, 2 are visible: start fewer, or add --device cpu"
    assert refusal(start, "02_ddp_raw --device cuda") == message
    start("02_ddp_raw --device cpu")
    gpus(4)
    start("02_ddp_raw --device cuda")


@pytest.mark.parametrize(
    ("command", "processes", "message"),
    [
        ("00_single_gpu", 3, "00_single_gpu is one process, but WORLD_SIZE is 3: unset it"),
        (FULL, 3, "--batch-size 64 is not divisible by 3 (3 processes): use 63 or 66"),
        (
            f"{FULL} --gradient-accumulation-steps 2",
            3,
            "--batch-size 64 is not divisible by 6 (3 processes × 2 accumulation steps): use 60 or 66",
        ),
        (ladder.MESH, 6, "--batch-size 64 is not divisible by 3 (3 rows of 2 processes): use 63 or 66"),
        (f"{ladder.MESH} --tensor 3", 4, "--tensor 3 does not divide the number of processes, 4"),
        (f"{ladder.MESH} --tensor 3", 3, "--tensor 3 does not divide fc1's outputs, 128: it must be a power of 2"),
    ],
)
def test_flags_that_processes_cannot_share_are_refused(command, processes, message, torchrun):
    torchrun(processes)
    assert refusal(start, f"{command} --device cpu") == message


def test_a_row_of_one_process_takes_any_number_of_them(torchrun):
    torchrun(processes=3)
    start(f"{ladder.MESH} --device cpu --tensor 1 --batch-size 48")


def test_replicas_are_the_visible_gpus_and_at_least_two(gpus):
    gpus(3)
    assert fit("01_data_parallel").replicas == 3
    message = "argument --replicas: 4 replicas need as many GPUs, 3 are visible"
    assert refusal(fit, "01_data_parallel --replicas 4") == message
    gpus(0)
    assert fit("01_data_parallel").replicas == 2
    assert fit("01_data_parallel --replicas 5").replicas == 5


def test_only_the_machine_of_rank_0_needs_the_folder_of_the_results(tmp_path, torchrun):
    path = tmp_path / "of_the_first_machine" / "w.pt"
    torchrun()
    message = f"argument --save: '{path}' cannot be written: it must be a file in a folder that exists"
    assert refusal(start, f"02_ddp_raw --save {path}") == message
    torchrun(rank=1)
    assert start(f"02_ddp_raw --save {path}").save == path


def test_a_train_full_takes_what_the_launcher_says(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    settings = fit(FULL)
    assert (settings.mixed_precision, settings.gradient_accumulation_steps) == ("bf16", 4)
    assert fit(f"{FULL} --mixed-precision no").mixed_precision == "no"
    assert fit("00_single_gpu").mixed_precision == "no"


LAUNCHED_OTHERWISE = {
    f"ACCELERATE_MIXED_PRECISION=fp8 {FULL}": "ACCELERATE_MIXED_PRECISION is 'fp8': it must be no, fp16 or bf16",
    f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS=auto {FULL}": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS is 'auto': "
    "it must be a whole number of at least 1",
    f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4 {FULL} --gradient-accumulation-steps 2": "the launcher's "
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4 contradicts --gradient-accumulation-steps 2: give one, to train_full.py",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4 04_trainer": "the launcher's "
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4 contradicts --gradient-accumulation-steps 1: give one, to train_full.py",
    "ACCELERATE_MIXED_PRECISION=bf16 03_accelerate": "the launcher's ACCELERATE_MIXED_PRECISION=bf16: "
    "only train_full.py has --mixed-precision",
    "ACCELERATE_CPU_THREADS=3 00_single_gpu --cores-per-device 1": "the launcher's ACCELERATE_CPU_THREADS=3 "
    "contradicts --cores-per-device 1: give one of them",
}


@pytest.mark.parametrize("launched", LAUNCHED_OTHERWISE)
def test_flags_that_contradict_the_launcher_are_refused(launched, monkeypatch):
    variable, command = launched.split(maxsplit=1)
    monkeypatch.setenv(*variable.split("="))
    assert refusal(fit, f"{command} --device cpu") == LAUNCHED_OTHERWISE[launched]


@pytest.mark.parametrize("name, value", [("WORLD_SIZE", ""), ("RANK", "x"), ("LOCAL_WORLD_SIZE", "0")])
def test_a_launchers_variable_that_is_no_number_is_one_line(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    message = refusal(start, "00_single_gpu --device cpu")
    assert message.startswith(f"{name} is {value!r}: it must be a whole number of at least ")


@pytest.mark.parametrize("script", ladder.WITH_CHECKPOINTS)
@pytest.mark.parametrize("launchers, flag", [("bf16", "no"), ("no", "bf16")])
def test_the_precision_is_that_of_the_flag_where_both_are_given(script, launchers, flag, monkeypatch):
    """A second run in the same process, without the flag, has the launcher's."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launchers)
    module = ladder.load(script)
    command = f"{script} {shlex.join(SHORT)} --device cpu"

    def precision_of(command: str) -> str:
        AcceleratorState._reset_state(reset_partial_state=True)
        module.train(start(command))
        return AcceleratorState().mixed_precision

    assert precision_of(f"{command} --mixed-precision {flag}") == flag
    assert precision_of(command) == launchers


@pytest.mark.parametrize("precision, warnings", [("fp16", 1), ("bf16", 0), ("no", 0)])
def test_a_slow_precision_on_a_cpu_is_warned_of_once(precision, warnings, capsys, torchrun):
    for rank in (0, 1):
        torchrun(rank=rank)
        start(f"{FULL} --mixed-precision {precision} --device cpu")
    assert capsys.readouterr().err.count("warning: ") == warnings
