"""A prepared loader keeps the samplers, epochs, workers and seeds of the script."""

import pickle
import random

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler, WeightedRandomSampler

from common.accelerator import Accelerator
from common.accelerator.data_loader import SeedableRandomSampler, get_sampler, prepare_data_loader, skip_first_batches
from common.accelerator.sampler import BatchSamplerShard, DistributedEvalSampler
from common.accelerator.utils import DataLoaderConfiguration, set_seed, synchronize_rng_states
from tests.toys import Numbers, NumbersOfEpoch, Stream, StreamOfWorkers, seeded_order
from tests.unit.accelerator.several_processes import DISPATCHING, gathered, on_ranks, played_loaders

in_both_ways = pytest.mark.parametrize("how", [{}, DISPATCHING], ids=["sharded", "dispatched"])


def lists(loader):
    return [batch.tolist() for batch in loader]


def test_a_device_mesh_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="torch_device_mesh"):
        prepare_data_loader(DataLoader(Numbers(4)), torch_device_mesh=object())


def test_a_loader_that_need_not_keep_the_order_keeps_it(caplog):
    unordered = DataLoader(Numbers(4), num_workers=1, in_order=False, pin_memory_device="cpu")
    loader = prepare_data_loader(skip_first_batches(unordered, 1))
    assert loader.in_order and loader.pin_memory_device == "cpu" and "read in order" in caplog.text


def test_the_sampler_can_be_read():
    sampler = WeightedRandomSampler([1.0, 2.0], 4)
    for world in (1, 2):
        for loader in played_loaders(world, lambda: DataLoader(Numbers(4), batch_size=2, sampler=sampler)):
            assert get_sampler(loader) is sampler is loader.get_sampler()
    seedable = prepare_data_loader(DataLoader(Numbers(2), shuffle=True), use_seedable_sampler=True)
    assert isinstance(get_sampler(seedable), SeedableRandomSampler)
    assert get_sampler(prepare_data_loader(DataLoader(Numbers(2), batch_sampler=[[0], [1]]))) is None


class OwnGenerator(Sampler):
    """Draws from a generator that is not torch's, and has a batch size though it yields single numbers."""

    batch_size = 3

    def __init__(self, n):
        self.n = n
        self.generator = random.Random(5)

    def __len__(self):
        return self.n

    def __iter__(self):
        return iter(self.generator.sample(range(self.n), self.n))


@pytest.mark.parametrize("world", [1, 2])
def test_a_sampler_may_have_a_generator_that_is_not_torchs(world):
    loaders = played_loaders(world, lambda: DataLoader(Numbers(9), 2, sampler=OwnGenerator(9)), rng_types=["generator"])
    expected = OwnGenerator(9)
    for _ in range(2):
        assert gathered(loaders) == list(expected)


class OwnBatches(BatchSampler):
    epochs = ()

    def set_epoch(self, epoch):
        self.epochs = (*self.epochs, epoch)

    def __iter__(self):
        yield from super().__iter__()
        yield from super().__iter__()

    def __len__(self):
        return 2 * super().__len__()


@pytest.mark.parametrize(("how", "epochs"), [({}, (0, 1)), (DISPATCHING, ())], ids=["sharded", "dispatched"])
def test_on_one_process_the_script_finds_its_own_batch_sampler_in_the_loader(how, epochs):
    mine = OwnBatches(SequentialSampler(range(4)), 2, False)
    loader = prepare_data_loader(DataLoader(Numbers(4), batch_sampler=mine), **how)
    assert loader.batch_sampler is mine
    assert lists(loader) == [[0, 1], [2, 3]] * 2
    loader.batch_sampler.batch_size = 4
    assert loader.total_batch_size == 4 and len(loader) == 2
    assert lists(loader) == [[0, 1, 2, 3]] * 2
    assert mine.epochs == epochs, "a loader that is sharded tells it the epoch of each pass"
    assert lists(skip_first_batches(loader, 1)) == [[0, 1, 2, 3]]
    assert lists(pickle.loads(pickle.dumps(loader))) == [[0, 1, 2, 3]] * 2


class Buckets(list, BatchSampler):
    """A batch sampler without torch's `__init__`: it has no batch size."""


class Reversed(BatchSamplerShard):
    def __iter__(self):
        for batch in super().__iter__():
            yield batch[::-1]


def test_a_shard_of_ones_own_makes_its_batches_by_itself():
    batches = Reversed(BatchSampler(range(4), 2, drop_last=False))
    assert gathered([prepare_data_loader(DataLoader(range(4), batch_sampler=batches))]) == [1, 0, 3, 2]


def test_a_loader_without_batches_yields_single_samples_in_the_samplers_order():
    """`DataLoader(dataset, batch_size=None)`, for data sets that make their batches by themselves."""
    sized = SequentialSampler(range(10))
    sized.batch_size = 2
    assert list(prepare_data_loader(DataLoader(range(10), batch_size=None, sampler=sized))) == list(range(10))
    loader = prepare_data_loader(
        DataLoader(Numbers(10), batch_size=None, shuffle=True), use_seedable_sampler=True, data_seed=2
    )
    assert len(loader) == 10
    for epoch in range(2):
        assert [int(sample) for sample in loader] == seeded_order(10, 2, epoch)


def test_a_loader_without_batches_is_for_one_process():
    shuffled = DataLoader(Numbers(10), batch_size=None, shuffle=True)
    of_stream = DataLoader(Stream([[0, 1], [2]]), batch_size=None)
    of_single_numbers = DataLoader(Numbers(9), batch_size=None, sampler=OwnGenerator(9))
    for loader in (shuffled, skip_first_batches(shuffled, 2), of_stream, of_single_numbers):
        with pytest.raises(ValueError, match="on several processes a loader needs batches"):
            played_loaders(2, lambda loader=loader: loader)


def test_a_loader_without_batches_whose_sampler_yields_lists_is_shared_out():
    of_lists = DataLoader(torch.arange(4), batch_size=None, sampler=Buckets([[0, 1], [2], [3]]))
    assert gathered(played_loaders(2, lambda: skip_first_batches(of_lists, 1))) == [2, 3]


def loader_of_epochs(how):
    """A loader whose sampler and data set both ask for the epoch."""
    data = NumbersOfEpoch(4)
    sampler = DistributedEvalSampler(data, 1, 0, shuffle=True, seed=6)
    return prepare_data_loader(DataLoader(data, sampler=sampler), **how)


def numbers_of_epoch(epoch):
    return [1000 * epoch + number for number in seeded_order(4, 6, epoch)]


@in_both_ways
def test_epochs_reach_samplers_and_datasets_that_ask_for_them(how):
    loader = loader_of_epochs(how)
    for epoch in (0, 1):
        loader.set_epoch(epoch)
        assert gathered([loader]) == numbers_of_epoch(epoch)


@in_both_ways
def test_epochs_reach_the_rest_of_a_loader_also_if_the_script_sets_iteration(how):
    loader = loader_of_epochs(how)
    loader.set_epoch(5)
    rest = skip_first_batches(loader, 1)
    assert gathered([rest]) == numbers_of_epoch(5)[1:]
    loader.iteration = 7  # as some scripts do
    assert gathered([rest]) == numbers_of_epoch(7)[1:]


class OrderOfEpoch(Sampler):
    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(BatchSampler(seeded_order(8, 0, self.epoch), 2, drop_last=False))

    def __len__(self):
        return 4


@pytest.mark.parametrize(("world", "skipped"), [(1, 0), (2, 0), (1, 1), (2, 1)])
def test_an_epoch_that_the_script_tells_its_own_batch_sampler_stays(world, skipped):
    mine = OrderOfEpoch()
    loaders = played_loaders(world, lambda: DataLoader(Numbers(8), batch_sampler=mine), use_stateful_dataloader=True)
    for epoch in (2, 3):
        mine.set_epoch(epoch)
        rests = [skip_first_batches(loader, skipped) for loader in loaders]
        assert gathered(rests) == seeded_order(8, 0, epoch)[2 * world * skipped :]


@pytest.mark.parametrize("world", [1, 2])
def test_a_loaded_state_tells_its_epoch_to_the_scripts_own_batch_sampler(world):
    mine = OrderOfEpoch()
    loaders = played_loaders(world, lambda: DataLoader(Numbers(8), batch_sampler=mine), use_stateful_dataloader=True)
    for loader in loaders:
        loader.set_epoch(7)
        mine.set_epoch(0)  # as in a new run
        loader.load_state_dict(loader.state_dict())
    assert gathered(loaders) == seeded_order(8, 0, 7)


class OfUnknownLength(Numbers):
    def __len__(self):
        raise NotImplementedError


class OfTokens(Numbers):
    total_length = 1000003


@pytest.mark.parametrize(
    ("loader", "how", "expected"),
    [
        pytest.param(DataLoader(Numbers(5), 2), {}, [1, 1, 1], id="one sample is left"),
        pytest.param(DataLoader(Numbers(4), 2), {}, [0, 0], id="full"),
        pytest.param(DataLoader(OfTokens(4), 2), {}, [0, 0], id="of another total"),
        pytest.param(DataLoader(Numbers(5), 2, drop_last=True), {}, [-1, -1], id="dropped"),
        pytest.param(DataLoader(Stream(range(3)), 2), {}, [-1, -1], id="a stream"),
        pytest.param(DataLoader(OfUnknownLength(3), batch_sampler=[[0], [1]]), {}, [-1, -1], id="of unknown length"),
        pytest.param(DataLoader(Numbers(5), 2), DISPATCHING, [-1, -1, 1], id="dispatched"),
        pytest.param(DataLoader(Numbers(4), 2), DISPATCHING, [-1, 2], id="dispatched, full"),
        pytest.param(DataLoader(Stream(range(3)), 2), DISPATCHING, [-1, 1], id="a dispatched stream"),
    ],
)
def test_within_a_loop_the_remainder_is_the_originals(loader, how, expected):
    loader = prepare_data_loader(loader, **how)
    remainders = []
    for _ in loader:
        loader.end_of_dataloader = False  # A script may set it. The remainder stays.
        remainders.append(loader.remainder)
    assert remainders == expected
    assert loader.remainder == -1


@pytest.mark.parametrize(("world", "how"), [(1, {}), (1, DISPATCHING), (2, {})], ids=["one", "dispatched", "two"])
@pytest.mark.parametrize(("stream", "readers"), [(Stream, 2), (StreamOfWorkers, 1)])
def test_each_worker_reads_a_stream_once_that_is_not_split_among_workers(stream, readers, world, how):
    """Plain torch does the same: a stream that ignores its worker is read once by each of them."""
    loaders = played_loaders(world, lambda: DataLoader(stream(range(13)), batch_size=2, num_workers=2), **how)
    assert sorted(gathered(loaders)) == sorted(list(range(13)) * readers)


def shuffle_with_other_states(accelerator, device_specific):
    """A draw of this process for itself, the orders that all visit, and a draw from synchronized generators."""
    set_seed(3, device_specific=device_specific)
    own_draw = torch.rand(1 + accelerator.process_index)[-1].item()
    own_generator = torch.Generator().manual_seed(accelerator.process_index)
    samplers = {
        "random": RandomSampler(range(12)),
        "weighted": WeightedRandomSampler([1.0] * 12, 12, False),
        "weighted, own generator": WeightedRandomSampler([1.0] * 12, 12, False, own_generator),
    }
    orders = {}
    for name, sampler in samplers.items():
        loader = accelerator.prepare(DataLoader(range(12), batch_size=2, sampler=sampler))
        orders[name] = [row for batch in loader for row in accelerator.gather(batch).tolist()]
    synchronize_rng_states(["torch"])
    return {"own draw": own_draw, "orders": orders, "common draw": torch.rand(1).item()}


@pytest.mark.parametrize(("use_seedable_sampler", "device_specific"), [(False, True), (True, True), (True, False)])
def test_seeds_that_differ_by_process_do_not_break_sharding(use_seedable_sampler, device_specific):
    # https://github.com/huggingface/accelerate/issues/2823
    config = DataLoaderConfiguration(use_seedable_sampler=use_seedable_sampler)
    one, two = on_ranks(2, shuffle_with_other_states, device_specific, dataloader_config=config)
    assert one.pop("own draw") != two.pop("own draw")
    assert one == two
    for order in one["orders"].values():
        assert sorted(order) == list(range(12))
    if use_seedable_sampler:
        assert one["orders"]["random"] == seeded_order(12, seed=3)


def test_split_batches_and_the_dataloader_configuration_reach_the_loaders():
    shared = DataLoaderConfiguration(even_batches=False, use_seedable_sampler=True, data_seed=3)
    accelerator = Accelerator(dataloader_config=shared, split_batches=True, cpu=True)
    assert accelerator.dataloader_config.split_batches and not accelerator.even_batches and not shared.split_batches
    assert gathered([accelerator.prepare(DataLoader(range(4), shuffle=True))]) == seeded_order(4, seed=3)
