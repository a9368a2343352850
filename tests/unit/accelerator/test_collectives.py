"""Collectives of nested structures: what accelerate's give, and what comes where those fail."""

import importlib
import itertools
from typing import NamedTuple

import pytest
import torch

from common.accelerator import PartialState, exchange, metrics, operations, remote_errors
from common.accelerator.utils import broadcast, gather, listify, pad_across_processes, reduce
from common.accelerator.utils.operations import DistributedOperationException
from common.processes import ranks
from tests.peers import import_or_skip
from tests.states import OURS, THEIRS, on_a_rank
from tests.unit.accelerator.plain import Point, plain
from tests.unit.accelerator.several_processes import on_ranks


@on_a_rank
def run_collectives(library):
    """The results of one collective after the other, by name, on `library`."""
    operations = importlib.import_module(f"{library}.utils.operations")
    accelerator = importlib.import_module(library).Accelerator(cpu=True)
    rank = accelerator.process_index
    rows = torch.arange(4.0).view(2, 2) + 10 * rank
    ragged = torch.full((2, rank + 1), rank)
    results = {
        "gather": operations.gather({"x": rows, "y": (torch.tensor(rank), [torch.tensor([True])])}),
        "gather transposed": operations.gather(rows.bfloat16().T),
        "gather empty": operations.gather(torch.ones(0, 2)),
        "gather no columns": operations.gather(torch.ones(2, 0)),
        "gather a column of one row": operations.gather(rows[:1, 1]),
        "gather columns of one row": operations.gather([rows[:1, 1], rows[:1, 0]]),
        "gather with gradient": operations.gather(rows.clone().requires_grad_()),
        "gather_object": operations.gather_object([rank, {"rank": rank}]),
        "broadcast": operations.broadcast([rows.clone(), Point(torch.tensor(rank), torch.ones(1))], from_process=1),
        "broadcast transposed": operations.broadcast(rows.clone().T, from_process=1),
        "broadcast_object_list": operations.broadcast_object_list([rank, "x"], from_process=1),
        "pad": operations.pad_across_processes({"x": ragged}, dim=1, pad_index=9),
        "pad first": operations.pad_across_processes(ragged.float(), dim=-1, pad_index=0.5, pad_first=True),
        "pad no such dimension": operations.pad_across_processes(torch.tensor(3), dim=0),
    }
    for reduction in ("sum", "mean", "max"):
        results[f"reduce {reduction}"] = operations.reduce([rows, {"half": rows.half()}], reduction, scale=3.0)
    with accelerator.split_between_processes(torch.arange(3), apply_padding=True) as share:
        results["split"] = share
    return {name: plain(result) for name, result in results.items()}


def test_collectives_give_what_accelerates_give():
    import_or_skip("accelerate")
    ours = ranks(2).run(run_collectives, OURS)
    theirs = ranks(2).run(run_collectives, THEIRS)
    assert ours == theirs
    assert ours[0]["gather"] == ours[1]["gather"] and ours[0]["pad"] != ours[1]["pad"]


def pad_integers_with_a_fraction(accelerator):
    ragged = torch.ones(accelerator.process_index + 1, dtype=torch.int64)
    return operations.pad_across_processes(ragged, pad_index=-1.0).tolist()


def test_padding_keeps_the_dtype():
    """On accelerate the process that is padded has floats then, and the other one integers."""
    padded, longest = on_ranks(2, pad_integers_with_a_fraction)
    assert (padded, longest) == ([1, -1], [1, 1]) and isinstance(padded[0], int)


def move_numbers(accelerator, dtype):
    """Rows and a number, gathered, and the number that rank 1 broadcasts."""
    rows = torch.tensor([[1.0, 2.0], [3.0, accelerator.process_index]]).to(dtype)
    moved = gather({"rows": rows, "number": rows[1, 1]})
    moved["of rank 1"] = broadcast(rows[1, 1].clone(), from_process=1)
    assert all(tensor.dtype == dtype for tensor in moved.values())
    return {name: tensor.float().tolist() for name, tensor in moved.items()}


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, torch.float8_e4m3fn])
def test_dtypes_that_gloo_does_not_know_are_moved_as_bytes(dtype):
    """On accelerate that ends in "Invalid scalar type"."""
    for moved in on_ranks(2, move_numbers, dtype):
        assert moved == {"rows": [[1, 2], [3, 0], [1, 2], [3, 1]], "number": [0, 1], "of rank 1": 1}


def reduce_integers(accelerator):
    """A mean of integers whose sum has more bits than they, and a tensor that is not reduced."""
    rank = accelerator.process_index
    mean = accelerator.reduce(torch.tensor([127, rank], dtype=torch.int8), "mean")
    unchanged = accelerator.reduce(torch.tensor([rank]), "none")
    return {"mean": mean.tolist(), "not reduced": unchanged.tolist()}


def test_integers_have_a_mean_and_none_changes_nothing():
    """On accelerate the first is an error, the second a sum."""
    for rank, reduced in enumerate(on_ranks(2, reduce_integers)):
        assert reduced == {"mean": [127.0, 0.5], "not reduced": [rank]}


def reduce_in_two_layouts(accelerator):
    square = torch.tensor([[1, 2], [3, 4]])
    return accelerator.reduce(square if accelerator.is_main_process else square.T.contiguous().T).tolist()


def test_reduce_adds_up_the_places_of_a_tensor_that_lies_transposed_on_one_rank():
    assert on_ranks(2, reduce_in_two_layouts) == [[[2, 4], [6, 8]]] * 2


def broadcast_views(accelerator):
    """The rows into whose second column rank 1's has come, and the conjugate of a number that rank 1 sends."""
    rank = accelerator.process_index
    rows = torch.tensor([[1, 2], [3, 4]]) + 10 * rank
    column = broadcast(rows[:, 1], from_process=1)
    assert column.tolist() == [12, 14]
    conjugate = broadcast(torch.tensor([rank + 1j]).conj(), from_process=1)
    return {"rows": rows.tolist(), "conjugate": conjugate.tolist()}


def test_broadcast_writes_into_the_memory_of_a_view():
    """On accelerate other numbers arrive in a column."""
    one, two = on_ranks(2, broadcast_views)
    assert one == {"rows": [[1, 12], [3, 14]], "conjugate": [1 - 1j]}
    assert two == {"rows": [[11, 12], [13, 14]], "conjugate": [1 - 1j]}


def in_order_of_rank(rank, **values):
    return dict(sorted(values.items(), reverse=rank == 1))


def exchange_in_another_order(accelerator):
    rank = accelerator.process_index
    numbers = in_order_of_rank(rank, a=torch.tensor([rank]), b=torch.tensor([rank + 10.0]))
    texts = in_order_of_rank(rank, a=[f"a{rank}"], b=torch.tensor([rank]))
    uneven = in_order_of_rank(rank, a=torch.ones(1 + rank, dtype=torch.bool), b=torch.ones(3))
    return {
        "gather": listify(gather(numbers)),
        "gather by rank": listify(gather({1 - rank: torch.tensor([1 - rank]), rank: torch.tensor([rank])})),
        "gather_for_metrics": listify(accelerator.gather_for_metrics(texts)),
        "reduce": listify(reduce(numbers, "sum")),
        "broadcast": listify(broadcast(numbers, from_process=1)),
        "pad": listify(gather(pad_across_processes(uneven))),
    }


def test_each_value_arrives_under_its_own_key_whatever_the_order_of_keys():
    for results in on_ranks(2, exchange_in_another_order):
        assert results == {
            "gather": {"a": [0, 1], "b": [10, 11]},
            "gather by rank": {0: [0, 0], 1: [1, 1]},
            "gather_for_metrics": {"a": ["a0", "a1"], "b": [0, 1]},
            "reduce": {"a": [1], "b": [21]},
            "broadcast": {"a": [1], "b": [11]},
            "pad": {"a": [True, False, True, True], "b": [1.0] * 6},
        }


def broadcast_a_longer_list(accelerator):
    return operations.broadcast_object_list(["of 0", "only"] if accelerator.is_main_process else ["of 1"])


def test_a_list_of_objects_arrives_whole_in_a_shorter_one():
    assert on_ranks(2, broadcast_a_longer_list) == [["of 0", "only"]] * 2


ONE = torch.ones(1)
# The values of rank 0, and of all others.
DIFFERENT = {
    "shape": (torch.ones(2), torch.ones(3)),
    "transposed": (torch.ones(2, 3), torch.ones(3, 2)),
    "dtype": (torch.ones(2), torch.ones(2, dtype=torch.float64)),
    "nothing": (torch.ones(0, 4), torch.ones(2, 4)),
    "count": ([ONE], [ONE, ONE]),
    "keys": ({"a": ONE}, {"b": ONE}),
    "kind": (ONE, "text"),
    "large": (torch.ones(9999), torch.ones(10000)),
    "sparse": (torch.eye(2), torch.eye(2).to_sparse()),
    "sparse shape": (torch.eye(2).to_sparse(), torch.eye(3).to_sparse()),
    "empty": ([], [ONE]),
}
COLLECTIVES = [gather, metrics.gather_for_metrics, reduce, broadcast, pad_across_processes]
CAN_BE_PADDED = {"shape", "transposed", "dtype", "nothing", "large", "sparse", "sparse shape"}


class Refusal(NamedTuple):
    collective: str
    difference: str
    message: str
    gathered_next: list[int]


def refusal(rank, collective, difference, value):
    with pytest.raises(DistributedOperationException) as raised:
        collective(value)
    return Refusal(collective.__name__, difference, str(raised.value), gather(torch.tensor([rank])).tolist())


def enter_with_differences(accelerator):
    rank = accelerator.process_index
    rows = [
        refusal(rank, collective, difference, first if rank == 0 else other)
        for collective, (difference, (first, other)) in itertools.product(COLLECTIVES, DIFFERENT.items())
        if not (collective is pad_across_processes and difference in CAN_BE_PADDED)
    ]
    in_two_collectives = refusal(rank, reduce if rank == 0 else gather, "collective", ONE)
    return [*rows, in_two_collectives._replace(collective="reduce and gather")]


@pytest.mark.parametrize("world", [2, 3])
def test_collectives_refuse_differences_between_ranks_with_one_message_on_all_and_work_on(world):
    rows, *others = on_ranks(world, enter_with_differences)
    assert others == [rows] * (world - 1)
    for row in rows:
        assert "rank 0: " in row.message and "rank 1: " in row.message
        assert "pad_across_processes" in row.message and "use_gather_object" in row.message
        assert row.gathered_next == list(range(world))
    messages = {(row.collective, row.difference): row.message for row in rows}
    assert "rank 0: tensor [2] torch.float32\n  - rank 1: tensor [3] torch.float32" in messages["reduce", "shape"]
    assert "rank 0: ['a'] [1] torch.float32\n  - rank 1: ['b'] [1]" in messages["gather", "keys"]


class NotForSending:
    def __reduce__(self):
        raise ValueError("not for sending")


def send_what_cannot_be_sent(accelerator):
    with pytest.raises(RuntimeError, match="rank 1 cannot pickle what it has to send"):
        operations.gather_object([1 if accelerator.is_main_process else lambda: 1])
    with pytest.raises(RuntimeError, match="rank 0 cannot pickle what it has to send: not for sending"):
        operations.gather_object([NotForSending()])
    with pytest.raises(RuntimeError, match="rank 0 cannot pickle what it has to send"):
        operations.broadcast_object_list([NotForSending()])
    for collective in (gather, broadcast):
        with pytest.raises(TypeError, match="sparse, nested and quantized tensors can be neither gathered nor broad"):
            collective([ONE, ONE.to_sparse()])


def test_collectives_refuse_what_cannot_be_pickled_or_is_sparse_on_all_ranks():
    on_ranks(2, send_what_cannot_be_sent)


ROOM = exchange.ROOM_FOR_CONTENT


def gather_bytes(accelerator, size):
    """Gathers so many bytes of each rank beside a number and nothing, and as long a text of rank 1."""
    numbers = torch.arange(size, dtype=torch.uint8)
    gathered, sizes, nothing = gather([numbers, torch.tensor(size), torch.empty(0, 2)])
    assert torch.equal(gathered, numbers.repeat(2))
    assert sizes.tolist() == [size, size] and nothing.shape == (0, 2)
    assert gather([]) == []
    assert operations.gather_object(["x" * size * accelerator.process_index]) == ["", "x" * size]


@pytest.mark.parametrize("size", [0, 1, ROOM - 1, ROOM, ROOM + 1, 5 * ROOM])
def test_short_and_long_messages_arrive_whole(size):
    on_ranks(2, gather_bytes, size)


def collect_beside_a_default_device(accelerator):
    own = torch.full((1 + accelerator.process_index,), 1.0)
    with torch.device("meta"):  # as `torch.set_default_device`
        padded = accelerator.pad_across_processes(own)
        return {"gathered": accelerator.gather(padded).tolist(), "sum": accelerator.reduce(padded, "sum").tolist()}


def test_the_default_device_changes_no_collective():
    for results in on_ranks(2, collect_beside_a_default_device):
        assert results == {"gathered": [1.0, 0.0, 1.0, 1.0], "sum": [2.0, 1.0]}


def test_an_unknown_reduction_is_refused():
    PartialState(cpu=True)
    with pytest.raises(ValueError, match="reduction must be 'mean', 'sum', 'max' or 'none', not 'median'"):
        reduce(torch.ones(1), "median")


def exit_on_rank_1(accelerator):
    def leave():
        if accelerator.process_index == 1:
            raise SystemExit("the disk is full")

    try:
        remote_errors.run_on_all_ranks(leave)
    except (SystemExit, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def test_run_on_all_ranks_ends_the_others_when_one_exits():
    """They would else wait for it in the next collective."""
    first, exiting = on_ranks(2, exit_on_rank_1, timeout=30)
    assert first == "RemoteError: rank 1: SystemExit: the disk is full"
    assert exiting == "SystemExit: the disk is full"
