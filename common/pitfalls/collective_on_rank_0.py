"""A collective under `if rank == 0`: it meets another one, or nobody.

Collectives are matched by their order and by nothing else. Rank 0's extra
all-reduce for the log is answered by the next one that rank 1 calls for
something else. Here rank 1 adds rank 0's loss, 0.25, to its 300 correct answers
and goes on with 300.25. Rank 0 calls once more, nobody answers, and it hangs.
Let all ranks reduce and rank 0 print. `TORCH_DISTRIBUTED_DEBUG=DETAIL` compares
shapes, which are equal here; compare what the ranks note before they call.
"""

from itertools import zip_longest

import torch
import torch.distributed as dist


def all_reduce(tensor, what, trace):
    trace.note(f"sums the {what}")
    dist.all_reduce(tensor)


def wrong(trace):
    loss = torch.tensor(0.25)
    correct = torch.tensor(300.0)
    if dist.get_rank() == 0:
        all_reduce(loss, "losses", trace)  # for the log
    all_reduce(correct, "correct answers", trace)
    return correct


def right(trace):
    loss = torch.tensor(0.25)
    correct = torch.tensor(300.0)
    all_reduce(loss, "losses", trace)
    all_reduce(correct, "correct answers", trace)
    return correct


def detect(_, trace):
    by_call = zip_longest(*trace.notes_by_rank())
    for number, calls in enumerate(by_call, start=1):
        if len(set(calls)) > 1:
            ranks = (f"rank {rank} {call}" for rank, call in enumerate(calls))
            return f"in all-reduce {number} {', '.join(ranks)}"
