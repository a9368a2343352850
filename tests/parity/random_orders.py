"""Random loops over random loaders: the same samples, lengths, draws and gathered rows on both libraries.

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
    generator = random.Random(seed)
    loops = []
    for _ in range(generator.randint(1, 3)):
        loops.append(For(**{name: generator.choice(values) for name, values in LOOP_CHOICES.items()}))
    chosen = {name: generator.choice(values) for name, values in CHOICES.items()}
    return Script(world=processes, rank=0 if processes == 1 else None, loops=tuple(loops), **chosen)


def draw_played(seed: int, processes: int) -> Script:
    """The same for one of two or three processes, which this one plays."""
    world = 2 + seed % 2
    return dataclasses.replace(draw(seed, processes), world=world, rank=seed // 2 % world, **NO_DISPATCH)


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
            seen_in_loop = {"length": None, "batches": [], "gathered": []}
            seen["loops"].append(seen_in_loop)
            for batch in batches(data_loader, loader, loop, seen_in_loop):
                if script.rank is None and can_gather(script):
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
    try:
        seen["length"] = len(loader)
    except (TypeError, ValueError) as error:  # no length, or one below zero
        seen["length"] = type(error).__name__
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


def can_gather(script: Script) -> bool:
    """Whether all processes have equally large batches on the original too: otherwise it hangs."""
    return (script.even_batches or script.dispatches) and script.sampler != "lists"


def hangs(script: Script, ours: Any, processes: int) -> str | None:
    """Whether a process of the original is left waiting: for the main one, which raises, or for a batch."""
    waits = processes > 1 and script.dispatches and script.n // 2 < script.world
    return "the original hangs" if waits else None


# Where a row of the table may show, for the scripts that it concerns.


def from_loop(first: int) -> str:
    """All that is seen from this loop on."""
    return rf"loops\.[{first}-9](\..*)?"


def the_original_crashes(script: Script, ours: Any, theirs: Any) -> str | None:
    """What it had seen before is the same."""
    if theirs["error"] is None:
        return None
    if not theirs["loops"]:
        return r"error|prepared|loops\..*"
    last = len(theirs["loops"]) - 1
    unseen = "|".join(str(step) for step in range(len(theirs["loops"][last]["batches"]), script.n + 100))
    return rf"error|loops\.{last}\.(length|generators|(batches|gathered)\.({unseen}))|{from_loop(last + 1)}"


def length(script: Script, ours: Any, theirs: Any) -> str:
    """Of the loops that run to their end, those that have as many batches as ours says."""
    right = []
    for number, (loop, seen) in enumerate(zip(script.loops, ours["loops"], strict=False)):
        if loop.stop_after is not None or seen["length"] in ("TypeError", len(seen["batches"])):
            right.append(str(number))
    return rf"loops\.({'|'.join(right)})\.length"


def epochs_of_samplers_and_data_sets(script: Script, ours: Any, theirs: Any) -> str | None:
    """The original tells the epoch to a batch sampler on one process alone, and not behind skip_first_batches.

    A loader that dispatches tells it to the sampler or to the data set, not to both. Epoch 0 needs no telling.
    """
    told = [number for number, loop in enumerate(script.loops) if loop.set_epoch or number > 0]
    if script.world == 1 and not script.dispatches:
        told = [number for number, loop in enumerate(script.loops) if loop.skip]
    if not told:
        return None
    if script.sampler == "batch sampler of epoch" and not script.streams:
        return from_loop(told[0])
    if script.data == "of epoch":
        return rf"loops\.[{told[0]}-9]\.(batches\.\d+\.0|gathered)\..*"
    return None


def last_step_of_a_stream(script: Script, ours: Any, theirs: Any) -> str | None:
    """The original fills up the last step. Where that is a step more, its draws are others from there on."""
    if not script.streams or script.even_batches or script.world == 1 or script.dispatches:
        return None
    places = [r"loops\.\d+\.(generators\.0|batches\.\d+\.2)"]
    for number, seen in enumerate(ours["loops"]):
        steps = len(seen["batches"])
        places.append(rf"loops\.{number}\.(length|batches\.({steps - 1}\..*|{steps}))")
    return "|".join(places)


def epochs_after_skipping(script: Script, ours: Any, theirs: Any) -> str | None:
    """The original's loader visits the epoch again of which the rest was visited."""
    for number, (loop, seen) in enumerate(zip(script.loops, ours["loops"], strict=False)):
        ends = loop.stop_after is None or len(seen["batches"]) < loop.stop_after
        if loop.skip and ends:
            return from_loop(number + 1)
    return None


def steps_of_a_dispatching_loader(script: Script, ours: Any, theirs: Any) -> str | None:
    skipping = [number for number, loop in enumerate(script.loops) if loop.skip]
    return from_loop(skipping[0]) if skipping and script.dispatches and script.world > 1 else None


def seeds_of_processes(script: Script, ours: Any, theirs: Any) -> str | None:
    """Without a data_seed every process of the original shuffles by its own generator's: other samples and draws."""
    shuffles = script.use_seedable_sampler and script.data_seed is None and not script.streams
    if not (script.device_specific and shuffles and script.world > 1):
        return None
    return r"loops\.\d+\.(batches\.\d+\.[02]|gathered|generators)(\..*)?"


def rows_of_a_sample(script: Script, ours: Any, theirs: Any) -> str | None:
    """The original cuts what is gathered by the length of the data set, and knows none after skipping."""
    loops = [str(number) for number, loop in enumerate(script.loops) if loop.skip]
    if script.streams or script.sampler in ("part", "replacement", "subset", "batch sampler", "batch sampler of epoch"):
        loops = [r"\d"]
    return rf"loops\.({'|'.join(loops)})\.gathered\..*"


ROWS = {
    "asks for `len(loader)`": length,
    "calls `gather_for_metrics`": rows_of_a_sample,
    "`even_batches=False` and a stream": last_step_of_a_stream,
    "calls `set_epoch`": epochs_of_samplers_and_data_sets,
    "visits the rest of an epoch by `skip_first_batches`": epochs_after_skipping,
    "`skip_first_batches` on a loader that dispatches": steps_of_a_dispatching_loader,
    "`use_seedable_sampler` without a `data_seed`": seeds_of_processes,
    "the original crashes": the_original_crashes,
}
ORDERS = Kind((OURS, THEIRS), draw, run, ROWS, hangs)
PLAYED = Kind((OURS, THEIRS), draw_played, run, ROWS)
