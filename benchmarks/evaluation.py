"""Three ways to evaluate on several ranks: what they count, how long they take and how often the ranks must meet.

The network is one linear layer, so that the time is that of dealing out samples, loading and meeting. Where a sampler
pads, some samples are counted twice, and the accuracy is not the test set's.
"""

import contextlib
import io
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks import records
from benchmarks.paired import Samples
from benchmarks.workers import ranks
from common.accelerator import Accelerator
from common.accelerator.sampler import DistributedEvalSampler
from common.accelerator.state import available_cores
from common.args import parse_args
from common.data import collate, load_data
from common.ladder import script

RANKS, BATCH_SIZE = 3, 64
TIMEOUT = 900  # seconds, for any one evaluation
PADDED, EXACT, GATHERED = "DistributedSampler (padded)", "DistributedEvalSampler", "gather_for_metrics"


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

    Counting slows the operations down, so a timed run does without.
    """
    torch.set_num_threads(max(1, available_cores() // RANKS))
    with contextlib.redirect_stdout(io.StringIO()):
        argv = ["--batch-size", str(BATCH_SIZE * RANKS), *flags]
        _, test_set = load_data(parse_args(str(script("02_ddp_raw")), argv))
    accelerator = Accelerator(cpu=True)
    try:
        torch.manual_seed(0)
        model = torch.nn.Linear(784, 10)
        loading = {"batch_size": BATCH_SIZE, "collate_fn": collate}
        if way == GATHERED:
            loader = accelerator.prepare(DataLoader(test_set, **loading))
        else:
            sampler = DistributedEvalSampler(test_set) if way == EXACT else DistributedSampler(test_set, shuffle=False)
            loader = DataLoader(test_set, sampler=sampler, **loading)
        dist.barrier()
        counter = Collectives() if counting else contextlib.nullcontext()
        began = time.perf_counter()
        with counter, torch.no_grad():
            totals = _gathered(model, loader, accelerator) if way == GATHERED else _summed(model, loader)
        result = {"counted": int(totals[1]), "correct": int(totals[0])}
        return result | ({"collectives": counter.count} if counting else {"seconds": time.perf_counter() - began})
    finally:
        accelerator.end_training()


def _summed(model, loader) -> list[float]:
    """[correct, samples]: summed on each rank, then over the ranks, once."""
    totals = torch.zeros(2, dtype=torch.float64)
    for images, targets in loader:
        totals += _counts(model(images.flatten(1)), targets)
    dist.all_reduce(totals)
    return totals.tolist()


def _gathered(model, loader, accelerator) -> list[float]:
    """[correct, samples]: every batch from all ranks, summed on each of them."""
    totals = torch.zeros(2, dtype=torch.float64)
    for images, targets in loader:
        totals += _counts(*accelerator.gather_for_metrics((model(images.flatten(1)), targets)))
    return totals.tolist()


def _counts(logits, targets) -> torch.Tensor:
    correct = (F.log_softmax(logits, dim=1).argmax(dim=1) == targets).sum()
    return torch.tensor([correct, len(targets)], dtype=torch.float64)


def contestants(flags: tuple[str, ...]) -> dict[str, Callable[[], float]]:
    """Each way, in ms; the slowest rank counts."""

    def slowest(way: str) -> float:
        return 1000 * max(result["seconds"] for result in ranks(RANKS).run(evaluate, way, flags, timeout=TIMEOUT))

    return {way: lambda way=way: slowest(way) for way in (PADDED, EXACT, GATHERED)}


def facts(flags: tuple[str, ...]) -> dict[str, dict]:
    """What each way counts, from a run apart from the timed ones: "counted", "correct", "collectives"."""
    return {way: ranks(RANKS).run(evaluate, way, flags, True, timeout=TIMEOUT)[0] for way in (PADDED, EXACT, GATHERED)}


def record(samples: Samples, counted: dict[str, dict]) -> dict:
    notes = [
        f"{way}: samples counted {row['counted']}, correct {row['correct']}, collectives {row['collectives']}"
        for way, row in counted.items()
    ]
    ratios = [(PADDED, EXACT), (GATHERED, EXACT)]
    return records.group(f"evaluating on {RANKS} ranks", "ms", samples, counted, ratios, notes=notes)
