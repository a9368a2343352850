"""A wide convolutional net on MNIST: a learning rate that moves with every batch, mixed precision, the best one kept.

    python 03_accelerate/examples/wide_net.py --mixed-precision bf16
    python -m common.accelerator launch --num_processes 2 --mixed_precision bf16 03_accelerate/examples/wide_net.py

Published for this net: 98.87 % after 5 epochs with OneCycleLR. Well-known versions of it evaluate with
`drop_last=True`, which counts 9216 of the 10000 test images, never call `model.eval()`, and take `is_main_process` for
"first on this machine"; here every image counts once and rank 0 of the whole run does the saving.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.utils.data import DataLoader

from common.accelerator import Accelerator
from common.accelerator.utils import DataLoaderConfiguration, set_seed
from common.data import collate, load_data


def wide_net():
    return nn.Sequential(
        nn.Conv2d(1, 512, kernel_size=3), nn.MaxPool2d(2),
        nn.Conv2d(512, 256, kernel_size=5), nn.MaxPool2d(2),
        nn.Dropout2d(0.1), nn.AdaptiveMaxPool2d(1), nn.Flatten(),
        nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def train(args):
    # The batch is the global one, and the scheduler, too, then takes one step per optimizer step on any number of
    # processes: with split_batches=False Accelerate would step it once for each of them.
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision, dataloader_config=DataLoaderConfiguration(split_batches=True)
    )
    set_seed(args.seed)
    train_set, test_set = load_data(args)
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True, collate_fn=collate)
    test_loader = DataLoader(test_set, args.batch_size, collate_fn=collate)  # the last, smaller batch counts

    model = wide_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps = len(train_loader) * args.epochs
    if args.scheduler == "onecycle":
        scheduler = OneCycleLR(optimizer, max_lr=25e-3, total_steps=steps)
    else:
        scheduler = StepLR(optimizer, step_size=len(train_loader), gamma=0.7)  # once per epoch
    model, optimizer, scheduler, train_loader, test_loader = accelerator.prepare(
        model, optimizer, scheduler, train_loader, test_loader
    )
    set_seed(args.seed, device_specific=True)  # each process drops units of its own out

    output = Path(args.output_dir)
    best = -1.0
    step = 0
    accelerator.on_main_process(output.mkdir)(parents=True, exist_ok=True)
    for epoch in range(args.epochs):
        model.train()
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            step += 1
        accuracy, evaluated = evaluate(accelerator, model, test_loader)
        accelerator.print(f"epoch {epoch}: {accuracy:.2%} of {evaluated} after {step} steps")
        weights = accelerator.get_state_dict(model)  # the net's own names, without DDP's `module.`
        accelerator.save(weights, output / f"epoch_{epoch}.pt")
        if accuracy > best:
            best = accuracy
            accelerator.save(weights, output / "best.pt")

    accelerator.wait_for_everyone()  # rank 0 may still be writing what the others read, on a disk that all share
    bare = accelerator.unwrap_model(model)
    bare.load_state_dict(torch.load(output / "best.pt", map_location="cpu", weights_only=True))
    accuracy, evaluated = evaluate(accelerator, model, test_loader)
    accelerator.print(f"best: {accuracy:.2%} of {evaluated}")
    accelerator.end_training()
    return {"accuracy": accuracy, "best": best, "evaluated": evaluated, "steps": step}


@torch.no_grad()
def evaluate(accelerator, model, loader):
    model.eval()
    correct = evaluated = 0
    for images, labels in loader:
        predictions, labels = accelerator.gather_for_metrics((model(images).argmax(dim=1), labels))
        correct += (predictions == labels).sum().item()
        evaluated += len(labels)
    return correct / evaluated, evaluated


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=1024, help="global: of all processes together")
    parser.add_argument("--scheduler", choices=["onecycle", "step"], default="onecycle")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--mixed-precision", choices=["no", "fp16", "bf16"])
    parser.add_argument("--dataset", choices=["auto", "mnist", "synthetic"], default="auto")
    parser.add_argument("--data-dir", default=os.environ.get("MNIST_ROOT", "data"))
    parser.add_argument("--train-samples", type=int)
    parser.add_argument("--eval-samples", type=int)
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--output-dir", default="runs/wide_net", help="for a checkpoint per epoch and the best one")
    parser.set_defaults(dtype=torch.float32, data="host")  # load_data asks for them
    train(parser.parse_args())


if __name__ == "__main__":
    main()
