"""With `use_stateful_dataloader=True` an epoch that was stopped goes on bit for bit, and so does torch's generator."""

import itertools
import random
import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from common.accelerator import data_loader
from common.accelerator.data_loader import prepare_data_loader, skip_first_batches
from common.accelerator.sampler import DistributedEvalSampler
from common.accelerator.utils import listify, set_seed
from common.accelerator.utils.random import get_random_states, set_random_states
from common.accelerator.utils.serialization import load_safely, save_loadable
from tests.toys import Augmented, Numbers, Stream, seeded_order
from tests.unit.accelerator.several_processes import gathered, on_ranks, steps_of

N = 22
DATA = Numbers(N)
CPU = torch.device("cpu")
SEEDABLE = {"use_seedable_sampler": True, "data_seed": 9}
DISPATCHING = {"device": CPU, "put_on_device": True}


class Case(NamedTuple):
    """A loader of a script, given a batch size, and how it is prepared."""

    make: Callable[[int], DataLoader]
    how: Mapping[str, Any] = MappingProxyType({})


def seeded():
    return torch.Generator().manual_seed(5)


def masked(samples):
    """A collator that draws from all three generators, as many numbers as it likes."""
    return {"rows": torch.stack(samples), "drawn": [random.random(), numpy.random.rand(), torch.rand(len(samples))]}


def drawn_from(generator, size):
    """A loader whose collator draws from the generator that draws the order."""

    def noisy(samples):
        return [torch.stack(samples), torch.rand(len(samples), generator=generator)]

    return DataLoader(DATA, size, shuffle=True, generator=generator, collate_fn=noisy)


LISTS = [[0, 1, 2], [3], [4, 5], [6], [7, 8], [9], [1, 2]]
ORDERS = {
    "sequential": Case(lambda size: DataLoader(DATA, size)),
    "random": Case(lambda size: DataLoader(DATA, size, shuffle=True)),
    "random, a generator of its own": Case(
        lambda size: DataLoader(DATA, size, sampler=RandomSampler(DATA, generator=seeded()))
    ),
    "random, the loader's generator": Case(lambda size: DataLoader(DATA, size, shuffle=True, generator=seeded())),
    "subset": Case(lambda size: DataLoader(DATA, size, sampler=SubsetRandomSampler(range(3, N)))),
    "weighted": Case(lambda size: DataLoader(DATA, size, sampler=WeightedRandomSampler(range(1, N), 30))),
    "seedable, a seed": Case(lambda size: DataLoader(DATA, size, shuffle=True), SEEDABLE),
    "batch sampler": Case(
        lambda size: DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), size, drop_last=True))
    ),
    "lists of any size": Case(lambda size: DataLoader(DATA, batch_sampler=LISTS)),
    "uneven": Case(lambda size: DataLoader(DATA, size, shuffle=True), {"even_batches": False}),
    "drawn by the data set": Case(lambda size: DataLoader(Augmented(N), size, shuffle=True)),
    "drawn by the collator": Case(lambda size: DataLoader(DATA, size, shuffle=True, collate_fn=masked)),
    "a stream": Case(lambda size: DataLoader(Stream(DATA), size, collate_fn=masked)),
    "a stream that skips": Case(lambda size: skip_first_batches(DataLoader(Stream(DATA), size), 6)),
}
ON_ONE_PROCESS = {
    "skipped": Case(lambda size: skip_first_batches(DataLoader(DATA, size), 1)),
    "evaluation": Case(lambda size: DataLoader(DATA, size, sampler=DistributedEvalSampler(DATA, 1, 0, shuffle=True))),
    "dispatched": Case(
        lambda size: DataLoader(Augmented(N), size, shuffle=True), DISPATCHING | {"dispatch_batches": True}
    ),
    "a dispatched stream": Case(lambda size: DataLoader(Stream(DATA), size, collate_fn=masked), DISPATCHING),
    "drawn from the loader's generator": Case(lambda size: drawn_from(seeded(), size)),
    "workers": Case(lambda size: DataLoader(DATA, size, shuffle=True, num_workers=1)),
    "in three parts, workers": Case(
        lambda size: DataLoader(
            DATA, size, sampler=RandomSampler(range(5), num_samples=14, generator=seeded()), num_workers=1
        )
    ),
    "workers that stay": Case(lambda size: DataLoader(DATA, size, True, num_workers=1, persistent_workers=True)),
}
CASES = ORDERS | ON_ONE_PROCESS


def prepared(kind, world=1, rank=0, batch_size=2, stateful=True, **more):
    settings = {"num_processes": world, "process_index": rank, "use_stateful_dataloader": stateful}
    case = CASES[kind]
    return data_loader.prepare_data_loader(case.make(batch_size), **settings, **case.how, **more)


def visit(loader, epochs, stop=None, checkpoint=None):
    """Yield the steps, with a draw beside each, as for dropout.

    After (epoch, step) `stop` it ends, and the states of the loader and of the generators are in `checkpoint`.
    """
    for epoch in epochs:
        loader.set_epoch(epoch)
        for step, batch in enumerate(loader, 1):
            yield epoch, listify(batch), loader.end_of_dataloader, torch.rand(()).item()
            if stop == (epoch, step):
                checkpoint.update(loader=loader.state_dict(), generators=get_random_states(CPU))
                return
        yield epoch, "end", torch.rand(()).item()


@pytest.mark.parametrize("stop", [(0, 1), (1, 2)])
@pytest.mark.parametrize(
    ("kind", "world"), [*itertools.product(ORDERS, [1, 2, 3]), *itertools.product(ON_ONE_PROCESS, [1])]
)
def test_the_rest_of_the_run_is_the_same_bit_for_bit(kind, world, stop, tmp_path):
    for rank in range(world):
        set_seed(3)
        straight = list(visit(prepared(kind, world, rank), range(3)))
        set_seed(3)
        checkpoint = {}
        until = list(visit(prepared(kind, world, rank), range(3), stop, checkpoint))
        set_seed(999)  # another process, whose generators are elsewhere
        state = checkpoint["loader"]
        for _ in range(2):  # The first run is stopped again before its first batch.
            save_loadable(state, tmp_path / "state")
            loader = prepared(kind, world, rank)
            loader.load_state_dict(load_safely(tmp_path / "state"))
            state = loader.state_dict()
        set_random_states(CPU, checkpoint["generators"])
        resumed = list(visit(loader, range(stop[0], 3)))
        assert until + resumed == straight and len(resumed) < len(straight)


@pytest.mark.parametrize("kind", ["random", "weighted", "random, a generator of its own", "seedable, a seed"])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4)])
def test_another_number_of_processes_goes_on_in_the_global_order(kind, before, after):
    def loaders_of(world):
        loaders = []
        for rank in range(world):
            torch.manual_seed(world)
            loaders.append(prepared(kind, world, rank, batch_size=4, split_batches=True, even_batches=False))
        return loaders

    loaders = loaders_of(before)
    torch.manual_seed(11)
    steps = []
    states = []
    for step in steps_of(loaders):
        steps.append([row for share in step for row in share.rows])
        states.append(loaders[0].state_dict())
    later = loaders_of(after)
    for loader in later:
        loader.load_state_dict(states[1])
    torch.manual_seed(11)
    assert gathered(later) == list(itertools.chain(*steps[2:]))


def stopped_after(loader, steps):
    for step, _ in enumerate(loader, 1):
        if step == steps:
            return loader.state_dict()


def test_another_epoch_or_an_explicit_skip_replaces_the_position_of_a_checkpoint():
    def loaded():
        loader = prepared("seedable, a seed", batch_size=1)
        loader.load_state_dict(state)
        return loader

    loader = prepared("seedable, a seed", batch_size=1)
    loader.set_epoch(1)
    state = stopped_after(loader, 3)
    first, second = (seeded_order(N, seed=9, epoch=epoch) for epoch in (1, 2))
    loader = loaded()
    loader.set_epoch(1)
    assert gathered([loader]) == first[3:]
    loader = loaded()
    loader.set_epoch(2)
    assert gathered([loader]) == second
    loader = loaded()
    assert gathered([skip_first_batches(loader, 4)]) == first[4:]
    assert gathered([loader]) == second
    loader = prepared("seedable, a seed")
    loader.load_state_dict(prepared("random").state_dict())
    assert gathered([loader]) == seeded_order(N, seed=9, epoch=0)
    loader = prepared("sequential")
    loader.load_state_dict(stopped_after(prepared("sequential"), 11))
    loader.set_epoch(0)
    assert gathered([skip_first_batches(loader, 9)]) == list(range(18, N))  # in the finished epoch


def test_a_checkpoint_made_while_the_rest_of_an_epoch_is_skipped_to_goes_on():
    torch.manual_seed(3)
    straight = gathered([prepared("random")])
    torch.manual_seed(3)
    loader = prepared("random")
    for step, _ in enumerate(skip_first_batches(loader, 2), 3):
        if step == 4:
            state = loader.state_dict()
    loader.load_state_dict(state)
    assert gathered([loader]) == straight[4 * 2 :]


def test_with_steps_of_another_size_a_loader_goes_on_between_epochs_alone():
    saved = prepared("sequential", batch_size=4)
    loader = prepared("sequential", batch_size=2)
    for state, epoch in ((saved.state_dict(), 0), (stopped_after(saved, 6), 1)):
        loader.load_state_dict(state)
        assert loader.iteration == epoch and gathered([loader]) == list(range(N))
        loader.load_state_dict(state)
        loader.set_epoch(0)
        assert gathered([loader]) == list(range(N))
    for how in ({"kind": "sequential"}, {"kind": "a stream", "world": 2, "split_batches": True}):
        state = stopped_after(prepared(**how, batch_size=4), 1)
        with pytest.raises(ValueError, match="4 samples per step cannot go on with 2"):
            prepared(**how, batch_size=2).load_state_dict(state)


def test_an_epoch_does_not_go_on_in_the_order_of_another_sampler():
    with pytest.raises(ValueError, match="in the order of a RandomSampler cannot go on by a SequentialSampler"):
        prepared("sequential").load_state_dict(stopped_after(prepared("random"), 3))


def dispatch_and_resume_by_all(accelerator):
    set_seed(3, device_specific=True)
    how = DISPATCHING | {"use_stateful_dataloader": True}
    loader = prepare_data_loader(DataLoader(Numbers(16), 2, shuffle=True), dispatch_batches=True, **how)
    run = []
    for batch in loader:
        run.append(listify(batch))
        if len(run) == 2:
            state = loader.state_dict()
    resumed = prepare_data_loader(DataLoader(Numbers(16), 2, shuffle=True), dispatch_batches=False, **how)
    resumed.load_state_dict(state)
    return run[2:] == [listify(batch) for batch in resumed]


def test_every_rank_goes_on_in_the_order_that_the_main_process_drew_alone():
    assert on_ranks(2, dispatch_and_resume_by_all) == [True, True]


@pytest.mark.parametrize("steps", [3, 11])
def test_a_loader_that_became_stateful_or_ceased_to_be_keeps_the_epoch(steps):
    loaders = [prepared("seedable, a seed", stateful=stateful) for stateful in (True, False)]
    for before, after in itertools.permutations(loaders):
        before.set_epoch(1)
        after.load_state_dict(stopped_after(before, steps))
        assert gathered([after]) == seeded_order(N, seed=9, epoch=2 if steps == 11 else 1)


def test_a_loader_that_is_let_go_ends_its_workers_at_once():
    """In a circle of references they would end when garbage is collected, and torch would wait seconds for each."""
    loader = prepared("workers that stay")
    next(iter(loader))
    freed = weakref.ref(loader)
    del loader
    assert freed() is None
