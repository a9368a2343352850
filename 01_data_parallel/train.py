"""Level 01: DataParallel. One process, one thread per device; what cannot be shared happens on the first.

On all visible GPUs, or on two replicas emulated by CPU threads; or say how many:

    python 01_data_parallel/train.py
    python 01_data_parallel/train.py --replicas 4
"""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, RandomSampler

from common.args import parse_args
from common.data import collate, load_data
from common.data_parallel import data_parallel
from common.model import build_model
from common.report import Run


def train(args):
    device = args.device
    train_set, test_set = load_data(args)
    sampler = RandomSampler(train_set, generator=torch.Generator())
    loading = {"batch_size": args.batch_size, "collate_fn": collate, "num_workers": args.num_workers}
    train_loader = DataLoader(train_set, sampler=sampler, drop_last=True, **loading)
    test_loader = DataLoader(test_set, **loading)

    model = build_model(args).to(device)
    model = data_parallel(model, args.replicas)  # each forward: replicate, scatter, parallel_apply, gather
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    torch.manual_seed(args.seed)  # for dropout

    run = Run(args, train_set, test_set, device, backend=type(model).__name__, world_size=args.replicas)
    for epoch in run.epochs():
        sampler.generator.manual_seed(args.seed + epoch)  # another order for each epoch
        model.train()
        for images, targets in run.batches(train_loader):
            images, targets = images.to(device), targets.to(device)
            loss = F.nll_loss(model(images), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.count(loss)  # not loss.item(): the CPU would wait for the GPU at every step
        train_loss = run.mean_loss()

        model.eval()
        # Sums, not means: batches differ in size, and a mean of their means would weigh them alike.
        totals = torch.zeros(3, dtype=torch.float64, device=device)
        with torch.no_grad():
            for images, targets in test_loader:
                images, targets = images.to(device), targets.to(device)
                log_probs = model(images)
                totals[0] += F.nll_loss(log_probs, targets, reduction="sum")
                totals[1] += (log_probs.argmax(dim=1) == targets).sum()
                totals[2] += len(targets)
    return run.result(model.module, train_loss, totals)


def main():
    train(parse_args(__file__))


if __name__ == "__main__":
    main()
