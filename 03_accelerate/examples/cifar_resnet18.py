"""ResNet-18 on CIFAR-10, with what level 03 leaves out: a tracker, a logger that speaks once, `save_model`.

    python 03_accelerate/examples/cifar_resnet18.py --tracker jsonl
    python -m common.accelerator launch --num_processes 2 03_accelerate/examples/cifar_resnet18.py --tracker tensorboard

CIFAR images are small: the first convolution is 3×3 with stride 1 and the max-pooling goes, else a 32×32 image would
reach the residual blocks as 8×8. By default it trains on coloured noise of the same shape; `--dataset cifar10` fetches
CIFAR-10.
"""

import argparse
import logging

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.datasets import CIFAR10
from torchvision.models import resnet18

from common.accelerator import Accelerator
from common.accelerator.logging import get_logger
from common.accelerator.utils import DataLoaderConfiguration, set_seed

logger = get_logger(__name__)


def cifar_resnet18():
    model = resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def load_cifar(args, train):
    """Images as bytes, (n, 3, 32, 32), and labels 0–9."""
    if args.dataset == "cifar10":
        cifar = CIFAR10(args.data_dir, train=train, download=True)
        images, labels = torch.from_numpy(cifar.data).permute(0, 3, 1, 2), torch.tensor(cifar.targets)
    else:  # each class is a pattern of its own under noise
        noise = torch.Generator().manual_seed(int(train))
        labels = torch.randint(10, (5000 if train else 1000,), generator=noise)
        patterns = torch.rand(10, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        images = (patterns[labels] * 128 + torch.rand(len(labels), 3, 32, 32, generator=noise) * 127).byte()
    return TensorDataset(images[: args.samples], labels[: args.samples])


def normalise(images):
    return images.float().div(127.5).sub(1)


def train(args):
    # --batch-size is the global one: split_batches shares each batch out, instead of giving one to every process.
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision,
        log_with=args.tracker,
        project_dir=args.output_dir,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    set_seed(args.seed)
    with accelerator.main_process_first():  # one process downloads
        train_set = load_cifar(args, train=True)
        test_set = load_cifar(args, train=False)
    sizes = f"{len(train_set)} training and {len(test_set)} test images"
    logger.info(f"{args.dataset}: {sizes}, world size {accelerator.num_processes}")
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True, drop_last=True)
    test_loader = DataLoader(test_set, batch_size=16 * args.batch_size)

    model = cifar_resnet18()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    settings = {name: value for name, value in vars(args).items() if value is not None}
    accelerator.init_trackers("cifar_resnet18", config=settings)

    step = 0
    for epoch in range(args.epochs):
        model.train()
        for images, labels in train_loader:
            with accelerator.autocast():
                loss = F.cross_entropy(model(normalise(images)), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % args.log_every == 0:
                loss = accelerator.reduce(loss.detach(), "mean").item()  # of all processes
                accelerator.log({"loss": loss}, step=step)
            if step == args.max_steps:
                break
        correct, evaluated = evaluate(accelerator, model, test_loader)
        logger.info(f"epoch {epoch}: {correct} of {evaluated} correct after {step} steps")
        accelerator.log({"accuracy": correct / evaluated, "epoch": epoch}, step=step)
        if step == args.max_steps:
            break

    accelerator.save_model(model, args.output_dir)  # safetensors, with ResNet-18's own names
    accelerator.end_training()
    return {"correct": correct, "evaluated": evaluated, "steps": step}


@torch.no_grad()
def evaluate(accelerator, model, loader):
    model.eval()
    correct = evaluated = 0
    for images, labels in loader:
        predictions = model(normalise(images)).argmax(dim=1)
        # Batches are padded until all processes have the same number; this drops the padding again.
        predictions, labels = accelerator.gather_for_metrics((predictions, labels))
        correct += (predictions == labels).sum().item()
        evaluated += len(labels)
    return correct, evaluated


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16, help="global: of all processes together")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--mixed-precision", choices=["no", "fp16", "bf16"])
    parser.add_argument("--dataset", choices=["cifar10", "synthetic"], default="synthetic")
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--samples", type=int, help="only the first of each set")
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--tracker", help="jsonl or tensorboard")
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--output-dir", default="runs/cifar_resnet18", help="for the weights and the tracker's files")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
