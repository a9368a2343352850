"""Random loops over random loaders: the same samples, draws and gathered rows on both libraries.

In one process, the ranks of a script that need not talk to each other are played one after the other.
"""

import dataclasses
import datetime
import importlib
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from tests.parity.random_scripts import Kind
from tests.states import OURS, THEIRS, forget_states
from tests.toys import Augmented, Numbers, NumbersOfEpoch, ShuffledStream, SizedStream, Stream


class StreamOfEpoch(ShuffledStream):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return (number + 1000 * self.epoch for number in super().__iter__())


class BatchSamplerOfEpoch(BatchSampler):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(list(super().__iter__())[self.epoch % 2 :])

    def __len__(self):
        return max(0, super().__len__() - self.epoch % 2)


STREAMS = {
    "Stream": lambda n: Stream(range(n)),
    "SizedStream": lambda n: SizedStream(range(n)),
    "ShuffledStream": lambda n: ShuffledStream(range(n), seed=1),
    "StreamOfEpoch": lambda n: StreamOfEpoch(range(n), seed=1),
}
SAMPLERS = [
    "sequential",
    "shuffle",
    "random",
    "part",
    "replacement",
    "weighted",
    "subset",
    "batch sampler",
    "batch sampler of epoch",
    "lists",
]


@dataclasses.dataclass(frozen=True)
class For:
    """One loop over the loader."""

    set_epoch: int | None
    stop_after: int | None
    skip: int


@dataclasses.dataclass(frozen=True)
class Script:
    """How a script makes its loader, prepares it and iterates over it."""

    world: int
    rank: int | None  # the process that is played; None where there are real ones
    n: int
    batch: int
    data: str
    sampler: str
    own_generator: bool
    loader_generator: bool
    drop_last: bool
    split_batches: bool
    even_batches: bool
    use_seedable_sampler: bool
    data_seed: int | None
    put_on_device: bool
    dispatch_batches: bool | None
    seed: int
    device_specific: bool
    loops: tuple[For, ...]

    @property
    def streams(self):
        return self.data in STREAMS

    @property
    def dispatches(self):
        return self.dispatch_batches or (self.dispatch_batches is None and self.put_on_device and self.streams)

    @property
    def ends_alike(self):
        """False where the original crashes, hangs, or shows other samples than those it is asked for."""
        skips = [loop.skip > 0 for loop in self.loops]
        if any(skips[:-1]):  # the next loop visits the same epoch again
            return False
        if self.dispatches and self.world > 1 and any(skips):
            return False
        if self.dispatches and self.n // 2 < self.batch * self.world:  # some sampler may not fill a step
            return False
        of_epoch = self.data == "of epoch" or (self.sampler == "batch sampler of epoch" and not self.streams)
        is_told_epoch = self.world == 1 and not self.dispatches and not any(skips)
        if of_epoch and not is_told_epoch:
            return False
        if self.world == 1:
            return True
        if self.streams and not self.even_batches and not self.dispatches:  # it fills up the last step
            return False
        is_seeded_apart = self.device_specific and self.data_seed is None
        return not (self.use_seedable_sampler and is_seeded_apart and not self.streams)

    def loader(self):
        size = self.batch * self.world if self.split_batches else self.batch
        arguments = {"batch_size": size, "drop_last": self.drop_last}
        if self.loader_generator:
            arguments["generator"] = torch.Generator().manual_seed(2)
        if self.streams:
            return DataLoader(STREAMS[self.data](self.n), **arguments)
        kinds = {"plain": Numbers, "augmented": Augmented, "of epoch": NumbersOfEpoch}
        dataset = kinds[self.data](self.n)
        if self.sampler == "shuffle":
            return DataLoader(dataset, shuffle=True, **arguments)
        if self.sampler in ("batch sampler", "batch sampler of epoch", "lists"):
            del arguments["batch_size"], arguments["drop_last"]
            return DataLoader(dataset, batch_sampler=self.batch_sampler(dataset, size), **arguments)
        return DataLoader(dataset, sampler=self.index_sampler(dataset), **arguments)

    def index_sampler(self, dataset):
        generator = torch.Generator().manual_seed(3) if self.own_generator else None
        return {
            "sequential": lambda: SequentialSampler(dataset),
            "random": lambda: RandomSampler(dataset, generator=generator),
            "part": lambda: RandomSampler(dataset, num_samples=max(1, self.n * 2 // 3), generator=generator),
            "replacement": lambda: RandomSampler(dataset, True, self.n + 35, generator=generator),
            "weighted": lambda: WeightedRandomSampler(range(1, self.n + 1), self.n, generator=generator),
            "subset": lambda: SubsetRandomSampler(range(0, self.n, 2), generator=generator),
        }[self.sampler]()

    def batch_sampler(self, dataset, size):
        if self.sampler == "lists":
            return [[0] * (1 + number % 3) for number in range(self.batch)]
        kind = BatchSamplerOfEpoch if self.sampler == "batch sampler of epoch" else BatchSampler
        inner = RandomSampler(dataset) if self.own_generator else SequentialSampler(dataset)
        return kind(inner, size, self.drop_last)


LOOP_CHOICES = {
    "set_epoch": [None] * 5 + [0, 1, 2, 3, 4],
    "stop_after": [None] * 8 + [1, 2, 3, 4],
    "skip": [0] * 14 + [1, 3],
}
CHOICES = {
    "n": range(1, 61),
    "batch": range(1, 6),
    "data": ["plain"] * 9 + ["augmented"] * 3 + ["of epoch"] + list(STREAMS),
    "sampler": SAMPLERS + ["sequential"] * 2 + ["shuffle"] * 4 + ["random"] * 2,
    "own_generator": [False, True],
    "loader_generator": [False, True],
    "drop_last": [False, True],
    "split_batches": [False, True],
    "even_batches": [True, True, False],
    "use_seedable_sampler": [False, True],
    "data_seed": [None] * 10 + list(range(10)),
    "seed": range(100),
    "device_specific": [False] * 5 + [True],
    "put_on_device": [False, True],
    "dispatch_batches": [None, None, False, True],
}
# What processes that are played do without: a main one that reads for all.
NO_DISPATCH = {"put_on_device": False, "dispatch_batches": False}


def draw(seed: int, processes: int) -> Script:
    """The script of a seed: no two have more in common than by chance."""
    return draw_any(random.Random(seed), processes, rank=0 if processes == 1 else None)


def draw_played(seed: int, processes: int) -> Script:
    """The same for one of two or three processes, which this one plays."""
    world = 2 + seed % 2
    return draw_any(random.Random(seed), world, rank=seed // 2 % world, **NO_DISPATCH)


def draw_any(generator: random.Random, world: int, **how: Any) -> Script:
    """The first script that is drawn and ends alike on both libraries."""
    while True:
        loops = []
        for _ in range(generator.randint(1, 3)):
            loops.append(For(**{name: generator.choice(values) for name, values in LOOP_CHOICES.items()}))
        chosen = {name: generator.choice(values) for name, values in CHOICES.items()}
        script = Script(**chosen | {"world": world, "loops": tuple(loops)} | how)
        if script.ends_alike:
            return script


def run(library: str, scripts: list[Script], folder: str) -> list[dict[str, Any]]:
    """What each script sees: on this one of several real processes, or on the rank that it plays."""
    root = importlib.import_module(library)
    patience = root.utils.InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=20))
    accelerator = root.Accelerator(cpu=True, kwargs_handlers=[patience])
    outcomes = []
    for script in scripts:
        outcomes.append(run_script(library, script, accelerator))
        if library == THEIRS:  # keeps loaders that were left early
            accelerator.gradient_state.dataloader_references = [None]
    accelerator.end_training()
    forget_states(library)
    return outcomes


def run_script(library: str, script: Script, accelerator: Any) -> dict[str, Any]:
    """What one script sees, up to an error that ends it."""
    data_loader = importlib.import_module(f"{library}.data_loader")
    played = {} if script.rank is None else {"num_processes": script.world, "process_index": script.rank}
    # As after set_seed(…, device_specific=True): generators that differ, on real processes.
    differs = script.device_specific and script.rank is None
    torch.manual_seed(script.seed + accelerator.process_index if differs else script.seed)
    names = ("split_batches", "even_batches", "use_seedable_sampler", "data_seed", "put_on_device", "dispatch_batches")
    how = {name: getattr(script, name) for name in names}
    plain = script.loader()
    seen = {"error": None, "loops": []}
    try:
        loader = data_loader.prepare_data_loader(plain, torch.device("cpu"), rng_types=["generator"], **how, **played)
        seen["prepared"] = generator_states(plain)
        for loop in script.loops:
            seen_in_loop = {"batches": [], "gathered": []}
            seen["loops"].append(seen_in_loop)
            for batch in batches(data_loader, loader, loop, seen_in_loop):
                if script.rank is None and can_gather(script, loop):
                    seen_in_loop["gathered"].append(accelerator.gather_for_metrics(batch).tolist())
            seen_in_loop["generators"] = generator_states(plain)
    except Exception as error:
        seen["error"] = type(error).__name__
    return seen


def batches(data_loader: Any, loader: Any, loop: For, seen: dict[str, Any]) -> Iterator[Any]:
    """The batches of one loop over the loader, noted in `seen` with a draw from torch's generator."""
    if loop.set_epoch is not None:
        loader.set_epoch(loop.set_epoch)
    if loop.skip:
        loader = data_loader.skip_first_batches(loader, loop.skip)
    for step, batch in enumerate(loader, 1):
        seen["batches"].append([batch.tolist(), loader.end_of_dataloader, torch.rand(()).item()])
        yield batch
        if step == loop.stop_after:
            return


def generator_states(loader: DataLoader) -> list[torch.Tensor | None]:
    """The states of torch's generator, the sampler's, the loader's and the stream's."""
    inner = loader.batch_sampler
    sampler = getattr(inner, "sampler", None)
    while inner is not None and sampler is None and hasattr(inner, "batch_sampler"):
        inner = inner.batch_sampler
        sampler = getattr(inner, "sampler", None)
    generators = [getattr(holder, "generator", None) for holder in (sampler, loader, loader.dataset)]
    return [torch.get_rng_state(), *(None if one is None else one.get_state() for one in generators)]


def can_gather(script: Script, loop: For) -> bool:
    """Whether all processes have equally large batches on the original, and it knows how many samples there are."""
    draws_all = script.sampler in ("sequential", "shuffle", "random", "weighted")
    if script.streams or not draws_all or loop.skip:
        return False
    return bool(script.even_batches or script.dispatches)


ORDERS = Kind((OURS, THEIRS), draw, run)
PLAYED = Kind((OURS, THEIRS), draw_played, run)
