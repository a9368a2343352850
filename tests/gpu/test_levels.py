"""Every rung on a rank of eight GPUs: its tensors lie on the rank's own GPU, and no step waits for it."""

import contextlib
from pathlib import Path
from unittest import mock

import pytest
import torch
from common.run.metrics import demand_finite_weights
from torch import nn

from common import ladder
from common.accelerator import Accelerator, PartialState
from common.errors import UserError
from common.process_group import abort_on_error, process_group
from tests.gpu.levels import BATCH, STEPS, train_on_rank
from tests.gpu.machine import GPUS, Machine, Misplaced, Wait, imitated_rank

SLOW = pytest.mark.slow


def is_of_the_meter(wait: Wait) -> bool:
    """Whether the clock is about to be read at the end of the warm-up: a measurement, and no part of a step."""
    return wait.step == 10 and wait.operation == "synchronize" and wait.place.startswith("common/run/")


def waits_of_steps(machine: Machine) -> list[Wait]:
    """What the steps wait for, the meter's one wait left out, which must be there."""
    waits = machine.waits_within_steps()
    assert sum(map(is_of_the_meter, waits)) == 1
    return [wait for wait in waits if not is_of_the_meter(wait)]


def ranks_of(rung: str) -> list[int]:
    return [0, 3] if ladder.level_of(rung) in ladder.DISTRIBUTED else [0]


def all_cases() -> list:
    cases = []
    for rung in ladder.rungs():
        for rank in ranks_of(rung):
            quick = (rung, rank) == ("02_ddp_raw", 3)
            cases.append(pytest.param(rung, rank, marks=() if quick else SLOW))
    return cases


def world_size_of(rung: str) -> int:
    return GPUS if ladder.level_of(rung) in ladder.DISTRIBUTED else 1


@pytest.mark.parametrize("rung, rank", all_cases())
def test_a_rank_uses_its_own_gpu_and_no_step_waits_for_it(rung, rank):
    machine = train_on_rank(rung, rank, world_size_of(rung))
    assert waits_of_steps(machine) == []
    assert machine.watch.operations
    if machine.world_size > 1:
        assert machine.backend == "nccl"
        assert machine.named == rank
        assert machine.watch.collectives
        assert machine.peaks == [("reset_peak_memory_stats", rank), ("max_memory_allocated", rank)]
        assert machine.endings == ["destroyed"]


@SLOW
@pytest.mark.parametrize("rung", ladder.DISTRIBUTED)
def test_on_a_second_node_it_is_the_local_rank_that_names_the_gpu(rung):
    machine = train_on_rank(rung, rank=5, gpus=4, nodes=2)
    assert machine.named == 1
    assert waits_of_steps(machine) == []


@SLOW
@pytest.mark.parametrize("rung", ladder.with_checkpoints())
@pytest.mark.parametrize("precision, waits_per_step", [("bf16", 0), ("fp16", 1)])
def test_in_mixed_precision_only_fp16_waits_once_a_step(rung, precision, waits_per_step):
    machine = train_on_rank(rung, 3, flags=("--mixed-precision", precision, "--gradient-accumulation-steps", "2"))
    steps = machine.watch.steps
    waits = waits_of_steps(machine)
    assert len(waits) == waits_per_step * (steps - 1)
    # GradScaler.step reads from the GPU whether a gradient was not finite, before it lets the optimizer step.
    assert {wait.operation for wait in waits} <= {"aten._local_scalar_dense.default"}


@SLOW
@pytest.mark.parametrize("rung", ladder.rungs())
def test_data_on_the_gpu_are_chosen_without_waiting(rung):
    machine = train_on_rank(rung, 3 if world_size_of(rung) > 1 else 0, world_size_of(rung), ("--data", "device"))
    assert waits_of_steps(machine) == []


@SLOW
def test_ranks_tell_each_other_of_signals_without_waiting(tmp_path):
    flags = ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "1000")
    # The last step's checkpoint would have no values to write.
    with mock.patch.object(Accelerator, "save_state"):
        machine = train_on_rank("03_accelerate/train_full", 3, flags=flags, integers=0)  # no signal
    assert waits_of_steps(machine) == []
    exchanges = [name for name in machine.watch.collectives if name == "c10d.allreduce_.default"]
    assert len(exchanges) > 2


def test_all_weights_are_asked_about_at_once():
    with imitated_rank() as machine:
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)).to("cuda")
        machine.watch.waits.clear()
        demand_finite_weights(model, step=1)
    assert [wait.operation for wait in machine.watch.waits] == ["aten._local_scalar_dense.default"]


EVALUATED = [pytest.param(rung, marks=() if rung == "04_trainer" else SLOW) for rung in ladder.rungs()]


@pytest.mark.parametrize("rung", EVALUATED)
def test_a_longer_evaluation_waits_no_more_often(rung):
    counts = []
    for batches in (2, 4):
        machine = train_on_rank(
            rung,
            3 if world_size_of(rung) > 1 else 0,
            world_size_of(rung),
            flags=("--max-steps", "2"),
            eval_samples=batches * BATCH,
        )
        counts.append(len(machine.watch.waits))
    few, many = counts
    assert few == many


# Planted bugs: what the tests above must not miss.


def planted(rung: str, folder: Path, *changes: tuple[str, str]) -> Path:
    """The rung with these changes of its text, in a folder of its level's name."""
    source = ladder.script(rung).read_text()
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    path = folder / ladder.level_of(rung) / "train.py"
    path.parent.mkdir()
    path.write_text(source)
    return path


SET_DEVICE = ("        torch.cuda.set_device(device)\n", "")
IMAGES = (
    "        for images, targets in run.batches(train_loader):\n            images = images.to({}, non_blocking=True)"
)


@SLOW
def test_a_trainer_that_clips_and_schedules_waits_in_no_step_before_it_logs(tmp_path):
    defaults = (
        ("max_grad_norm=0,", "max_grad_norm=1.0,"),
        ('lr_scheduler_type="constant",', 'lr_scheduler_type="linear",'),
        ('logging_strategy="epoch",', f'logging_strategy="steps", logging_steps={STEPS},'),
    )
    machine = train_on_rank("04_trainer", 3, path=planted("04_trainer", tmp_path, *defaults))
    assert waits_of_steps(machine) == []
    assert any("linalg_vector_norm" in name for name in machine.watch.operations)


def test_level_02_without_set_device_is_found(tmp_path):
    path = planted("02_ddp_raw", tmp_path, SET_DEVICE)
    with pytest.raises(Misplaced, match="before set_device"):
        train_on_rank("02_ddp_raw", 3, path=path)


def test_all_gather_object_before_set_device_is_found(tmp_path):
    checked = "    check_same_dataset(found)"
    late = (checked, f"    torch.cuda.set_device(device)\n{checked}")
    path = planted("02_ddp_raw", tmp_path, SET_DEVICE, late)
    with pytest.raises(Misplaced, match="all_gather_object before set_device"):
        train_on_rank("02_ddp_raw", 3, path=path)


@pytest.mark.parametrize("rung", ["03_accelerate", "04_trainer"])
def test_a_core_without_set_device_is_found(rung):
    with mock.patch.object(Machine, "set_device", lambda machine, device: None), pytest.raises(Misplaced):
        train_on_rank(rung, 3)


def test_a_batch_on_the_first_gpu_is_found_on_rank_3(tmp_path):
    path = planted("02_ddp_raw", tmp_path, (IMAGES.format("device"), IMAGES.format('"cuda:0"')))
    with pytest.raises(Exception, match=r"cuda:[03].*cuda:[03]"):
        train_on_rank("02_ddp_raw", 3, path=path)


def test_a_peak_that_is_reset_on_another_gpu_is_found(tmp_path):
    loop = "    for epoch in run.epochs():"
    path = planted("02_ddp_raw", tmp_path, (loop, f"    torch.cuda.reset_peak_memory_stats(0)\n{loop}"))
    with pytest.raises(Misplaced, match="rank 3, on cuda:3, calls reset_peak_memory_stats of cuda:0"):
        train_on_rank("02_ddp_raw", 3, path=path)


@SLOW
def test_a_collective_with_a_tensor_of_the_cpu_is_found(tmp_path):
    path = planted("02_ddp_raw", tmp_path, ("dist.all_reduce(totals)", "dist.all_reduce(totals.cpu())"))
    with pytest.raises(Misplaced, match="of a tensor on cpu"):
        train_on_rank("02_ddp_raw", 3, path=path)


@pytest.mark.parametrize("rung", ["00_single_gpu", pytest.param("02_ddp_raw", marks=SLOW)])
def test_a_loader_whose_batches_are_not_pinned_is_found_twice_a_step(rung, tmp_path):
    path = planted(rung, tmp_path, ("pinned = train_set.device.type != device.type", "pinned = False"))
    machine = train_on_rank(rung, 0, world_size_of(rung), ("--max-steps", "3"), path)
    assert [wait.operation for wait in machine.waits_within_steps()] == ["copy from cpu to cuda, not pinned"] * 4


@pytest.mark.parametrize("rung", ["00_single_gpu", pytest.param("03_accelerate", marks=SLOW)])
def test_a_loss_that_is_read_in_the_loop_is_found(rung, tmp_path):
    path = planted(rung, tmp_path, ("            run.count(loss)", "            run.count(loss), loss.item()"))
    machine = train_on_rank(rung, 0, world_size_of(rung), ("--max-steps", "3"), path)
    assert [wait.operation for wait in machine.waits_within_steps()] == ["aten._local_scalar_dense.default"] * 2


@SLOW
def test_a_deferred_read_into_memory_that_is_not_pinned_is_found():
    empty_like = torch.empty_like

    def unpinned(tensor, *args, pin_memory=False, **kwargs):
        return empty_like(tensor, *args, **kwargs)

    @contextlib.contextmanager
    def change(module):
        with mock.patch.object(torch, "empty_like", unpinned):
            yield

    machine = train_on_rank("00_single_gpu", 0, 1, change=change)
    assert [wait for wait in machine.waits_within_steps() if "not pinned" in wait.operation]


def test_memory_that_is_read_before_the_copy_has_arrived_is_found():
    with imitated_rank() as machine:
        on_gpu = torch.ones(3, device="cuda")
        copy = on_gpu.to("cpu", non_blocking=True)
        with pytest.raises(Misplaced, match="before a copy from the GPU has arrived"):
            copy.tolist()
        event = torch.cuda.current_stream().record_event()
        on_gpu += 1  # the GPU has something to do while the CPU waits
        machine.watch.waits.clear()
        event.synchronize()
        assert copy.tolist() == [1, 1, 1]
    assert machine.watch.waits == []


class Broken(Exception):
    """What goes wrong on one rank."""


def breaking(module):
    """A context in which the rung's training raises after the group was made."""

    def raises(*args, **kwargs):
        raise Broken

    return mock.patch.object(module, "LadderCallback" if hasattr(module, "LadderCallback") else "Run", raises)


RUNGS_WITH_GROUPS = [rung for rung in ladder.rungs() if world_size_of(rung) > 1]
BREAKING = [pytest.param(rung, marks=SLOW if rung == ladder.FULL else ()) for rung in RUNGS_WITH_GROUPS]


@pytest.mark.parametrize("rung", BREAKING)
def test_a_rank_that_raises_waits_for_no_other_rank(rung):
    """nccl's `destroy_process_group` would wait until the other ranks come to it, which wait for this one."""
    endings = []

    @contextlib.contextmanager
    def change(module):
        keep = Machine.abort_process_group, Machine.destroy_process_group

        def abort(machine, group=None):
            endings.append("aborted")
            keep[0](machine, group)

        def destroy(machine, group=None):
            endings.append("destroyed")
            keep[1](machine, group)

        with (
            breaking(module),
            mock.patch.object(Machine, "abort_process_group", abort),
            mock.patch.object(Machine, "destroy_process_group", destroy),
        ):
            yield

    with pytest.raises(Broken):
        train_on_rank(rung, 3, change=change)
    assert endings == ["aborted"]


def test_after_a_preemption_on_which_all_ranks_agreed_the_group_is_destroyed():
    with imitated_rank(3, GPUS) as machine:
        PartialState()
        with pytest.raises(SystemExit), abort_on_error():
            raise SystemExit(143)
        assert machine.endings == ["destroyed"]


@pytest.mark.parametrize("error, endings", [(Broken, ["aborted"]), (UserError, ["aborted"])])
def test_after_an_error_the_group_of_a_pool_is_aborted(error, endings):
    with imitated_rank(3, GPUS) as machine:
        with pytest.raises(error), process_group("nccl"):
            raise error("a reason")
        assert machine.endings == endings


@pytest.mark.parametrize("rung", ladder.DISTRIBUTED)
def test_ranks_compare_the_backends_of_their_nodes_before_they_wait_for_each_other(rung):
    """A node with too few GPUs chooses gloo, and would wait for ever for ranks that wait in nccl."""

    def differ(store, rank, world_size, timeout, backend):
        raise ValueError(f"this node chose {backend}")

    with mock.patch.object(Machine, "meet", staticmethod(differ)), pytest.raises(ValueError, match="chose nccl"):
        train_on_rank(rung, 3)
    with mock.patch.object(Machine, "meet", staticmethod(differ)), pytest.raises(ValueError, match="chose gloo"):
        train_on_rank(rung, 3, gpus=4)
