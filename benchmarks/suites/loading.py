"""The cost of a batch before it is trained on: tensors in memory against torchvision's images and transforms.

Both pipelines give the same numbers for the same images. With worker processes the loading overlaps with what the
process does otherwise; here it does nothing else, so that the time between two batches is the pipeline's own.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.harness import records
from benchmarks.harness.groups import Extent, Group, chosen
from benchmarks.harness.paired import Samples, measure
from benchmarks.harness.process_facts import process_facts
from benchmarks.suites.throughput import Configuration, Throughput
from common.args import parse_args
from common.data import collate, load_data
from common.data.digits import MEAN, STD
from common.data.synthetic import synthetic_folder
from common.ladder import script

BATCH_SIZE = 64
PASSED_OVER = 10  # batches; the first ones wait for the workers to start
STEP = "level 00's whole step"


def tensors(flags: tuple[str, ...]) -> Dataset:
    args = parse_args(str(script("00_single_gpu")), list(flags))
    train_set, _ = load_data(args)
    return train_set


def images(flags: tuple[str, ...]) -> Dataset:
    """The same images as torchvision hands them out: opened with PIL, made a tensor, normalised, one by one."""
    from torchvision import transforms
    from torchvision.datasets import MNIST

    args = parse_args(str(script("00_single_gpu")), list(flags))
    train_set, _ = load_data(args)
    # torchvision looks for ROOT/MNIST/raw.
    root = args.data_dir if train_set.name == "mnist" else synthetic_folder().parent.parent
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    return MNIST(str(root), transform=transform)


def milliseconds_per_batch(dataset: Dataset, num_workers: int, collate_fn: Callable | None, batches: int) -> float:
    loader = DataLoader(dataset, BATCH_SIZE, shuffle=True, num_workers=num_workers, collate_fn=collate_fn)
    for number, _ in enumerate(loader, start=1):
        if number == PASSED_OVER:
            began = time.perf_counter()
        if number == PASSED_OVER + batches:
            return 1000 * (time.perf_counter() - began) / batches
    raise ValueError(f"{len(dataset)} samples are fewer than {PASSED_OVER + batches} batches of {BATCH_SIZE}")


TITLE = f"loading a batch of {BATCH_SIZE}"
WORKERS = (0, 2)
ROWS = (*(f"{pipeline}, {workers} workers" for workers in WORKERS for pipeline in ("tensors", "PIL images")), STEP)


def groups() -> list[Group]:
    return [Group("loading", TITLE, ROWS, measured)]


def measured(rows: tuple[str, ...], extent: Extent) -> dict:
    """The record of these rows; a step of level 00 is one of them."""
    pipelines = contestants(extent.data_flags, 20 if extent.quick else 100)
    facts = {row: process_facts() for row in rows if row != STEP}
    if STEP in rows:
        configuration = Configuration("00_single_gpu", batch_size=BATCH_SIZE)
        step = Throughput([configuration], extent.seconds, extent.data_flags, extent.quick)
        images_per_sec = step.contestants[configuration.name]
        pipelines[STEP] = lambda: 1000 * BATCH_SIZE / images_per_sec()
    samples = measure(chosen(pipelines, rows), extent.rounds)
    if STEP in rows:
        facts[STEP] = step.facts[configuration.name]
    return record(samples, facts)


def contestants(flags: tuple[str, ...], batches: int) -> dict[str, Callable[[], float]]:
    """Each pipeline with 0 and 2 workers, in ms per batch."""
    in_memory = tensors(flags)
    files = images(flags)
    found = {}
    for workers in WORKERS:
        found[f"tensors, {workers} workers"] = partial(milliseconds_per_batch, in_memory, workers, collate, batches)
        found[f"PIL images, {workers} workers"] = partial(milliseconds_per_batch, files, workers, None, batches)
    return found


def record(samples: Samples, facts: dict[str, dict]) -> dict:
    """With the factor between the pipelines, and the share of level 00's step that each takes without workers."""
    plain, pil = "tensors, 0 workers", "PIL images, 0 workers"
    ratios = [(pil, plain), ("PIL images, 2 workers", plain), (plain, STEP), (pil, STEP)]
    notes = [f"{STEP.capitalize()} includes loading: tensors, 0 workers. {torch.get_num_threads()} threads."]
    return records.group(TITLE, "ms", samples, facts, ratios, notes=notes)


if __name__ == "__main__":
    raise SystemExit("error: a suite is run by: pytest benchmarks -k test_loading")
