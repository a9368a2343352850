"""Errors that the others see when one of three ranks raises, leaves out a collective, or calls another one.

    torchrun --standalone --nproc-per-node 3 02_ddp_raw/one_rank_fails.py raises
    torchrun --standalone --nproc-per-node 3 02_ddp_raw/one_rank_fails.py leaves-out
    torchrun --standalone --nproc-per-node 3 02_ddp_raw/one_rank_fails.py differs

All three ranks add up a number, five times. In the third round something is wrong on rank 1.
"""

import argparse
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from flight_recorder import write_notes_after
from torch.distributed.elastic.multiprocessing.errors import record


def raise_an_error(timeout: float) -> None:
    raise ValueError("the image of sample 1234 cannot be read")


def leave_the_collective_out(timeout: float) -> None:
    """Do something else for so long that the others give up first. They would notice if this rank ended."""
    time.sleep(timeout + 30)


def call_another_collective(timeout: float) -> None:
    dist.broadcast(torch.ones(1), src=1)


MISTAKES = {"raises": raise_an_error, "leaves-out": leave_the_collective_out, "differs": call_another_collective}


def work(mistake: str, timeout: float) -> None:
    for number in range(1, 6):
        if dist.get_rank() == 1 and number == 3:
            MISTAKES[mistake](timeout)
        else:
            dist.all_reduce(torch.ones(1))


@record  # torchrun then shows the traceback of the rank that failed first
def run(mistake: str, timeout: float) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    if "TORCH_FR_BUFFER_SIZE" in os.environ:
        write_notes_after(timeout / 2, "flight_records")
    # Not in a `finally`: the connections stay open until torchrun has been given this rank's traceback.
    work(mistake, timeout)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mistake", choices=MISTAKES, help="what rank 1 does wrong")
    parser.add_argument("--timeout", type=float, default=10, metavar="SECONDS", help="how long a collective may wait")
    options = parser.parse_args()
    run(options.mistake, options.timeout)


if __name__ == "__main__":
    main()
