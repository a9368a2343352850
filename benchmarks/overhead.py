"""What an abstraction adds to a training step: a raw loop, the core and its peers, round by round in one process.

The model is Linear(16, 10), the batch 64 samples, in memory, on the CPU with one thread: next to nothing to compute, so
that what is left is the loop's own cost. Each round runs every contestant once over the same batches, in an order that
rotates; what counts is the difference to the raw loop of the same round.

    python -m benchmarks.overhead
"""

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

STEPS, WARM_UP, BATCH = 400, 100, 64


class Samples(TensorDataset):
    """Hands out whole batches, so that loading costs next to nothing."""

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, ...]:
        return self[indices]


def pieces() -> tuple[torch.nn.Module, torch.optim.Optimizer, DataLoader]:
    """A model, its optimizer and its loader: the same for every contestant."""
    torch.manual_seed(0)
    samples = Samples(torch.randn(STEPS * BATCH, 16), torch.randint(10, (STEPS * BATCH,)))
    model = torch.nn.Linear(16, 10)
    loader = DataLoader(samples, BATCH, shuffle=True, drop_last=True, collate_fn=lambda batch: batch)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), loader


def timed(model, optimizer, loader, backward: Callable, accumulate: Callable) -> float:
    """Seconds per step after the warm-up."""
    for step, (inputs, targets) in enumerate(loader):
        if step == WARM_UP:
            began = time.perf_counter()
        with accumulate(model):
            loss = F.cross_entropy(model(inputs), targets)
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return (time.perf_counter() - began) / (STEPS - WARM_UP)


def raw() -> float:
    return timed(*pieces(), torch.Tensor.backward, lambda model: nullcontext())


def accelerated(library: str, accumulating: bool) -> Callable[[], float]:
    module = importlib.import_module(library)

    def run() -> float:
        accelerator = module.Accelerator(cpu=True)
        prepared = accelerator.prepare(*pieces())
        accumulate = accelerator.accumulate if accumulating else lambda model: nullcontext()
        seconds = timed(*prepared, accelerator.backward, accumulate)
        accelerator.free_memory()
        return seconds

    return run


def fabric() -> float:
    from lightning.fabric import Fabric

    engine = Fabric(accelerator="cpu", devices=1)
    model, optimizer, loader = pieces()
    model, optimizer = engine.setup(model, optimizer)
    loader = engine.setup_dataloaders(loader)
    return timed(model, optimizer, loader, engine.backward, lambda model: nullcontext())


def contestants() -> dict[str, Callable[[], float]]:
    """Those that can run here, the raw loop first."""
    found = {
        "raw loop": raw,
        "common.accelerator": accelerated("common.accelerator", False),
        "common.accelerator, accumulate()": accelerated("common.accelerator", True),
    }
    if importlib.util.find_spec("accelerate"):
        found["accelerate"] = accelerated("accelerate", False)
        found["accelerate, accumulate()"] = accelerated("accelerate", True)
    if importlib.util.find_spec("lightning"):
        found["lightning.fabric"] = fabric
    return found


def measure(rounds: int) -> dict[str, list[float]]:
    """Microseconds per step of each contestant in each round."""
    torch.set_num_threads(1)
    running = contestants()
    names = list(running)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in tqdm(range(rounds), leave=False, disable=None):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            times[name].append(running[name]() * 1e6)
    return times


def summary(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Per contestant the median step, and median and quartiles of what it adds to the raw loop, in µs."""
    result = {}
    for name, own in times.items():
        added = [mine - theirs for mine, theirs in zip(own, times["raw loop"], strict=True)]
        low, middle, high = statistics.quantiles(added, n=4) if len(added) > 1 else added * 3
        result[name] = {"step": statistics.median(own), "added": middle, "low": low, "high": high}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, metavar="N")
    parser.add_argument("--json", type=Path, metavar="PATH")
    options = parser.parse_args()
    times = measure(options.rounds)
    print(f"{'µs per step, medians of ' + str(options.rounds) + ' rounds':<36}{'step':>8}{'added':>8}  quartiles")
    for name, row in summary(times).items():
        print(f"{name:<36}{row['step']:8.1f}{row['added']:8.1f}  {row['low']:.1f} to {row['high']:.1f}")
    if options.json:
        options.json.write_text(json.dumps({"times": times, "summary": summary(times)}, indent=2) + "\n")


if __name__ == "__main__":
    main()
