"""Prepared loaders: who gets which sample, in which order, with which seeds. One process plays all ranks."""

import copy
import functools
import importlib
import itertools
import pickle
import random

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from common.accelerator import Accelerator
from common.accelerator.data_loader import (
    SeedableRandomSampler,
    get_sampler,
    prepare_data_loader,
    skip_first_batches,
)
from common.accelerator.sampler import DistributedEvalSampler
from common.accelerator.state import GradientState
from tests.states import THEIRS, forget_states
from tests.toys import Numbers


class Stream(IterableDataset):
    def __init__(self, n, knows_workers=False):
        self.n, self.knows_workers = n, knows_workers

    def __iter__(self):
        worker = get_worker_info() if self.knows_workers else None
        return iter(range(self.n) if worker is None else range(worker.id, self.n, worker.num_workers))


class Sized(Stream):
    def __len__(self):
        return self.n


@pytest.fixture
def theirs():
    """The module of accelerate, in a process that has no state of accelerate's before and after."""
    data_loader = pytest.importorskip("accelerate.data_loader")
    importlib.import_module("accelerate.state").PartialState(cpu=True)
    yield data_loader
    forget_states(THEIRS)


def ranks(world, make, **kwargs):
    """The prepared loaders of all ranks, each made from the same state of torch's generator."""
    loaders = []
    state = torch.get_rng_state()
    for rank in range(world):
        torch.set_rng_state(state)
        loaders.append(prepare_data_loader(make(rank), num_processes=world, process_index=rank, **kwargs))
    return loaders


def shuffled(rank, size=1, n=10):
    return DataLoader(Numbers(n), batch_size=size, shuffle=True)


def seedable(world, size=1, n=10, seed=2, **kwargs):
    """Loaders whose order is that of `order(n, seed, epoch)`."""
    return ranks(world, lambda rank: shuffled(rank, size, n), use_seedable_sampler=True, data_seed=seed, **kwargs)


def gathered(loaders, steps=None):
    """What gather_for_metrics would return, step by step: in each step every rank's real rows, in rank order.

    The ranks' batches of each step are added to `steps`.
    """
    rows = []
    for step in itertools.zip_longest(*loaders):
        if steps is not None:
            steps.append([batch.tolist() for batch in step])
        for loader, batch in zip(loaders, step, strict=True):
            if batch is not None:
                rows += batch[: loader.partial_step.num_real if loader.partial_step else None].tolist()
    return rows


def order(n, seed, epoch=0):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch)).tolist()


# Samples, samples in a batch of one process, processes, split_batches, even_batches: 40 of 120 combinations.
SHAPES = random.Random(3).sample(
    list(itertools.product((0, 1, 5, 12, 13), (1, 4), (1, 2, 3), (False, True), (False, True))), 40
)


def samplers(n):
    """Every kind of sampler, over n samples, made anew for each rank, with another seed on each."""
    torch.manual_seed(random.randrange(2**32))
    subset = list(range(0, 2 * n, 2))
    yield lambda size: {"batch_size": size}
    yield lambda size: {"batch_size": size, "sampler": subset}
    yield lambda size: {"batch_sampler": BatchSampler(SequentialSampler(range(n)), size, False)}
    yield lambda size: {"sampler": BatchSampler(SequentialSampler(range(n)), size, False), "batch_size": None}
    if n:
        yield lambda size: {"batch_size": size, "shuffle": True}
        yield lambda size: {"batch_size": size, "sampler": SubsetRandomSampler(subset)}
        yield lambda size: {"batch_size": size, "sampler": WeightedRandomSampler(range(1, n + 1), 2 * n)}


def test_each_real_sample_is_gathered_once_for_every_sampler():
    # https://github.com/huggingface/accelerate/issues/1674 and /issues/226
    for n, batch, world, split, even in SHAPES:
        size = batch * world if split else batch
        for sampler in samplers(n):
            torch.manual_seed(3)
            loaders = ranks(
                world,
                lambda rank, sampler=sampler, n=n, size=size: DataLoader(Numbers(2 * n), **sampler(size)),
                split_batches=split,
                even_batches=even,
            )
            inner = get_sampler(loaders[0])
            if getattr(inner, "generator", None) is not None:
                state = inner.generator.get_state()
                expected = list(inner)
                inner.generator.set_state(state)
            elif world == 1:
                torch.manual_seed(4)
                torch.empty((), dtype=torch.int64).random_()  # the DataLoader's seed for its workers
                expected = list(inner)
            else:
                expected = list(inner)
            torch.manual_seed(4)
            assert gathered(loaders) == expected, (n, batch, world, split, even)


def test_each_sample_of_a_stream_is_gathered_once():
    for n, batch, world, split, even in SHAPES:
        size = batch * world if split else batch
        loaders = ranks(
            world,
            lambda rank, n=n, size=size: DataLoader(Stream(n), batch_size=size),
            split_batches=split,
            even_batches=even,
        )
        assert gathered(loaders) == list(range(n)), (n, batch, world, split, even)


def test_skipping_leaves_out_whole_steps_and_still_gathers_each_sample_once():
    # https://github.com/huggingface/accelerate/pull/4235: the padding stayed in after skip_first_batches.
    for dataset, world, skip in itertools.product((Numbers(11), Stream(11)), (1, 2, 3), (0, 1, 2, 3)):
        loaders = [
            skip_first_batches(loader, skip)
            for loader in ranks(world, lambda rank, d=dataset: DataLoader(d, batch_size=2))
        ]
        assert gathered(loaders) == list(range(11))[skip * 2 * world :]


def test_len_is_the_number_of_batches_also_of_streams_and_after_skipping():
    for n, batch, world, split, even in SHAPES:
        size = batch * world if split else batch
        for dataset, drop_last in itertools.product((Numbers(n), Sized(n)), (False, True)):
            for loader in ranks(
                world,
                lambda rank, d=dataset, s=size, drop=drop_last: DataLoader(d, batch_size=s, drop_last=drop),
                split_batches=split,
                even_batches=even,
            ):
                assert len(loader) == len(list(loader))
                later = skip_first_batches(loader, 2)
                assert len(later) == len(list(later))


@pytest.mark.parametrize("kind", [DistributedSampler, DistributedEvalSampler])
def test_a_distributed_sampler_is_refused_where_it_would_shard_twice(kind):
    # https://github.com/huggingface/accelerate/issues/3520
    with pytest.raises(ValueError, match="twice"):
        ranks(2, lambda rank: DataLoader(Numbers(8), sampler=kind(Numbers(8), 2, rank)))
    (loader,) = ranks(1, lambda rank: DataLoader(Numbers(8), sampler=kind(Numbers(8), 1, 0)))
    assert len(list(loader)) == 8


def test_what_is_out_of_scope_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="torch_device_mesh"):
        prepare_data_loader(DataLoader(Numbers(4)), torch_device_mesh=object())
    with pytest.raises(NotImplementedError, match="in_order"):
        prepare_data_loader(DataLoader(Numbers(4), num_workers=1, in_order=False))


# Order and epochs


def test_the_sampler_can_be_read_and_exchanged():
    sampler = WeightedRandomSampler([1.0, 2.0], 4)
    prepared = prepare_data_loader(DataLoader(Numbers(2), batch_size=2, sampler=sampler))
    assert get_sampler(prepared) is sampler is prepared.get_sampler()
    shards = ranks(2, lambda rank: DataLoader(Numbers(4), batch_size=2, sampler=sampler))
    assert all(shard.get_sampler() is sampler for shard in shards)
    prepared.set_sampler(SequentialSampler(range(2)))
    assert gathered([prepared]) == [0, 1]
    assert isinstance(get_sampler(*seedable(1)), SeedableRandomSampler)
    assert get_sampler(prepare_data_loader(DataLoader(Numbers(2), batch_sampler=[[0], [1]]))) is None


def test_epochs_reach_samplers_and_datasets_that_ask_for_them():
    class Asking(Numbers):
        epoch = None

        def set_epoch(self, epoch):
            self.epoch = epoch

    data = Asking(4)
    sampler = DistributedEvalSampler(data, 1, 0, shuffle=True, seed=6)
    loader = prepare_data_loader(DataLoader(data, sampler=sampler))
    assert gathered([loader]) == order(4, 6, 0) and data.epoch == 0
    assert gathered([loader]) == order(4, 6, 1) and data.epoch == 1

    seeded = {"use_seedable_sampler": True, "data_seed": 6}
    dispatched = prepare_data_loader(
        DataLoader(data, shuffle=True), torch.device("cpu"), put_on_device=True, dispatch_batches=True, **seeded
    )
    assert gathered([dispatched]) == order(4, 6, 0) and data.epoch == 0
    assert gathered([dispatched]) == order(4, 6, 1) and data.epoch == 1


class OwnGenerator(Sampler):
    """Draws from a generator that is not torch's."""

    def __init__(self, n):
        self.n = n
        self.generator = random.Random(5)

    def __len__(self):
        return self.n

    def __iter__(self):
        return iter(self.generator.sample(range(self.n), self.n))


@pytest.mark.parametrize("world", [1, 2])
def test_a_sampler_may_have_a_generator_that_is_not_torchs(world):
    make = lambda rank: DataLoader(Numbers(9), 2, sampler=OwnGenerator(9))  # noqa: E731
    loaders = ranks(world, make, rng_types=["generator"])
    expected = OwnGenerator(9)
    assert gathered(loaders) == list(expected) and gathered(loaders) == list(expected)


class OwnBatches(BatchSampler):
    """Twice the batches of its kind, longer ones in every second epoch."""

    note = "mine"
    epochs = ()

    def set_epoch(self, epoch):
        self.epochs = (*self.epochs, epoch)

    def __iter__(self):
        yield from super().__iter__()
        yield from super().__iter__()

    def __len__(self):
        return 2 * super().__len__()


@pytest.mark.parametrize("dispatch", [False, True])
def test_on_one_process_the_script_finds_its_own_batch_sampler_in_the_loader(dispatch):
    mine = OwnBatches(SequentialSampler(range(4)), 2, False)
    plain = DataLoader(Numbers(4), batch_sampler=mine)
    loader = prepare_data_loader(plain, torch.device("cpu"), put_on_device=dispatch, dispatch_batches=dispatch)
    assert loader.batch_sampler is mine is skip_first_batches(loader, 1).batch_sampler.batch_sampler
    assert loader.batch_sampler.note == "mine"
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]] * 2 and mine.epochs == (0,)
    loader.batch_sampler.batch_size = 4
    assert loader.total_batch_size == 4 and len(loader) == 2
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3]] * 2 and mine.epochs == (0, 1)
    assert [batch.tolist() for batch in skip_first_batches(loader, 1)] == [[0, 1, 2, 3]]
    assert [batch.tolist() for batch in pickle.loads(pickle.dumps(loader))] == [[0, 1, 2, 3]] * 2


# Streams and workers


class Range(IterableDataset):
    """As in torch's documentation: `worker_init_fn` sets what each worker's copy yields. It hears of epochs."""

    start, end = 0, 13
    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(range(self.start, self.end))


def take_a_part(worker_id):
    worker = get_worker_info()
    size = -(-(worker.dataset.end - worker.dataset.start) // worker.num_workers)
    worker.dataset.start = worker_id * size
    worker.dataset.end = min(worker.dataset.start + size, worker.dataset.end)


STREAMS_IN_WORKERS = {
    "asks for nothing": (lambda: Stream(13), None),
    "asks for its worker": (lambda: Stream(13, knows_workers=True), None),
    "worker_init_fn": (Range, take_a_part),
}


def stream_in_workers(kind, persistent_workers):
    make, init = STREAMS_IN_WORKERS[kind]
    return DataLoader(make(), batch_size=2, num_workers=2, worker_init_fn=init, persistent_workers=persistent_workers)


# Workers that stay keep their states from one epoch to the next. The tests with them are slow ones.
STAYING = pytest.mark.parametrize("persistent_workers", [False, pytest.param(True, marks=pytest.mark.slow)])


def two_epochs(loader):
    return [[batch.tolist() for batch in loader] for _ in range(2)]


@functools.cache
def two_epochs_of_plain_torch(kind, persistent_workers):
    torch.manual_seed(1)
    return two_epochs(stream_in_workers(kind, persistent_workers))


@STAYING
@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("kind", STREAMS_IN_WORKERS)
def test_on_one_process_streams_in_workers_are_read_as_in_plain_torch(kind, dispatch, persistent_workers):
    """No sample is lost, whoever deals them out among the workers. A stream that nobody deals out is read by each."""
    expected = two_epochs_of_plain_torch(kind, persistent_workers)
    torch.manual_seed(1)
    plain = stream_in_workers(kind, persistent_workers)
    loader = prepare_data_loader(plain, torch.device("cpu"), put_on_device=dispatch, dispatch_batches=dispatch)
    assert two_epochs(loader) == expected
    times = 2 if kind == "asks for nothing" else 1
    for epoch in expected:
        assert sorted(itertools.chain(*epoch)) == sorted(list(range(13)) * times)


@STAYING
@pytest.mark.parametrize("kind", ["asks for nothing", "asks for its worker"])
def test_on_several_processes_streams_in_workers_are_read_as_on_accelerate(kind, persistent_workers, theirs):
    """No sample is lost, and none is gathered twice that the workers do not read twice."""
    loaders = ranks(2, lambda rank: stream_in_workers(kind, persistent_workers))
    times = 2 if kind == "asks for nothing" else 1
    originals = [
        theirs.prepare_data_loader(stream_in_workers(kind, persistent_workers), num_processes=2, process_index=rank)
        for rank in range(2)
    ]
    for _ in range(2):
        steps = []
        assert sorted(gathered(loaders, steps)) == sorted(list(range(13)) * times)
        assert steps == [[batch.tolist() for batch in step] for step in zip(*originals, strict=True)]


def test_the_batch_size_of_a_stream_of_ones_own_says_nothing_of_the_loader():
    stream = Stream(13)
    stream.batch_size, stream.num_processes, stream.split_batches = 100, 7, True
    for how in ({}, {"put_on_device": True, "device": torch.device("cpu")}):
        assert prepare_data_loader(DataLoader(stream, batch_size=4), **how).total_batch_size == 4
    assert [loader.total_batch_size for loader in ranks(2, lambda rank: DataLoader(stream, batch_size=4))] == [8, 8]


def test_a_stream_of_ready_batches_is_dealt_out_in_whole_batches():
    class Batches(IterableDataset):
        def __iter__(self):
            return (torch.arange(3 * i, 3 * i + 3) for i in range(5))

    loaders = ranks(2, lambda rank: DataLoader(Batches(), batch_size=None))
    assert gathered(loaders) == list(range(15))
    assert [len(list(loader)) for loader in loaders] == [3, 3]


class EpochStream(IterableDataset):
    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([self.epoch] * 4)


class EpochSamples(Dataset):
    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.epoch


@pytest.mark.parametrize("kind", [EpochStream, EpochSamples])
def test_the_epoch_reaches_a_data_set_whose_workers_would_stay_alive(kind):
    """Each worker has a copy of the data set, made when it started."""
    loaders = ranks(1, lambda rank: DataLoader(kind(), batch_size=2, num_workers=1, persistent_workers=True))
    for epoch in range(3):
        assert gathered(loaders) == [epoch] * 4


class Draws(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([torch.initial_seed(), random.getrandbits(40)])


def test_workers_get_the_seeds_that_plain_torch_gives_them():
    seeds = []
    for prepare in (lambda loader: loader, prepare_data_loader):
        torch.manual_seed(1)
        loader = prepare(DataLoader(Draws(), num_workers=2, generator=torch.Generator().manual_seed(3)))
        seeds.append([[batch.tolist() for batch in loader] for _ in range(2)])
    assert seeds[0] == seeds[1] and seeds[0][0] != seeds[0][1]


def test_a_loader_without_batches_yields_single_samples_in_the_samplers_order():
    """`DataLoader(dataset, batch_size=None)`, for data sets that make their batches by themselves."""
    (loader,) = seedable(1, None)
    assert len(loader) == 10
    for epoch in range(2):
        assert [int(sample) for sample in loader] == order(10, 2, epoch)
    with pytest.raises(ValueError, match="on several processes a loader needs batches"):
        seedable(2, None)


# Leaving early, nesting, resuming


def test_break_exceptions_and_nesting_leave_no_stale_state():
    # https://github.com/huggingface/accelerate/issues/1050 and /pull/4248
    state = GradientState()
    outer, inner = (prepare_data_loader(DataLoader(Numbers(3))) for _ in range(2))
    assert not state.in_dataloader
    ends = []
    for _ in outer:
        for _ in inner:
            assert state.active_dataloader is inner
            break
        assert state.active_dataloader is outer
        ends.append(state.end_of_dataloader)
    assert ends == [False, False, True]
    with pytest.raises(RuntimeError, match="oops"):
        for step, _ in enumerate(outer):
            if step == 2:
                assert state.end_of_dataloader
                raise RuntimeError("oops")
    assert not state.in_dataloader and not state.end_of_dataloader and not outer.end_of_dataloader


def test_a_loader_that_is_nested_in_itself_knows_the_last_batch_of_both_loops():
    for loader in ranks(2, lambda rank: DataLoader(Numbers(10), batch_size=2)):
        ends = []
        for step, _ in enumerate(loader):
            if step == 0:
                assert [loader.end_of_dataloader for _ in loader] == [False, False, True]
            ends.append((loader.end_of_dataloader, loader.partial_step is not None))
        assert ends == [(False, False), (False, False), (True, True)]


def stopped_after(loader, steps):
    """The state of the loader when it has handed out `steps` steps, and what came until then."""
    rows = []
    for step, batch in enumerate(loader, 1):
        rows.append(batch.tolist())
        if step == steps:
            return loader.state_dict(), rows


STATEFUL = {"use_stateful_dataloader": True}


def test_another_epoch_or_an_explicit_skip_replaces_the_position_of_a_checkpoint():
    (loader,) = seedable(1, **STATEFUL)
    loader.set_epoch(1)
    state, _ = stopped_after(loader, 3)
    for epoch, expected in ((1, order(10, 2, 1)[3:]), (2, order(10, 2, 2))):
        (loader,) = seedable(1, **STATEFUL)
        loader.load_state_dict(state)
        loader.set_epoch(epoch)
        assert gathered([loader]) == expected
    (loader,) = seedable(1, **STATEFUL)
    loader.load_state_dict(state)
    assert gathered([skip_first_batches(loader, 4)]) == order(10, 2, 1)[4:]
    assert gathered([loader]) == order(10, 2, 1)  # as on the original, the script says which epoch comes next


def test_a_position_that_is_no_whole_number_of_steps_is_refused():
    loader = prepare_data_loader(DataLoader(Numbers(20), batch_size=4), **STATEFUL)
    with pytest.raises(ValueError, match="6 samples of epoch 0"):
        loader.load_state_dict({"epoch": 0, "step": 3, "step_size": 2})


def test_skipping_works_on_loaders_that_were_not_prepared():
    assert [b.tolist() for b in skip_first_batches(DataLoader(Numbers(5), batch_size=2), 1)] == [[2, 3], [4]]
    assert [b.tolist() for b in skip_first_batches(DataLoader(Stream(5), batch_size=2), 1)] == [[2, 3], [4]]
    assert [sample.item() for sample in skip_first_batches(DataLoader(Numbers(5), batch_size=None), 2)] == [2, 3, 4]


def test_skipping_twice_leaves_out_both_numbers_of_batches():
    for dataset, world in itertools.product((Numbers(11), Stream(11)), (1, 2)):
        loaders = ranks(world, lambda rank, d=dataset: DataLoader(d, batch_size=2))
        rest = [skip_first_batches(skip_first_batches(loader, 1), 1) for loader in loaders]
        assert gathered(rest) == list(range(11))[4 * world :]


def test_what_skipping_made_of_a_prepared_loader_stays_as_it_is_when_it_is_prepared():
    accelerator = Accelerator(cpu=True, split_batches=True)
    rest = accelerator.skip_first_batches(accelerator.prepare(DataLoader(Numbers(5), batch_size=2)), 1)
    assert accelerator.prepare(rest) is rest


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_the_last_batch_of_a_copied_loader_ends_its_window(copied):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = copied(accelerator.prepare(DataLoader(Numbers(3), batch_size=1)))
    ends = []
    for _ in loader:
        with accelerator.accumulate():
            ends.append(accelerator.sync_gradients)
    assert ends == [False, True, True]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_a_copy_that_is_made_in_a_loop_is_in_no_loop(copied):
    loader = prepare_data_loader(DataLoader(Numbers(3)), use_stateful_dataloader=True)
    for _ in loader:
        copy_of_loader = copied(loader)
    assert not copy_of_loader.end_of_dataloader
    position = copy_of_loader.state_dict()
    assert (position["epoch"], position["step"]) == (0, 0)


class EpochNumbers(Numbers):
    """Numbers of an epoch: 100 stands for the first sample of epoch 1."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return 100 * self.epoch + super().__getitem__(index)


def test_an_epoch_that_is_set_in_the_loop_reaches_the_next_batch():
    (loader,) = ranks(1, lambda rank: DataLoader(EpochNumbers(3), batch_size=1))
    seen = []
    for batch in loader:
        loader.set_epoch(1)
        seen += batch.tolist()
    assert seen == [0, 101, 102]


def test_skipping_leaves_the_epoch_of_a_stream_that_was_not_prepared_to_the_script():
    stream = Range()
    stream.set_epoch(3)
    assert len(gathered([skip_first_batches(DataLoader(stream, batch_size=2), 1)])) == 11 and stream.epoch == 3
