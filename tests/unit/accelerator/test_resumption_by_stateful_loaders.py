"""With `use_stateful_dataloader=True` an epoch that was stopped goes on bit for bit, and so does torch's generator."""

import copy
import itertools
import random
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from common.accelerator.data_loader import prepare_data_loader, skip_first_batches
from common.accelerator.sampler import DistributedEvalSampler
from common.accelerator.utils import listify, set_seed
from common.accelerator.utils.random import get_random_states, set_random_states
from common.accelerator.utils.serialization import load_safely, save_loadable
from tests.toys import Augmented, Numbers, Stream, seeded_order
from tests.unit.accelerator.several_processes import DISPATCHING, gathered, on_ranks, steps_of

N = 22
DATA = Numbers(N)
CPU = torch.device("cpu")


class Case(NamedTuple):
    """What makes a loader of a script, and how it is prepared. `make` is copied for each loader."""

    make: Callable[..., DataLoader]
    how: Mapping[str, Any] = MappingProxyType({})


def seeded():
    return torch.Generator().manual_seed(5)


def masked(samples):
    """A collator that draws from all three generators, as many numbers as it likes."""
    return {"rows": torch.stack(samples), "drawn": [random.random(), numpy.random.rand(), torch.rand(len(samples))]}


def collator_with_the_loaders_generator():
    """A loader whose collator draws from the generator that draws the order."""
    generator = seeded()

    def noisy(samples):
        return [torch.stack(samples), torch.rand(len(samples), generator=generator)]

    return DataLoader(DATA, 2, shuffle=True, generator=generator, collate_fn=noisy)


BATCHES = BatchSampler(RandomSampler(DATA), 2, drop_last=True)
# The sampler draws an order of five numbers three times in an epoch.
THREE_TIMES_FIVE = RandomSampler(range(5), num_samples=14, generator=seeded())
in_order = partial(DataLoader, DATA, batch_size=2)
shuffled = partial(in_order, shuffle=True)
drawn_by_the_data_set = partial(DataLoader, Augmented(N), batch_size=2, shuffle=True)
masked_stream = partial(DataLoader, Stream(DATA), batch_size=2, collate_fn=masked)

ORDERS = {
    "sequential": Case(in_order),
    "random": Case(shuffled),
    "random, a generator of its own": Case(partial(in_order, sampler=RandomSampler(DATA, generator=seeded()))),
    "random, the loader's generator": Case(partial(shuffled, generator=seeded())),
    "subset": Case(partial(in_order, sampler=SubsetRandomSampler(range(3, N)))),
    "weighted": Case(partial(in_order, sampler=WeightedRandomSampler(range(1, N), 30))),
    "seedable, a seed": Case(shuffled, {"use_seedable_sampler": True, "data_seed": 9}),
    "batch sampler": Case(partial(DataLoader, DATA, batch_sampler=BATCHES)),
    "lists of any size": Case(
        partial(DataLoader, DATA, batch_sampler=[[0, 1, 2], [3], [4, 5], [6], [7, 8], [9], [1, 2]])
    ),
    "uneven": Case(shuffled, {"even_batches": False}),
    "drawn by the data set": Case(drawn_by_the_data_set),
    "drawn by the collator": Case(partial(shuffled, collate_fn=masked)),
    "a stream": Case(masked_stream),
    "a stream that skips": Case(partial(skip_first_batches, DataLoader(Stream(DATA), 2), 6)),
}
ON_ONE_PROCESS = {
    "skipped": Case(partial(skip_first_batches, DataLoader(DATA, 2), 1)),
    "evaluation": Case(partial(in_order, sampler=DistributedEvalSampler(DATA, 1, 0, shuffle=True))),
    "dispatched": Case(drawn_by_the_data_set, DISPATCHING),
    "a dispatched stream": Case(masked_stream, {"put_on_device": True}),  # which is dispatched by default
    "drawn from the loader's generator": Case(collator_with_the_loaders_generator),
    "workers": Case(partial(shuffled, num_workers=1)),
    "in three parts, workers": Case(partial(in_order, sampler=THREE_TIMES_FIVE, num_workers=1)),
    "workers that stay": Case(partial(shuffled, num_workers=1, persistent_workers=True)),
}
CASES = ORDERS | ON_ONE_PROCESS


def prepared(kind, world=1, rank=0, batch_size=None, stateful=True, **more):
    settings = {"num_processes": world, "process_index": rank, "use_stateful_dataloader": stateful}
    case = CASES[kind]
    make = copy.deepcopy(case.make)
    loader = make() if batch_size is None else make(batch_size=batch_size)
    return prepare_data_loader(loader, **settings, **case.how, **more)


def checkpoint_of(loader):
    return {"loader": loader.state_dict(), "generators": get_random_states(CPU)}


def load_checkpoint(loader, checkpoint):
    loader.load_state_dict(checkpoint["loader"])
    set_random_states(CPU, checkpoint["generators"])


def visit(loader, epochs, stop=None, checkpoint=None):
    """Yield the steps, with a draw beside each, as for dropout.

    After (epoch, step) `stop` it ends, and the states of the loader and of the generators are in `checkpoint`.
    """
    for epoch in epochs:
        loader.set_epoch(epoch)
        for step, batch in enumerate(loader, 1):
            yield epoch, listify(batch), loader.end_of_dataloader, torch.rand(()).item()
            if stop == (epoch, step):
                checkpoint.update(checkpoint_of(loader))
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
    if steps == 0:
        return loader.state_dict()
    for step, _ in enumerate(loader, 1):
        if step == steps:
            return loader.state_dict()


@pytest.fixture
def stopped_in_epoch_1():
    """A seedable loader with the state of another that was stopped in epoch 1, after three batches of one sample."""
    saved, loader = (prepared("seedable, a seed", batch_size=1) for _ in range(2))
    saved.set_epoch(1)
    loader.load_state_dict(stopped_after(saved, 3))
    return loader


@pytest.mark.parametrize(("epoch", "done"), [(1, 3), (2, 0)])
def test_the_position_of_a_checkpoint_holds_for_its_epoch_alone(stopped_in_epoch_1, epoch, done):
    stopped_in_epoch_1.set_epoch(epoch)
    assert gathered([stopped_in_epoch_1]) == seeded_order(N, seed=9, epoch=epoch)[done:]


def test_an_explicit_skip_replaces_the_position_of_a_checkpoint(stopped_in_epoch_1):
    assert gathered([skip_first_batches(stopped_in_epoch_1, 4)]) == seeded_order(N, seed=9, epoch=1)[4:]
    assert gathered([stopped_in_epoch_1]) == seeded_order(N, seed=9, epoch=2)


def test_after_a_finished_epoch_comes_a_whole_one_or_an_explicit_skip_in_it():
    loader = prepared("sequential")
    state = stopped_after(prepared("sequential"), 11)
    loader.load_state_dict(state)
    assert gathered([loader]) == list(range(N))
    loader.load_state_dict(state)
    loader.set_epoch(0)
    assert gathered([skip_first_batches(loader, 9)]) == list(range(18, N))


def test_a_state_saved_before_the_first_batch_fits_a_loader_of_another_order():
    loader = prepared("seedable, a seed")
    loader.load_state_dict(stopped_after(prepared("random"), 0))
    assert gathered([loader]) == seeded_order(N, seed=9, epoch=0)


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


@pytest.mark.parametrize(("steps", "next_epoch"), [(0, 0), (6, 1)], ids=["before the first epoch", "after it"])
def test_between_epochs_a_loader_goes_on_with_steps_of_another_size(steps, next_epoch):
    state = stopped_after(prepared("sequential", batch_size=4), steps)
    loader = prepared("sequential", batch_size=2)
    loader.load_state_dict(state)
    assert loader.iteration == next_epoch and gathered([loader]) == list(range(N))
    loader.load_state_dict(state)
    loader.set_epoch(0)
    assert gathered([loader]) == list(range(N))


@pytest.mark.parametrize(("kind", "sharing"), [("sequential", {}), ("a stream", {"world": 2, "split_batches": True})])
def test_within_an_epoch_steps_of_another_size_are_refused(kind, sharing):
    state = stopped_after(prepared(kind, batch_size=4, **sharing), 1)
    with pytest.raises(ValueError, match="4 samples per step cannot go on with 2"):
        prepared(kind, batch_size=2, **sharing).load_state_dict(state)


def test_an_epoch_does_not_go_on_in_the_order_of_another_sampler():
    with pytest.raises(ValueError, match="in the order of a RandomSampler cannot go on by a SequentialSampler"):
        prepared("sequential").load_state_dict(stopped_after(prepared("random"), 3))


def dispatch_and_resume_by_all(accelerator):
    """The rest of an epoch after two steps that the main process read: by going on, and by ranks that all read."""
    set_seed(3, device_specific=True)
    make = partial(DataLoader, Numbers(16), 2, shuffle=True)
    loader = prepare_data_loader(make(), use_stateful_dataloader=True, **DISPATCHING)
    run = []
    for batch in loader:
        run.append(listify(batch))
        if len(run) == 2:
            state = loader.state_dict()
    resumed = prepare_data_loader(make(), use_stateful_dataloader=True, put_on_device=True, dispatch_batches=False)
    resumed.load_state_dict(state)
    return {"straight": run[2:], "resumed": [listify(batch) for batch in resumed]}


def test_every_rank_goes_on_in_the_order_that_the_main_process_drew_alone():
    for rest in on_ranks(2, dispatch_and_resume_by_all):
        assert rest["resumed"] == rest["straight"] and len(rest["straight"]) == 2


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


def stateful(*args, **kwargs):
    return prepare_data_loader(DataLoader(*args, **kwargs), use_stateful_dataloader=True)


class SavedWhileItIsRead(Numbers):
    """Numbers with noise. The ninth that is read saves the state of `loader`."""

    num_read = 0

    def __getitem__(self, index):
        self.num_read += 1
        if self.num_read == 9:
            self.saved = checkpoint_of(self.loader)
        return super().__getitem__(index) + torch.rand(())


class NewSampler(BatchSampler):
    def set_epoch(self, epoch):
        seed = int(torch.randint(1000, ()))
        self.sampler = RandomSampler(range(10), generator=torch.Generator().manual_seed(seed))


def test_a_copy_of_a_loaded_loader_goes_on_at_the_same_place():
    loader = stateful(range(10), batch_size=2, shuffle=True)
    iterator = iter(loader)
    next(iterator)
    loader.load_state_dict(loader.state_dict())
    iterator.close()
    second = copy.copy(loader)
    assert listify(list(loader)) == listify(list(second)) and len(list(second)) == 5


def test_a_state_that_is_saved_while_a_batch_is_read_has_the_generators_of_the_batch_before():
    data = SavedWhileItIsRead(10)
    data.loader = stateful(data, batch_size=2)
    batches = listify(list(data.loader))
    load_checkpoint(data.loader, data.saved)
    assert listify(list(data.loader))[0] == batches[3]


def test_a_batch_sampler_that_gets_a_new_sampler_in_each_epoch_makes_the_same_order_again():
    def new():
        return stateful(range(10), batch_sampler=NewSampler(RandomSampler(range(10)), 2, False))

    loader = new()
    iterator = iter(loader)
    next(iterator)
    checkpoint = checkpoint_of(loader)
    rest = listify(list(iterator))
    resumed = new()
    load_checkpoint(resumed, checkpoint)
    assert listify(list(resumed)) == rest
