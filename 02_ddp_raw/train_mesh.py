"""Level 02 on a mesh of ranks: a row shares fc1 and fc2 (tensor parallelism), and a column shares the data (FSDP).

torchrun --standalone --nproc-per-node 4 02_ddp_raw/train_mesh.py --tensor 2
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler

from common.args import parse_args
from common.data import collate, load_data
from common.eval_sampler import DistributedEvalSampler
from common.instruments import measured
from common.model import build_model
from common.start import prepare_process


@torch.no_grad()
def evaluate(model, loader, device, num_left, column_group):
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
    dist.all_reduce(totals, group=column_group)  # each sample is counted once
    return (loss_sum / evaluated).item(), (correct / evaluated).item(), evaluated.item()


def train(args):
    device = args.device  # what --device says; by default a GPU if there is one
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))  # not the rank: each machine counts from 0
        torch.cuda.set_device(device)  # for calls that name no device
    # Joins the other processes: torchrun has put rank, world size and address into the environment. gloo is for CPUs.
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=args.timeout)
    # With --tensor 2, four ranks are two rows of two. The mesh has a name for each direction:
    #
    #                    "tensor" →
    #     "data"   row 0   rank 0   rank 1     A row has the same samples, and divides fc1 and fc2.
    #       ↓      row 1   rank 2   rank 3     A column has different samples, and does what train_fsdp.py's ranks do.
    num_rows = dist.get_world_size() // args.tensor
    mesh = init_device_mesh(device.type, (num_rows, args.tensor), mesh_dim_names=("data", "tensor"))
    for group in mesh.get_all_groups():  # those of this rank's row and column
        group.set_timeout(args.timeout)  # a mesh makes its groups with torch's default, of 30 minutes on a CPU
    column = mesh["data"]  # the ranks along "data" from this one
    column_group = column.get_group()  # for the collectives of torch.distributed
    row = column.get_local_rank()  # the number of this rank's row, which takes the place of the rank below

    train_set, test_set = load_data(args)
    sampler = DistributedSampler(train_set, num_rows, row, seed=args.seed, drop_last=True)  # an equal part for each row
    eval_sampler = DistributedSampler(test_set, num_rows, row, shuffle=False)  # repeats samples, as in train_fsdp.py
    num_real = len(DistributedEvalSampler(test_set, num_rows, row))  # this row's samples, without repeated ones
    share = args.batch_size // num_rows  # of the global batch, so the learning rate need not change
    loading = dict(collate_fn=collate, num_workers=args.num_workers, pin_memory=train_set.device.type != device.type)
    train_loader = DataLoader(train_set, share, sampler=sampler, drop_last=True, **loading)  # whole batches
    test_loader = DataLoader(test_set, share, sampler=eval_sampler, **loading)

    model = build_model(args).to(device)
    # In a row, each rank computes some outputs of fc1. From these it computes a summand of every output of fc2, and an
    # all-reduce over the row adds the summands up.
    parallelize_module(model, mesh["tensor"], {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})
    # In a column, fully_shard cuts each rank's parameters once more, and gathers and averages over the column only. A
    # rank then keeps 1/(num_rows × tensor) of fc1 and of fc2's weight, and 1/num_rows of the rest.
    for layer in model.children():
        fully_shard(layer, mesh=column)
    fully_shard(model, mesh=column)  # tells the layers of each other: a GPU gathers the next one while one computes
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)  # after sharding: it steps this rank's parts
    # The ranks of a row must drop the same inputs of fc1, so they have one seed. After fc1 they then drop the same
    # places of their parts too, for example outputs 0 and 64 together. One device would draw these apart.
    torch.manual_seed(args.seed + row)  # for dropout: each row draws its own random numbers

    with measured(args, model, train_set, test_set) as report:  # counts steps, takes the time, prints what is reported
        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)  # another order for each epoch
            train_loss = torch.zeros((), dtype=torch.float64, device=device)
            model.train()
            for images, targets in train_loader:
                images, targets = images.to(device, non_blocking=True), targets.to(device, non_blocking=True)
                loss = F.nll_loss(model(images), targets)
                loss.backward()  # averages the gradients over the column
                optimizer.step()
                optimizer.zero_grad()
                train_loss += loss.detach()  # on the device: to read it, the CPU would wait for the GPU at every step
            dist.all_reduce(train_loss, group=column_group)  # every rank now has the sum over its column
            train_loss /= num_rows
            evaluation = evaluate(model, test_loader, device, num_real, column_group)
            result = report(train_loss.item() / len(train_loader), *evaluation)
    dist.destroy_process_group()
    return result


if __name__ == "__main__":
    args = prepare_process(parse_args(__file__))  # device, cores and memory, before torch computes
    train(args)
