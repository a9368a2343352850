"""Where the time of a step of DDP goes: a table by torch's profiler, and a trace of each rank to open in Perfetto.

    torchrun --standalone --nproc-per-node 2 02_ddp_raw/profile_step.py
    torchrun --standalone --nproc-per-node 2 02_ddp_raw/profile_step.py --images 1

It computes on the CPU. The five lines that a script of your own needs bear a star.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule  # * and ProfilerActivity.CUDA on a GPU

WARM_UP, STEPS = 3, 5  # DDP has its final buckets from the second step on


def milliseconds_by_kind(events):
    """The mean step: operators that compute and that copy, the time without an operator, and gloo's threads beside."""
    spent = {"computing": 0.0, "copying": 0.0, "nothing": 0.0, "sending": 0.0}
    for event in events:
        if event.name.startswith("ProfilerStep"):
            spent["nothing"] += event.cpu_time_total  # all of the step, from which the operators are taken
        elif event.name.startswith("gloo:"):
            spent["sending"] += event.time_range.elapsed_us()
        elif event.name.startswith("aten::"):
            spent["copying" if event.name == "aten::copy_" else "computing"] += event.self_cpu_time_total
            spent["nothing"] -= event.self_cpu_time_total
    return {kind: microseconds / 1000 / STEPS for kind, microseconds in spent.items()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=32, help="of a rank in a step")
    images = torch.randn(parser.parse_args().images, 1, 28, 28)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    convolutions = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    network = nn.Sequential(*convolutions, nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    profiled = schedule(wait=0, warmup=WARM_UP, active=STEPS, repeat=1)  # *
    with profile(activities=[ProfilerActivity.CPU], schedule=profiled) as profiler:  # *
        for _ in range(WARM_UP + STEPS):
            loss = model(images).logsumexp(dim=1).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()  # *
    profiler.export_chrome_trace(f"trace_rank_{rank}.json")  # *

    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, milliseconds_by_kind(profiler.events()))
    if rank == 0:
        print("ms of a step", *(f"rank {number:2}" for number in range(len(of_ranks))), sep="  ")
        for kind in of_ranks[0]:
            print(f"{kind:12}", *(f"{spent[kind]:7.1f}" for spent in of_ranks), sep="  ")
    del model  # before its group: a DDP that is freed after it may hang (torch 2.11)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
