"""Every level on a rank of eight GPUs: its tensors lie on the rank's own GPU, and what a step waits for is known."""

from pathlib import Path
from unittest import mock

import pytest
import torch

from common import ladder
from common.args import parse_args
from common.data import loading
from common.data.synthetic import draw_cache, read_synthetic
from common.start import fit_to_machine
from tests.gpu.machine import GPUS, IMITATING, Machine, imitated_rank, peak_of
from tests.gpu.watch import READ, Misplaced
from tests.levels import changed

pytestmark = IMITATING
SLOW = pytest.mark.slow
IMITATED = [level for level in ladder.SCRIPTS if level not in ladder.SHARDED]
BATCH = 16
WARM_UP_STEPS = 4
STEPS = 9
FLAGS = ["--device", "cuda", "--dataset", "synthetic", "--batch-size", str(BATCH)]
FLAGS += ["--train-samples", str(STEPS * BATCH), "--eval-samples", str(2 * BATCH)]
FLAGS += ["--warm-up-steps", str(WARM_UP_STEPS)]


def is_distributed(level: str) -> bool:
    return ladder.level_of(level) in ladder.DISTRIBUTED


def train(level: str, *flags: str, rank: int = 3, nodes: int = 1, path: Path | None = None) -> Machine:
    """Train a level from its first line to its last on a rank of eight, or as one process where it is one.

    `path` is of another version of the level.
    """
    world_size = GPUS
    if not is_distributed(level):
        rank = 0
        world_size = 1
    module = ladder.load(level, path)
    args = parse_args(module.__file__, [*FLAGS, *flags])
    draw_cache()
    sets = read_synthetic()  # before the imitation begins, in which no tensor has values
    with (
        mock.patch.object(loading, "read_synthetic", lambda: sets),
        imitated_rank(rank, world_size, nodes) as machine,
    ):
        machine.result = module.train(fit_to_machine(args))
        assert not torch.distributed.is_initialized()  # a rank leaves its group at the end
    return machine


def waits_of_steps(machine: Machine) -> list[list[str]]:
    """The waits of each step after the first, but for the clock's."""
    waits = machine.watch.waits
    # At the end of the warm-up the clock stops and starts again. Each time it waits until the GPU has done its work.
    assert waits[WARM_UP_STEPS].count("synchronize") == 2
    waits[WARM_UP_STEPS] = [wait for wait in waits[WARM_UP_STEPS] if wait != "synchronize"]
    return waits[1:-1]


def slow_but(*quick: str) -> list:
    return [pytest.param(level, marks=[] if level in quick else SLOW) for level in IMITATED]


@pytest.mark.parametrize("level", slow_but("00_single_gpu", "02_ddp_raw"))
def test_a_step_waits_for_nothing(level):
    machine = train(level)
    assert waits_of_steps(machine) == [[]] * (STEPS - 1)
    if is_distributed(level):
        assert machine.backend == "nccl"
        assert machine.watch.collectives
        assert machine.calls["reset_peak_memory_stats"] == [3]
        assert machine.result["peak_memory_bytes"] == [peak_of(3)] * GPUS


@SLOW
@pytest.mark.parametrize("level", IMITATED)
def test_with_the_data_on_the_gpu_a_step_waits_for_nothing(level):
    assert waits_of_steps(train(level, "--data", "device")) == [[]] * (STEPS - 1)


@SLOW
@pytest.mark.parametrize("level", [*ladder.DISTRIBUTED, *ladder.WITH_CHECKPOINTS])
def test_the_local_rank_names_the_gpu(level):
    machine = train(level, "--data", "device", rank=5, nodes=2)  # the second one of four on the second node
    assert machine.calls["set_device"] == [1]
    assert machine.calls["max_memory_allocated"] == [1]


def test_each_gpu_of_data_parallel_has_a_peak_of_its_own():
    machine = train("01_data_parallel", "--max-steps", "2")
    assert machine.result["peak_memory_bytes"] == [peak_of(gpu) for gpu in range(GPUS)]
    assert machine.calls["reset_peak_memory_stats"] == list(range(GPUS))


@pytest.mark.parametrize("level", slow_but("04_trainer"))
def test_a_longer_evaluation_waits_for_its_batches_only(level):
    counts = []
    for batches in (2, 4):
        machine = train(level, "--max-steps", "2", "--data", "device", "--eval-samples", str(batches * BATCH))
        counts.append(len(machine.watch.waits[-1]))
    few, many = counts
    assert few == many


# Planted bugs: what the tests above must not miss.


@pytest.mark.parametrize(
    "old, new, error",
    [
        ("torch.cuda.set_device(device)", "pass", "before set_device"),
        ("dist.all_reduce(totals)", "dist.all_reduce(totals.cpu())", "of a tensor on the CPU"),
        ("loss = F.nll_loss(model(images)", 'loss = F.nll_loss(model(images.to("cuda:0"))', "on cuda:0"),
        ("    with measured", "    dist.barrier()\n    with measured", "device_ids None"),
    ],
)
def test_a_bug_of_level_02_on_gpus_is_found(old, new, error, tmp_path):
    path = changed("02_ddp_raw", tmp_path, old, new)
    with pytest.raises(Misplaced, match=error):
        train("02_ddp_raw", path=path)


def test_a_loss_that_is_read_in_the_loop_is_found(tmp_path):
    path = changed("00_single_gpu", tmp_path, "train_loss += loss.detach()", "train_loss += loss.item()")
    waits = waits_of_steps(train("00_single_gpu", "--data", "device", path=path))
    assert waits == [[READ]] * (STEPS - 1)


def test_a_batch_for_which_a_step_waits_is_found(tmp_path):
    path = changed("00_single_gpu", tmp_path, "train_set.device.type != device.type", "False")
    waits = waits_of_steps(train("00_single_gpu", path=path))
    assert waits == [["copy from cpu to cuda, not pinned"] * 2] * (STEPS - 1)
