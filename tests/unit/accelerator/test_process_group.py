"""Processes meet, and part: one that is missing, fails or starts again leaves nobody waiting and nothing behind."""

import os
import socket
import sys
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from common.accelerator import Accelerator, PartialState
from common.accelerator.rendezvous import join_attempt
from common.accelerator.utils import InitProcessGroupKwargs
from common.launch import rank_variables
from common.process_group import process_group
from common.processes import RankFailed, ranks
from tests.jobs import run_to_end
from tests.states import on_a_rank
from tests.unit.accelerator.several_processes import on_ranks

OF_TORCHRUN = rank_variables(rank=1, world_size=4, port=1) | {"LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("names", "changes", "message"),
    [
        (["WORLD_SIZE"], {}, "needs RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT too"),
        (["WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR"], {}, "needs MASTER_PORT too"),
        (OF_TORCHRUN, {"RANK": "4"}, "RANK=4 of WORLD_SIZE=4"),
        (OF_TORCHRUN, {"LOCAL_RANK": "3"}, "LOCAL_RANK=3 of 2 "),
    ],
)
def test_a_half_set_environment_says_what_is_missing(names, changes, message, monkeypatch):
    for name in names:
        monkeypatch.setenv(name, (OF_TORCHRUN | changes)[name])
    for _ in range(2):  # and leaves nothing half made behind
        with pytest.raises(ValueError, match=message):
            PartialState(cpu=True)


def test_a_backend_that_cannot_be_had_is_refused(monkeypatch):
    for name, value in OF_TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="assigned backend nccl is not available, please use gloo"):
        PartialState(cpu=True, backend="nccl")


@on_a_rank
def join_on_unequal_nodes():
    """Rank 1 is on a node with a GPU, rank 0 on one without. What the error says, and what is left of the state."""
    rank = int(os.environ["RANK"])
    with (
        mock.patch.object(socket, "gethostname", lambda: f"node-{rank}"),
        mock.patch.object(torch.cuda, "is_available", lambda: rank == 1),
        mock.patch.object(torch.cuda, "device_count", lambda: rank),
        mock.patch.object(torch.cuda, "set_device", lambda device: None),
        pytest.raises(ValueError) as raised,
    ):
        PartialState(timeout=timedelta(seconds=20))
    return str(raised.value), dict(PartialState._shared_state)


def test_nodes_with_different_backends_are_named():
    alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for message, state in ranks(2).run(join_on_unequal_nodes, environment=alone):
        assert "gloo on node-0, nccl on node-1" in message and state == {}


@on_a_rank
def join_late():
    """Rank 0, whose patience is shorter than rank 1's delay, makes the store here, and torch counts who has joined."""
    if os.environ["RANK"] == "1":
        time.sleep(3)
        return
    impatient = InitProcessGroupKwargs(timeout=timedelta(seconds=1))
    with pytest.raises(dist.DistStoreError, match="1/2 clients joined"):
        Accelerator(kwargs_handlers=[impatient], cpu=True)


@pytest.mark.slow
def test_rank_0_waits_no_longer_than_its_timeout():
    ranks(2).run(join_late)


def test_a_rank_that_never_joins_is_named():
    with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2 did not join"):
        join_attempt(dist.HashStore(), rank=0, world_size=2, backend="gloo", timeout=timedelta(seconds=0.1))


def enter_first(accelerator, path):
    with accelerator.main_process_first():
        if accelerator.is_main_process:
            time.sleep(0.5)  # whoever did not wait for it would write before it
        with path.open("a") as file:
            file.write(f"{accelerator.process_index} ")


def test_the_main_process_enters_first(tmp_path):
    on_ranks(2, enter_first, tmp_path / "order")
    assert (tmp_path / "order").read_text() == "0 1 "


def fail_first(accelerator):
    with accelerator.main_process_first():
        if accelerator.is_main_process:
            raise RuntimeError("oops")


def test_an_error_in_the_first_process_reaches_the_others():
    with pytest.raises(RankFailed, match="rank 0: RuntimeError: oops"):
        on_ranks(2, fail_first, timeout=20)


@on_a_rank
def start_again_and_again():
    """The sums of what the ranks put in: in two groups of Accelerators, and in one that the script itself makes."""
    sums = []
    for of_the_script in (False, False, True):
        if of_the_script:
            dist.init_process_group("gloo")
        accelerator = Accelerator(cpu=True)
        sums.append(int(accelerator.reduce(torch.tensor(accelerator.process_index + 1))))
        accelerator.end_training()
        assert not dist.is_initialized() and accelerator.num_processes == 2
    return sums


def test_an_accelerator_after_end_training_joins_a_new_group():
    assert ranks(2).run(start_again_and_again) == [[3, 3, 3]] * 2
    for precision in ("bf16", "no"):  # a process without a group starts afresh too
        Accelerator(cpu=True, mixed_precision=precision).end_training()


HOLDS = pytest.mark.skipif(torch.__version__ < "2.14", reason="older caches of FSDP's mesh cannot be emptied")
LEAVES_A_GROUP = """
import atexit, sys, weakref

atexit.register(lambda: print(group() is not None))  # registered first, it runs last
import torch.distributed as dist
from common.process_group import leave_process_group

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = weakref.ref(dist.group.WORLD)

def train_by_fsdp():
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(torch.nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    model.weight.full_tensor()

if sys.argv[1:]:
    train_by_fsdp()
leave_process_group()
print(group() is not None)
"""


@pytest.mark.parametrize("arguments", [[], pytest.param(["by FSDP"], marks=HOLDS)])
def test_the_group_that_was_left_is_freed_before_the_interpreter_ends(arguments):
    finished = run_to_end([sys.executable, "-c", LEAVES_A_GROUP, *arguments])
    assert finished.stdout.split() == ["True", "False"], finished.stderr


def test_after_an_error_a_group_of_nccl_is_aborted(monkeypatch):
    """Its `destroy_process_group` would wait until the other ranks come to it, which wait for this one."""
    monkeypatch.setattr(dist, "init_process_group", mock.Mock())
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr("common.process_group.get_world_size", lambda: 8)
    abort = mock.Mock()
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", abort)
    with pytest.raises(ArithmeticError), process_group("nccl"):
        raise ArithmeticError
    abort.assert_called_once_with()
