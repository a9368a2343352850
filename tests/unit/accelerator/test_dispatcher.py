"""Loaders that the main process alone reads: everybody gets what reading everywhere would have given them."""

import collections
import itertools
import math
import re
from functools import partial
from typing import NamedTuple

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from common.accelerator import DistributedEvalSampler
from common.accelerator.data_loader import DataLoaderDispatcher, prepare_data_loader, skip_first_batches
from common.accelerator.rows import fill_up, join_batches
from common.accelerator.utils import DataLoaderConfiguration, recursively_apply
from common.processes import RankFailed
from tests.toys import ShuffledStream
from tests.unit.accelerator.several_processes import on_ranks


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


def on_dispatching_ranks(world, job, *args, **config):
    return on_ranks(world, job, *args, dataloader_config=DataLoaderConfiguration(dispatch_batches=True, **config))


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
    """Rows, each with a random number that is drawn when it is read."""

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
    assert len(skipping) == len(whole) - 3
    return whole[3:], after_load, [batch["number"].tolist() for batch in skipping]


def test_it_continues_where_a_checkpoint_was_made_and_skips_whole_steps():
    for rest, after_load, after_skip in on_dispatching_ranks(2, resume_in_three_ways, use_stateful_dataloader=True):
        assert len(rest) == 4 and rest == after_load
        # As in the original, the last step is now filled up with rows of the first step that is left.
        assert [numbers for numbers, *_ in rest[:3]] == after_skip[:3]


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
def test_what_the_main_process_raises_is_raised_on_all(kind):
    numbers = [[0], [1]] if kind == "sample 5" else [[], []]
    one, two = on_dispatching_ranks(2, read_what_is_broken, kind)
    assert one == (numbers[0], "LookupError", f"{kind} is gone")
    assert two == (numbers[1], "RemoteError", f"rank 0: LookupError: {kind} is gone")


def dispatch_texts(accelerator):
    records = [{"text": letter, "pair": (letter, number)} for number, letter in enumerate("abcde")]
    steps = []
    for batch in accelerator.prepare(DataLoader(records, batch_size=2)):
        gathered = accelerator.gather_for_metrics(batch)
        steps.append((batch["text"], gathered["text"], gathered["pair"][1].tolist()))
    return steps


def test_texts_are_sharded_like_rows():
    one, two = on_dispatching_ranks(2, dispatch_texts)
    assert one == [(["a", "b"], list("abcd"), [0, 1, 2, 3]), (["e"], ["e"], [4])]
    assert two == [(["c", "d"], list("abcd"), [0, 1, 2, 3]), (["a"], ["e"], [4])]


def as_channels_last(images):
    return torch.stack(images).to(memory_format=torch.channels_last)


def dispatch_images(accelerator):
    loader = DataLoader(torch.arange(96).view(4, 3, 2, 4), batch_size=2, collate_fn=as_channels_last)
    return [batch.tolist() for batch in accelerator.prepare(loader)]


def test_batches_keep_their_numbers_whatever_their_strides():
    images = torch.arange(96).view(4, 3, 2, 4).tolist()
    assert on_dispatching_ranks(2, dispatch_images) == [[images[:2]], [images[2:]]]


Tagged = collections.namedtuple("Tagged", "tag rows")


class NamedDict(dict):
    """A mapping with another constructor than dict's."""

    def __init__(self, name):
        self.name = name


def named_dict(rows):
    batch = NamedDict("a batch")
    batch["rows"] = rows
    return batch


def batches_to_keep(rows):
    """Batches in which some entries have no row for each sample, by what is special. These entries stay as they are."""
    return {
        "flag": {"flag": True, "rows": rows},
        "text": {"name": "ab", "rows": rows},
        "number": {"scale": torch.tensor(0.5), "of numpy": numpy.float32(2), "rows": rows},
        "none": (None, rows),
        "empty": {"empty": [], "also": {}, "rows": rows},
        "tuple": (("a", "b", "c"), rows),
        "nested": {"meta": {"flag": True, "name": b"ab"}, "rows": [rows]},
        "namedtuple": Tagged("tag", rows),
        "array": {"array": rows.numpy(), "rows": rows},
        "entries": [{"row": row} for row in rows.tolist()],
        "columns": {"rows": rows, "pair": [rows.tolist()] * 4},
        "defaultdict": collections.defaultdict(list, rows=rows),
        "class": named_dict(rows),
    }


def batches_to_refuse(rows):
    """Batches that cannot be divided among the ranks, or joined with the other batch of their step, by their errors."""
    first = rows[0].item()
    more = {"more": rows} if first == 0 else {}
    return {
        "['weights']: 3, ['rows']: 4": {"weights": torch.ones(3), "rows": rows},
        "['names']: 3, ['texts']: 4": {"names": ["a", "b", "c"], "texts": [str(row) for row in rows.tolist()]},
        "may be samples or columns": [("a", "b", "c", "d"), ("A", "B", "C", "D")],
        "nothing in the batch has a row": {"flag": True, "loss": torch.tensor(0.5)},
        "['first'] differs between the batches of a step": {"first": first, "rows": rows},
        "['arrays'] differs between the batches of a step": {"arrays": [rows.numpy()], "rows": rows},
        "['slice'] differs between the batches of a step": {"slice": slice(rows), "rows": rows},
        "only some of the batches of a step have ['more']": {"rows": rows, **more},
        "['rows'] cannot be joined to a step (Sizes of": {"rows": rows[:, None].expand(-1, 1 + first)},
        "['mixed'] cannot be joined": {"mixed": rows if first == 0 else rows.tolist(), "rows": rows},
    }


def collate_one_of(make_batches, kind, rows):
    return make_batches(torch.tensor(rows))[kind]


def dispatch(accelerator, make_batches, kind):
    """This rank's part of the one step that 8 samples make."""
    loader = DataLoader(range(8), batch_size=4, collate_fn=partial(collate_one_of, make_batches, kind))
    (batch,) = accelerator.prepare(loader)
    return batch


def as_lists(batch):
    return recursively_apply(lambda leaf: leaf.tolist(), batch, test_type=lambda leaf: hasattr(leaf, "tolist"))


def assert_all_are_kept(accelerator):
    rank = accelerator.process_index
    for kind, expected in batches_to_keep(torch.arange(4) + 4 * rank).items():
        found = dispatch(accelerator, batches_to_keep, kind)
        assert as_lists(found) == as_lists(expected), kind
        assert type(found) is type(expected)


def test_an_entry_without_a_row_for_each_sample_arrives_as_it_is():
    on_dispatching_ranks(2, assert_all_are_kept)


def assert_all_are_refused(accelerator):
    for message in batches_to_refuse(torch.arange(4)):
        with pytest.raises(Exception, match=rf"{re.escape(message)}(?s:.*)dispatch_batches=False"):
            dispatch(accelerator, batches_to_refuse, message)


def test_a_batch_that_cannot_be_divided_is_refused_by_name_on_all_ranks():
    on_dispatching_ranks(2, assert_all_are_refused)


def dispatch_pairs(accelerator, pair):
    return list(accelerator.prepare(DataLoader([{"label": 0, "pair": pair}] * 2, batch_size=2)))


@pytest.mark.parametrize("pair", [("a", "b"), [{"text": "a"}, {"text": "b"}]])
def test_columns_are_not_divided_like_samples(pair):
    with pytest.raises(RankFailed, match=r"the lists in \['pair'\] may be samples or columns"):
        on_dispatching_ranks(2, dispatch_pairs, pair, split_batches=True)


@pytest.mark.parametrize("batch", [{"x": torch.ones(4, 3), "pad": torch.ones(1)}, {"n": 2}, [("a", "b"), ("A", "B")]])
def test_the_only_process_gets_its_batches_whole(batch):
    def dispatched(accelerator):
        (found,) = accelerator.prepare(DataLoader(range(4), batch_size=4, collate_fn=lambda samples: batch))
        return as_lists(found)

    assert on_dispatching_ranks(1, dispatched) == [as_lists(batch)]


def read_batches_of_varying_size(accelerator, batches):
    loader = accelerator.prepare(DataLoader(Rows(9, accelerator.process_index), batch_sampler=batches))
    return [(batch["number"].tolist(), accelerator.gather_for_metrics(batch)["number"].tolist()) for batch in loader]


def test_batches_of_varying_size_are_joined_as_long_as_a_step_can_be_divided():
    one, two = on_dispatching_ranks(2, read_batches_of_varying_size, [[0, 1, 2], [3], [4, 5, 6]])
    assert one == [([0, 1], [0, 1, 2, 3]), ([4, 5], [4, 5, 6])]
    assert two == [([2, 3], [0, 1, 2, 3]), ([6, 0], [4, 5, 6])]
    with pytest.raises(RankFailed, match="a step of 3 samples cannot be divided by 2 processes"):
        on_dispatching_ranks(2, read_batches_of_varying_size, [[0, 1], [2], [3]])


def test_a_first_step_without_samples_cannot_fill_up_the_last_one():
    with pytest.raises(ValueError, match="the first step has no samples"):
        fill_up(torch.ones(1), torch.ones(0), least_rows=2)


def test_what_is_the_same_in_all_batches_of_a_step_stays_as_it_is():
    names = ["a", "b", "c"]
    first, last = ({"loss": float("nan"), "names": names, "rows": torch.ones(rows)} for rows in (2, 3))
    for batch in (join_batches([first, last]), fill_up(last, first, least_rows=4)):
        assert math.isnan(batch["loss"]) and batch["names"] == names and len(batch["rows"]) == 5


def test_what_cannot_be_dispatched_is_refused():
    def prepare(loader, **kwargs):
        return prepare_data_loader(loader, num_processes=2, process_index=0, dispatch_batches=True, **kwargs)

    with pytest.raises(ValueError, match="requires put_on_device"):
        prepare(DataLoader(Rows(4)))
    with pytest.raises(ValueError, match="twice"):
        prepare(DataLoader(Rows(4), sampler=DistributedEvalSampler(range(4), 2, 0)), put_on_device=True)
    with pytest.raises(ValueError, match="2 processes can split, not 5"):
        prepare(DataLoader(Rows(5), batch_size=5), put_on_device=True, split_batches=True)
