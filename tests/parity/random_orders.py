"""Random loops over random loaders: the same samples, draws and gathered rows on both libraries."""

import copy
import datetime
import importlib
import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from tests.parity.random_scripts import Kind, choices_of, draw_from, one_of
from tests.states import OURS, THEIRS
from tests.toys import Augmented, Numbers, ShuffledStream, SizedStream, Stream


class StreamOfEpoch(ShuffledStream):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return (number + 1000 * self.epoch for number in super().__iter__())


DATA = {"plain": Numbers, "augmented": Augmented}
STREAMS = {
    "stream": Stream,
    "stream of known length": SizedStream,
    "shuffled stream": partial(ShuffledStream, seed=1),
    "stream of its epoch": partial(StreamOfEpoch, seed=1),
}
RARE_SAMPLERS = ["weighted", "part", "replacement", "subset", "batches", "lists"]
DRAWS_ALL = ["sequential", "random", "weighted"]
LOADING = ["split_batches", "even_batches", "use_seedable_sampler", "data_seed", "put_on_device", "dispatch_batches"]


@dataclass
class Loop:
    """A loop over a loader. A number of None calls no `set_epoch`, and reads to the end."""

    set_epoch: int | None = one_of({None: 5} | dict.fromkeys(range(5), 1))
    stop_after: int | None = one_of({None: 8, 1: 1, 2: 1, 3: 1, 4: 1})  # Steps.
    skip: int = 0  # Steps that it leaves out at its beginning.


@dataclass
class Script:
    """The settings of a script that loops over a loader, once or several times."""

    processes: int
    loops: list[Loop]
    n: int = one_of(range(1, 61))  # Samples.
    batch: int = one_of(range(1, 6))  # Samples of one process.
    data: str = one_of({"plain": 9, "augmented": 3} | dict.fromkeys(STREAMS, 1))
    sampler: str = one_of({"sequential": 3, "random": 6} | dict.fromkeys(RARE_SAMPLERS, 1))
    sampler_generator: str | None = one_of([None, "own", "the loader's"])
    loader_generator: bool = one_of([False, True])
    drop_last: bool = one_of([False, True])
    split_batches: bool = one_of([False, True])
    even_batches: bool = one_of({True: 2, False: 1})
    use_seedable_sampler: bool = one_of([False, True])
    data_seed: int | None = one_of({None: 10} | dict.fromkeys(range(10), 1))
    seed: int = one_of(range(100))
    put_on_device: bool = one_of([False, True])
    dispatch_batches: bool | None = one_of({None: 2, False: 1, True: 1})


def reads_stream(script: Script) -> bool:
    return script.data in STREAMS


def dispatches(script: Script) -> bool:
    """True if the main process reads for all. By default it does where a stream goes to a device."""
    if script.dispatch_batches is None:
        return script.put_on_device and reads_stream(script)
    return script.dispatch_batches


def draw(seed: int, processes: int) -> Script:
    generator = random.Random(seed)
    loops = [Loop(**draw_from(choices_of(Loop), generator)) for _ in range(generator.randint(1, 3))]
    script = Script(processes=processes, loops=loops, **draw_from(choices_of(Script), generator))
    loops[-1].skip = generator.choice([0] * 7 + [1, 3])
    # Both libraries refuse a loader that the main process reads for all, but that puts no batch on the device.
    if script.dispatch_batches:
        script.put_on_device = True
    # Lists of indices have no batch size that could be split, so both libraries refuse them too.
    if script.sampler == "lists":
        script.split_batches = False
    return script


def without_known_differences(script: Script) -> Script:
    changed = copy.deepcopy(script)
    last = changed.loops[-1]
    # On several processes the original loses samples of a batch that cannot be divided. Ours:
    # `test_batches_of_varying_size_are_joined_as_long_as_a_step_can_be_divided`.
    if script.sampler == "lists" and script.processes > 1 and not reads_stream(script):
        changed.dispatch_batches = False
    if dispatches(changed):
        # On several processes the original skips the main process's batches in place of steps. Ours:
        # `test_a_dispatching_loader_continues_where_a_checkpoint_was_made_and_skips_whole_steps`.
        if script.processes > 1 or script.sampler == "lists":
            last.skip = 0
        # The original crashes where no step is left. These samples make a whole step more than are skipped, also where
        # a sampler draws half of them only. Ours: `test_the_main_process_reads_and_each_sample_is_gathered_once`.
        changed.n += 2 * (1 + last.skip) * script.batch * script.processes
    # Where each process reads a stream, the original fills up the last step in any case. Ours:
    # `test_skipping_leaves_out_whole_steps_and_still_gathers_each_sample_once`.
    elif script.processes > 1 and reads_stream(script):
        changed.even_batches = True
    return changed


def make_sampler(name: str, n: int, generator: torch.Generator | None) -> Sampler:
    match name:
        case "sequential":
            return SequentialSampler(range(n))
        case "random":
            return RandomSampler(range(n), generator=generator)
        case "weighted":
            return WeightedRandomSampler(range(1, n + 1), n, generator=generator)
        case "part":
            return RandomSampler(range(n), num_samples=max(1, n * 2 // 3), generator=generator)
        case "replacement":
            return RandomSampler(range(n), replacement=True, num_samples=n + 35, generator=generator)
        case "subset":
            return SubsetRandomSampler(range(0, n, 2), generator=generator)
    raise ValueError(name)


def make_loader(script: Script) -> DataLoader:
    size = script.batch * script.processes if script.split_batches else script.batch
    generator = torch.Generator().manual_seed(2) if script.loader_generator else None
    if reads_stream(script):
        return DataLoader(STREAMS[script.data](range(script.n)), size, drop_last=script.drop_last, generator=generator)
    dataset = DATA[script.data](script.n)
    if script.sampler == "batches":
        inner = RandomSampler(dataset) if script.sampler_generator else SequentialSampler(dataset)
        batches = BatchSampler(inner, size, script.drop_last)
        return DataLoader(dataset, batch_sampler=batches, generator=generator)
    if script.sampler == "lists":
        lists = [[0] * (1 + number % 3) for number in range(script.batch)]
        return DataLoader(dataset, batch_sampler=lists, generator=generator)
    generators = {None: None, "own": torch.Generator().manual_seed(3), "the loader's": generator}
    sampler = make_sampler(script.sampler, script.n, generators[script.sampler_generator])
    return DataLoader(dataset, size, sampler=sampler, drop_last=script.drop_last, generator=generator)


def run(library: str, script: Script, folder: str, seen: dict[str, Any]) -> None:
    root = importlib.import_module(library)
    data_loader = importlib.import_module(f"{library}.data_loader")
    patience = root.utils.InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=20))
    accelerator = root.Accelerator(cpu=True, kwargs_handlers=[patience])
    # The generators of the processes differ, except where the original would then draw a seed or a subset for each.
    needs_one_seed = script.use_seedable_sampler and (script.data_seed is None or script.sampler == "subset")
    torch.manual_seed(script.seed if needs_one_seed else script.seed + accelerator.process_index)
    loading = {name: getattr(script, name) for name in LOADING}
    plain = make_loader(script)
    loader = data_loader.prepare_data_loader(plain, torch.device("cpu"), rng_types=["generator"], **loading)
    seen["prepared"] = generator_states(plain)
    seen["loops"] = []
    for loop in script.loops:
        if loop.set_epoch is not None:
            loader.set_epoch(loop.set_epoch)
        rest = data_loader.skip_first_batches(loader, loop.skip) if loop.skip else loader
        batches = []
        gathered = []
        for step, batch in enumerate(rest, 1):
            batches.append([batch.tolist(), rest.end_of_dataloader, torch.rand(()).item()])
            if can_gather(script, loop):
                gathered.append(accelerator.gather_for_metrics(batch).tolist())
            if step == loop.stop_after:
                break
        seen["loops"].append({"batches": batches, "gathered": gathered, "generators": generator_states(plain)})


def can_gather(script: Script, loop: Loop) -> bool:
    """True if the processes have equally large batches on the original, and it knows how many samples there are."""
    if script.processes == 1 or loop.skip > 0 or reads_stream(script):
        return False
    return script.sampler in DRAWS_ALL and (script.even_batches or dispatches(script))


def generator_states(loader: DataLoader) -> list[torch.Tensor | None]:
    """The states of torch's generator, the sampler's, the loader's and the stream's."""
    sampler = getattr(loader.batch_sampler, "sampler", None)  # a list of batches has none
    generators = [getattr(holder, "generator", None) for holder in (sampler, loader, loader.dataset)]
    return [torch.get_rng_state(), *(None if one is None else one.get_state() for one in generators)]


ORDERS = Kind(OURS, THEIRS, draw, without_known_differences, run)
