"""A stateful loader that is stopped in the middle of an epoch goes on bit for bit, and so does torch's generator."""

import io
import itertools
import weakref

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from common.accelerator import data_loader
from common.accelerator.data_loader import skip_first_batches
from common.accelerator.sampler import DistributedEvalSampler
from tests.toys import Augmented, Numbers, Stream

N = 22


def seeded():
    return torch.Generator().manual_seed(5)


DATA = Numbers(N)
# How the script makes its loader, and how it is prepared, for each kind of order.
ORDERS = {
    "sequential": ({"batch_size": 3}, {}),
    "random": (lambda: {"batch_size": 3, "shuffle": True}, {}),
    "random, a generator of its own": (lambda: {"sampler": RandomSampler(DATA, generator=seeded())}, {}),
    "random, the loader's generator": (lambda: {"batch_size": 2, "shuffle": True, "generator": seeded()}, {}),
    "subset": (lambda: {"batch_size": 2, "sampler": SubsetRandomSampler(range(3, N))}, {}),
    "weighted": (lambda: {"batch_size": 2, "sampler": WeightedRandomSampler(range(1, N), 30)}, {}),
    "seedable, a seed": (lambda: {"batch_size": 3, "shuffle": True}, {"use_seedable_sampler": True, "data_seed": 9}),
    "batch sampler": (lambda: {"batch_sampler": BatchSampler(RandomSampler(DATA), 2, True)}, {}),
    "lists of any size": ({"batch_sampler": [[0, 1, 2], [3], [4, 5], [6], [7, 8], [9], [1, 2]]}, {}),
    "uneven": ({"batch_size": 3, "shuffle": True}, {"even_batches": False}),
}


def prepare_data_loader(*args, **kwargs):
    return data_loader.prepare_data_loader(*args, use_stateful_dataloader=True, **kwargs)


def prepared(kind, world, rank, dataset=DATA, **more):
    arguments, how = ORDERS[kind]
    loader = DataLoader(dataset, **(arguments() if callable(arguments) else arguments), **more)
    return prepare_data_loader(loader, num_processes=world, process_index=rank, **how)


def trained(loader, epochs, rows, stop=None):
    """Iterate and draw dropout beside it; the state of loader and torch where `stop` says (epoch, steps)."""
    for epoch in epochs:
        loader.set_epoch(epoch)
        for step, batch in enumerate(loader, 1):
            rows.append((epoch, batch.tolist(), loader.end_of_dataloader, torch.rand(()).item()))
            if stop == (epoch, step):
                checkpoint = io.BytesIO()
                torch.save([loader.state_dict(), torch.get_rng_state()], checkpoint)
                return checkpoint.getvalue()
        rows.append((epoch, "end", torch.rand(()).item()))


def resumed(make, checkpoint, epochs):
    """What comes after the checkpoint in another process, whose generators are elsewhere."""
    torch.manual_seed(999)
    loader = make()
    state, torch_state = torch.load(io.BytesIO(checkpoint), weights_only=True)
    loader.load_state_dict(state)
    torch.set_rng_state(torch_state)
    rows = []
    trained(loader, epochs, rows)
    return rows


def assert_exact(make, stop=(1, 2)):
    straight, until = [], []
    torch.manual_seed(3)
    trained(make(), range(3), straight)
    torch.manual_seed(3)
    checkpoint = trained(make(), range(3), until, stop)
    assert until == straight[: len(until)] and len(until) < len(straight)
    assert resumed(make, checkpoint, range(stop[0], 3)) == straight[len(until) :]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", ORDERS)
def test_the_rest_of_the_run_is_the_same_bit_for_bit(kind, world):
    for rank in range(world):
        for stop in ((0, 1), (1, 2)):
            assert_exact(lambda rank=rank: prepared(kind, world, rank), stop)


@pytest.mark.parametrize("persistent", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["random", "random, the loader's generator"])
def test_loader_workers_change_nothing(kind, persistent):
    assert_exact(lambda: prepared(kind, 1, 0, num_workers=1, persistent_workers=persistent))


def test_a_loader_that_is_let_go_ends_its_workers_at_once():
    """In a circle of references they would end when garbage is collected, and torch would wait seconds for each."""
    loader = prepared("random", 1, 0, num_workers=1, persistent_workers=True)
    next(iter(loader))
    freed = weakref.ref(loader)
    del loader
    assert freed() is None


def test_random_numbers_that_the_data_set_draws_in_the_main_process_are_the_same():
    assert_exact(lambda: prepared("random", 1, 0, Augmented(N)))


def test_an_evaluation_sampler_goes_on():
    for rank in range(2):
        sampler = DistributedEvalSampler(DATA, 2, rank, shuffle=True)
        assert_exact(lambda sampler=sampler: prepare_data_loader(DataLoader(DATA, batch_size=2, sampler=sampler)))


@pytest.mark.parametrize("dataset", [DATA, Stream(DATA)])
@pytest.mark.parametrize("dispatch", [True, False])
def test_dispatched_batches_and_streams_that_draw_nothing_go_on(dataset, dispatch):
    def make():
        loader = DataLoader(dataset, batch_size=2, shuffle=dataset is DATA)
        return prepare_data_loader(loader, torch.device("cpu"), put_on_device=True, dispatch_batches=dispatch)

    assert_exact(make)


def test_a_checkpoint_made_while_the_rest_of_an_epoch_is_skipped_to_goes_on():
    """A resumed script that passes over batches by itself may be stopped once more."""

    loader = prepared("random", 1, 0)
    torch.manual_seed(3)
    straight = [batch.tolist() for batch in loader]
    torch.manual_seed(3)
    loader = prepared("random", 1, 0)
    for step, _ in enumerate(skip_first_batches(loader, 2), 3):
        if step == 4:
            state = loader.state_dict()
    loader.load_state_dict(state)
    assert [batch.tolist() for batch in loader] == straight[4:]


@pytest.mark.parametrize("kind", ["random", "weighted", "random, a generator of its own", "seedable, a seed"])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4)])
def test_another_number_of_processes_goes_on_in_the_global_order(kind, before, after):
    def run(world, state=None):
        """The batches of each rank, and the state of rank 0 after its second step."""
        rows = []
        states = []
        for rank in range(world):
            torch.manual_seed(world)
            arguments, how = ORDERS[kind]
            loader = DataLoader(DATA, **(arguments() | {"batch_size": 4}))
            loader = prepare_data_loader(loader, None, world, rank, split_batches=True, even_batches=False, **how)
            if state is not None:
                loader.load_state_dict(state)
            torch.manual_seed(11)
            rows.append([])
            for batch in loader:
                rows[-1].append(batch.tolist())
                states.append(loader.state_dict())
        return rows, states[1]

    def in_global_order(per_rank):
        return [row for step in itertools.zip_longest(*per_rank, fillvalue=[]) for batch in step for row in batch]

    whole, state = run(before)
    rest, _ = run(after, state)
    assert in_global_order(rest) == in_global_order(whole)[8:]
