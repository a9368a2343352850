"""The core on one of eight ranks, each with a GPU: what its operations and steps do with tensors of a GPU."""

from collections.abc import Iterator

import pytest
import torch

from common.accelerator import Accelerator, PartialState
from common.accelerator.operations import gather
from common.accelerator.utils import FullyShardedDataParallelPlugin, synchronize_rng_states
from common.trainer import evaluation
from tests.gpu.imitation import imitated_rank
from tests.gpu.machine import ARRIVED, OWN_GPU, READ, WORLD_SIZE


@pytest.fixture
def machine():
    with imitated_rank() as machine:
        PartialState()
        yield machine


def test_tensors_are_gathered_on_the_own_gpu_without_a_wait(machine):
    numbers = torch.arange(2, dtype=torch.int16, device=OWN_GPU)
    fractions = torch.rand(3, device=OWN_GPU)
    gathered = gather((numbers, fractions))
    assert machine.waits == [[]]
    assert [tensor.device for tensor in gathered] == [OWN_GPU, OWN_GPU]
    # In the imitation all ranks send the same.
    assert gathered[0].equal(numbers.repeat(WORLD_SIZE)) and gathered[1].equal(fractions.repeat(WORLD_SIZE))


def test_fsdp_is_refused_where_processes_share_a_gpu(machine):
    PartialState().backend = "gloo"
    with pytest.raises(ValueError, match="FSDP on GPUs needs nccl"):
        Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))


def test_a_barrier_names_the_own_gpu(machine):
    PartialState().wait_for_everyone()
    assert machine.waits == [["barrier"]]


def test_the_state_of_a_gpus_generator_is_sent_from_the_gpu(machine):
    synchronize_rng_states(["cuda"])
    assert machine.collectives == ["c10d.broadcast_.default"]


def test_a_batch_of_an_evaluation_arrives_while_the_gpu_computes_the_next_one(machine):
    waits = machine.waits[-1]

    def results() -> Iterator[torch.Tensor]:
        yield torch.empty(2, device=OWN_GPU)
        assert waits == []
        yield torch.empty(2, device=OWN_GPU)
        assert waits == [ARRIVED]

    evaluation.to_host(results(), OWN_GPU)
    assert waits == [ARRIVED, ARRIVED]


@pytest.mark.parametrize(
    "precision, dtype, waits", [("no", None, []), ("bf16", torch.bfloat16, []), ("fp16", torch.float16, [READ])]
)
def test_a_step_is_autocast_for_gpus_and_waits_in_fp16_only(precision, dtype, waits, machine):
    accelerator = Accelerator(mixed_precision=precision)
    dtypes = set()

    def note_dtype(*_) -> None:
        dtypes.add(torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None)

    net = torch.nn.Sequential(torch.nn.Linear(4, 2))
    net[0].register_forward_pre_hook(note_dtype)
    optimizer = torch.optim.AdamW(net.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    model, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
    for _ in range(6):
        loss = model(torch.ones(3, 4, device=OWN_GPU)).sum()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert dtypes == {dtype}
    assert machine.waits[1:-1] == [waits] * 5
