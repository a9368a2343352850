"""Flags: defaults, and every wrong one answered by a single line."""

import pytest
import torch

from common.args import parse_args
from common.errors import UserError

LEVELS = ["00_single_gpu", "01_data_parallel", "02_ddp_raw", "03_accelerate", "04_trainer"]
RANKED = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "3",
    "LOCAL_WORLD_SIZE": "3",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


def parse(level: str, *argv: str):
    return parse_args(f"/anywhere/{level}/train.py", list(argv))


def refusal(capsys, level: str, *argv: str) -> str:
    with pytest.raises(UserError) as caught:
        parse(level, *argv)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize("level", LEVELS)
def test_defaults_are_the_contract(level, monkeypatch):
    monkeypatch.delenv("MNIST_ROOT", raising=False)
    args = parse(level)
    assert (args.epochs, args.batch_size, args.lr, args.seed) == (1, 64, 1e-3, 42)
    assert (args.dataset, args.data_dir, args.num_workers) == ("auto", "data", 0)
    assert (args.max_steps, args.no_dropout, args.dtype) == (None, False, torch.float32)
    assert args.level == level


def test_mnist_root_changes_the_default_folder(monkeypatch):
    monkeypatch.setenv("MNIST_ROOT", "/elsewhere")
    assert parse("00_single_gpu").data_dir == "/elsewhere"
    assert parse("00_single_gpu", "--data-dir", "here").data_dir == "here"


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--epochs", "0"], "argument --epochs: must be a whole number of at least 1, not '0'"),
        (["--batch-size", "many"], "argument --batch-size: must be a whole number of at least 1, not 'many'"),
        (["--batch-size", "6.5"], "not '6.5'"),
        (["--lr", "0"], "argument --lr: must be a number above 0, not '0'"),
        (["--lr", "nan"], "not 'nan'"),
        (["--lr", "inf"], "not 'inf'"),
        (["--seed", "-1"], "argument --seed: must be a whole number from 0 to 4000000000"),
        (["--dataset", "cifar"], "invalid choice: 'cifar'"),
        (["--dtype", "float16"], "invalid choice: 'float16'"),
        (["--device", "abacus"], "argument --device: 'abacus' cannot be used here"),
        (["--save", "/no/such/folder/w.pt"], "it must be a file in a folder that exists"),
        (["--json", "/tmp"], "argument --json: '/tmp' cannot be written"),
        (["--batchsize", "64"], "unknown argument --batchsize"),
        (["--batch", "64"], "unknown argument --batch"),
        (["--epochs"], "expected one argument"),
        (["--epochs=--"], "argument --epochs: expected one argument"),
        (["--seed", "9" * 5000], "a whole number from 0 to 4000000000, not '999"),
    ],
)
def test_a_wrong_value_is_one_clear_line(argv, message, capsys):
    assert message in refusal(capsys, "00_single_gpu", *argv)


@pytest.mark.parametrize("seconds", ["0", "0.5", "1000001", "for ever"])
def test_a_timeout_is_whole_seconds_that_a_backend_can_count(seconds, capsys):
    assert "argument --timeout: must be a whole number from 1 to 1000000" in refusal(
        capsys, "02_ddp_raw", "--timeout", seconds
    )
    assert parse("04_trainer").timeout.total_seconds() == 300
    assert "--timeout belongs to level 02_ddp_raw and 03" in refusal(capsys, "00_single_gpu", "--timeout", "5")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_absent_gpu_is_said(capsys):
    assert "try --device cpu" in refusal(capsys, "00_single_gpu", "--device", "cuda")


@pytest.mark.parametrize("level", ["00_single_gpu", "02_ddp_raw"])
def test_a_flag_of_another_level_is_refused_by_name(level, capsys):
    assert f"--replicas belongs to level 01_data_parallel, not to {level}" in refusal(capsys, level, "--replicas", "2")
    message = refusal(capsys, level, "--mixed-precision=bf16")
    assert f"--mixed-precision belongs to level 03_accelerate and 04_trainer, not to {level}" in message


def test_replicas_default_to_two_without_gpus():
    if torch.cuda.device_count() < 2:
        assert parse("01_data_parallel").replicas == 2
    assert parse("01_data_parallel", "--replicas", "5", "--device", "cpu").replicas == 5


def test_a_batch_that_processes_cannot_share_names_the_nearest_that_they_can(capsys, monkeypatch):
    for name, value in RANKED.items():
        monkeypatch.setenv(name, value)
    message = refusal(capsys, "02_ddp_raw", "--batch-size", "64")
    assert message == "error: --batch-size 64 does not divide by 3 (3 processes): use 63 or 66\n"
    assert refusal(capsys, "02_ddp_raw", "--batch-size", "2").endswith("use 3\n")
    message = refusal(capsys, "03_accelerate", "--gradient-accumulation-steps", "2")
    assert "does not divide by 6 (3 processes × 2 accumulation steps): use 60 or 66" in message
    assert parse("02_ddp_raw", "--batch-size", "66").batch_size == 66


def test_replicas_may_be_uneven():
    assert parse("01_data_parallel", "--replicas", "3", "--batch-size", "64").batch_size == 64


def test_one_process_levels_refuse_a_world(capsys, monkeypatch):
    for name, value in RANKED.items():
        monkeypatch.setenv(name, value)
    assert "00_single_gpu is one process, but WORLD_SIZE is 3" in refusal(capsys, "00_single_gpu")


@pytest.mark.parametrize("missing", ["WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"])
def test_half_an_environment_says_what_is_missing(missing, capsys, monkeypatch):
    for name, value in RANKED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    assert f"is set but {missing} is not: start the ranks with torchrun" in refusal(capsys, "02_ddp_raw")


@pytest.mark.parametrize("name, value", [("RANK", "3"), ("RANK", "-1"), ("LOCAL_RANK", "3"), ("WORLD_SIZE", "two")])
def test_an_impossible_environment_is_one_line(name, value, capsys, monkeypatch):
    monkeypatch.setattr("common.errors.time.sleep", lambda seconds: None)
    for each, usual in (RANKED | {name: value}).items():
        monkeypatch.setenv(each, usual)
    assert f"{name}={value}" in refusal(capsys, "02_ddp_raw", "--batch-size", "66")


def test_the_second_local_rank_leaves_the_word_to_the_first(capsys, monkeypatch):
    import common.errors

    waited = []
    monkeypatch.setattr(common.errors.time, "sleep", waited.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(UserError):
        common.errors.fail("no")
    assert waited and capsys.readouterr().err == "error: no\n"


def test_what_the_launcher_was_configured_with_is_the_default(monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2")
    args = parse("03_accelerate")
    assert (args.mixed_precision, args.gradient_accumulation_steps) == ("bf16", 2)
    assert parse("03_accelerate", "--mixed-precision", "no").mixed_precision == "no"
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "none")
    assert "argument --gradient-accumulation-steps: must be a whole number" in refusal(capsys, "03_accelerate")


@pytest.mark.parametrize("level", ["03_accelerate", "04_trainer"])
def test_fp16_on_a_cpu_is_warned_of_once(level, monkeypatch, capsys):
    parse(level, "--mixed-precision", "bf16", "--device", "cpu")
    assert capsys.readouterr().err == ""
    for name, value in RANKED.items():
        monkeypatch.setenv(name, value)
    for rank, times in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        parse(level, "--mixed-precision", "fp16", "--device", "cpu", "--batch-size", "66")
        said = capsys.readouterr().err
        assert said.count("fp16 on a CPU works, but its convolutions are some 90 times slower") == times
        assert said.count("\n") == times
    assert "warning" not in refusal(capsys, level, "--mixed-precision", "fp16", "--device", "cpu", "--batch-size", "64")


def test_a_checkpoint_dir_is_one_place_wherever_it_is_looked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    for given, meant in (("a/../b", f"{tmp_path}/b"), ("~/c", "/home/somebody/c"), ("/d", "/d")):
        assert parse("03_accelerate", f"--checkpoint-dir={given}").checkpoint_dir == meant
    assert parse("04_trainer").checkpoint_dir is None
    assert "argument --checkpoint-dir: must name a folder" in refusal(capsys, "04_trainer", "--checkpoint-dir", "")
