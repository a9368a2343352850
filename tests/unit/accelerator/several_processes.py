"""Several processes in a test. There are two ways, for two kinds of promise.

**Real ranks** run a job: `on_ranks(2, job, 5)` calls `job(accelerator, 5)` on two processes and returns what they
return, in rank order. What has a collective in it needs them. Where the job makes its own Accelerator, or the
original's, it has the decorator `on_a_rank` and is run by `ranks(2).run(job, 5)`, which `on_ranks` calls too.

**Played ranks** are for what each process does by itself: this process takes the part of one rank after the other.
`played_loaders(3, make)` gives the loaders that three ranks prepare, `gathered` what they come to together, and
`played_states(3)` the PartialState of each rank in turn.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from common.accelerator import Accelerator
from common.accelerator.data_loader import prepare_data_loader
from common.accelerator.state import PartialState
from common.accelerator.utils import DataLoaderConfiguration
from common.processes import ranks
from tests.states import forget_states

# How to prepare a loader that the main process reads for all.
DISPATCHING: dict[str, Any] = {"device": torch.device("cpu"), "put_on_device": True, "dispatch_batches": True}


def on_ranks(
    world: int,
    job: Callable[..., Any],
    *args: Any,
    timeout: float = 120,
    environment: dict[str, str] | None = None,
    **settings: Any,
) -> list:
    """The results of `job(accelerator, *args)` on each of `world` processes; `settings` are the Accelerator's.

    One process is this one, without a process group. It has no time limit and no environment of its own.
    """
    if world == 1:
        assert environment is None
        return [with_accelerator(job, args, settings)]
    return ranks(world).run(with_accelerator, job, args, settings, timeout=timeout, environment=environment)


def on_dispatching_ranks(world: int, job: Callable[..., Any], *args: Any, **config: Any) -> list:
    """`on_ranks`, where the main process alone reads; `config` is the rest of the loaders' configuration."""
    return on_ranks(world, job, *args, dataloader_config=DataLoaderConfiguration(dispatch_batches=True, **config))


def with_accelerator(job: Callable[..., Any], args: tuple, settings: dict[str, Any]) -> Any:
    """`job` with an Accelerator that ends with it, and is forgotten, whatever happens: the next job may be any."""
    accelerator = Accelerator(cpu=True, **settings)
    try:
        return job(accelerator, *args)
    finally:
        accelerator.end_training()
        forget_states()


def played_loaders(world: int, make: Callable[[], DataLoader], **how: Any) -> list[DataLoader]:
    """The loader of every rank, each made and prepared with torch's generator in the same state."""
    state = torch.get_rng_state()
    loaders = []
    for rank in range(world):
        torch.set_rng_state(state)
        loaders.append(prepare_data_loader(make(), num_processes=world, process_index=rank, **how))
    return loaders


class Share(NamedTuple):
    """The batch of one rank in one step, and those of its rows that are real: not repeated to fill it up."""

    rows: list
    real: list


def steps_of(loaders: list[DataLoader]) -> Iterator[list[Share]]:
    """One epoch of all ranks: for each step the shares of the ranks that have a batch in it, in rank order."""
    for step in itertools.zip_longest(*loaders):
        shares = []
        for rank, (loader, batch) in enumerate(zip(loaders, step, strict=True)):
            if batch is not None:
                rows = batch.tolist()
                short_step = loader.short_step
                shares.append(Share(rows, real=rows if short_step is None else rows[: short_step.num_real(rank)]))
        yield shares


def gathered(loaders: list[DataLoader]) -> list:
    """The result of `gather_for_metrics` in one epoch, all steps together."""
    return [row for step in steps_of(loaders) for share in step for row in share.real]


def played_states(world: int) -> Iterator[PartialState]:
    """The state of this process as each of `world` ranks; what the test does meanwhile must need no other rank."""
    state = PartialState(cpu=True)
    state.num_processes = world
    for rank in range(world):
        state.process_index = rank
        state.local_process_index = rank
        yield state
