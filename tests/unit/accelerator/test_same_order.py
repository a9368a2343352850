"""Random loaders on Accelerate and on the core: the same samples, lengths, draws and gathered rows, bit for bit.

Where they may differ there is a row in the core's DIFFERENCES.md; each has a condition here, which is looked at only if
something differs. Processes that need not talk to each other are played one after the other by this one.
"""

import collections
import dataclasses
import datetime
import importlib
import random

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from common.processes import ranks
from tests.states import OURS, THEIRS, forget_states

pytest.importorskip("accelerate")
# Scripts that are given to the ranks at once, for one process group.
CHUNK = 20


class Numbers(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return torch.as_tensor(index)


class NumbersOfEpoch(Numbers):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return torch.as_tensor(index + 1000 * self.epoch)


class Stream(IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(range(self.n))


class SizedStream(Stream):
    def __len__(self):
        return self.n


class ShuffledStream(SizedStream):
    def __init__(self, n):
        super().__init__(n)
        self.generator = torch.Generator().manual_seed(1)

    def __iter__(self):
        return iter(torch.randperm(self.n, generator=self.generator).tolist())


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


STREAMS = {kind.__name__: kind for kind in (Stream, SizedStream, ShuffledStream, StreamOfEpoch)}
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
        dataset = NumbersOfEpoch(self.n) if self.data == "of epoch" else Numbers(self.n)
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
    "data": ["plain"] * 12 + ["of epoch"] + list(STREAMS),
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
}
# Scripts with several processes that dispatch need real ones.
DISPATCH_CHOICES = {
    True: {"put_on_device": [False, True], "dispatch_batches": [None, None, False, True]},
    False: {"put_on_device": [False], "dispatch_batches": [None, False]},
}


def scripts(worlds, dispatch):
    """Any script, as hypothesis draws it: it repeats and varies what it has drawn."""
    chosen = {"world": worlds} | CHOICES | DISPATCH_CHOICES[dispatch]
    loop = st.builds(For, **{name: st.sampled_from(values) for name, values in LOOP_CHOICES.items()})
    loops = st.lists(loop, min_size=1, max_size=3).map(tuple)
    return st.builds(Script, loops=loops, **{name: st.sampled_from(values) for name, values in chosen.items()})


def seeded_script(number, world):
    """Any script, of its own for each number: no two have more in common than by chance."""
    draw = random.Random(number)
    loops = []
    for _ in range(draw.randint(1, 3)):
        loops.append(For(**{name: draw.choice(values) for name, values in LOOP_CHOICES.items()}))
    chosen = CHOICES | DISPATCH_CHOICES[True]
    return Script(world=world, loops=tuple(loops), **{name: draw.choice(values) for name, values in chosen.items()})


@dataclasses.dataclass
class Seen:
    """What a script saw on one rank.

    Attributes:
        error: the type of the exception that ended it.
        lengths: of the loader, before each loop.
        batches: of each loop: rows, whether the loader said that it was the last, a draw from torch's generator.
        states: of all generators after prepare and after each loop.
        gathered: of each loop: the rows of all processes as `gather_for_metrics` returned them.
    """

    error: str | None = None
    lengths: list = dataclasses.field(default_factory=list)
    batches: list = dataclasses.field(default_factory=list)
    states: list = dataclasses.field(default_factory=list)
    gathered: list = dataclasses.field(default_factory=list)


def generator_states(loader):
    inner = loader.batch_sampler
    sampler = None if inner is None else getattr(inner, "sampler", None)
    while inner is not None and sampler is None and hasattr(inner, "batch_sampler"):
        inner = inner.batch_sampler
        sampler = getattr(inner, "sampler", None)
    generators = [getattr(sampler, "generator", None), loader.generator, getattr(loader.dataset, "generator", None)]
    states = [None if generator is None else generator.get_state().tolist() for generator in generators]
    return [torch.get_rng_state().tolist(), *states]


def run_script(library, script, rank, accelerator=None):
    """What `script` sees on `rank`; with an `accelerator` on real processes, which can gather."""
    data_loader = importlib.import_module(f"{library}.data_loader")
    seen = Seen()
    # As after set_seed(…, device_specific=True): generators that differ, on real processes.
    differs = script.device_specific and accelerator is not None
    torch.manual_seed(script.seed + rank if differs else script.seed)
    how = {} if accelerator is not None else {"num_processes": script.world, "process_index": rank}
    names = ("split_batches", "even_batches", "use_seedable_sampler", "data_seed", "put_on_device", "dispatch_batches")
    how |= {name: getattr(script, name) for name in names}
    plain = script.loader()
    try:
        loader = data_loader.prepare_data_loader(plain, torch.device("cpu"), rng_types=["generator"], **how)
        seen.states.append(generator_states(plain))
        for loop in script.loops:
            run_loop(data_loader, loader, loop, seen, accelerator if can_gather(script) else None)
            seen.states.append(generator_states(plain))
    except Exception as error:
        seen.error = type(error).__name__
        seen.states.clear()
    return seen


def can_gather(script):
    """Whether all processes have equally large batches on the original too: otherwise it hangs."""
    return (script.even_batches or script.dispatches) and script.sampler != "lists"


def run_loop(data_loader, loader, loop, seen, accelerator):
    if loop.set_epoch is not None:
        loader.set_epoch(loop.set_epoch)
    if loop.skip:
        loader = data_loader.skip_first_batches(loader, loop.skip)
    try:
        seen.lengths.append(len(loader))
    except (TypeError, ValueError) as error:  # no length, or one below zero
        seen.lengths.append(type(error).__name__)
    batches, gathered = [], []
    seen.batches.append(batches)
    seen.gathered.append(gathered)
    for step, batch in enumerate(loader, 1):
        batches.append((batch.tolist(), loader.end_of_dataloader, torch.rand(()).item()))
        if accelerator is not None:
            gathered.append(accelerator.gather_for_metrics(batch).tolist())
        if step == loop.stop_after:
            break


def ignores_set_epoch(script, ours, theirs):
    """The original tells the epoch to a batch sampler on one process alone, and not behind skip_first_batches.

    A loader that dispatches tells it to the sampler or to the data set, not to both.
    """
    hidden = script.world > 1 or script.dispatches or any(loop.skip for loop in script.loops)
    return hidden and (script.sampler == "batch sampler of epoch" or script.data == "of epoch")


def fills_streams(script, ours, theirs):
    return script.streams and not script.even_batches and script.world > 1 and not script.dispatches


def skips_batches_of_steps(script, ours, theirs):
    return script.dispatches and any(loop.skip for loop in script.loops)


def says_another_length(script, ours, theirs):
    return all(
        length in ("TypeError", len(batches))
        for length, batches, loop in zip(ours.lengths, ours.batches, script.loops, strict=True)
        if loop.stop_after is None
    )


def draws_other_seeds(script, ours, theirs):
    """Without a data_seed every process of the original has that of its own generator."""
    return (
        script.device_specific
        and script.use_seedable_sampler
        and script.data_seed is None
        and not script.streams
        and script.world > 1
    )


def guesses_the_length(script, ours, theirs):
    """The original cuts what is gathered by the length of the data set, and knows none after skipping."""
    other_length = script.sampler in ("part", "replacement", "subset", "batch sampler", "batch sampler of epoch")
    return script.streams or other_length or any(loop.skip for loop in script.loops)


# The rows of DIFFERENCES.md that a difference may belong to: each with its condition.
ROWS = {
    "the original crashes": lambda script, ours, theirs: theirs.error is not None,
    "even_batches=False for streams": fills_streams,
    "`set_epoch`": ignores_set_epoch,
    "`skip_first_batches` of a dispatching loader": skips_batches_of_steps,
    "`use_seedable_sampler` without a `data_seed`": draws_other_seeds,
}
# Those that concern one of the things that are seen: its name, the row and the condition.
ROWS_OF = {
    "lengths": ("`len(loader)`", says_another_length),
    "gathered": ("`gather_for_metrics`", guesses_the_length),
}


def row_of(script, ours, theirs):
    """The row that a difference belongs to, or None."""
    for name, holds in ROWS.items():
        if holds(script, ours, theirs):
            return name
    row = None
    for field in dataclasses.fields(Seen):
        if getattr(ours, field.name) == getattr(theirs, field.name):
            continue
        row, holds = ROWS_OF.get(field.name, (None, None))
        if row is None or not holds(script, ours, theirs):
            return None
    return row


def compare_played(script):
    """The row of the table that `script` touches, or None if both libraries do the same on all ranks."""
    row = None
    for rank in range(script.world):
        seen = []
        for library in (OURS, THEIRS):
            seen.append(run_script(library, script, rank))
            importlib.import_module(f"{library}.state").GradientState._reset_state()
        if seen[0] != seen[1]:
            row = row_of(script, *seen)
            assert row is not None, explained(script, rank, *seen)
    return row


def explained(script, rank, ours, theirs):
    lines = [f"rank {rank} of {script}"]
    for field in dataclasses.fields(Seen):
        one, other = getattr(ours, field.name), getattr(theirs, field.name)
        if one != other:
            text = "differ" if field.name == "states" else f"\n  ours   {one}\n  theirs {other}"
            lines.append(f"{field.name}: {text}")
    return "\n".join(lines)


def check(strategy, examples, compare):
    """Run `compare` on so many scripts from `strategy`; the numbers of those that touch a row, by row."""
    counts = collections.Counter()

    @seed(42)
    @settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=False
    )
    @given(strategy)
    def compared(script):
        counts[compare(script)] += 1

    compared()
    return counts


@pytest.fixture(autouse=True)
def their_state():
    from accelerate import Accelerator

    Accelerator(cpu=True)
    yield
    forget_states(THEIRS)


@pytest.mark.parametrize(
    ("worlds", "examples"),
    [
        ([1], 60),
        ([2, 3], 60),
        pytest.param([1], 1500, marks=pytest.mark.long),
        pytest.param([2, 3], 1500, marks=pytest.mark.long),
    ],
)
def test_each_process_visits_the_same_samples_and_draws_the_same_numbers(worlds, examples):
    counts = check(scripts(worlds, dispatch=worlds == [1]), examples, compare_played)
    print(dict(counts))
    assert counts[None] >= 0.75 * sum(counts.values()), counts


def run_scripts(library, chosen):
    """What each script sees on this one of several real processes."""
    root = importlib.import_module(library)
    state = importlib.import_module(f"{library}.state")
    patience = root.utils.InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=20))
    accelerator = root.Accelerator(cpu=True, kwargs_handlers=[patience])
    seen = []
    for script in chosen:
        seen.append(run_script(library, script, accelerator.process_index, accelerator))
        state.GradientState().dataloader_references = [None]  # the original keeps loaders that were left early
    accelerator.end_training()
    forget_states(library)
    return seen


def runs_on_the_original(script):
    """Whether no process of the original is left waiting: for the main one, which raises, or for a batch."""
    return not script.dispatches or script.n // 2 >= script.world


def compare_on_processes(world, number):
    """How many of so many scripts are equal on real processes (None) or touch a row, by row."""
    drawn = [seeded_script(seed, world) for seed in range(number)]
    chosen = [script for script in drawn if runs_on_the_original(script)]
    counts = collections.Counter({"the original hangs": number - len(chosen)})
    for start in range(0, len(chosen), CHUNK):
        chunk = chosen[start : start + CHUNK]
        ours, theirs = (ranks(world).run(run_scripts, library, chunk, timeout=300) for library in (OURS, THEIRS))
        for script, one, other in zip(chunk, zip(*ours, strict=True), zip(*theirs, strict=True), strict=True):
            counts[row_on_processes(script, one, other)] += 1
    return counts


def row_on_processes(script, ours, theirs):
    """The row that `script` touches, or None; from what each rank saw on both libraries."""
    row = None
    for rank, seen in enumerate(zip(ours, theirs, strict=True)):
        if seen[0] != seen[1]:
            row = row_of(script, *seen)
            assert row is not None, explained(script, rank, *seen)
    return row


@pytest.mark.parametrize(
    ("world", "examples"),
    [(2, 24), pytest.param(2, 400, marks=pytest.mark.long), pytest.param(3, 400, marks=pytest.mark.long)],
)
def test_processes_that_talk_to_each_other_see_the_same(world, examples):
    counts = compare_on_processes(world, examples)
    print(dict(counts))
    assert counts[None] >= 0.75 * examples, counts


def gathered_without_rows(library, samples):
    """What is gathered of things that have no row for each sample, in each step."""
    root = importlib.import_module(library)
    accelerator = root.Accelerator(cpu=True)
    steps = []
    for batch in accelerator.prepare(DataLoader(Numbers(samples), batch_size=2)):
        loss = batch.float().mean()
        several = {"loss": loss, "one": loss[None], "repeated": loss.repeat(2), "long": loss.repeat(5)}
        steps.append({name: accelerator.gather_for_metrics(value).tolist() for name, value in several.items()})
        steps[-1]["objects"] = accelerator.gather_for_metrics([f"rank {accelerator.process_index}"])
        steps[-1]["text"] = accelerator.gather_for_metrics("ab")
    accelerator.end_training()
    forget_states(library)
    return steps


@pytest.mark.parametrize("samples", [4, 5, 6, 7])
def test_what_has_no_row_for_each_sample_is_gathered_as_on_the_original(samples):
    ours, theirs = (ranks(2).run(gathered_without_rows, library, samples) for library in (OURS, THEIRS))
    assert ours == theirs
    one, other = (gathered_without_rows(library, samples) for library in (OURS, THEIRS))
    assert one == other
