"""Ways to evaluate on several ranks: what they count, how long they take and how often the ranks must meet.

The network is one linear layer, so that the time is that of dealing out samples, loading and meeting. Where a sampler
pads, some samples are counted twice, and the accuracy is not the test set's.
"""

import contextlib
import importlib
import io
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks.harness import records
from benchmarks.harness.groups import Extent, Group, chosen
from benchmarks.harness.paired import Samples, measure
from benchmarks.harness.process_facts import process_facts
from benchmarks.suites.overhead import missing
from common.accelerator.sampler import DistributedEvalSampler
from common.args import parse_args
from common.cores import available_cores
from common.data import collate, load_data
from common.ladder import script
from common.processes import ranks

RANKS = 3
FEWER_RANKS = 2
BATCH_SIZE = 64
TIMEOUT = 900  # seconds, for any one evaluation
PADDED = "DistributedSampler (padded)"
EXACT = "DistributedEvalSampler"
GATHERED = "gather_for_metrics"
WAYS = (PADDED, EXACT, GATHERED)
THEIRS = "accelerate's gather_for_metrics"


class Collectives(TorchDispatchMode):
    """Counts the collectives that this process takes part in; each passes the dispatcher as an operation of c10d."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


def evaluate(way: str, flags: tuple[str, ...], counting: bool = False) -> dict:
    """On one of the ranks: samples "counted" and "correct" over all ranks; "collectives" if `counting`, else "seconds".

    How the rank is set is there too, see `process_facts`.
    Counting slows the operations down, so a timed run does without.
    """
    torch.set_num_threads(max(1, available_cores() // int(os.environ["WORLD_SIZE"])))
    test_set = _test_set(flags)
    library = importlib.import_module("accelerate" if way == THEIRS else "common.accelerator")
    accelerator = library.Accelerator(cpu=True)
    try:
        torch.manual_seed(0)
        model = torch.nn.Linear(784, 10)
        loader = _loader(way, test_set)
        if way in (GATHERED, THEIRS):
            loader = accelerator.prepare(loader)
        dist.barrier()
        counter = Collectives() if counting else contextlib.nullcontext()
        began = time.perf_counter()
        with counter, torch.no_grad():
            totals = _gathered(model, loader, accelerator) if way in (GATHERED, THEIRS) else _summed(model, loader)
        seconds = time.perf_counter() - began
    finally:
        accelerator.end_training()
        if way == THEIRS:  # its states outlive it, and this process will have other jobs
            library.state.AcceleratorState._reset_state(reset_partial_state=True)
            library.state.GradientState._reset_state()
    result = {"counted": int(totals[1]), "correct": int(totals[0])} | process_facts()
    if counting:
        return result | {"collectives": counter.count}
    return result | {"seconds": seconds}


def _test_set(flags: tuple[str, ...]) -> Dataset:
    argv = ["--batch-size", str(BATCH_SIZE * int(os.environ["WORLD_SIZE"])), *flags]
    with contextlib.redirect_stdout(io.StringIO()):
        args = parse_args(str(script("02_ddp_raw")), argv)
        _, test_set = load_data(args)
    return test_set


def _loader(way: str, test_set: Dataset) -> DataLoader:
    """This rank's batches; what `gather_for_metrics` gathers is dealt out by `prepare`."""
    sampler = None
    if way == EXACT:
        sampler = DistributedEvalSampler(test_set)
    elif way == PADDED:
        sampler = DistributedSampler(test_set, shuffle=False)
    return DataLoader(test_set, sampler=sampler, batch_size=BATCH_SIZE, collate_fn=collate)


def _summed(model: torch.nn.Module, loader: DataLoader) -> list[float]:
    """[correct, samples]: summed on each rank, then over the ranks, once."""
    totals = torch.zeros(2, dtype=torch.float64)
    for images, targets in loader:
        logits = model(images.flatten(1))
        totals += _counts(logits, targets)
    dist.all_reduce(totals)
    return totals.tolist()


def _gathered(model: torch.nn.Module, loader: DataLoader, accelerator: Any) -> list[float]:
    """[correct, samples]: every batch from all ranks, summed on each of them."""
    totals = torch.zeros(2, dtype=torch.float64)
    for images, targets in loader:
        logits = model(images.flatten(1))
        gathered_logits, gathered_targets = accelerator.gather_for_metrics((logits, targets))
        totals += _counts(gathered_logits, gathered_targets)
    return totals.tolist()


def _counts(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    predictions = F.log_softmax(logits, dim=1).argmax(dim=1)
    correct = (predictions == targets).sum()
    return torch.tensor([correct, len(targets)], dtype=torch.float64)


def contestants(flags: tuple[str, ...], world: int = RANKS) -> dict[str, Callable[[], float]]:
    """Each way, in ms; the slowest rank counts."""
    return {way: partial(milliseconds, way, flags, world) for way in ways()}


def ways() -> tuple[str, ...]:
    """Those that can run here."""
    return WAYS if missing("accelerate") else (*WAYS, THEIRS)


def groups() -> list[Group]:
    found = []
    for key, world in (("evaluation", RANKS), ("evaluation-2", FEWER_RANKS)):
        found.append(Group(key, title(world), ways(), partial(measured, world)))
    return found


def title(world: int) -> str:
    return f"evaluating on {world} ranks"


def measured(world: int, rows: tuple[str, ...], extent: Extent) -> dict:
    counted = facts(extent.data_flags, rows, world)
    samples = measure(chosen(contestants(extent.data_flags, world), rows), extent.rounds)
    return record(samples, counted, world)


def milliseconds(way: str, flags: tuple[str, ...], world: int = RANKS) -> float:
    """Of one evaluation, by the slowest rank's clock."""
    results = ranks(world).run(evaluate, way, flags, timeout=TIMEOUT)
    return 1000 * max(result["seconds"] for result in results)


def facts(flags: tuple[str, ...], ways: tuple[str, ...] = WAYS, world: int = RANKS) -> dict[str, dict]:
    """The count of each way, and how its ranks are set, from a run apart from the timed ones."""
    found = {}
    for way in ways:
        results = ranks(world).run(evaluate, way, flags, counting=True, timeout=TIMEOUT)
        found[way] = results[0]  # all ranks know the totals
    return found


def record(samples: Samples, counted: dict[str, dict], world: int) -> dict:
    notes = [
        f"{way}: samples counted {row['counted']}, correct {row['correct']}, collectives {row['collectives']}"
        for way, row in counted.items()
    ]
    ratios = [(PADDED, EXACT), (GATHERED, EXACT), (GATHERED, THEIRS)]
    return records.group(title(world), "ms", samples, counted, ratios, notes=notes)


if __name__ == "__main__":
    raise SystemExit("error: a suite is run by: pytest benchmarks -k test_evaluation")
