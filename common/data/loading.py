"""The two sets that a run trains and evaluates on: found, verified, and the same on every rank."""

import os
import sys
from pathlib import Path
from typing import Any

import torch

from common.data.cache import FailureNote, one_process_at_a_time
from common.data.digits import DigitImages
from common.data.idx import IdxError, read_idx
from common.data.mnist import MNIST_FILES, download, md5, mnist_on_disk, raw_folder
from common.data.synthetic import checksums_of_synthetic, synthetic_folder
from common.errors import fail


def load_data(args: Any) -> tuple[DigitImages, DigitImages]:
    """The training and the test set that the flags ask for.

    `args.dataset` "auto" takes MNIST if it is in `args.data_dir` or can be downloaded, else the synthetic digits, and
    says so. Processes on different machines may find different datasets: `check_same_dataset` compares them.

    Raises:
        UserError: where MNIST is there but damaged, or where "mnist" cannot be had.
    """
    with one_process_at_a_time("data", args.data_dir) as note:
        name, folder = _locate(args, note)
    try:
        train_set = _read(name, folder, "train", args.dtype)
        test_set = _read(name, folder, "t10k", args.dtype)
    except (OSError, IdxError) as error:
        fail(f"{error}. Remove {folder} to have it made again, or use --dataset synthetic")
    train_set.keep_first(args.train_samples)
    test_set.keep_first(args.eval_samples)
    if args.data == "device":
        device = device_of_this_process(args.device)
        train_set.move_to(device)
        test_set.move_to(device)
    return train_set, test_set


def device_of_this_process(device: torch.device) -> torch.device:
    """`device` with a number, where several processes share the GPUs of a machine."""
    if device.type != "cuda" or device.index is not None:
        return device
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def check_same_dataset(descriptions: list[str]) -> None:
    """Raise UserError if the ranks have loaded different data, as machines with different disks may.

    Args:
        descriptions: `DigitImages.description` of each rank's training set, in the order of the ranks.
    """
    first = descriptions[0]
    for rank, description in enumerate(descriptions):
        if description != first:
            fail(f"the ranks have different data: rank 0 {first}, rank {rank} {description}. Name one with --dataset")


def _locate(args: Any, note: FailureNote) -> tuple[str, Path]:
    """The dataset's name and the folder that holds its four files, which are there when this returns."""
    raw = raw_folder(args.data_dir)
    if args.dataset != "synthetic":
        if mnist_on_disk(args.data_dir):
            return "mnist", raw
        reason = note.read()
        if reason is None:
            reason = download(raw)
            note.write(reason)
        if reason is None:
            return "mnist", raw
        if args.dataset == "mnist":
            fail(f"MNIST is not in {raw} and cannot be downloaded: {reason}")
        if os.environ.get("RANK", "0") == "0":
            print(
                f"NOT MNIST: it is not in {raw} and cannot be downloaded ({reason}). "
                "Training on the synthetic digits instead (--dataset mnist makes this an error).",
                file=sys.stderr,
            )
    return "synthetic", synthetic_folder()


def _read(name: str, folder: Path, part: str, dtype: torch.dtype) -> DigitImages:
    images = read_idx(folder / f"{part}-images-idx3-ubyte", dimensions=3)
    labels = read_idx(folder / f"{part}-labels-idx1-ubyte", dimensions=1)
    checksums = MNIST_FILES if name == "mnist" else checksums_of_synthetic(folder)
    for file in (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"):
        if md5(folder / file) != checksums[file]:
            raise IdxError(f"{folder / file} is damaged: its checksum is not the one of {name}")
    return DigitImages(name, images, labels, dtype)
