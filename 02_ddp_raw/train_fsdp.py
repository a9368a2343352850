"""Level 02 with FSDP: each rank keeps a part of every parameter; a layer is whole only while it computes.

torchrun --standalone --nproc-per-node 2 02_ddp_raw/train_fsdp.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from common.args import parse_args
from common.data import collate, load_data
from common.eval_sampler import DistributedEvalSampler
from common.instruments import measured
from common.model import build_model
from common.start import prepare_process


@torch.no_grad()
def evaluate(model, loader, device, num_left):
    # Sums, not means: batches differ in size, and a mean of their means would weigh them alike.
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    loss_sum, correct, evaluated = totals  # views of `totals`: the all-reduce below sums all three
    model.eval()
    for images, targets in loader:
        images, targets = images.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        log_probs = model(images)  # gathers parameters, a collective: all ranks need equally many batches
        log_probs, targets = log_probs[:num_left], targets[:num_left]  # repeated samples come last, and do not count
        num_left -= len(targets)
        loss_sum += F.nll_loss(log_probs, targets, reduction="sum")
        correct += (log_probs.argmax(dim=1) == targets).sum()
        evaluated += len(targets)
    dist.all_reduce(totals)  # each sample is counted once
    return (loss_sum / evaluated).item(), (correct / evaluated).item(), evaluated.item()


def train(args):
    device = args.device  # what --device says; by default a GPU if there is one
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))  # not the rank: each machine counts from 0
        torch.cuda.set_device(device)  # for calls that name no device
    # Joins the other processes: torchrun has put rank, world size and address into the environment. gloo is for CPUs.
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=args.timeout)
    world_size = dist.get_world_size()  # the number of processes on all machines
    mesh = init_device_mesh(device.type, (world_size,))  # all ranks in one line: each has a part of every parameter

    train_set, test_set = load_data(args)
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)  # one order for all, equal parts of it
    eval_sampler = DistributedSampler(test_set, shuffle=False)  # repeats samples, so that all ranks have equally many
    num_real = len(DistributedEvalSampler(test_set))  # this rank's samples, without repeated ones
    share = args.batch_size // world_size  # of the global batch, so the learning rate need not change
    loading = dict(collate_fn=collate, num_workers=args.num_workers, pin_memory=train_set.device.type != device.type)
    train_loader = DataLoader(train_set, share, sampler=sampler, drop_last=True, **loading)  # whole batches
    test_loader = DataLoader(test_set, share, sampler=eval_sampler, **loading)

    model = build_model(args).to(device)
    # Each rank keeps a part of every parameter, as a DTensor. A layer's parameters are gathered before it computes, and
    # freed afterwards. In backward, a reduce-scatter averages the gradients: each rank gets those of its own parts.
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)  # tells the layers of each other: a GPU gathers the next one while one computes
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)  # after sharding: it steps this rank's parts
    torch.manual_seed(args.seed + dist.get_rank())  # for dropout: each process draws its own random numbers

    with measured(args, model, train_set, test_set) as report:  # counts steps, takes the time, prints what is reported
        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)  # another order for each epoch
            train_loss = torch.zeros((), dtype=torch.float64, device=device)
            model.train()
            for images, targets in train_loader:
                images, targets = images.to(device, non_blocking=True), targets.to(device, non_blocking=True)
                loss = F.nll_loss(model(images), targets)
                loss.backward()  # averages the gradients of all ranks
                optimizer.step()
                optimizer.zero_grad()
                train_loss += loss.detach()  # on the device: to read it, the CPU would wait for the GPU at every step
            dist.all_reduce(train_loss)  # every rank now has the sum over all ranks
            train_loss /= world_size
            result = report(train_loss.item() / len(train_loader), *evaluate(model, test_loader, device, num_real))
    dist.destroy_process_group()
    return result


if __name__ == "__main__":
    args = prepare_process(parse_args(__file__))  # device, cores and memory, before torch computes
    train(args)
