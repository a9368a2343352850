"""Level 00: one process, one device. The training run that every other level repeats.

Run it, with --help for its flags:

    python 00_single_gpu/train.py
"""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, RandomSampler

from common.args import parse_args
from common.data import collate, load_data
from common.instruments import measured, prepare_process
from common.model import build_model


def train(args):
    device = args.device
    train_set, test_set = load_data(args)
    sampler = RandomSampler(train_set, generator=torch.Generator())
    loading = {"collate_fn": collate, "num_workers": args.num_workers}
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True, **loading)
    test_loader = DataLoader(test_set, args.batch_size, **loading)

    model = build_model(args).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    torch.manual_seed(args.seed)  # for dropout

    with measured(args, model, train_set, test_set) as report:  # counts steps, takes the time, prints the result once
        for epoch in range(args.epochs):
            sampler.generator.manual_seed(args.seed + epoch)  # another order for each epoch
            train_loss = torch.zeros((), dtype=torch.float64, device=device)
            model.train()
            for images, targets in train_loader:
                images, targets = images.to(device), targets.to(device)
                loss = F.nll_loss(model(images), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                train_loss += loss.detach()  # on the device: to read it, the CPU would wait for the GPU at every step
            train_loss /= len(train_loader)  # drop_last: all batches are equally large

            # Sums, not means: batches differ in size, and a mean of their means would weigh them alike.
            totals = torch.zeros(3, dtype=torch.float64, device=device)
            model.eval()
            with torch.no_grad():
                for images, targets in test_loader:
                    images, targets = images.to(device), targets.to(device)
                    log_probs = model(images)
                    totals[0] += F.nll_loss(log_probs, targets, reduction="sum")
                    totals[1] += (log_probs.argmax(dim=1) == targets).sum()
                    totals[2] += len(targets)
            loss_sum, correct, evaluated = totals.tolist()
            result = report(train_loss.item(), loss_sum / evaluated, correct / evaluated, evaluated)
    return result


if __name__ == "__main__":
    args = parse_args(__file__)
    prepare_process(args)  # its device, cores and memory, before torch computes
    train(args)
