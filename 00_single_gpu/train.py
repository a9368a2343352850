"""Level 00: one process, one device. The training run that every other level repeats.

Run it, with --help for its flags:

    python 00_single_gpu/train.py
"""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, RandomSampler

from common.args import parse_args
from common.data import collate, load_data
from common.instruments import measured
from common.model import build_model
from common.start import prepare_process


@torch.no_grad()
def evaluate(model, loader, device):
    # Sums, not means: batches differ in size, and a mean of their means would weigh them alike.
    loss_sum, correct, evaluated = torch.zeros(3, dtype=torch.float64, device=device)
    model.eval()
    for images, targets in loader:
        images, targets = images.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        log_probs = model(images)
        loss_sum += F.nll_loss(log_probs, targets, reduction="sum")
        correct += (log_probs.argmax(dim=1) == targets).sum()
        evaluated += len(targets)
    return (loss_sum / evaluated).item(), (correct / evaluated).item(), evaluated.item()


def train(args):
    device = args.device  # what --device says; by default a GPU if there is one
    train_set, test_set = load_data(args)
    sampler = RandomSampler(train_set, generator=torch.Generator())
    loading = dict(collate_fn=collate, num_workers=args.num_workers, pin_memory=train_set.device.type != device.type)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True, **loading)  # whole batches
    test_loader = DataLoader(test_set, args.batch_size, **loading)

    model = build_model(args).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    torch.manual_seed(args.seed)  # for dropout

    with measured(args, model, train_set, test_set) as report:  # counts steps, takes the time, prints what is reported
        for epoch in range(args.epochs):
            sampler.generator.manual_seed(args.seed + epoch)  # another order for each epoch
            train_loss = torch.zeros((), dtype=torch.float64, device=device)
            model.train()
            for images, targets in train_loader:
                images, targets = images.to(device, non_blocking=True), targets.to(device, non_blocking=True)
                loss = F.nll_loss(model(images), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                train_loss += loss.detach()  # on the device: to read it, the CPU would wait for the GPU at every step
            result = report(train_loss.item() / len(train_loader), *evaluate(model, test_loader, device))
    return result


if __name__ == "__main__":
    args = prepare_process(parse_args(__file__))  # device, cores and memory, before torch computes
    train(args)
