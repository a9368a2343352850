"""The time that an abstraction adds to a step: a raw loop, the core, the Trainer and their peers.

The model, Linear(16, 10), has next to nothing to compute, so what is left is the loop's own cost. Model and data are in
the CPU's memory. Every contestant has a process of its own with one thread, because what one library imports may slow
the others. Each round runs every contestant once over 400 batches of 64 samples, in an order that is drawn anew. The
result is the difference to a raw loop of the same round that does the same work. The Trainers' raw loop also measures
the gradients' norm, steps a schedule and sums the losses, as they do. No contestant logs or saves.

A contestant's sample is its median step. A step takes some hundred microseconds, and a process that loses its core for
one step would else add milliseconds to the mean.
"""

import importlib.util
import io
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext, redirect_stdout
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness import records
from benchmarks.harness.options import TIMEOUT_SECONDS, MeasureOptions
from benchmarks.harness.paired import take_turns
from benchmarks.harness.records import Pair
from common.processes import Ranks

STEPS = 400
WARM_UP = 100
BATCH = 64
RAW = "raw loop"
RAW_LIKE_TRAINER = "raw loop like a Trainer's"
PEERS = ("accelerate", "lightning", "transformers")


class Batches(TensorDataset):
    """Hands out whole batches, so that loading costs next to nothing."""

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, ...]:
        return self[indices]


def data() -> Batches:
    samples = STEPS * BATCH
    return Batches(torch.randn(samples, 16), torch.randint(10, (samples,)))


def median_step(ends: list[float]) -> float:
    """The median step after the warm-up, from the times at which steps ended."""
    return statistics.median(end - start for start, end in pairwise(ends[WARM_UP:]))


def model_and_optimizer() -> tuple[Module, Optimizer]:
    """The same for every contestant."""
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 10)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def tuple_loader() -> DataLoader:
    return DataLoader(data(), BATCH, shuffle=True, drop_last=True, collate_fn=lambda batch: batch)


def timed(
    model: Module, optimizer: Optimizer, loader: Iterable, backward: Callable, context_of_step: Callable = nullcontext
) -> float:
    """Seconds of the median step. Each step runs in the context that `context_of_step(model)` makes."""
    ends = []
    for inputs, targets in loader:
        with context_of_step(model):
            loss = F.cross_entropy(model(inputs), targets)
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        ends.append(time.perf_counter())
    return median_step(ends)


def raw_loop() -> float:
    return timed(*model_and_optimizer(), tuple_loader(), torch.Tensor.backward)


def by_accelerator(library: str, accumulate: bool = False) -> float:
    """Seconds of the median step of the Accelerator of `library`, "common.accelerator" or "accelerate"."""
    module = importlib.import_module(library)
    accelerator = module.Accelerator(cpu=True)
    loader = tuple_loader()
    model, optimizer, loader = accelerator.prepare(*model_and_optimizer(), loader)
    context_of_step = accelerator.accumulate if accumulate else nullcontext
    return timed(model, optimizer, loader, accelerator.backward, context_of_step)


def by_fabric() -> float:
    from lightning.fabric import Fabric

    engine = Fabric(accelerator="cpu", devices=1)
    model, optimizer = engine.setup(*model_and_optimizer())
    return timed(model, optimizer, engine.setup_dataloaders(tuple_loader()), engine.backward)


def to_dict(batch: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    return {"x": batch[0], "y": batch[1]}


def raw_loop_like_trainer() -> float:
    """Seconds of the median step of a plain loop with all that a Trainer does: the norm, the schedule, the losses."""
    model, optimizer = model_and_optimizer()
    schedule = LambdaLR(optimizer, lambda step: 1.0)
    loss_sum = torch.zeros((), dtype=torch.float64)
    ends = []
    loader = DataLoader(data(), BATCH, shuffle=True, collate_fn=to_dict)
    for batch in loader:
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        loss_sum += loss.detach()
        ends.append(time.perf_counter())
    return median_step(ends)


def by_trainer(library: str) -> float:
    """Seconds of the median step of the Trainer of `library`, "common.trainer" or "transformers"."""
    module = importlib.import_module(library)
    ends = []

    class LossTrainer(module.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return F.cross_entropy(model(inputs["x"]), inputs["y"])

    class Watching(module.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            ends.append(time.perf_counter())

    model, optimizer = model_and_optimizer()
    # A Trainer prints a summary at its end, which is not wanted here.
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        arguments = module.TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH,
            num_train_epochs=1,
            max_grad_norm=0,  # no limit; both Trainers measure the norm all the same
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        trainer = LossTrainer(
            model,
            arguments,
            data_collator=to_dict,
            train_dataset=data(),
            callbacks=[Watching()],
            optimizers=(optimizer, LambdaLR(optimizer, lambda step: 1.0)),
        )
        trainer.train()
    return median_step(ends)


class Loop(NamedTuple):
    name: str
    run: Callable[[], float]  # returns the seconds of its median step
    raw: str | None = None  # the name of the raw loop that does the same work; None for a raw loop
    needs: tuple[str, ...] = ()  # the PEERS that it imports


LOOPS = (
    Loop(RAW, raw_loop),
    Loop("common.accelerator", partial(by_accelerator, "common.accelerator"), RAW),
    Loop("common.accelerator, accumulate()", partial(by_accelerator, "common.accelerator", accumulate=True), RAW),
    Loop("accelerate", partial(by_accelerator, "accelerate"), RAW, ("accelerate",)),
    Loop("accelerate, accumulate()", partial(by_accelerator, "accelerate", accumulate=True), RAW, ("accelerate",)),
    Loop("lightning.fabric", by_fabric, RAW, ("lightning",)),
    Loop(RAW_LIKE_TRAINER, raw_loop_like_trainer),
    Loop("common.trainer", partial(by_trainer, "common.trainer"), RAW_LIKE_TRAINER),
    Loop("transformers.Trainer", partial(by_trainer, "transformers"), RAW_LIKE_TRAINER, ("transformers", "accelerate")),
)


def measure(options: MeasureOptions) -> dict:
    """One group, of all loops, with what each library adds to the raw loop that does the same work."""
    missing = {name for name in PEERS if not importlib.util.find_spec(name)}
    if missing:
        print(f"not measured: {', '.join(sorted(missing))}, not installed (pip install -e '.[peers]')", flush=True)
    loops = [loop for loop in LOOPS if missing.isdisjoint(loop.needs)]
    pairs = [Pair(loop.name, loop.raw, "difference") for loop in loops if loop.raw]
    # As ranks, accelerate would wrap the model in a DDP of one rank.
    processes = {loop: Ranks(1, on_cpu=True, launched=False) for loop in loops}
    settings = {"timeout": TIMEOUT_SECONDS, "environment": {"HF_HUB_OFFLINE": "1"}}
    contestants = {loop.name: partial(process.run, loop.run, **settings) for loop, process in processes.items()}
    try:
        results = take_turns(contestants, range(1 + options.rounds))  # in the first round, left out, processes import
    finally:
        for process in processes.values():
            process.stop()
    samples = {name: [1e6 * seconds for (seconds,) in turns[1:]] for name, turns in results.items()}
    return {"groups": [records.group("overhead per step", "µs", samples, pairs=pairs)]}
