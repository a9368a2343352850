"""Flags: defaults, and every wrong one answered by a single line."""

import os

import pytest
import torch

from common import ladder
from common.args import parse_args
from common.checkpoint_schedule import CheckpointInterval
from common.errors import UserError
from common.gpus import hide_gpus
from common.machine import check_launch, fit_to_machine

FULL = "03_accelerate/train_full"
ONE_PROCESS = ("00_single_gpu", "01_data_parallel")


@pytest.fixture(autouse=True)
def rank_of_two(monkeypatch):
    """Level 02 needs the environment of torchrun, and levels 00 and 01 must not have it: the tests say which."""

    def become(world_size: str = "2", rank: str = "0") -> None:
        for name in ("RANK", "LOCAL_RANK"):
            monkeypatch.setenv(name, rank)
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.setenv(name, world_size)

    return become


def parse(level: str, *argv: str):
    path = level if "/" in level else f"{level}/train"
    return parse_args(f"/anywhere/{path}.py", list(argv))


def fit(level: str, *argv: str):
    return fit_to_machine(parse(level, *argv))


def refusal(capsys, level: str, *argv: str) -> str:
    with pytest.raises(UserError) as caught:
        fit(level, *argv)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize("level", ladder.scripts())
def test_defaults_are_the_contract(level, monkeypatch, rank_of_two):
    if level not in ONE_PROCESS:
        rank_of_two()
    monkeypatch.delenv("MNIST_ROOT", raising=False)
    args = parse(level)
    assert (args.epochs, args.batch_size, args.lr, args.seed) == (1, 64, 1e-3, 42)
    assert (args.dataset, args.data_dir, args.num_workers, args.data) == ("auto", "data", 0, "host")
    assert (args.max_steps, args.train_samples, args.eval_samples, args.warm_up_steps) == (None, None, None, 10)
    assert (args.no_dropout, args.dtype, args.save, args.json) == (False, torch.float32, None, None)
    assert (args.cores_per_device, args.allocator) == (None, "keep")
    assert args.level == level.partition("/")[0]
    if level not in ONE_PROCESS:
        assert args.timeout.total_seconds() == 300
    if "train_full" in level:
        assert (args.mixed_precision, args.gradient_accumulation_steps, args.checkpoint_dir) == ("no", 1, None)
        assert args.checkpoint_every == CheckpointInterval(steps=100)
    monkeypatch.setenv("MNIST_ROOT", "/elsewhere")
    assert parse(level).data_dir == "/elsewhere"
    assert parse(level, "--data-dir", "here").data_dir == "here"


@pytest.mark.parametrize(
    "level, argv, message",
    [
        ("00_single_gpu", ["--epochs", "0"], "argument --epochs: must be a whole number of at least 1, not '0'"),
        ("00_single_gpu", ["--seed", "-1"], "argument --seed: must be a whole number from 0 to 4000000000"),
        ("00_single_gpu", ["--save", "/no/such/folder/w.pt"], "it must be a file in a folder that exists"),
        ("00_single_gpu", ["--batch", "64"], "unknown argument --batch"),
        ("00_single_gpu", ["--epochs"], "expected one argument"),
        ("00_single_gpu", ["--data", "device", "--num-workers", "1"], "nothing for loader workers to do"),
        ("00_single_gpu", ["--replicas", "2"], "--replicas belongs to 01_data_parallel, not to 00_single_gpu"),
        ("03_accelerate", ["--mixed-precision=bf16"], "belongs to 03_accelerate/train_full and 04_trainer/train_full"),
        ("03_accelerate", ["--timeout", "0.5"], "argument --timeout: must be a whole number from 1 to 1000000"),
        (FULL, ["--checkpoint-dir", ""], "argument --checkpoint-dir: must name a folder"),
        (FULL, ["--checkpoint-dir", f"{__file__}/a/b"], "argument --checkpoint-dir: nothing can be written to"),
        ("00_single_gpu", ["--device", "mps"], "CUDA_VISIBLE_DEVICES says which GPUs"),
        (FULL, ["--checkpoint-every", "1m"], "argument --checkpoint-every: must be a whole number"),
    ],
)
def test_a_wrong_value_is_one_clear_line(level, argv, message, capsys):
    assert message in refusal(capsys, level, *argv)


def test_intervals_and_folders_of_checkpoints(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", f"{tmp_path}/home")
    assert parse(FULL, "--checkpoint-every", "50").checkpoint_every == CheckpointInterval(steps=50)
    assert parse(FULL, "--checkpoint-every", "60s").checkpoint_every == CheckpointInterval(seconds=60)
    for given, meant in (
        ("a/../b", f"{tmp_path}/b"),
        ("~/c", f"{tmp_path}/home/c"),
        (f"{tmp_path}/d", f"{tmp_path}/d"),
    ):
        assert parse(FULL, f"--checkpoint-dir={given}").checkpoint_dir == meant


@pytest.fixture
def gpus(monkeypatch):
    """`gpus(n)`: the driver says that there are n. Whoever asks the CUDA runtime, and so starts it, fails."""

    def runtime():
        raise AssertionError("the CUDA runtime has been asked")

    def pretend(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
        monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: count)
        monkeypatch.setattr(torch.cuda, "_cached_device_count", None)
        monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", runtime, raising=False)

    return pretend


def test_one_process_chooses_among_gpus_and_a_rank_does_not(gpus, capsys, rank_of_two):
    gpus(0)
    assert fit("00_single_gpu").device == torch.device("cpu")
    assert "torch finds no GPU" in refusal(capsys, "00_single_gpu", "--device", "cuda")
    gpus(2)
    for level in ONE_PROCESS:
        assert fit(level).device == fit(level, "--device", "cuda").device == torch.device("cuda", 0)
        assert fit(level, "--device", "cuda:1").device == torch.device("cuda", 1)
        assert "'cuda:2' cannot be used here (GPUs 0 to 1 are visible)" in refusal(capsys, level, "--device", "cuda:2")
    rank_of_two()
    for level in ladder.DISTRIBUTED:
        assert fit(level).device == torch.device("cuda")
        assert "set CUDA_VISIBLE_DEVICES=1" in refusal(capsys, level, "--device", "cuda:1")


def launch_refusal(level: str, device: str = "cpu") -> str:
    with pytest.raises(UserError) as caught:
        check_launch(fit(level, "--device", device))
    return str(caught.value)


def test_levels_of_one_process_refuse_torchrun_and_level_02_wants_it_and_a_gpu_for_each_rank(gpus, rank_of_two):
    assert "needs torchrun: torchrun --standalone" in launch_refusal("02_ddp_raw")
    rank_of_two("3")
    for level in ONE_PROCESS:
        assert "is one process, but WORLD_SIZE is 3" in launch_refusal(level)
    gpus(2)
    assert "3 processes need as many GPUs, 2 are visible" in launch_refusal("02_ddp_raw", "cuda")
    check_launch(fit("02_ddp_raw", "--device", "cpu"))
    gpus(3)
    check_launch(fit("02_ddp_raw", "--device", "cuda"))


@pytest.mark.parametrize(
    "world_size, tensor, message",
    [(4, 3, "3 does not divide the number of processes, 4"), (3, 3, "3 does not divide fc1's outputs, 128")],
)
def test_a_mesh_whose_rows_are_not_whole_is_refused(world_size, tensor, message, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    with pytest.raises(UserError, match=message):
        check_launch(fit(ladder.MESH, "--device", "cpu", "--tensor", str(tensor)))
    check_launch(fit(ladder.MESH, "--device", "cpu", "--tensor", "1"))


def test_replicas_are_the_visible_gpus_and_at_least_two(gpus, capsys):
    gpus(3)
    assert fit("01_data_parallel").replicas == 3
    assert "4 replicas need as many GPUs, 3 are visible" in refusal(capsys, "01_data_parallel", "--replicas", "4")
    gpus(0)
    assert fit("01_data_parallel").replicas == 2
    assert fit("01_data_parallel", "--replicas", "5").replicas == 5


def test_looking_for_gpus_leaves_the_process_able_to_fork(gpus, monkeypatch):
    """The CUDA runtime, once asked, cannot be used in forked processes, as a notebook's are."""
    for before in (None, "0"):
        gpus(2)
        if before is None:
            monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
        else:
            monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", before)
        assert fit("01_data_parallel").replicas == 2 and fit("04_trainer").device.type == "cuda"
        assert os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK") == before
    with pytest.raises(AssertionError, match="has been asked"):
        torch.cuda.is_available()


def test_a_process_for_the_cpu_sees_no_gpus_even_in_a_fork_of_one_that_has_used_them(gpus, monkeypatch):
    gpus(2)
    for name in ("CUDA_VISIBLE_DEVICES", "PYTORCH_NVML_BASED_CUDA_CHECK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(torch.cuda, "_cached_device_count", 2)
    hide_gpus()
    assert not torch.cuda.is_available() and torch.cuda.device_count() == 0


def test_only_rank_0s_machine_needs_the_folder_of_the_results(capsys, tmp_path, rank_of_two):
    path = tmp_path / "of_the_first_machine" / "w.pt"
    rank_of_two()
    assert "must be a file in a folder that exists" in refusal(capsys, "02_ddp_raw", "--save", str(path))
    rank_of_two(rank="1")
    assert parse("02_ddp_raw", "--save", str(path)).save == path


def test_what_the_launcher_was_configured_with_is_the_default(monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    args = parse(FULL)
    assert (args.mixed_precision, args.gradient_accumulation_steps) == ("bf16", 4)
    assert parse(FULL, "--mixed-precision", "no").mixed_precision == "no"
    said = refusal(capsys, FULL, "--gradient-accumulation-steps", "2")
    assert "--gradient-accumulation-steps 2 contradicts the launcher's --gradient_accumulation_steps 4" in said


@pytest.mark.parametrize("precision, warns", [("fp16", 1), ("bf16", 0), ("no", 0)])
def test_a_slow_precision_on_a_cpu_is_warned_of_once(precision, warns, capsys, rank_of_two):
    for rank in ("0", "1"):
        rank_of_two(rank=rank)
        fit(FULL, "--mixed-precision", precision, "--device", "cpu")
    assert capsys.readouterr().err.count("warning: ") == warns
