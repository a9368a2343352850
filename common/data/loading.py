"""The two sets that a run trains and evaluates on: found, and of the same name on every rank."""

import sys
from argparse import Namespace

import torch

from common.data.digits import DigitImages
from common.data.mnist import CannotDownload, download, mnist_on_disk, raw_folder, read_mnist
from common.data.synthetic import draw_cache, read_synthetic
from common.errors import fail
from common.launch import read_launch
from common.process_group import all_gather_object, is_distributed


def load_data(args: Namespace) -> tuple[DigitImages, DigitImages]:
    """The training and the test set, cut as the flags ask for. In a process group all ranks call this.

        --dataset    MNIST is in --data-dir   it can be downloaded   neither
        auto         MNIST                    MNIST                  synthetic digits, with a warning
        mnist        MNIST                    MNIST                  an error
        synthetic    synthetic digits         synthetic digits       synthetic digits

    On each machine local rank 0 decides and fetches, while the others wait.

    Raises:
        UserError: where MNIST is damaged, or cannot be had although the flags say "mnist"; where two machines have
            found different sets; where an epoch has no step, or `--max-steps` is not for a part of one epoch.
    """
    name = _provide_on_every_machine(args)
    if name == "mnist":
        train = read_mnist(args.data_dir, "train")
        test = read_mnist(args.data_dir, "t10k")
    else:
        train, test = read_synthetic()
    device = None  # The images stay on the host.
    if args.data == "device":
        device = args.device
        if device.type == "cuda" and device.index is None:
            # This is the rank's own GPU. It may not be the current one yet: a Trainer chooses it when it is made.
            device = torch.device("cuda", read_launch().local_rank % torch.cuda.device_count())
    _, labels = train
    count = count_training_samples(args, len(labels))
    train_set = DigitImages(name, *train, count=count, dtype=args.dtype, device=device)
    test_set = DigitImages(name, *test, count=args.eval_samples, dtype=args.dtype, device=device)
    return train_set, test_set


def _provide_on_every_machine(args: Namespace) -> str:
    """The name of the dataset whose files are on this machine when this returns; the same name on all ranks."""
    if not is_distributed():
        return provide(args)
    own = None
    if read_launch().local_rank == 0:
        own = provide(args)
    names = all_gather_object(own)
    for rank, name in enumerate(names):
        if name not in (None, names[0]):
            fail(f"the ranks have different data: rank 0 {names[0]}, rank {rank} {name}. Name one with --dataset")
    return names[0]


def provide(args: Namespace) -> str:
    """The name of the dataset whose files are on this machine when this returns, by the table of `load_data`."""
    if args.dataset == "synthetic":
        draw_cache()
        return "synthetic"
    if mnist_on_disk(args.data_dir):
        return "mnist"
    try:
        download(args.data_dir)
        return "mnist"
    except CannotDownload as error:
        reason = str(error)
    missing = f"not in {raw_folder(args.data_dir)} and cannot be downloaded"
    if args.dataset == "mnist":
        fail(f"MNIST is {missing}: {reason}")
    if read_launch().rank == 0:
        instead = "Training on the synthetic digits instead (--dataset mnist makes this an error)."
        print(f"NOT MNIST: it is {missing} ({reason}). {instead}", file=sys.stderr)
    draw_cache()
    return "synthetic"


def count_training_samples(args: Namespace, available: int) -> int:
    """The number of samples to train on: all, or as many as the flags ask for.

    Raises UserError if an epoch has no step, or if `--max-steps` is not for a part of one epoch.
    """
    samples = available if args.train_samples is None else min(available, args.train_samples)
    steps = samples // args.batch_size
    if steps == 0:
        fail(f"{samples} training samples are fewer than one batch of {args.batch_size}")
    if not args.max_steps:
        return samples
    if args.epochs > 1:
        fail(f"--max-steps {args.max_steps} is for one epoch: leave it out, or ask for --epochs 1")
    if args.max_steps > steps:
        fail(f"--max-steps {args.max_steps} is more than an epoch's {steps} steps: ask for fewer, or for --epochs")
    return args.max_steps * args.batch_size
