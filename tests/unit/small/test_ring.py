"""The ring all-reduce sums what torch's sums, message by message, with as many messages and bytes as the pages say."""

import pytest
import torch
import torch.distributed as dist

from common.ladder import ring as shown
from common.ladder.__main__ import main
from common.process_group import process_group
from common.processes import ranks
from common.small.ring import ring_all_reduce


def sums(numbers: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    with process_group():
        own = torch.arange(numbers, dtype=torch.float64) * 10 ** dist.get_rank()
        ours = own.clone()
        ring_all_reduce(ours)
        theirs = own.clone()
        dist.all_reduce(theirs)
        return own, ours, theirs


# Fewer numbers than ranks leave some parts empty.
@pytest.mark.parametrize("world_size, numbers", [(2, 7), (3, 6), (3, 8), (4, 2)])
def test_the_ring_sums_what_an_all_reduce_sums(world_size, numbers):
    results = ranks(world_size).run(sums, numbers)
    assert not torch.equal(results[0][0], results[1][0])
    for _, ours, theirs in results:
        assert torch.equal(ours, theirs)


def test_the_picture_shows_what_four_ranks_compute():
    trace = shown.trace()
    assert [states[0].half for states in trace] == ["reduce-scatter"] * 3 + ["all-gather"] * 3
    assert [state.numbers for state in trace[-1]] == [[1111, 2222, 3333, 4444]] * 4
    before = shown.START
    for states in trace:
        for rank, state in enumerate(states):
            left = (rank - 1) % 4
            part = state.received
            assert states[left].sent == part
            had = before[rank][part] if state.half == "reduce-scatter" else 0
            assert state.numbers[part] == had + before[left][part]
        before = [state.numbers for state in states]


def test_the_text_has_every_state(capsys):
    main(["ring"])
    text = capsys.readouterr().out
    assert "rank 0 sends part 0 to rank 1" in text and "1111 2222 3333 4444" in " ".join(text.split())
