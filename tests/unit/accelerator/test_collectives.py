"""Collectives of nested structures: what accelerate's give, and what comes where those fail."""

import importlib

import pytest
import torch

from common.accelerator import PartialState, exchange, metrics, operations
from common.accelerator.utils import broadcast, gather, listify, pad_across_processes, reduce
from common.accelerator.utils.operations import DistributedOperationException
from common.processes import ranks
from tests.peers import import_or_skip
from tests.states import OURS, THEIRS, forget_states
from tests.unit.accelerator.plain import Point, plain
from tests.unit.accelerator.several_processes import on_ranks


def collectives(library):
    """The results of one collective after the other, by name, on `library`."""
    operations = importlib.import_module(f"{library}.utils.operations")
    accelerator = importlib.import_module(library).Accelerator(cpu=True)
    rank = accelerator.process_index
    rows = torch.arange(4.0).view(2, 2) + 10 * rank
    ragged = torch.full((2, rank + 1), rank)
    results = {
        "gather": operations.gather({"x": rows, "y": (torch.tensor(rank), [torch.tensor([True])])}),
        "gather transposed": operations.gather(torch.ones(2, 3, dtype=torch.bfloat16).T),
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
    accelerator.end_training()
    forget_states()
    return {name: plain(result) for name, result in results.items()}


def test_collectives_give_what_accelerates_give():
    import_or_skip("accelerate")
    ours = ranks(2).run(collectives, OURS)
    theirs = ranks(2).run(collectives, THEIRS, environment={"OMP_NUM_THREADS": "1"})
    assert ours == theirs
    assert ours[0]["gather"] == ours[1]["gather"] and ours[0]["pad"] != ours[1]["pad"]


def padded_with_a_fraction(accelerator):
    ragged = torch.ones(accelerator.process_index + 1, dtype=torch.int64)
    return operations.pad_across_processes(ragged, pad_index=-1.0).tolist()


def test_padding_keeps_the_dtype():
    """On accelerate the process that is padded has floats then, and the other one integers."""
    padded, longest = on_ranks(2, padded_with_a_fraction)
    assert (padded, longest) == ([1, -1], [1, 1]) and isinstance(padded[0], int)


UNKNOWN_TO_GLOO = [torch.int16, torch.uint16, torch.float8_e4m3fn]


def move_unknown_dtypes(accelerator):
    """The dtype that is gathered, and the numbers that are gathered and broadcast, for each dtype."""
    results = []
    for dtype in UNKNOWN_TO_GLOO:
        rows = torch.tensor([[1.0, 2.0], [3.0, accelerator.process_index]]).to(dtype)
        gathered = gather({"rows": rows, "scalar": rows[1, 1]})
        everywhere = broadcast(rows[1, 1].clone(), from_process=1)
        numbers = [tensor.float().tolist() for tensor in (gathered["rows"], gathered["scalar"], everywhere)]
        results.append((gathered["rows"].dtype, numbers))
    return results


def test_dtypes_that_gloo_does_not_know_are_moved_as_bytes():
    """On accelerate that ends in "Invalid scalar type"."""
    rows = [[1, 2], [3, 0], [1, 2], [3, 1]]
    expected = [(dtype, [rows, [0, 1], 1]) for dtype in UNKNOWN_TO_GLOO]
    assert on_ranks(2, move_unknown_dtypes) == [expected, expected]


def reduce_and_broadcast(accelerator):
    """A mean of integers, no reduction, and the column that rank 1 sends, in the rows that it came into."""
    rank = accelerator.process_index
    rows = torch.tensor([[1, 2], [3, 4]]) + 10 * rank
    column = broadcast(rows[:, 1], from_process=1)
    mean = accelerator.reduce(torch.tensor([1, rank]), "mean")
    unchanged = accelerator.reduce(torch.tensor([rank]), "none")
    conjugate = broadcast(torch.tensor([rank + 1j]).conj(), from_process=1)
    return [each.tolist() for each in (mean, unchanged, column, rows, conjugate)]


def test_integers_have_a_mean_none_changes_nothing_and_a_column_arrives_in_its_place():
    """On accelerate the first is an error, the second a sum, and of a column other numbers arrive."""
    assert on_ranks(2, reduce_and_broadcast) == [
        [[1.0, 0.5], [0], [12, 14], [[1, 12], [3, 14]], [1 - 1j]],
        [[1.0, 0.5], [1], [12, 14], [[11, 12], [13, 14]], [1 - 1j]],
    ]


def names_in_another_order(rank, **values):
    """A dict whose keys came in the other order on rank 1."""
    return dict(sorted(values.items(), reverse=rank == 1))


def exchange_in_another_order(accelerator):
    rank = accelerator.process_index
    mine = names_in_another_order(rank, a=torch.tensor([rank]), b=torch.tensor([rank + 10.0]))
    texts = names_in_another_order(rank, a=[f"a{rank}"], b=torch.tensor([rank]))
    longer = names_in_another_order(rank, a=torch.ones(1 + rank, dtype=torch.bool), b=torch.ones(3))
    return [
        listify(gather(mine)),
        listify(gather({1 - rank: torch.tensor([1 - rank]), rank: torch.tensor([rank])})),
        listify(accelerator.gather_for_metrics(texts)),
        listify(reduce(mine, "sum")),
        listify(broadcast(mine, from_process=1)),
        listify(gather(pad_across_processes(longer))),
        operations.broadcast_object_list(["of 0", "only"] if rank == 0 else ["of 1"]),
    ]


def test_each_value_arrives_under_its_own_key_whatever_the_order_of_keys():
    for results in on_ranks(2, exchange_in_another_order):
        assert results[:4] == [
            {"a": [0, 1], "b": [10, 11]},
            {0: [0, 0], 1: [1, 1]},
            {"a": ["a0", "a1"], "b": [0, 1]},
            {"a": [1], "b": [21]},
        ]
        assert results[4] == {"a": [1], "b": [11]} and results[5]["a"] == [True, False, True, True]
        assert results[6] == ["of 0", "only"]


def of_rank(rank, *choices):
    return choices[min(rank, len(choices) - 1)]


ONE = torch.ones(1)
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
COLLECTIVES = {
    "gather": gather,
    "gather_for_metrics": metrics.gather_for_metrics,
    "reduce": reduce,
    "broadcast": broadcast,
    "pad_across_processes": pad_across_processes,
}
CAN_BE_PADDED = {"shape", "transposed", "dtype", "nothing", "large", "sparse", "sparse shape"}


class NotForSending:
    def __reduce__(self):
        raise ValueError("not for sending")


def enter_with_what_differs(accelerator):
    """The message of each collective about each difference. A collective works after each of them."""
    messages = {}
    rank = accelerator.process_index
    for name, collective in COLLECTIVES.items():
        for kind, values in DIFFERENT.items():
            if name == "pad_across_processes" and kind in CAN_BE_PADDED:
                continue
            with pytest.raises(DistributedOperationException) as raised:
                collective(of_rank(rank, *values))
            messages[name, kind] = str(raised.value)
            assert gather(torch.tensor([rank])).tolist() == list(range(accelerator.num_processes))
    with pytest.raises(DistributedOperationException) as raised:
        (gather if rank else reduce)(ONE)
    messages["two collectives"] = str(raised.value)
    with pytest.raises(RuntimeError, match="rank 1 cannot pickle what it has to send"):
        operations.gather_object([of_rank(rank, 1, lambda: 1)])
    with pytest.raises(RuntimeError, match="rank 0 cannot pickle what it has to send: not for sending"):
        operations.gather_object([NotForSending()])
    for not_for_sending in (lambda: 1, NotForSending()):
        with pytest.raises(RuntimeError, match="rank 0 cannot pickle what it has to send"):
            operations.broadcast_object_list([not_for_sending])
    for collective in (gather, broadcast):
        with pytest.raises(TypeError, match="sparse, nested and quantized tensors can be neither gathered nor broad"):
            collective([ONE, ONE.to_sparse()])
    return messages


@pytest.mark.parametrize("world", [2, 3])
def test_what_differs_between_the_processes_is_the_same_error_on_all_of_them(world):
    messages, *others = on_ranks(world, enter_with_what_differs)
    assert all(of_other == messages for of_other in others)
    for message in messages.values():
        assert "rank 0: " in message and "rank 1: " in message
        assert "pad_across_processes" in message and "use_gather_object" in message
    assert "rank 0: tensor [2] torch.float32\n  - rank 1: tensor [3] torch.float32" in messages["reduce", "shape"]
    assert "rank 0: ['a'] [1] torch.float32\n  - rank 1: ['b'] [1]" in messages["gather", "keys"]


def gather_of_sizes(accelerator):
    """Tensors and texts that fit in a collective's first message, fill it, or do not, alone or on one rank only."""
    found = []
    room = exchange.CONTENT_BYTES_IN_FIRST_MESSAGE
    for size in (0, 1, room - 1, room, room + 1, 5 * room):
        numbers = torch.arange(size, dtype=torch.uint8)
        together, alone, nothing = gather([numbers, torch.tensor(size), torch.empty(0, 2)])
        assert torch.equal(together, numbers.repeat(accelerator.num_processes)) and nothing.shape == (0, 2)
        assert gather([]) == []
        texts = operations.gather_object(["x" * size * accelerator.process_index])
        found.append((alone.tolist(), [len(text) for text in texts]))
    return found, room


def test_messages_of_any_length_arrive_whole():
    found, room = on_ranks(2, gather_of_sizes)[1]
    assert found == [([size] * 2, [0, size]) for size in (0, 1, room - 1, room, room + 1, 5 * room)]


def test_an_unknown_reduction_is_refused():
    PartialState(cpu=True)
    with pytest.raises(ValueError, match="reduction must be 'mean', 'sum', 'max' or 'none', not 'median'"):
        reduce(torch.ones(1), "median")


def outcome_of_an_exit_on_rank_1(accelerator):
    def leave():
        if accelerator.process_index == 1:
            raise SystemExit("the disk is full")

    try:
        operations.run_on_all_ranks(leave)
    except (SystemExit, RuntimeError) as error:
        return type(error), str(error)


def test_an_exit_of_one_rank_ends_the_others_too():
    """In `run_on_all_ranks`: they would else wait for it in the next collective."""
    assert on_ranks(2, outcome_of_an_exit_on_rank_1, timeout=30) == [
        (operations.RemoteError, "rank 1: SystemExit: the disk is full"),
        (SystemExit, "the disk is full"),
    ]
