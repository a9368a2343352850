"""Loaders that the main process alone reads: everybody gets what reading everywhere would have given them."""

import itertools
import math
from typing import NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

from common.accelerator import DistributedEvalSampler
from common.accelerator.data_loader import DataLoaderDispatcher, prepare_data_loader, skip_first_batches
from common.accelerator.rows import WholeBatch
from common.accelerator.utils import listify
from common.processes import RankFailed
from tests.toys import Numbers, ShuffledStream
from tests.unit.accelerator.several_processes import DISPATCHING, on_dispatching_ranks, on_ranks


class Rows(Numbers):
    """Samples of a number and a tensor. A `reader` other than rank 0 gets an error."""

    def __init__(self, n, reader=0):
        super().__init__(n)
        self.reader = reader

    def __getitem__(self, index):
        assert self.reader == 0, "read by another process than the main one"
        return {"number": index, "row": torch.full((2,), index)}


def shuffled_rows(n, reader=0):
    return ShuffledStream(Rows(n, reader), seed=0)


class Epoch(NamedTuple):
    """The rows that one process gets in each step, and the numbers of all steps that are gathered."""

    rows: list
    gathered: list[int]


def epoch_of(accelerator, loader):
    """One epoch, in which only the last step has `end_of_dataloader`."""
    epoch = Epoch([], [])
    ends = []
    for batch in loader:
        epoch.rows.append(batch["row"].tolist())
        epoch.gathered.extend(accelerator.gather_for_metrics(batch)["number"].tolist())
        ends.append(loader.end_of_dataloader)
    assert not any(ends[:-1]) and all(ends[-1:])
    return epoch


class Shape(NamedTuple):
    """A loader of n samples. `batch` is the number of samples that one process gets in a step."""

    n: int
    batch: int
    split_batches: bool
    drop_last: bool

    def samples_gathered(self, world):
        of_step = self.batch * world
        return self.n // of_step * of_step if self.drop_last else self.n


SHAPES = [Shape(*choices) for choices in itertools.product((0, 1, 5, 13), (1, 4), (False, True), (False, True))]


def gather_numbers(accelerator, kind, shape):
    """The numbers gathered in each of two epochs over data that the main process alone can read."""
    size = shape.batch * accelerator.num_processes if shape.split_batches else shape.batch
    data = kind(shape.n, accelerator.process_index)
    loader = DataLoader(data, batch_size=size, drop_last=shape.drop_last)
    loader = prepare_data_loader(loader, split_batches=shape.split_batches, **DISPATCHING)
    assert isinstance(loader, DataLoaderDispatcher)
    first, second = epoch_of(accelerator, loader), epoch_of(accelerator, loader)
    if kind is Rows:
        assert len(loader) == len(first.rows)
    return {"first epoch": first.gathered, "second epoch": second.gathered}


def gather_numbers_of_every_shape(accelerator, kind):
    return {shape: gather_numbers(accelerator, kind, shape) for shape in SHAPES}


def test_the_main_process_reads_and_each_sample_is_gathered_once():
    for epochs_by_shape in on_ranks(2, gather_numbers_of_every_shape, Rows):
        for shape, epochs in epochs_by_shape.items():
            numbers = list(range(shape.samples_gathered(2)))
            assert epochs == {"first epoch": numbers, "second epoch": numbers}, shape


def test_the_main_process_reads_a_shuffled_stream_and_each_sample_is_gathered_once():
    epochs_by_shape, *others = on_ranks(3, gather_numbers_of_every_shape, shuffled_rows)
    assert others == [epochs_by_shape] * 2
    for shape, epochs in epochs_by_shape.items():
        for numbers in epochs.values():
            assert len(numbers) == len(set(numbers)) == shape.samples_gathered(3), shape
    epochs = epochs_by_shape[Shape(13, 4, split_batches=False, drop_last=False)]
    assert epochs["first epoch"] != epochs["second epoch"]


def read_by_workers(accelerator, kind, workers):
    """Two epochs, and what torch's generator draws after them."""
    settings = {"multiprocessing_context": "fork", "persistent_workers": True} if workers else {}
    torch.manual_seed(7)
    data = kind(13, accelerator.process_index)
    loader = accelerator.prepare(DataLoader(data, batch_size=2, num_workers=workers, **settings))
    epochs = [epoch_of(accelerator, loader) for _ in range(2)]
    return {"epochs": epochs, "draw": torch.rand(()).item()}


@pytest.mark.parametrize(("kind", "workers"), [(Rows, 2), (shuffled_rows, 1)])
def test_workers_of_the_main_process_change_nothing(kind, workers):
    """A stream has one worker here: as in plain torch, each of two would read all of it."""
    without_workers = on_dispatching_ranks(2, read_by_workers, kind, 0)
    with_workers = on_dispatching_ranks(2, read_by_workers, kind, workers)
    for expected, found in zip(without_workers, with_workers, strict=True):
        first_epoch = found["epochs"][0]
        assert len(first_epoch.rows) == 4 and sorted(first_epoch.gathered) == list(range(13))
        assert found["epochs"] == expected["epochs"]
    for one, two in (without_workers, with_workers):
        assert one["draw"] == two["draw"], "the generators of the ranks differ"


def draws_after_beginning_to_read(accelerator, sampler, persistent):
    torch.manual_seed(7)
    settings = {"num_workers": 1, "multiprocessing_context": "fork", "persistent_workers": persistent}
    rows = Rows(80, accelerator.process_index)
    loader = accelerator.prepare(DataLoader(rows, batch_size=2, sampler=sampler, **settings))
    draws = []
    for _ in range(2):
        next(iter(loader))
        draws.append(torch.rand(()).item())
    return draws


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("replacement", [False, True])
def test_where_workers_read_all_ranks_draw_the_order(persistent, replacement):
    sampler = RandomSampler(range(80), replacement=replacement)
    one, two = on_dispatching_ranks(2, draws_after_beginning_to_read, sampler, persistent)
    assert one == two


class NoisyRows(Rows):
    def __getitem__(self, index):
        return {**super().__getitem__(index), "noise": torch.rand(()).item()}


def resume_in_three_ways(accelerator):
    """The rest of an epoch after three steps, with a draw beside each: by going on, by a checkpoint, by skipping."""

    def prepared():
        torch.manual_seed(1)
        return accelerator.prepare(DataLoader(NoisyRows(25, accelerator.process_index), batch_size=2, shuffle=True))

    def content(batch):
        return {"numbers": batch["number"].tolist(), "noise": batch["noise"].tolist(), "draw": torch.rand(()).item()}

    loader = prepared()
    whole = []
    for step, batch in enumerate(loader, 1):
        whole.append(content(batch))
        if step == 3:
            state = loader.state_dict()
            generator = torch.get_rng_state()
    later = prepared()
    later.load_state_dict(state)
    torch.set_rng_state(generator)
    after_load = [content(batch) for batch in later]
    after_skip = [content(batch) for batch in skip_first_batches(prepared(), 3)]
    return {"going on": whole[3:], "after load": after_load, "after skip": after_skip}


def test_a_dispatching_loader_continues_where_a_checkpoint_was_made_and_skips_whole_steps():
    for rest in on_dispatching_ranks(2, resume_in_three_ways, use_stateful_dataloader=True):
        # As in the original, the last step is then filled up with rows of the first step that is read.
        assert len(rest["going on"]) == 4 and rest["going on"][:3] == rest["after load"][:3]
        loaded, skipped = ([step["numbers"] for step in rest[way]] for way in ("after load", "after skip"))
        assert loaded == skipped


def choose_slices(accelerator):
    def every_other(batch, part, process_index, num_processes):
        assert (part.stop - part.start) * num_processes == 4
        return {"rows": batch[0][process_index::num_processes], "rank": process_index}

    data = TensorDataset(torch.arange(8))
    loader = accelerator.prepare_data_loader(DataLoader(data, batch_size=2), slice_fn_for_dispatch=every_other)
    return [listify(batch) for batch in loader]


def test_a_function_of_ones_own_can_choose_the_slices():
    one, two = on_dispatching_ranks(2, choose_slices)
    assert one == [{"rows": [0, 2], "rank": 0}, {"rows": [4, 6], "rank": 0}]
    assert two == [{"rows": [1, 3], "rank": 1}, {"rows": [5, 7], "rank": 1}]


class Broken(Rows):
    def __getitem__(self, index):
        if index == 5:
            raise LookupError("sample 5 is gone")
        return super().__getitem__(index)


class Unopened(IterableDataset):
    def __iter__(self):
        if torch.distributed.get_rank() == 0:
            raise LookupError("the file is gone")
        return iter(())


def slice_on_others(batch, rows, process_index, num_processes):
    if rows == slice(0, 1):
        raise LookupError("the slice is gone")
    return batch


def read_what_is_broken(accelerator, kind):
    dataset = Unopened() if kind == "the file" else Broken(8, accelerator.process_index)
    slice_fn = slice_on_others if kind == "the slice" else None
    loader = accelerator.prepare_data_loader(DataLoader(dataset, batch_size=1), slice_fn_for_dispatch=slice_fn)
    numbers = []
    try:
        for batch in loader:
            numbers += batch["number"].tolist()
    except Exception as error:
        return {"read before": numbers, "error": f"{type(error).__name__}: {error}"}


@pytest.mark.parametrize("kind", ["sample 5", "the file", "the slice"])
def test_dispatching_raises_on_all_what_the_main_process_raises(kind):
    of_rank_0, of_rank_1 = ([0], [1]) if kind == "sample 5" else ([], [])
    one, two = on_dispatching_ranks(2, read_what_is_broken, kind)
    assert one == {"read before": of_rank_0, "error": f"LookupError: {kind} is gone"}
    assert two == {"read before": of_rank_1, "error": f"RemoteError: rank 0: LookupError: {kind} is gone"}


def read_batches_of_varying_size(accelerator, batches):
    loader = accelerator.prepare(DataLoader(Rows(9, accelerator.process_index), batch_sampler=batches))
    own = []
    gathered = []
    for batch in loader:
        own.append(batch["number"].tolist())
        gathered.append(accelerator.gather_for_metrics(batch)["number"].tolist())
        batch["number"].zero_()  # It fills up no last step.
    return {"own": own, "gathered": gathered}


def test_batches_of_varying_size_are_joined_as_long_as_a_step_can_be_divided():
    one, two = on_dispatching_ranks(2, read_batches_of_varying_size, [[8, 1, 2], [3], [0], [1], [5, 6, 7]])
    assert one["own"] == [[8, 1], [0], [5, 6]]
    assert two["own"] == [[2, 3], [1], [7, 8]]
    assert one["gathered"] == two["gathered"] == [[8, 1, 2, 3], [0, 1], [5, 6, 7]]


def test_a_step_of_varying_batches_that_cannot_be_divided_is_refused():
    with pytest.raises(RankFailed, match="a step of 3 samples cannot be divided by 2 processes"):
        on_dispatching_ranks(2, read_batches_of_varying_size, [[0, 1], [2], [3]])


def read_without_a_bad_sample(accelerator):
    loader = DataLoader(range(4), 1, drop_last=True, collate_fn=lambda rows: torch.tensor(rows)[torch.tensor(rows) < 3])
    return [batch.tolist() for batch in accelerator.prepare(loader)]


def test_a_last_step_with_fewer_rows_than_processes_is_dropped():
    assert on_dispatching_ranks(2, read_without_a_bad_sample) == [[[0]], [[1]]]


def test_a_first_step_without_samples_cannot_fill_up_the_last_one():
    with pytest.raises(ValueError, match="the first step has no samples"):
        WholeBatch(torch.ones(1), []).fill_up({"batch": torch.ones(0)}, 2)


def dispatch_names(accelerator, samples, names):
    def collate(rows):
        return {"rows": torch.tensor(rows), "names": names}

    loader = accelerator.prepare(DataLoader(range(samples), 3, collate_fn=collate))
    return [batch["names"] for batch in loader]


@pytest.mark.parametrize("names", [["a", "b"], list("abcdef"), list("abcd"), [("a", "b"), ("A", "B")]])
@pytest.mark.parametrize("samples", [8, 11, 7])
def test_a_list_without_rows_in_the_first_batch_stays_whole_in_each_step(samples, names):
    for batches in on_dispatching_ranks(2, dispatch_names, samples, names):
        assert batches == [names] * math.ceil(samples / 6)


def assert_that_what_cannot_be_dispatched_is_refused(accelerator):
    def prepare(loader, **kwargs):
        return prepare_data_loader(loader, dispatch_batches=True, **kwargs)

    with pytest.raises(ValueError, match="requires put_on_device"):
        prepare(DataLoader(Rows(4)))
    with pytest.raises(ValueError, match="twice"):
        prepare(DataLoader(Rows(4), sampler=DistributedEvalSampler(range(4), 2, 0)), put_on_device=True)
    with pytest.raises(ValueError, match="2 processes can split, not 5"):
        prepare(DataLoader(Rows(5), batch_size=5), put_on_device=True, split_batches=True, num_processes=1)


def test_dispatching_refuses_what_cannot_be_dispatched():
    on_ranks(2, assert_that_what_cannot_be_dispatched_is_refused)
