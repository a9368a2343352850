"""A template for level 00: one process, one device. Copy it and change it; it imports nothing of this repository.

A network of torchvision learns to classify images. Each class is a subfolder: DATA/train/cat/1.jpg, DATA/val/cat/2.jpg.

    python 00_single_gpu/template.py DATA --epochs 10 --checkpoint run.pt

For a task of your own change three places: `Images` with `load_data`, `build_network`, `compute_loss` with `score`.
With --checkpoint it saves after each epoch. After Ctrl-C the same command goes on with the epoch that was cut short.
"""

import argparse
import math
import os

import torch
import torch.nn.functional as F
import torchvision
from torch.utils.data import DataLoader, RandomSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2


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


def on_device(batch, device):
    inputs, targets = batch
    inputs = [tensor.to(device, non_blocking=True) for tensor in inputs]
    return inputs, targets.to(device, non_blocking=True)


@torch.no_grad()
def evaluate(model, loader, device):
    """The sum of the samples' scores, and their number, as a tensor."""
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in loader:
        inputs, targets = on_device(batch, device)
        scores = score(model(*inputs), targets)
        totals[0] += scores.sum()
        totals[1] += len(scores)
    return totals


def make_folder(path):
    """Make the folder of a checkpoint. Where nothing can be written this fails, and not the first save."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    open(path + ".new", "wb").close()
    os.remove(path + ".new")


def save(path, model, optimizer, epoch):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save(state, path + ".new")
    os.replace(path + ".new", path)  # a crash leaves the old file or the new one, and no half of one


def load(path, model, optimizer):
    """Go on from a checkpoint. Returns the epoch that comes next."""
    saved = torch.load(path, map_location="cpu", weights_only=True)  # on a GPU, AdamW's step count would be waited for
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["epoch"] + 1


def train(args):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_set, val_set = load_data(args)
    if len(train_set) < args.batch_size:
        raise SystemExit(f"{len(train_set)} training samples do not fill a batch of {args.batch_size}")
    sampler = RandomSampler(train_set, generator=torch.Generator())
    loading = {"num_workers": args.workers, "pin_memory": device.type == "cuda"}
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True, **loading)
    val_loader = DataLoader(val_set, args.batch_size, **loading)

    torch.manual_seed(args.seed)
    model = build_network(args, train_set).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    if args.checkpoint:
        make_folder(args.checkpoint)
    first_epoch = 0
    if args.checkpoint and os.path.exists(args.checkpoint):
        first_epoch = load(args.checkpoint, model, optimizer)
    schedule = cosine_schedule(optimizer, args.epochs * len(train_loader), first_epoch * len(train_loader))

    for epoch in range(first_epoch, args.epochs):
        sampler.generator.manual_seed(args.seed + epoch)  # another order for each epoch
        train_set.epoch = epoch  # other crops for each epoch
        torch.manual_seed(args.seed + epoch)  # so dropout draws in a resumed run what it draws in any other
        model.train()
        train_loss = torch.zeros((), dtype=torch.float64, device=device)
        for batch in train_loader:
            inputs, targets = on_device(batch, device)
            loss = compute_loss(model(*inputs), targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            train_loss += loss.detach()

        total, seen = evaluate(model, val_loader, device).tolist()
        train_loss /= len(train_loader)
        print(f"epoch {epoch}: training loss {train_loss:.4f}, score {total / seen:.4f} of {seen:.0f}", flush=True)
        if args.checkpoint:
            save(args.checkpoint, model, optimizer, epoch)
    return model


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
    parser.add_argument("--checkpoint", help="file to save to after each epoch, and to continue from")
    return parser.parse_args(argv)


if __name__ == "__main__":
    train(parse_args())
