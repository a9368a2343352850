"""Where the time of a step of DDP goes: a table by torch's profiler, and a trace of each rank to open in Perfetto.

    torchrun --standalone --nproc-per-node 2 02_ddp_raw/profile_step.py
    torchrun --standalone --nproc-per-node 2 02_ddp_raw/profile_step.py --images 1

It computes on the CPU. A script of your own needs five lines of it, which are marked with a star (*).
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # early, as minimal.py says
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule  # * and ProfilerActivity.CUDA on a GPU

WARM_UP = 3  # steps that are not measured: DDP sorts its buckets of gradients anew after the first one
STEPS = 5  # that are measured


def milliseconds_by_kind(events):
    """The time of a mean step, by kind.

    computing   in operators that compute
    copying     in operators that copy
    other       in Python, in DDP's own code, and in waiting for other ranks
    sending     in gloo's own threads, while the others compute or wait: it is no part of the step's time
    """
    steps = computing = copying = sending = 0.0  # microseconds
    for event in events:
        if event.name.startswith("ProfilerStep"):
            steps += event.cpu_time_total
        elif event.name.startswith("gloo:"):
            sending += event.time_range.elapsed_us()
        elif event.name == "aten::copy_":
            copying += event.self_cpu_time_total  # without the operators that it calls, which have events of their own
        elif event.name.startswith("aten::"):
            computing += event.self_cpu_time_total
    other = steps - computing - copying
    spent = {"computing": computing, "copying": copying, "other": other, "sending": sending}
    return {kind: microseconds / 1000 / STEPS for kind, microseconds in spent.items()}


def main():
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler prints a line when it begins and when it ends
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=32, help="images of a rank in a step")
    images = torch.randn(parser.parse_args().images, 1, 28, 28)
    if "WORLD_SIZE" not in os.environ:
        parser.error("start it by torchrun --standalone --nproc-per-node 2 02_ddp_raw/profile_step.py")
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

    all_spent = [None] * dist.get_world_size()
    dist.all_gather_object(all_spent, milliseconds_by_kind(profiler.events()))
    if rank == 0:
        titles = [f"rank {number:2}" for number in range(len(all_spent))]
        print("ms of a step", *titles, sep="  ")
        for kind in all_spent[0]:
            cells = [f"{spent[kind]:7.1f}" for spent in all_spent]
            print(f"{kind:12}", *cells, sep="  ")
    del model  # before its process group: a DDP that is freed after its group may hang (torch 2.11)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
