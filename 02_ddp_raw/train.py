r"""Level 02: DistributedDataParallel by hand. One process per device; a training step exchanges gradients.

Two processes on this machine, or four on two machines (the same command on both, HOST being one of them):

    torchrun --standalone --nproc-per-node 2 02_ddp_raw/train.py
    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-id ladder --rdzv-backend c10d --rdzv-endpoint HOST:29400 \
        02_ddp_raw/train.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from common.args import parse_args
from common.data import collate, load_data
from common.eval_sampler import DistributedEvalSampler
from common.instruments import measured, prepare_process
from common.model import build_model


def train(args):
    device = args.device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))  # not the rank: each machine counts from 0
        torch.cuda.set_device(device)  # for calls that name no device
    # Joins the other processes: torchrun has put rank, world size and address into the environment. gloo is for CPUs.
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=args.timeout)
    rank = dist.get_rank()  # the number of this process
    world_size = dist.get_world_size()  # the number of processes on all machines

    train_set, test_set = load_data(args)
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)  # one order for all, each rank its part
    eval_sampler = DistributedEvalSampler(test_set)  # torch's repeats samples, so that all ranks have equally many
    share = args.batch_size // world_size  # of the global batch: the learning rate stays as it is
    loading = {"collate_fn": collate, "num_workers": args.num_workers}
    train_loader = DataLoader(train_set, share, sampler=sampler, drop_last=True, **loading)
    test_loader = DataLoader(test_set, share, sampler=eval_sampler, **loading)

    model = build_model(args).to(device)  # first: DDP hooks into the parameters, which a later .to() may replace
    model = DistributedDataParallel(model)  # copies rank 0's weights to all ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    torch.manual_seed(args.seed + rank)  # for dropout, and each rank draws its own

    with measured(args, model, train_set, test_set) as report:  # counts steps, takes the time, prints the result once
        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)  # another order for each epoch
            train_loss = torch.zeros((), dtype=torch.float64, device=device)
            model.train()
            for images, targets in train_loader:
                images, targets = images.to(device), targets.to(device)
                loss = F.nll_loss(model(images), targets)
                loss.backward()  # averages the gradients of all ranks
                optimizer.step()
                optimizer.zero_grad()
                train_loss += loss.detach()  # on the device: to read it, the CPU would wait for the GPU at every step
            dist.all_reduce(train_loss)  # every rank now has the sum over all ranks
            train_loss /= len(train_loader) * world_size

            # Sums, not means: batches differ in size, and a mean of their means would weigh them alike.
            totals = torch.zeros(3, dtype=torch.float64, device=device)
            model.eval()
            with torch.no_grad():
                for images, targets in test_loader:
                    images, targets = images.to(device), targets.to(device)
                    log_probs = model.module(images)  # the bare network: the wrapper may wait for ranks that are done
                    totals[0] += F.nll_loss(log_probs, targets, reduction="sum")
                    totals[1] += (log_probs.argmax(dim=1) == targets).sum()
                    totals[2] += len(targets)
            dist.all_reduce(totals)  # each sample is counted once
            loss_sum, correct, evaluated = totals.tolist()
            result = report(train_loss.item(), loss_sum / evaluated, correct / evaluated, evaluated)
    model = model.module  # frees the wrapper: if its group is gone by then, that may hang (torch 2.11)
    dist.destroy_process_group()
    return result


if __name__ == "__main__":
    args = parse_args(__file__)
    prepare_process(args)  # its device, cores and memory, before torch computes
    train(args)
