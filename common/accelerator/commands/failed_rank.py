"""The rank that made a job fail: one failure takes the other ranks down with it."""

import signal
from collections.abc import Mapping
from typing import NamedTuple

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


class Suspicion(NamedTuple):
    """A failed rank. Where suspicions are sorted, the likeliest cause comes first.

    - torchrun ends the ranks that are left with SIGTERM, so a rank that SIGTERM ended is hardly the cause.
    - A rank that loses its peer raises an exception and leaves with an exit code. Where another rank was killed by a
      signal (out of memory, a crash in native code), that one is the cause.
    - Of equals, the one that failed first. The times are in whole seconds, and of a killed rank it is the time when
      torchrun noticed. So they come last.
    """

    ended_by_sigterm: bool
    left_with_exit_code: bool
    failed_at: int
    rank: int


def find_cause(failures: Mapping[int, ProcessFailure]) -> int:
    """The rank among `failures` (by rank, at least one) that is most likely the cause of the others."""
    suspicions = [suspicion(rank, failure) for rank, failure in failures.items()]
    return min(suspicions).rank


def suspicion(rank: int, failure: ProcessFailure) -> Suspicion:
    """The part that `rank` had in the failure of the job, by the way in which it ended."""
    return Suspicion(
        ended_by_sigterm=failure.exitcode == -signal.SIGTERM,
        left_with_exit_code=failure.exitcode > 0,
        failed_at=failure.timestamp,
        rank=rank,
    )


def describe(rank: int, failure: ProcessFailure) -> str:
    """One line: which rank it was, on which process, and how it ended."""
    how = f"exit code {failure.exitcode}" if failure.exitcode > 0 else f"ended by {failure.signal_name()}"
    return f"rank {rank} failed: {how} (local rank {failure.local_rank}, pid {failure.pid})"
