"""Every level on an imitated machine: its tensors lie on its own GPU, and its waits are known."""

from pathlib import Path

import pytest
import torch

from common import ladder
from common.args import parse_args
from common.settings import fit_to_machine
from tests.gpu.imitation import imitated_process, imitated_rank
from tests.gpu.machine import ARRIVED, GPUS, LENGTH, OWN_GPU, READ, WORLD_SIZE, Machine, Misplaced
from tests.levels import changed_script, run_level

SLOW = pytest.mark.slow
IMITATED = [level for level in ladder.SCRIPTS if level not in ladder.SHARDED]
BATCH = 16
STEPS = 9
COPIED = "copy from cpu to cuda"
FLAGS = ["--dataset", "synthetic", "--batch-size", str(BATCH), "--train-samples", str(STEPS * BATCH)]
# Without a warm-up the clock waits for the GPU before the first step and after the last one only.
FLAGS += ["--eval-samples", str(2 * BATCH), "--warm-up-steps", "0"]


def train(level: str, *flags: str, path: Path | None = None) -> tuple[Machine, dict]:
    """Train a level from its first line to its last, as a rank or as one process where it is one.

    Returns the machine and the training's result. `path` is of another version of the level.
    """
    module = ladder.load(level, path)
    args = parse_args(module.__file__, [*FLAGS, "--device", "cuda", *flags])
    imitated = imitated_rank if ladder.runs_on_ranks(level) else imitated_process
    with imitated() as machine:
        result = module.train(fit_to_machine(args))
        assert not torch.distributed.is_initialized(), "a rank leaves its group at the end"
    return machine, result


def waits_of_steps(level: str, *flags: str, path: Path | None = None) -> list[list[str]]:
    """The waits of each step but the first one, which the preparation precedes; the evaluation follows the last one."""
    machine, _ = train(level, *flags, path=path)
    return machine.waits[1:-1]


def slow_but(*quick: str) -> list:
    return [pytest.param(level, marks=[] if level in quick else SLOW) for level in IMITATED]


@pytest.mark.parametrize("data", [[], pytest.param(["--data", "device"], marks=SLOW)], ids=["host", "device"])
@pytest.mark.parametrize("level", slow_but("00_single_gpu", "02_ddp_raw", "03_accelerate"))
def test_a_step_waits_for_nothing(level, data):
    assert waits_of_steps(level, *data) == [[]] * (STEPS - 1)


def test_imitated_gpus_compute_what_the_cpu_computes():
    _, result = train("00_single_gpu", "--dtype", "float64")
    on_cpu, _ = run_level("00_single_gpu", [*FLAGS, "--device", "cpu", "--dtype", "float64"])
    for key in ("loss", "eval_loss", "accuracy"):
        assert result[key] == pytest.approx(on_cpu[key], abs=1e-9)


def test_a_rank_of_level_02_uses_nccl_and_measures_its_own_gpu():
    machine, result = train("02_ddp_raw", "--max-steps", "2")
    assert machine.backend == "nccl"
    assert machine.collectives
    assert result["peak_memory_bytes"] == [machine.peaks[OWN_GPU.index]] * WORLD_SIZE
    waits_of_clock = [step.count("synchronize") for step in machine.waits]
    assert waits_of_clock == [1, 0, 1], "it starts before the first step, and stops after the last one"


def test_each_gpu_of_data_parallel_has_a_peak_of_its_own():
    machine, result = train("01_data_parallel", "--max-steps", "2")
    assert result["peak_memory_bytes"] == [machine.peaks[gpu] for gpu in range(GPUS)]


def waits_of_evaluation(level: str, batches: int, path: Path | None = None) -> int:
    """The number of waits after the last step, but for those for the results of each batch."""
    machine, _ = train(level, "--max-steps", "2", "--data", "device", "--eval-samples", str(batches * BATCH), path=path)
    return len([wait for wait in machine.waits[-1] if wait != ARRIVED])


@pytest.mark.parametrize("level", slow_but("04_trainer"))
def test_a_longer_evaluation_waits_for_its_batches_only(level):
    assert waits_of_evaluation(level, batches=2) == waits_of_evaluation(level, batches=4)


# The tests below put a bug in the place of some code: the tests above must not miss it.
@pytest.mark.parametrize(
    "code, bug, error",
    [
        pytest.param("(), dtype=torch.float64, device=device", "()", "writes a tensor", id="losses summed on the CPU"),
        pytest.param("torch.cuda.set_device(device)", "pass", "before set_device", id="no GPU is chosen"),
        pytest.param("set_device(device)", "set_device('cpu')", "set_device names cpu", id="the CPU is chosen"),
        pytest.param('environ["LOCAL_RANK"]', 'environ["RANK"]', "set_device names cuda:5", id="the rank names a GPU"),
        pytest.param("all_reduce(totals)", "all_reduce(totals.cpu())", "tensor on the CPU", id="sums on the CPU"),
        pytest.param("build_model(args).to(device)", "build_model(args)", "cpu and cuda:1", id="a model on the CPU"),
        pytest.param("    with m", "    dist.barrier()\n    with m", "device_ids None", id="a barrier without a GPU"),
    ],
)
def test_what_is_not_on_the_own_gpu_is_found(code, bug, error, tmp_path):
    assert ladder.script("02_ddp_raw").read_text().count(code) == 1, "a single bug"
    path = changed_script("02_ddp_raw", tmp_path, code, bug)
    with pytest.raises(Misplaced, match=error):
        train("02_ddp_raw", path=path)


@pytest.mark.parametrize(
    "code, bug, data, waits",
    [
        pytest.param("loss.detach()", "loss.item()", "device", [READ], id="a loss is read"),
        pytest.param("loss.detach()", "targets[targets > 5].sum()", "device", [LENGTH], id="a mask is an index"),
        pytest.param("train_set.device.type != device.type", "False", "host", [COPIED] * 2, id="a batch is not pinned"),
    ],
)
def test_a_wait_in_the_loop_is_found(code, bug, data, waits, tmp_path):
    path = changed_script("00_single_gpu", tmp_path, code, bug)
    assert waits_of_steps("00_single_gpu", "--data", data, path=path) == [waits] * (STEPS - 1)


def test_a_wait_in_the_evaluation_is_found(tmp_path):
    code = '"sum")\n'
    assert ladder.script("00_single_gpu").read_text().count(code) == 1, "a single bug"
    path = changed_script("00_single_gpu", tmp_path, code, '"sum").item()\n')
    assert waits_of_evaluation("00_single_gpu", 4, path) == waits_of_evaluation("00_single_gpu", 2, path) + 2
