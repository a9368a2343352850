"""The tables of the collectives: what each does, and which a level calls, counted in a training on two ranks."""

import traceback
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from common import ladder
from common.process_group import process_group
from common.processes import ranks
from tests.docs.pages import section, table_rows
from tests.levels import run_level
from tests.states import forget_states

PAGE = "COLLECTIVES.md"
STEPS = 2
EPOCHS = 2
EVALUATION_BATCHES = 3  # Of 32, for the 65 of 130 samples that a rank has.
FLAGS = f"--dataset synthetic --train-samples {64 * STEPS} --eval-samples 130 --epochs {EPOCHS}".split()
TIMES = {"once": 1, "step": STEPS * EPOCHS, "epoch": EPOCHS, "batch": EVALUATION_BATCHES * EPOCHS}
NAMES = {
    "allreduce_": "all-reduce",
    "broadcast_": "broadcast",
    "allgather_": "all-gather",
    "_allgather_base_": "all-gather",
}
# The page says in words that level 04 also does what `prepare` does, and gathers.
NOT_IN_TABLE = {"04_trainer": {"broadcast", "all-gather"}}


class Call(NamedTuple):
    """A collective: the line of the level's script that calls it, its name, and the bytes that this rank puts in."""

    line: str
    collective: str
    size: int


class CallRecorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            collective = NAMES[function._opname]
            size = sum(tensor.nbytes for tensor in tensors_put_in(collective, args))
            line = [frame.line for frame in traceback.extract_stack() if frame.filename.endswith("train.py")][-1]
            self.calls.append(Call(line, collective, size))
        return function(*args, **kwargs or {})


def tensors_put_in(collective: str, args: tuple) -> list[torch.Tensor]:
    """The inputs of this rank. An all-gather has its outputs before them."""
    inputs = args[1] if collective == "all-gather" else args[0]
    return inputs if isinstance(inputs, list) else [inputs]


def recorded_calls(level: str) -> list[Call]:
    forget_states()  # A level has run in this process before.
    with CallRecorder() as recorder:
        run_level(level, FLAGS)
    return recorder.calls


@pytest.mark.parametrize("level", ladder.DISTRIBUTED)
def test_the_table_has_every_collective_and_its_bytes(level):
    unexplained = ranks(2).run(recorded_calls, level)[1]
    for levels, line, collective, often, size in table_rows(section("02_ddp_raw", "Which level calls what", PAGE)):
        if level[:2] not in levels:
            continue
        of_row = [call for call in unexplained if line.strip("`") in call.line and call.collective == collective]
        unexplained = [call for call in unexplained if call not in of_row]
        mean = sum(call.size for call in of_row) / TIMES[often]
        if size == "< 100":
            assert 0 < mean < 100, line
        else:
            assert f"{mean:,.0f}" == size, line
    assert {call.collective for call in unexplained} == NOT_IN_TABLE.get(level, set())


def numbers_after_collectives() -> dict[str, list[float]]:
    """The numbers of this rank after each collective of the table, by its name there."""
    with process_group():
        rank = dist.get_rank()
        own = torch.tensor([1.0 + rank])
        pair = torch.tensor([1.0, 2.0]) + 2 * rank
        broadcast = own.clone()
        dist.broadcast(broadcast, src=0)
        reduced = own.clone()
        dist.all_reduce(reduced)
        gathered = [torch.zeros(1), torch.zeros(1)] if rank == 0 else []
        dist.gather(own, gathered or None, dst=0)
        everywhere = [torch.zeros(1), torch.zeros(1)]
        dist.all_gather(everywhere, own)
        scattered = torch.zeros(1)
        dist.reduce_scatter_tensor(scattered, pair)
        return {
            "broadcast from rank 0": broadcast.tolist(),
            "all-reduce": reduced.tolist(),
            "gather to rank 0": [value.item() for value in gathered],
            "all-gather": [value.item() for value in everywhere],
            "reduce-scatter": scattered.tolist(),
        }


def test_the_collectives_do_what_the_table_says():
    results = ranks(2).run(numbers_after_collectives)
    after = {name: shown for name, _, shown in table_rows(section("02_ddp_raw", "The collectives", PAGE))}
    computed = {name: " and ".join(as_shown(result[name]) for result in results) for name in results[0]}
    assert after == computed | {"barrier": "nothing, but all have arrived"}


def as_shown(values: list[float]) -> str:
    return f"`{' '.join(f'{value:g}' for value in values)}`" if values else "nothing"
