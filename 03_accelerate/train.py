"""Level 03: an Accelerator. It knows the ranks, the device, the shards and the collectives; this file keeps the loop.

As one process, as several, or as a configuration file says:

    python 03_accelerate/train.py
    torchrun --standalone --nproc-per-node 2 03_accelerate/train.py
    python -m common.accelerator launch --config_file 03_accelerate/two_processes.yaml 03_accelerate/train.py

`common.accelerator` has the names of Hugging Face Accelerate. Replace it by `accelerate`, and this file runs there.
Mixed precision, accumulation and checkpoints are in train_full.py.
"""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from common.accelerator import Accelerator
from common.accelerator.utils import DataLoaderConfiguration, InitProcessGroupKwargs, set_seed
from common.args import parse_args
from common.data import collate, load_data
from common.instruments import measured
from common.model import build_model
from common.start import prepare_process


@torch.no_grad()
def evaluate(accelerator, model, loader):
    # Sums, not means: batches differ in size, and a mean of their means would weigh them alike.
    loss_sum, correct, evaluated = torch.zeros(3, dtype=torch.float64, device=accelerator.device)
    model.eval()
    for images, targets in loader:
        log_probs, targets = accelerator.gather_for_metrics((model(images), targets))  # of all ranks, no sample twice
        loss_sum += F.nll_loss(log_probs, targets, reduction="sum")
        correct += (log_probs.argmax(dim=1) == targets).sum()
        evaluated += len(targets)
    return (loss_sum / evaluated).item(), (correct / evaluated).item(), evaluated.item()


def train(args):
    accelerator = Accelerator(  # joins the other processes; finds rank, device and backend by itself
        cpu=args.device.type == "cpu",  # by default a GPU, where there is one
        dataloader_config=DataLoaderConfiguration(
            split_batches=True,  # by default a loader's batch size is that of each rank
            use_seedable_sampler=True,  # epoch e is ordered by data_seed + e
            data_seed=args.seed,
            non_blocking=True,  # a GPU computes while pinned batches are copied to it
        ),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=args.timeout)],
    )
    device = accelerator.device
    train_set, test_set = load_data(args)
    loading = dict(collate_fn=collate, num_workers=args.num_workers, pin_memory=train_set.device.type != device.type)
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True, **loading)
    test_loader = DataLoader(test_set, args.batch_size, **loading)  # prepare gives all ranks equal parts of a batch

    model = build_model(args)  # prepare moves it to its device and into DDP; the optimizer keeps its parameters
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    set_seed(args.seed, device_specific=True)  # for dropout: each rank draws its own random numbers

    with measured(args, model, train_set, test_set) as report:  # counts steps, takes the time, prints what is reported
        for epoch in range(args.epochs):
            train_loader.set_epoch(epoch)  # another order for each epoch
            train_loss = torch.zeros((), dtype=torch.float64, device=device)
            model.train()
            for images, targets in train_loader:
                loss = F.nll_loss(model(images), targets)
                accelerator.backward(loss)  # loss.backward(), and what mixed precision and accumulation need
                optimizer.step()
                optimizer.zero_grad()
                train_loss += loss.detach()  # on the device: to read it, the CPU would wait for the GPU at every step
            train_loss = accelerator.reduce(train_loss, reduction="mean")
            result = report(train_loss.item() / len(train_loader), *evaluate(accelerator, model, test_loader))
    accelerator.end_training()  # leaves the process group
    return result


if __name__ == "__main__":
    args = prepare_process(parse_args(__file__))  # device, cores and memory, before torch computes
    train(args)
