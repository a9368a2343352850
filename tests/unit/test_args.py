"""Flags: defaults, and every wrong one answered by a single line."""

from datetime import timedelta
from unittest import mock
from unittest.mock import DEFAULT

import pytest
import torch

from common import ladder, start
from common.accelerator.state import AcceleratorState
from common.args import parse_args
from common.checkpoints.schedule import CheckpointInterval
from common.errors import UserError
from common.launch import rank_variables
from common.levels import ONE_PROCESS
from common.settings import fit_to_machine
from common.start import prepare_process
from tests.levels import FULL, SHORT

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


def parse(level: str, *argv: str):
    path = level if "/" in level else f"{level}/train"
    return parse_args(f"/anywhere/{path}.py", list(argv))


def fit(level: str, *argv: str):
    return fit_to_machine(parse(level, *argv))


def launch(level: str, *argv: str):
    with mock.patch.multiple(start, end_with_launcher=DEFAULT, keep_large_blocks=DEFAULT, share_out_cores=DEFAULT):
        return prepare_process(parse(level, *argv))


def refusal(step, *args) -> str:
    with pytest.raises(UserError) as caught:
        step(*args)
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
    assert parse(FULL, "--data-dir", "here").data_dir == "here"


@pytest.mark.parametrize(
    "level, argv, message",
    [
        ("00_single_gpu", ["--epochs", "0"], "argument --epochs: must be a whole number of at least 1, not '0'"),
        ("00_single_gpu", ["--seed", "-1"], "argument --seed: must be a whole number from 0 to 4000000000"),
        ("00_single_gpu", ["--save", "/no/such/folder/w.pt"], "it must be a file in a folder that exists"),
        ("00_single_gpu", ["--batch", "64"], "unknown argument --batch"),
        ("00_single_gpu", ["--data", "device", "--num-workers", "1"], "nothing for loader workers to do"),
        ("03_accelerate", ["--mixed-precision=bf16"], "belongs to 03_accelerate/train_full and 04_trainer/train_full"),
        (FULL, ["--checkpoint-dir", ""], "argument --checkpoint-dir: must name a folder"),
        (FULL, ["--checkpoint-dir", f"{__file__}/a/b"], "argument --checkpoint-dir: nothing can be written to"),
        ("02_ddp_raw", [], "02_ddp_raw needs torchrun: torchrun --standalone"),
        ("00_single_gpu", ["--device", "mps"], "CUDA_VISIBLE_DEVICES says which GPUs"),
        (FULL, ["--checkpoint-every", "1m"], "seconds as in 60s, from 1 to 999999999, not '1m'"),
        ("00_single_gpu", ["--replicas"], "--replicas belongs to 01_data_parallel, not to 00_single_gpu"),
    ],
)
def test_a_wrong_value_is_one_clear_line(level, argv, message, capsys):
    assert message in refusal(launch, level, *argv)
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1


@pytest.mark.parametrize("given, meant", [("a/../b", "{here}/b"), ("~/c", "{here}/home/c"), ("{here}/d", "{here}/d")])
def test_the_folder_of_checkpoints_is_an_absolute_path(given, meant, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", f"{tmp_path}/home")
    assert parse(FULL, "--checkpoint-dir", given.format(here=tmp_path)).checkpoint_dir == meant.format(here=tmp_path)


def test_without_a_gpu_the_device_is_the_cpu(gpus):
    gpus(0)
    assert fit("00_single_gpu").device == torch.device("cpu")
    assert "torch finds no GPU" in refusal(fit, "00_single_gpu", "--device", "cuda")


@pytest.mark.parametrize("level", ONE_PROCESS)
def test_one_process_chooses_among_the_gpus(level, gpus):
    gpus(2)
    assert fit(level).device == fit(level, "--device", "cuda").device == torch.device("cuda", 0)
    assert fit(level, "--device", "cuda:1").device == torch.device("cuda", 1)
    assert "'cuda:2' cannot be used here (GPUs 0 to 1 are visible)" in refusal(fit, level, "--device", "cuda:2")


@pytest.mark.parametrize("level", ladder.DISTRIBUTED)
def test_a_rank_does_not_choose_its_gpu(level, gpus, torchrun):
    gpus(2)
    torchrun()
    assert fit(level).device == torch.device("cuda")
    assert "set CUDA_VISIBLE_DEVICES=1" in refusal(fit, level, "--device", "cuda:1")


def test_level_02_needs_a_gpu_for_each_rank_or_none(gpus, torchrun):
    torchrun(processes=4)
    gpus(2)
    assert "4 processes need as many GPUs, 2 are visible" in refusal(launch, "02_ddp_raw", "--device", "cuda")
    launch("02_ddp_raw", "--device", "cpu")
    gpus(4)
    launch("02_ddp_raw", "--device", "cuda")


@pytest.mark.parametrize(
    "level, processes, flags, message",
    [
        ("00_single_gpu", 3, "", "00_single_gpu is one process, but WORLD_SIZE is 3"),
        (FULL, 3, "", "--batch-size 64 is not divisible by 3 (3 processes): use 63 or 66"),
        (FULL, 3, "--gradient-accumulation-steps 2", "64 is not divisible by 6 (3 processes × 2 accumulation steps)"),
        (ladder.MESH, 6, "--tensor 2", "--batch-size 64 is not divisible by 3 (3 rows of 2 processes): use 63 or 66"),
        (ladder.MESH, 4, "--tensor 3", "3 does not divide the number of processes, 4"),
        (ladder.MESH, 3, "--tensor 3", "3 does not divide fc1's outputs, 128"),
    ],
)
def test_flags_that_processes_cannot_share_are_refused(level, processes, flags, message, torchrun):
    torchrun(processes)
    assert message in refusal(launch, level, "--device", "cpu", *flags.split())
    launch(ladder.MESH, "--device", "cpu", "--tensor", "1", "--batch-size", "48")


def test_replicas_are_the_visible_gpus_and_at_least_two(gpus):
    gpus(3)
    assert fit("01_data_parallel").replicas == 3
    assert "4 replicas need as many GPUs, 3 are visible" in refusal(fit, "01_data_parallel", "--replicas", "4")
    gpus(0)
    assert fit("01_data_parallel").replicas == 2
    assert fit("01_data_parallel", "--replicas", "5").replicas == 5


def test_only_the_machine_of_rank_0_needs_the_folder_of_the_results(tmp_path, torchrun):
    path = tmp_path / "of_the_first_machine" / "w.pt"
    torchrun()
    assert "must be a file in a folder that exists" in refusal(launch, "02_ddp_raw", "--save", str(path))
    torchrun(rank=1)
    assert launch("02_ddp_raw", "--save", str(path)).save == path


def test_a_train_full_takes_what_the_launcher_says(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    settings = fit(FULL)
    assert (settings.mixed_precision, settings.gradient_accumulation_steps) == ("bf16", 4)
    assert fit(FULL, "--mixed-precision", "no").mixed_precision == "no"
    assert fit("00_single_gpu").mixed_precision == "no"


@pytest.mark.parametrize(
    "script, flags, launchers, message",
    [
        (FULL, "", "MIXED_PRECISION=fp8", "PRECISION is 'fp8': it must be no, fp16 or bf16"),
        (FULL, "", "GRADIENT_ACCUMULATION_STEPS=auto", "STEPS is 'auto': it must be a whole number"),
        (FULL, "--gradient-accumulation-steps 2", "GRADIENT_ACCUMULATION_STEPS=4", "=4 contradicts --gradient-acc"),
        ("04_trainer", "", "GRADIENT_ACCUMULATION_STEPS=4", "=4 contradicts --gradient-accumulation-steps 1: give one"),
        ("03_accelerate", "", "MIXED_PRECISION=bf16", "=bf16: only train_full.py has --mixed-precision"),
        ("00_single_gpu", "--cores-per-device 1", "CPU_THREADS=3", "=3 contradicts --cores-per-device 1: give one of"),
    ],
)
def test_flags_that_contradict_the_launcher_are_refused(script, flags, launchers, message, monkeypatch):
    monkeypatch.setenv(*f"ACCELERATE_{launchers}".split("="))
    found = refusal(fit, script, "--device", "cpu", *flags.split())
    assert message in found and launchers.partition("=")[0] in found


@pytest.mark.parametrize("name, value", [("WORLD_SIZE", ""), ("RANK", "x"), ("LOCAL_WORLD_SIZE", "0")])
def test_a_launchers_variable_that_is_no_number_is_one_line(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    assert f"{name} is {value!r}: it must be a whole number" in refusal(launch, "00_single_gpu", "--device", "cpu")


@pytest.mark.parametrize("script", ladder.WITH_CHECKPOINTS)
@pytest.mark.parametrize("launchers, flag", [("bf16", "no"), ("no", "bf16")])
def test_the_precision_is_that_of_the_flag_where_both_are_given(script, launchers, flag, monkeypatch):
    """A second run in the same process, without the flag, has the launcher's."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launchers)
    module = ladder.load(script)
    for flags, expected in (["--mixed-precision", flag], flag), ([], launchers):
        AcceleratorState._reset_state(reset_partial_state=True)
        module.train(launch(script, *SHORT, *flags, "--device", "cpu"))
        assert AcceleratorState().mixed_precision == expected


@pytest.mark.parametrize("precision, warnings", [("fp16", 1), ("bf16", 0), ("no", 0)])
def test_a_slow_precision_on_a_cpu_is_warned_of_once(precision, warnings, capsys, torchrun):
    for rank in (0, 1):
        torchrun(rank=rank)
        launch(FULL, "--mixed-precision", precision, "--device", "cpu")
    assert capsys.readouterr().err.count("warning: ") == warnings
