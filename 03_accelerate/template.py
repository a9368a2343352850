"""A template for level 03: an Accelerator. It imports nothing of this repository but the core.

    torchrun --standalone --nproc-per-node 2 03_accelerate/template.py DATA --epochs 10 --checkpoint run

The same file runs on Hugging Face Accelerate: replace `common.accelerator` by `accelerate`.

For a task of your own change three places: `Images` with `load_data`, `build_network`, `compute_loss` with `score`.
With --checkpoint it saves after each epoch. After Ctrl-C the same command goes on with the epoch that was cut short.
"""

import argparse
import math
import os
import shutil
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
import torchvision
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from common.accelerator import Accelerator
from common.accelerator.utils import DataLoaderConfiguration, broadcast_object_list, set_seed


class Images(ImageFolder):
    """Samples (inputs, target): the network is called with the inputs, which are a tuple, here of one image."""

    def __init__(self, folder, transform, seed):
        super().__init__(folder, transform)
        self.seed = seed
        self.epoch = 0  # the training loop counts it

    def __getitem__(self, index):
        # Each image has a seed of its own in each epoch, so its crop does not depend on the process that reads it.
        with torch.random.fork_rng(devices=[]):  # afterwards the generator is as before: dropout draws from it too
            torch.default_generator.manual_seed(self.seed + self.epoch * len(self) + index)  # seeds no GPU's
            image, label = super().__getitem__(index)
        return (image,), label


def load_data(args):
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    to_numbers = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)]
    augment = v2.Compose([v2.RandomResizedCrop(args.size), v2.RandomHorizontalFlip(), *to_numbers])
    centre = v2.Compose([v2.Resize(args.size), v2.CenterCrop(args.size), *to_numbers])
    train_set = Images(f"{args.data}/train", augment, args.seed)
    val_set = Images(f"{args.data}/val", centre, args.seed)
    if val_set.classes != train_set.classes:  # a class would have another number in the evaluation
        raise SystemExit(f"{train_set.root} and {val_set.root} must have the same classes")
    return train_set, val_set


def build_network(args, train_set):
    return torchvision.models.get_model(args.arch, num_classes=len(train_set.classes))


def compute_loss(outputs, targets):
    return F.cross_entropy(outputs, targets)


def score(outputs, targets):
    """A number for each sample, whose mean is the score that is shown: here the accuracy."""
    return (outputs.argmax(dim=1) == targets).double()


def cosine_schedule(optimizer, steps, steps_done):
    """The learning rate falls to 0 in `steps` steps, of which `steps_done` are done, along half a wave of a cosine."""

    def factor(step):
        return (1 + math.cos(math.pi * step / steps)) / 2

    # `last_epoch` is the step before the next one. torch multiplies the factor by `initial_lr`: by this run's --lr.
    for group in optimizer.param_groups:
        group["initial_lr"] = optimizer.defaults["lr"]
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor, last_epoch=steps_done - 1)


@torch.no_grad()
def evaluate(model, loader, accelerator):
    """The sum of the samples' scores, and their number, as a tensor."""
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
    for inputs, targets in loader:
        # From all ranks, without the samples that were repeated to make the shards equally long.
        scores = accelerator.gather_for_metrics(score(model(*inputs), targets))
        totals[0] += scores.sum()
        totals[1] += len(scores)
    return totals


def newest_checkpoint(folder):
    """The folder of the last epoch that was saved; None if there is none, or nothing is to be saved."""
    if not folder:
        return None
    return max(Path(folder).glob("epoch_?????"), default=None)


def save(accelerator, path, epoch):
    folder = f"{path}/epoch_{epoch:05}"
    accelerator.save_state(folder + ".new")
    accelerator.wait_for_everyone()  # each process writes a file of its own
    if accelerator.is_main_process:
        # Hugging Face's save_state writes in place: a crash would leave half of a checkpoint under its name.
        os.replace(folder + ".new", folder)
        shutil.rmtree(f"{path}/epoch_{epoch - 2:05}", ignore_errors=True)  # the last two stay


def train(args):
    accelerator = Accelerator(
        # Without this, Hugging Face's Accelerator starts no group of processes on CPUs, and each of them trains alone.
        cpu=not torch.cuda.is_available(),
        dataloader_config=DataLoaderConfiguration(
            split_batches=True,  # the batch of a loader is the global one
            use_seedable_sampler=True,  # the order of an epoch is a function of data_seed and its number
            data_seed=args.seed,
            non_blocking=True,
        ),
    )
    if args.batch_size % accelerator.num_processes:
        raise SystemExit(
            f"--batch-size {args.batch_size} cannot be divided among {accelerator.num_processes} processes"
        )
    train_set, val_set = load_data(args)
    if len(train_set) < args.batch_size:
        raise SystemExit(f"{len(train_set)} training samples do not fill a batch of {args.batch_size}")
    loading = {"num_workers": args.workers, "pin_memory": accelerator.device.type == "cuda"}
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True, **loading)
    val_loader = DataLoader(val_set, args.batch_size, **loading)

    set_seed(args.seed)
    model = build_network(args, train_set)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer, train_loader, val_loader = accelerator.prepare(model, optimizer, train_loader, val_loader)
    if accelerator.is_main_process and args.checkpoint:  # fail before the training, not after an epoch
        Path(args.checkpoint).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=args.checkpoint).close()
    first_epoch = 0
    found = [newest_checkpoint(args.checkpoint)]
    broadcast_object_list(found)  # rank 0 has looked, so all ranks resume or none does
    if found[0]:
        accelerator.load_state(found[0])
        first_epoch = int(found[0].name.removeprefix("epoch_")) + 1
    # After `load_state`, which would bring the rate of the saved run: this one may have more epochs.
    schedule = cosine_schedule(optimizer, args.epochs * len(train_loader), first_epoch * len(train_loader))

    for epoch in range(first_epoch, args.epochs):
        train_loader.set_epoch(epoch)  # another order for each epoch
        train_set.epoch = epoch  # other crops for each epoch
        # So dropout draws other numbers on each rank, and in a resumed run what it draws in any other.
        set_seed(args.seed + epoch * accelerator.num_processes, device_specific=True)
        model.train()
        train_loss = torch.zeros((), dtype=torch.float64, device=accelerator.device)
        for inputs, targets in train_loader:
            loss = compute_loss(model(*inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            # Not while gradients accumulate, nor after a step that fp16 has skipped.
            if accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped:
                schedule.step()
            optimizer.zero_grad()
            train_loss += loss.detach()

        total, seen = evaluate(model, val_loader, accelerator).tolist()
        train_loss = accelerator.reduce(train_loss, reduction="mean") / len(train_loader)
        if accelerator.is_main_process:
            print(f"epoch {epoch}: training loss {train_loss:.4f}, score {total / seen:.4f} of {seen:.0f}", flush=True)
        if args.checkpoint:
            save(accelerator, args.checkpoint, epoch)
    accelerator.end_training()
    return accelerator.unwrap_model(model)


def parse_args(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("data", help="folder with train/CLASS/IMAGE and val/CLASS/IMAGE")
    parser.add_argument("--arch", default="resnet18", help="a name from torchvision.models")
    parser.add_argument("--size", type=int, default=224, help="pixels of an image's side")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="samples of an optimizer step, on all devices")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--workers", type=int, default=2, help="loader workers of each process")
    parser.add_argument("--checkpoint", help="folder to save to after each epoch, and to continue from")
    return parser.parse_args(argv)


if __name__ == "__main__":
    train(parse_args())
