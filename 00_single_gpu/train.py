"""Level 00: one process, one device. The training run that every other level repeats.

Run it, with --help for its flags:

    python 00_single_gpu/train.py
"""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, RandomSampler

from common.args import parse_args
from common.data import collate, load_data
from common.model import build_model
from common.run import Run


def train(args):
    device = args.device
    if device.type == "cuda":
        torch.cuda.set_device(device)  # from here on "cuda" without a number means this GPU
    train_set, test_set = load_data(args)
    sampler = RandomSampler(train_set, generator=torch.Generator())
    # Only from pinned memory can a batch be copied to the GPU while the CPU goes on.
    pinned = train_set.device.type != device.type
    loading = {"collate_fn": collate, "num_workers": args.num_workers, "pin_memory": pinned}
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True, **loading)
    test_loader = DataLoader(test_set, args.batch_size, **loading)

    model = build_model(args).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    torch.manual_seed(args.seed)  # for dropout

    # Its loops yield the batches as they are. It counts, takes the time, ends at --max-steps, and reports.
    run = Run(args, train_set, test_set, device)
    print(run.plan, flush=True)
    for epoch in run.epochs():
        sampler.generator.manual_seed(args.seed + epoch)  # another order for each epoch
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

        model.eval()
        # Sums, not means: batches differ in size, and a mean of their means would weigh them alike.
        totals = torch.zeros(3, dtype=torch.float64, device=device)
        with torch.no_grad():
            for images, targets in run.eval_batches(test_loader):
                images = images.to(device, non_blocking=True)
                targets = targets.to(device, non_blocking=True)
                log_probs = model(images)
                totals[0] += F.nll_loss(log_probs, targets, reduction="sum")
                totals[1] += (log_probs.argmax(dim=1) == targets).sum()
                totals[2] += len(targets)
    result = run.result(train_loss, totals)
    run.report(result, model)
    return result


def main():
    train(parse_args(__file__))


if __name__ == "__main__":
    main()
