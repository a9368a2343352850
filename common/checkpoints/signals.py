"""The signals after which a long training saves and ends.

Slurm and Kubernetes send SIGTERM and kill half a minute later; torchrun hands it on to its ranks, and Ctrl-C reaches
them as SIGINT. `CheckpointSchedule` makes of one rank's signal a decision of all.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from common.process_group import get_rank, leave_process_group


@contextlib.contextmanager
def caught_signals(enabled: bool = True) -> Iterator[list[int]]:
    """A block in which SIGTERM and the first Ctrl-C do not end the process: their numbers are added to the list.

    The second Ctrl-C ends the process at once. A second SIGTERM does not, because Slurm and torchrun may both send one.
    Unless `enabled`, signals do what they always do, and the list stays empty.
    """
    received: list[int] = []
    if not enabled:
        yield received
        return
    sigints_of_one_ctrl_c = 1
    if "TORCHELASTIC_RUN_ID" in os.environ:
        sigints_of_one_ctrl_c = 2  # The terminal sends one to torchrun and to its ranks, and torchrun one to its ranks.

    def receive(signal_number: int, frame: FrameType | None) -> None:
        received.append(signal_number)
        if received.count(signal.SIGINT) >= sigints_of_one_ctrl_c:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # This ends also a process that waits in a collective.

    before = {}
    for each in (signal.SIGTERM, signal.SIGINT):
        before[each] = signal.signal(each, receive)
    try:
        yield received
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def stop_run(step: int, signals: list[int]) -> NoReturn:
    """Leave the process group and end the process. All ranks call this after a decision to stop.

    The exit code is 128 + the number of the signal, which shells and schedulers take for a process that the signal has
    ended. Where another rank has got the signal it is SIGTERM's.
    """
    if get_rank() == 0:
        print(f"stopped at step {step}: run it again to continue", flush=True)
    leave_process_group()
    signal_number = signals[0] if signals else signal.SIGTERM
    raise SystemExit(128 + signal_number)
