"""One rank of `benchmarks.suites.network`: it does the jobs that arrive as lines on stdin and answers on stdout.

torchrun starts it once on each node; a job names the port at which the ranks meet for it, so that none finds an earlier
one's keys.
"""

import contextlib
import io
import json
import os
import socket
import statistics
import sys
import time
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.harness.lanes import record_rank
from benchmarks.harness.overlap_rank import time_steps
from benchmarks.suites.throughput import WARM_UP_STEPS, train
from common.allocator import keep_large_blocks
from common.model import BasicNet
from common.process_group import process_group

LEVEL = "02_ddp_raw"
CHUNK = bytes(1 << 20)
# What the benchmark is told of a training: its speed, its faults, and how the process is set.
TOLD = ("images_per_sec", "minor_faults_per_step", "threads_per_process", "allocator", "pinned_to_cores")


def throughput(batch_per_process: int, steps: int) -> dict:
    """Level 02's "images_per_sec" over all ranks, by this rank's clock, its "minor_faults_per_step" and the facts."""
    world_size = int(os.environ["WORLD_SIZE"])
    batch = batch_per_process * world_size
    argv = ("--dataset", "synthetic", "--device", "cpu", "--batch-size", str(batch), "--eval-samples", str(world_size))
    result = train(LEVEL, (*argv, "--max-steps", str(WARM_UP_STEPS + steps)), threads=1)
    return {key: result[key] for key in TOLD}


def alone(batch_per_process: int, steps: int) -> dict | None:
    """The same of rank 0 as the only process there is; None elsewhere, where nothing is done meanwhile."""
    if os.environ["RANK"] != "0":
        return None
    with mock.patch.dict(os.environ, WORLD_SIZE="1"):
        return throughput(batch_per_process, steps)


def transfer(size: int) -> float | None:
    """Bits per second of a plain TCP transfer of `size` bytes to rank 0, which alone knows; None elsewhere."""
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if os.environ["RANK"] == "0":
        with socket.create_server(address) as server, server.accept()[0] as connection:
            buffer = bytearray(1 << 20)
            connection.recv_into(buffer)
            received = 0
            began = time.perf_counter()
            while count := connection.recv_into(buffer):
                received += count
            return 8 * received / (time.perf_counter() - began)
    with _connect(address) as connection:
        for _ in range(max(size // len(CHUNK), 1)):
            connection.sendall(CHUNK)
    return None


def _connect(address: tuple[str, int], patience: float = 30.0) -> socket.socket:
    deadline = time.monotonic() + patience
    while True:
        try:
            return socket.create_connection(address, timeout=patience)
        except ConnectionRefusedError:  # rank 0 does not listen yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def latency(repeats: int) -> float:
    """Seconds of an all-reduce of one number, the median."""
    with process_group():
        number = torch.ones(1)
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            dist.all_reduce(number)
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)


def window(batch_per_process: int, repeats: int) -> float:
    """The share of a step of one process, without DDP, that is left once fc1's gradient is there, the median.

    DDP's first bucket then is full, nearly all of the gradient is on its way, and backward goes on beside it.
    """
    model = BasicNet()
    moments: list[float] = []
    model.fc1.weight.register_post_accumulate_grad_hook(lambda _: moments.append(time.perf_counter()))
    optimizer = torch.optim.AdamW(model.parameters())
    images = torch.randn(batch_per_process, 1, 28, 28)
    targets = torch.arange(batch_per_process) % 10
    shares = []
    for _ in range(WARM_UP_STEPS + repeats):
        began = time.perf_counter()
        F.nll_loss(model(images), targets).backward()
        through = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        shares.append((through - moments.pop()) / (time.perf_counter() - began))
    return statistics.median(shares[WARM_UP_STEPS:])


def main() -> None:
    keep_large_blocks()  # as the levels do, but before the first tensor of the first job
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})  # one core a node, as though each had its own
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # rank 0 opens a store at the job's port, not torchrun's agent
    jobs = {job.__name__: job for job in (throughput, alone, transfer, latency, window, record_rank, time_steps)}
    for line in sys.stdin:
        name, port, arguments = json.loads(line)
        os.environ["MASTER_PORT"] = str(port)
        with contextlib.redirect_stdout(io.StringIO()):
            answer = jobs[name](**arguments)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
