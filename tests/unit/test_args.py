"""Flags: defaults, and every wrong one answered by a single line."""

import io
import os
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from common.args import CheckpointInterval, parse_args
from common.errors import UserError

LEVELS = ["00_single_gpu", "01_data_parallel", "02_ddp_raw", "03_accelerate", "03_accelerate/train_full", "04_trainer"]
FULL = "03_accelerate/train_full"
RANKED = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "3",
    "LOCAL_WORLD_SIZE": "3",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


def become_rank(monkeypatch, **changes: str) -> None:
    """Let this process be a rank of three, but for these changes."""
    for name, value in (RANKED | changes).items():
        monkeypatch.setenv(name, value)


def parse(level: str, *argv: str):
    path = level if "/" in level else f"{level}/train"
    return parse_args(f"/anywhere/{path}.py", list(argv))


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
    assert args.level == level.partition("/")[0]


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
        (["--device", "abacus"], "argument --device: 'abacus' is not auto, cpu or cuda"),
        (["--save", "/no/such/folder/w.pt"], "it must be a file in a folder that exists"),
        (["--json", "/tmp"], "argument --json: '/tmp' cannot be written"),
        (["--batchsize", "64"], "unknown argument --batchsize"),
        (["--batch", "64"], "unknown argument --batch"),
        (["--epochs"], "expected one argument"),
        (["--epochs=--"], "argument --epochs: expected one argument"),
        (["--train-samples", "63"], "63 training samples are fewer than one batch of 64"),
        (["--batch-size", "60001"], "60000 training samples are fewer than one batch of 60001"),
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
    assert "--timeout belongs to 02_ddp_raw and 03" in refusal(capsys, "00_single_gpu", "--timeout", "5")


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


@pytest.mark.parametrize("level", ["00_single_gpu", "04_trainer"])
def test_an_absent_gpu_is_said(level, gpus, capsys):
    gpus(0)
    assert parse(level).device == torch.device("cpu")
    assert "(torch finds no GPU); try --device cpu" in refusal(capsys, level, "--device", "cuda")


def test_the_device_of_one_process_has_its_number_and_that_of_a_rank_has_none(gpus, capsys):
    gpus(2)
    for level in ("00_single_gpu", "01_data_parallel"):
        assert parse(level).device == parse(level, "--device", "cuda").device == torch.device("cuda", 0)
        assert parse(level, "--device", "cuda:1").device == torch.device("cuda", 1)
        assert "'cuda:2' cannot be used here (GPUs 0 to 1 are visible)" in refusal(capsys, level, "--device", "cuda:2")
    for level in ("02_ddp_raw", "03_accelerate", "04_trainer"):
        assert parse(level).device == torch.device("cuda")
        said = refusal(capsys, level, "--device", "cuda:1")
        assert "each process takes the GPU of its local rank; to choose among them set CUDA_VISIBLE_DEVICES=1" in said


def test_looking_for_gpus_leaves_the_process_able_to_fork(gpus, monkeypatch):
    """The CUDA runtime, once asked, cannot be used in forked processes, as a notebook's are."""
    for before in (None, "0"):
        gpus(2)
        if before is None:
            monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
        else:
            monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", before)
        assert parse("01_data_parallel").replicas == 2 and parse("04_trainer").device.type == "cuda"
        assert os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK") == before
    with pytest.raises(AssertionError, match="has been asked"):
        torch.cuda.is_available()


@pytest.mark.parametrize("device", ["mps", "meta", "cpu:0", "cuda:", "cuda:x", "cuda:-1", "", "CUDA"])
def test_other_devices_are_refused_with_a_hint(device, capsys):
    said = refusal(capsys, "00_single_gpu", f"--device={device}")
    assert f"argument --device: {device!r} is not auto, cpu or cuda; CUDA_VISIBLE_DEVICES says which GPUs" in said


@pytest.mark.parametrize("level", ["00_single_gpu", "02_ddp_raw", "03_accelerate"])
def test_a_flag_of_another_level_is_refused_by_name(level, capsys):
    assert f"--replicas belongs to 01_data_parallel, not to {level}" in refusal(capsys, level, "--replicas", "2")
    message = refusal(capsys, level, "--mixed-precision=bf16")
    assert f"--mixed-precision belongs to 03_accelerate/train_full and 04_trainer, not to {level}\n" in message


def test_replicas_default_to_two_without_gpus_and_may_be_uneven():
    if torch.cuda.device_count() < 2:
        assert parse("01_data_parallel").replicas == 2
    assert parse("01_data_parallel", "--replicas", "5", "--batch-size", "64", "--device", "cpu").replicas == 5


def test_a_batch_that_processes_cannot_share_names_the_nearest_that_they_can(capsys, monkeypatch):
    become_rank(monkeypatch)
    message = refusal(capsys, "02_ddp_raw", "--batch-size", "64")
    assert message == "error: --batch-size 64 does not divide by 3 (3 processes): use 63 or 66\n"
    assert refusal(capsys, "02_ddp_raw", "--batch-size", "2").endswith("use 3\n")
    message = refusal(capsys, FULL, "--gradient-accumulation-steps", "2")
    assert "does not divide by 6 (3 processes × 2 accumulation steps): use 60 or 66" in message
    assert parse("02_ddp_raw", "--batch-size", "66").batch_size == 66


@pytest.mark.parametrize(
    "environment, said",
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set: unset it"),
        (RANKED, "WORLD_SIZE is 3: unset it"),
        (RANKED | {"TORCHELASTIC_RUN_ID": "1"}, "WORLD_SIZE is 3: start it with python, not torchrun"),
    ],
)
@pytest.mark.parametrize("level", ["00_single_gpu", "01_data_parallel"])
def test_one_process_levels_refuse_a_world_and_say_what_to_do(level, environment, said, capsys, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert refusal(capsys, level) == f"error: {level} is one process, but {said}\n"


def test_the_script_of_one_clone_is_not_run_with_the_modules_of_another(tmp_path, capsys):
    other = tmp_path / "other"
    (other / "common").mkdir(parents=True)
    (other / "common" / "args.py").touch()
    with pytest.raises(UserError):
        parse_args(str(other / "00_single_gpu" / "train.py"), [])
    said = capsys.readouterr().err
    ours = Path(__file__).resolve().parents[2]
    assert said.count("\n") == 1 and f"{other}/00_single_gpu/train.py" in said
    assert f"is that of {ours}: pip install -e {other}, or set PYTHONPATH={other}" in said


def test_what_stdout_cannot_encode_is_escaped(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    parse("00_single_gpu")
    print("64 = 2 × 32", file=out, flush=True)
    assert out.buffer.getvalue() == b"64 = 2 \\xd7 32\n"


def test_too_little_shared_memory_for_the_workers_is_one_line(capsys, monkeypatch):
    usage = SimpleNamespace(free=2 * 2**20)
    monkeypatch.setattr("common.args.shutil.disk_usage", lambda folder: usage)
    monkeypatch.setattr("common.args._SHARED_MEMORY", Path("/"))
    said = refusal(capsys, "02_ddp_raw", "--num-workers", "4")
    assert "--num-workers 4 needs 2.3 MiB in /, which has 2.0 MiB free: give it more" in said
    assert parse("02_ddp_raw", "--num-workers", "2").num_workers == 2
    four = ["--num-workers", "4", "--gradient-accumulation-steps", "2"]  # a worker hands over a micro-batch
    assert parse(FULL, *four).num_workers == 4
    usage.free = 0
    assert parse("02_ddp_raw").num_workers == 0


def test_only_rank_0s_machine_needs_the_folder_of_the_results(capsys, monkeypatch, tmp_path):
    path = tmp_path / "of_the_first_machine" / "w.pt"
    assert "must be a file in a folder that exists" in refusal(capsys, "02_ddp_raw", "--save", str(path))
    for variable, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("MASTER_ADDR", "first")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert parse("02_ddp_raw", "--save", str(path)).save == path


@pytest.mark.parametrize("missing", ["WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"])
def test_half_an_environment_says_what_is_missing(missing, capsys, monkeypatch):
    become_rank(monkeypatch)
    monkeypatch.delenv(missing)
    assert f"is set but {missing} is not: start the ranks with torchrun" in refusal(capsys, "02_ddp_raw")


@pytest.mark.parametrize("name, value", [("RANK", "3"), ("RANK", "-1"), ("LOCAL_RANK", "3"), ("WORLD_SIZE", "two")])
def test_an_impossible_environment_is_one_line(name, value, capsys, monkeypatch):
    monkeypatch.setattr("common.errors.time", mock.Mock())
    become_rank(monkeypatch, **{name: value})
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
    args = parse(FULL)
    assert (args.mixed_precision, args.gradient_accumulation_steps) == ("bf16", 2)
    assert parse(FULL, "--mixed-precision", "no").mixed_precision == "no"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    assert "asks for fp8 (ACCELERATE_MIXED_PRECISION): use no, fp16, bf16" in refusal(capsys, FULL)
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "none")
    assert "argument --gradient-accumulation-steps: must be a whole number" in refusal(capsys, FULL)


@pytest.mark.parametrize("level", [FULL, "04_trainer"])
@pytest.mark.parametrize(
    "precision, has_bf16, warning",
    [
        ("fp16", True, "fp16 on a CPU works, but its convolutions are some 90 times slower"),
        ("bf16", False, "this CPU has no instructions for bf16"),
        ("bf16", True, None),
        ("no", False, None),
    ],
)
def test_a_slow_precision_on_a_cpu_is_warned_of_once(level, precision, has_bf16, warning, monkeypatch, capsys):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    flags = ["--mixed-precision", precision, "--device", "cpu", "--batch-size"]
    for rank in ("0", "1"):
        become_rank(monkeypatch, RANK=rank)
        parse(level, *flags, "66")
        said = capsys.readouterr().err
        if warning and rank == "0":
            assert warning in said and said.count("\n") == 1
        else:
            assert said == ""
    assert "warning" not in refusal(capsys, level, *flags, "64")


def test_a_checkpoint_dir_is_one_place_wherever_it_is_looked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    for given, meant in (("a/../b", f"{tmp_path}/b"), ("~/c", "/home/somebody/c"), ("/d", "/d")):
        assert parse(FULL, f"--checkpoint-dir={given}").checkpoint_dir == meant
    assert parse("04_trainer").checkpoint_dir is None
    assert "argument --checkpoint-dir: must name a folder" in refusal(capsys, "04_trainer", "--checkpoint-dir", "")


@pytest.mark.parametrize("level", [FULL, "04_trainer"])
def test_a_flag_that_contradicts_the_launcher_is_refused_with_both_values(level, monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    said = refusal(capsys, level, "--gradient-accumulation-steps", "2")
    assert "--gradient-accumulation-steps 2 contradicts the launcher's --gradient_accumulation_steps 4" in said
    assert parse(level, "--gradient-accumulation-steps", "4").gradient_accumulation_steps == 4
    monkeypatch.delenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    assert parse(level, "--gradient-accumulation-steps", "2").gradient_accumulation_steps == 2
    assert parse(level).gradient_accumulation_steps == 1


@pytest.mark.parametrize("level", ["02_ddp_raw", "03_accelerate"])
def test_what_the_launcher_asks_for_and_the_script_does_not_do_is_refused(level, monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    parse(level)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    said = refusal(capsys, level)
    assert f"asks for mixed precision (ACCELERATE_MIXED_PRECISION=bf16), which {level}/train.py does not do" in said
    assert "03_accelerate/train_full.py" in said
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2")
    assert "asks for gradient accumulation (ACCELERATE_GRADIENT_ACCUMULATION_STEPS=2)" in refusal(capsys, level)


@pytest.mark.parametrize(
    "text, interval", [("50", CheckpointInterval(steps=50)), ("60s", CheckpointInterval(seconds=60))]
)
def test_checkpoints_are_made_every_so_many_steps_or_seconds(text, interval):
    assert parse(FULL, "--checkpoint-every", text).checkpoint_every == interval
    assert parse("04_trainer").checkpoint_every == CheckpointInterval(steps=100)


@pytest.mark.parametrize("text", ["0", "0s", "s", "-1s", "1.5s", "1m", "60 seconds"])
def test_another_interval_is_one_line(text, capsys):
    assert "argument --checkpoint-every: must be a whole number" in refusal(capsys, FULL, f"--checkpoint-every={text}")


@pytest.mark.parametrize("level", LEVELS)
def test_images_on_the_device_leave_nothing_to_workers(level, capsys):
    assert parse(level, "--data", "device").data == "device"
    assert "--num-workers" in refusal(capsys, level, "--data", "device", "--num-workers", "1")


@pytest.fixture
def four_cores(monkeypatch):
    monkeypatch.setattr("common.args.available_cores", lambda: 4)


def test_devices_that_the_cores_are_too_few_for_are_refused_with_what_can_be_had(four_cores, monkeypatch, capsys):
    said = refusal(capsys, "00_single_gpu", "--cores-per-device", "5")
    assert said == "error: --cores-per-device 5: 1 device needs 5 cores, there are 4: 4 is the most for each\n"
    said = refusal(capsys, "01_data_parallel", "--replicas", "3", "--cores-per-device", "2")
    assert "3 devices need 6 cores, there are 4: 1 is the most for each" in said
    said = refusal(capsys, "01_data_parallel", "--replicas", "5", "--cores-per-device", "1")
    assert "5 devices need 5 cores, there are 4: leave the flag out, or use fewer devices" in said
    become_rank(monkeypatch)
    assert "3 devices need 6 cores" in refusal(capsys, "02_ddp_raw", "--batch-size", "66", "--cores-per-device", "2")


@pytest.mark.parametrize("level", LEVELS)
def test_cores_per_device_are_refused_on_a_gpu_by_name(level, gpus, capsys):
    gpus(2)
    said = refusal(capsys, level, "--cores-per-device", "1")
    assert said.startswith("error: --cores-per-device 1: this run computes on a GPU") and "--device cpu" in said
    assert "must be a whole number of at least 1" in refusal(capsys, level, "--cores-per-device", "0")


def test_cores_per_device_and_the_launchers_threads_must_agree(monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_CPU_THREADS", "3")
    said = refusal(capsys, "03_accelerate", "--cores-per-device", "1")
    assert "contradicts the launcher's --num_cpu_threads_per_process 3 (ACCELERATE_CPU_THREADS)" in said
