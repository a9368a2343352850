"""Level 02: DistributedDataParallel by hand. One process per device; a training step exchanges gradients.

Two processes on this machine, or four on two machines (the same command on both, HOST being one of them):

    torchrun --standalone --nproc-per-node 2 02_ddp_raw/train.py
    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-id ladder --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        02_ddp_raw/train.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from common.accelerator.sampler import DistributedEvalSampler
from common.args import parse_args
from common.cores import threads_per_worker
from common.data import check_same_dataset, collate, load_data
from common.model import build_model
from common.process_group import abort_on_error
from common.rendezvous import meet
from common.run import Run


def train(args):
    # torchrun tells each process who it is; without torchrun there is one.
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = args.device
    backend = "gloo"
    if device.type == "cuda":
        # Local rank, not rank: on the second machine rank 2 is the first process and takes the first GPU.
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        if local_world_size <= torch.cuda.device_count():
            backend = "nccl"  # faster, but wants a GPU for each process
    torch.set_num_threads(threads_per_worker(local_world_size))
    store = dist.HashStore()
    if "RANK" in os.environ:
        store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=args.timeout))
        # After a restart the store still has the dead ranks' addresses, so each attempt gets a prefix of its own.
        # `meet` also compares the backends: with unequal GPUs some ranks would wait in nccl and some in gloo.
        store = dist.PrefixStore(meet(store, rank, world_size, args.timeout, backend), store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=args.timeout)
    with abort_on_error():
        result = train_rank(args, device, rank, world_size)
    # Not in a `finally`: after an error here nccl would wait for the other ranks, which wait for this one.
    dist.destroy_process_group()
    return result


def train_rank(args, device, rank, world_size):
    train_set, test_set = load_data(args)
    found = [None] * world_size
    dist.all_gather_object(found, train_set.description)
    check_same_dataset(found)  # each machine has looked for MNIST on its own disk
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)  # rank r: every world_size-th sample
    eval_sampler = DistributedEvalSampler(test_set)  # the same, but nothing dropped or repeated
    # Only from pinned memory can a batch be copied to the GPU while the CPU goes on.
    pinned = train_set.device.type != device.type
    loading = {"collate_fn": collate, "num_workers": args.num_workers, "pin_memory": pinned}
    share = args.batch_size // world_size
    train_loader = DataLoader(train_set, share, sampler=sampler, drop_last=True, **loading)
    test_loader = DataLoader(test_set, share, sampler=eval_sampler, **loading)

    # On the device first: DDP hooks into each parameter's gradient accumulator, which a later .to() may replace.
    # Without device_ids, which would let DDP copy each batch to the GPU: it is there already.
    model = DistributedDataParallel(build_model(args).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    torch.manual_seed(args.seed + rank)  # for dropout, and each rank draws its own

    # Its loops yield the batches as they are. It counts, takes the time, ends at --max-steps, and reports.
    run = Run(args, train_set, test_set, device)
    if rank == 0:  # once, not once per process
        print(run.plan, flush=True)
    for epoch in run.epochs():
        sampler.set_epoch(epoch)  # another order for each epoch
        model.train()
        for images, targets in run.batches(train_loader):
            images = images.to(device, non_blocking=True)
            targets = targets.to(device, non_blocking=True)
            loss = F.nll_loss(model(images), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.count(loss)  # added up on the device: to read it, the CPU would wait for the GPU at every step
        train_loss = run.mean_loss()
        dist.all_reduce(train_loss)
        train_loss /= world_size

        model.eval()
        # Sums, not means: batches differ in size, and a mean of their means would weigh them alike.
        totals = torch.zeros(3, dtype=torch.float64, device=device)
        with torch.no_grad():
            for images, targets in run.eval_batches(test_loader):
                images = images.to(device, non_blocking=True)
                targets = targets.to(device, non_blocking=True)
                log_probs = model.module(images)  # the bare network: shards may differ in length
                totals[0] += F.nll_loss(log_probs, targets, reduction="sum")
                totals[1] += (log_probs.argmax(dim=1) == targets).sum()
                totals[2] += len(targets)
        dist.all_reduce(totals)  # every rank has the sums over all samples, each counted once
    peaks = [None] * world_size
    dist.all_gather_object(peaks, run.peak_memory_bytes())  # a rank can ask its own GPU only
    result = run.result(train_loss, totals, peaks)
    if rank == 0:
        run.report(result, model.module)
    return result


@record  # torchrun then shows the traceback of the rank that failed first
def main():
    train(parse_args(__file__))


if __name__ == "__main__":
    main()
