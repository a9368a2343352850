"""What a batch costs before it is trained on: tensors in memory against torchvision's images and transforms.

Both pipelines give the same numbers for the same images. With worker processes the loading overlaps with what the
process does otherwise; here it does nothing else, so that the time between two batches is the pipeline's own.
"""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks import records
from benchmarks.paired import Samples
from common.args import parse_args
from common.data import MEAN, STD, collate, load_data
from common.ladder import script
from common.synthetic import synthetic_folder

BATCH_SIZE = 64
PASSED_OVER = 10  # batches; the first ones wait for the workers to start
STEP = "level 00's whole step"


def tensors(flags: tuple[str, ...]) -> Dataset:
    return load_data(parse_args(str(script("00_single_gpu")), list(flags)))[0]


def images(flags: tuple[str, ...]) -> Dataset:
    """The same images as torchvision hands them out: opened with PIL, made a tensor, normalised, one by one."""
    from torchvision import transforms
    from torchvision.datasets import MNIST

    args = parse_args(str(script("00_single_gpu")), list(flags))
    root = Path(args.data_dir) if tensors(flags).name == "mnist" else synthetic_folder().parent.parent
    return MNIST(str(root), transform=transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)]))


def milliseconds_per_batch(dataset: Dataset, num_workers: int, collate_fn: Callable | None, batches: int) -> float:
    loader = DataLoader(dataset, BATCH_SIZE, shuffle=True, num_workers=num_workers, collate_fn=collate_fn)
    for number, _ in enumerate(loader, start=1):
        if number == PASSED_OVER:
            began = time.perf_counter()
        if number == PASSED_OVER + batches:
            return 1000 * (time.perf_counter() - began) / batches
    raise ValueError(f"{len(dataset)} samples are fewer than {PASSED_OVER + batches} batches of {BATCH_SIZE}")


def contestants(flags: tuple[str, ...], batches: int) -> dict[str, Callable[[], float]]:
    """Each pipeline with 0 and 2 workers, in ms per batch."""
    pipelines = {"tensors": (tensors(flags), collate), "PIL images": (images(flags), None)}
    return {
        f"{name}, {workers} workers": lambda dataset=dataset, workers=workers, collate_fn=collate_fn: (
            milliseconds_per_batch(dataset, workers, collate_fn, batches)
        )
        for name, (dataset, collate_fn) in pipelines.items()
        for workers in (0, 2)
    }


def record(samples: Samples, facts: dict[str, dict]) -> dict:
    """With the factor between the pipelines, and the share of level 00's step that each takes without workers."""
    plain, pil = "tensors, 0 workers", "PIL images, 0 workers"
    ratios = [(pil, plain), ("PIL images, 2 workers", plain), (plain, STEP), (pil, STEP)]
    notes = [f"{STEP.capitalize()} includes loading: tensors, 0 workers. {torch.get_num_threads()} threads."]
    return records.group(f"loading a batch of {BATCH_SIZE}", "ms", samples, facts, ratios, notes=notes)
