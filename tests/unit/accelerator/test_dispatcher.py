"""Loaders that the main process alone reads: everybody gets what reading everywhere would have given them."""

import itertools
import math
from typing import NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from common.accelerator import DistributedEvalSampler
from common.accelerator.data_loader import DataLoaderDispatcher, prepare_data_loader, skip_first_batches
from common.accelerator.rows import WholeBatch
from common.processes import RankFailed
from tests.toys import ShuffledStream
from tests.unit.accelerator.several_processes import on_dispatching_ranks, on_ranks


class Rows(Dataset):
    """Samples of a number and a tensor. A `reader` other than rank 0 gets an error."""

    def __init__(self, n, reader=0):
        self.n = n
        self.reader = reader

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        assert self.reader == 0, "read by another process than the main one"
        return {"number": index, "row": torch.full((2,), index)}


def shuffled_rows(n, reader=0):
    return ShuffledStream(Rows(n, reader), seed=0)


def epoch_of(accelerator, loader):
    """The rows that this process gets, step by step, and all numbers that are gathered.

    Only the last step has `end_of_dataloader`.
    """
    rows = []
    gathered = []
    ends = []
    for batch in loader:
        rows.append(batch["row"].tolist())
        gathered += accelerator.gather_for_metrics(batch)["number"].tolist()
        ends.append(loader.end_of_dataloader)
    assert not any(ends[:-1]) and all(ends[-1:])
    return rows, gathered


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
    loader = prepare_data_loader(
        DataLoader(kind(shape.n, accelerator.process_index), batch_size=size, drop_last=shape.drop_last),
        put_on_device=True,
        device=accelerator.device,
        split_batches=shape.split_batches,
        dispatch_batches=True,
    )
    assert isinstance(loader, DataLoaderDispatcher)
    first_rows, first = epoch_of(accelerator, loader)
    _, second = epoch_of(accelerator, loader)
    if kind is Rows:
        assert len(loader) == len(first_rows)
    return first, second


def gather_numbers_of_every_shape(accelerator, kind):
    return {shape: gather_numbers(accelerator, kind, shape) for shape in SHAPES}


def test_the_main_process_reads_and_each_sample_is_gathered_once():
    for of_rank in on_ranks(2, gather_numbers_of_every_shape, Rows):
        for shape, epochs in of_rank.items():
            numbers = list(range(shape.samples_gathered(2)))
            assert epochs == (numbers, numbers), shape


def test_the_main_process_reads_a_shuffled_stream_and_each_sample_is_gathered_once():
    by_rank = on_ranks(3, gather_numbers_of_every_shape, shuffled_rows)
    assert by_rank[1:] == by_rank[:-1]
    for shape, epochs in by_rank[0].items():
        for numbers in epochs:
            assert len(numbers) == len(set(numbers)) == shape.samples_gathered(3), shape
    first, second = by_rank[0][Shape(13, 4, split_batches=False, drop_last=False)]
    assert first != second


def read_by_workers(accelerator, kind, workers):
    """The rows and numbers of two epochs, and what torch's generator draws after them."""
    settings = {"multiprocessing_context": "fork", "persistent_workers": True} if workers else {}
    torch.manual_seed(7)
    data = kind(13, accelerator.process_index)
    loader = accelerator.prepare(DataLoader(data, batch_size=2, num_workers=workers, **settings))
    return [epoch_of(accelerator, loader) for _ in range(2)], torch.rand(()).item()


@pytest.mark.parametrize(("kind", "workers"), [(Rows, 2), (shuffled_rows, 1)])
def test_workers_of_the_main_process_change_nothing(kind, workers):
    """A stream has one worker here: as in plain torch, each of two would read all of it."""
    plain, loaded = (on_dispatching_ranks(2, read_by_workers, kind, number) for number in (0, workers))
    assert [epochs for epochs, _ in plain] == [epochs for epochs, _ in loaded]
    for (first_epoch, _), _ in plain:
        rows, numbers = first_epoch
        assert len(rows) == 4 and sorted(numbers) == list(range(13))
    for one, two in (plain, loaded):
        assert one[1] == two[1], "the generators of the ranks differ"


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
        return batch["number"].tolist(), batch["noise"].tolist(), torch.rand(()).item()

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
    skipping = skip_first_batches(prepared(), 3)
    return whole[3:], after_load, [batch["number"].tolist() for batch in skipping]


def test_a_dispatching_loader_continues_where_a_checkpoint_was_made_and_skips_whole_steps():
    for rest, after_load, after_skip in on_dispatching_ranks(2, resume_in_three_ways, use_stateful_dataloader=True):
        # As in the original, the last step is then filled up with rows of the first step that is read.
        assert len(rest) == 4 and rest[:3] == after_load[:3]
        assert [numbers for numbers, *_ in after_load] == after_skip


def choose_slices(accelerator):
    def every_other(batch, part, process_index, num_processes):
        assert (part.stop - part.start) * num_processes == 4
        return batch[0][process_index::num_processes], process_index

    data = TensorDataset(torch.arange(8))
    loader = accelerator.prepare_data_loader(DataLoader(data, batch_size=2), slice_fn_for_dispatch=every_other)
    return [(rows.tolist(), rank) for rows, rank in loader]


def test_a_function_of_ones_own_can_choose_the_slices():
    results = on_dispatching_ranks(2, choose_slices)
    assert results == [[([0, 2], 0), ([4, 6], 0)], [([1, 3], 1), ([5, 7], 1)]]


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
        return numbers, type(error).__name__, str(error)


@pytest.mark.parametrize("kind", ["sample 5", "the file", "the slice"])
def test_dispatching_raises_on_all_what_the_main_process_raises(kind):
    numbers = [[0], [1]] if kind == "sample 5" else [[], []]
    one, two = on_dispatching_ranks(2, read_what_is_broken, kind)
    assert one == (numbers[0], "LookupError", f"{kind} is gone")
    assert two == (numbers[1], "RemoteError", f"rank 0: LookupError: {kind} is gone")


def read_batches_of_varying_size(accelerator, batches):
    loader = accelerator.prepare(DataLoader(Rows(9, accelerator.process_index), batch_sampler=batches))
    found = []
    for batch in loader:
        found.append((batch["number"].tolist(), accelerator.gather_for_metrics(batch)["number"].tolist()))
        batch["number"].zero_()  # It fills up no last step.
    return found


def test_batches_of_varying_size_are_joined_as_long_as_a_step_can_be_divided():
    one, two = on_dispatching_ranks(2, read_batches_of_varying_size, [[8, 1, 2], [3], [0], [1], [5, 6, 7]])
    assert one == [([8, 1], [8, 1, 2, 3]), ([0], [0, 1]), ([5, 6], [5, 6, 7])]
    assert two == [([2, 3], [8, 1, 2, 3]), ([1], [0, 1]), ([7, 8], [5, 6, 7])]
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
