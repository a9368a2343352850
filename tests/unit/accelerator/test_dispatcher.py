"""Loaders that the main process alone reads: everybody gets what reading everywhere would have given them."""

import importlib
import itertools
import multiprocessing

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from common.accelerator import Accelerator, DistributedEvalSampler
from common.accelerator.data_loader import DataLoaderDispatcher, prepare_data_loader, skip_first_batches
from common.accelerator.utils import DataLoaderConfiguration, listify
from common.processes import RankFailed, ranks
from tests.states import forget_states


class Numbers(Dataset):
    """Can be read on rank 0 only, if it is `private`."""

    def __init__(self, n, private=None):
        self.n, self.private = n, private

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        assert self.private in (None, 0), "read by another process than the main one"
        return {"number": index, "row": torch.full((2,), index)}


class Stream(IterableDataset):
    def __init__(self, n, private=None):
        self.numbers = Numbers(n, private)
        self.generator = torch.Generator().manual_seed(0)

    def __iter__(self):
        order = torch.randperm(self.numbers.n, generator=self.generator).tolist()
        return (self.numbers[index] for index in order)


def run(job, *args, **config):
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**config), cpu=True)
    try:
        return job(accelerator, *args)
    finally:
        accelerator.end_training()


def seen(accelerator, loader):
    """What a loop sees in two epochs, and what it can gather."""
    steps = []
    for epoch in range(2):
        for batch in loader:
            rows = accelerator.gather_for_metrics(batch)["number"].tolist()
            steps.append((epoch, batch["row"].tolist(), loader.end_of_dataloader, rows))
    return steps


SHAPES = list(itertools.product((0, 1, 5, 13), (1, 4), *[(False, True)] * 2))


def every_shape(accelerator, kind):
    """For every shape: the steps of a loader that dispatches, of data that only the main process can read."""
    found = []
    for n, batch, split, drop_last in SHAPES:
        size = batch * accelerator.num_processes if split else batch
        torch.manual_seed(3)
        loader = prepare_data_loader(
            DataLoader(
                kind(n, accelerator.process_index),
                batch_size=size,
                drop_last=drop_last,
                shuffle=n > 0 if kind is Numbers else None,
            ),
            put_on_device=True,
            device=accelerator.device,
            split_batches=split,
            dispatch_batches=True,
        )
        assert isinstance(loader, DataLoaderDispatcher)
        length = None if kind is Stream else len(loader)
        steps = seen(accelerator, loader)
        assert length in (None, len(steps) / 2), (n, batch, split, drop_last)
        found.append(steps)
    return found


@pytest.mark.parametrize(("kind", "world"), [(Numbers, 2), (Stream, 3)])
def test_the_main_process_reads_and_each_sample_is_gathered_once(kind, world):
    everyone = ranks(world).run(run, every_shape, kind)
    for shape, *steps_of_ranks in zip(SHAPES, *everyone, strict=True):
        n, batch, _, drop_last = shape
        assert len({len(steps) for steps in steps_of_ranks}) == 1
        for steps in steps_of_ranks:
            assert [last for _, _, last, _ in steps] == [last for _, _, last, _ in steps_of_ranks[0]]
            assert [rows for *_, rows in steps] == [rows for *_, rows in steps_of_ranks[0]]
            ends = [step for step, (epoch, _, last, _) in enumerate(steps) if last]
            assert len(ends) == (2 if steps else 0)
        epochs = [[row for step in steps if step[0] == epoch for row in step[-1]] for epoch in range(2)]
        if drop_last:
            whole = n // (batch * world) * batch * world
            assert all(len(rows) == len(set(rows)) == whole for rows in epochs), shape
        else:
            assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(n)), shape
            assert n < 13 or epochs[0] != epochs[1]


def with_workers(accelerator, kind, workers):
    multiprocessing.current_process()._config["daemon"] = False  # as a rank that torchrun starts
    data = kind(13, accelerator.process_index)
    context = "fork" if workers else None
    plain = DataLoader(data, batch_size=2, num_workers=workers, multiprocessing_context=context)
    steps = seen(accelerator, accelerator.prepare(plain))
    return [step for step in steps if step[0] == 0]  # each worker draws from a copy of a stream's generator


@pytest.mark.parametrize(("kind", "workers"), [(Numbers, 2), (Stream, 1)])
def test_workers_of_the_main_process_change_nothing(kind, workers):
    """Two workers would both read a stream that does not ask which worker it is in, as in plain torch."""
    plain, loaded = (ranks(2).run(run, with_workers, kind, number, dispatch_batches=True) for number in (0, workers))
    assert plain == loaded and len(plain[0]) == 4


def resumed(accelerator):
    """Three steps of an epoch, and what follows them: by going on, by a checkpoint, by skipping."""

    def prepared():
        torch.manual_seed(1)
        return accelerator.prepare(DataLoader(Numbers(24, accelerator.process_index), batch_size=2, shuffle=True))

    straight, loader = prepared(), prepared()
    whole = [batch["number"].tolist() for batch in straight]
    torch.manual_seed(1)
    for step, _ in enumerate(loader):
        if step == 2:
            state = loader.state_dict()
            break
    later = prepared()
    later.load_state_dict(state)
    torch.manual_seed(8)
    rest = [batch["number"].tolist() for batch in later]
    went_on = torch.rand(1).item()
    skipping = skip_first_batches(prepared(), 3)
    torch.manual_seed(8)
    assert went_on == torch.rand(1).item()
    assert len(skipping) == len(whole) - 3
    torch.manual_seed(1)
    return whole[3:], rest, [batch["number"].tolist() for batch in skipping]


def test_it_continues_where_a_checkpoint_was_made_and_skips_whole_steps():
    for rest, after_load, after_skip in ranks(2).run(run, resumed, dispatch_batches=True, use_stateful_dataloader=True):
        assert len(rest) == 3 and rest == after_load == after_skip


def sliced(accelerator):
    def every_other(batch, part, process_index, num_processes):
        assert (part.stop - part.start) * num_processes == 4
        return batch[0][process_index::num_processes], process_index

    data = TensorDataset(torch.arange(8))
    loader = accelerator.prepare_data_loader(DataLoader(data, batch_size=2), slice_fn_for_dispatch=every_other)
    return [(rows.tolist(), rank) for rows, rank in loader]


def test_a_function_of_ones_own_can_choose_the_slices():
    results = ranks(2).run(run, sliced, dispatch_batches=True)
    assert results == [[([0, 2], 0), ([4, 6], 0)], [([1, 3], 1), ([5, 7], 1)]]


class Broken(Numbers):
    def __getitem__(self, index):
        if index == 5:
            raise LookupError("sample 5 is gone")
        return super().__getitem__(index)


def broken(accelerator):
    steps = []
    try:
        for batch in accelerator.prepare(DataLoader(Broken(8, accelerator.process_index), batch_size=1)):
            steps.append(batch["number"].tolist())
    except Exception as error:
        return steps, type(error).__name__, str(error)


def test_what_the_main_process_raises_is_raised_on_all():
    one, two = ranks(2).run(run, broken, dispatch_batches=True)
    assert one == ([[0]], "LookupError", "sample 5 is gone")
    assert two == ([[1]], "RuntimeError", "rank 0: LookupError: sample 5 is gone")


def texts(accelerator):
    records = [{"text": letter, "pair": (letter, number)} for number, letter in enumerate("abcde")]
    steps = []
    for batch in accelerator.prepare(DataLoader(records, batch_size=2)):
        together = accelerator.gather_for_metrics(batch)
        steps.append((batch["text"], together["text"], together["pair"][1].tolist()))
    return steps


def test_texts_are_sharded_like_rows():
    one, two = ranks(2).run(run, texts, dispatch_batches=True)
    gathered = [(list("abcd"), [0, 1, 2, 3]), (["e"], [4])]
    assert one == [(batch, *both) for batch, both in zip((["a", "b"], ["e"]), gathered, strict=True)]
    assert two == [(batch, *both) for batch, both in zip((["c", "d"], ["a"]), gathered, strict=True)]


def as_channels_last(images):
    return torch.stack(images).to(memory_format=torch.channels_last)


def dispatched_images(accelerator):
    loader = DataLoader(torch.arange(96).view(4, 3, 2, 4), batch_size=2, collate_fn=as_channels_last)
    return [batch.tolist() for batch in accelerator.prepare(loader)]


def test_batches_keep_their_numbers_whatever_their_strides():
    of_ranks = ranks(2).run(run, dispatched_images, dispatch_batches=True)
    images = torch.arange(96).view(4, 3, 2, 4).tolist()
    assert of_ranks == [[images[:2]], [images[2:]]]


def dispatched_with_numbers(accelerator):
    """What comes of batches that hold a number, a text and nothing beside their rows."""
    loader = accelerator.prepare(DataLoader(range(8), batch_size=4, collate_fn=with_numbers))
    return [{name: listify(value) for name, value in batch.items()} for batch in loader]


def with_numbers(samples):
    return {"rows": torch.tensor(samples), "scale": 2.0, "name": "ab", "nothing": None}


def test_what_has_no_entry_per_sample_stays_as_it_is():
    of_two = ranks(2).run(run, dispatched_with_numbers, dispatch_batches=True, split_batches=True)
    assert of_two[1][0] == {"rows": [2, 3], "scale": 2.0, "name": "ab", "nothing": None}


def test_what_cannot_be_dispatched_is_refused():
    def prepare(loader, **kwargs):
        return prepare_data_loader(loader, num_processes=2, process_index=0, dispatch_batches=True, **kwargs)

    with pytest.raises(ValueError, match="requires put_on_device"):
        prepare(DataLoader(Numbers(4)))
    with pytest.raises(ValueError, match="twice"):
        prepare(DataLoader(Numbers(4), sampler=DistributedEvalSampler(range(4), 2, 0)), put_on_device=True)


def of_varying_size(accelerator, batches):
    loader = accelerator.prepare(DataLoader(Numbers(9, accelerator.process_index), batch_sampler=batches))
    return [(batch["number"].tolist(), accelerator.gather_for_metrics(batch)["number"].tolist()) for batch in loader]


def test_batches_of_varying_size_are_joined_as_long_as_a_step_can_be_divided():
    one, two = ranks(2).run(run, of_varying_size, [[0, 1, 2], [3], [4, 5, 6]], dispatch_batches=True)
    assert one == [([0, 1], [0, 1, 2, 3]), ([4, 5], [4, 5, 6])]
    assert two == [([2, 3], [0, 1, 2, 3]), ([6, 0], [4, 5, 6])]
    with pytest.raises(RankFailed, match="a step of 3 samples cannot be divided by 2 processes"):
        ranks(2).run(run, of_varying_size, [[0, 1], [2], [3]], dispatch_batches=True)


class ShuffledWhenIterated(Stream):
    """Draws its order when `iter` is called on it, not when the first sample is asked for."""

    def __len__(self):
        return self.numbers.n

    def __iter__(self):
        return map(self.numbers.__getitem__, torch.randperm(self.numbers.n).tolist())


def whole_epochs(package, kind):
    accelerate = importlib.import_module(package)
    data_loader = importlib.import_module(f"{package}.data_loader")
    accelerator = accelerate.Accelerator(cpu=True)
    kwargs = {"put_on_device": True, "device": accelerator.device}
    found = []
    for n, split, drop_last in itertools.product((8, 13, 16, 17), (False, True), (False, True)):
        torch.manual_seed(3)
        plain = DataLoader(kind(n), batch_size=4, drop_last=drop_last, shuffle=kind is Numbers or None)
        dispatch = True if kind is Numbers else None
        loader = data_loader.prepare_data_loader(plain, split_batches=split, dispatch_batches=dispatch, **kwargs)
        steps = [
            (batch["number"].tolist(), accelerator.gather_for_metrics(batch["number"]).tolist()) for batch in loader
        ]
        found.append((type(loader).__name__, len(loader), steps, torch.rand(1).item()))
    accelerator.end_training()
    forget_states(package)
    return found


@pytest.mark.parametrize("kind", [Numbers, ShuffledWhenIterated])
def test_steps_and_draws_equal_those_of_accelerate(kind):
    pytest.importorskip("accelerate")
    ours, theirs = (ranks(2).run(whole_epochs, package, kind) for package in ("common.accelerator", "accelerate"))
    assert ours == theirs and ours[0][0][0] == "DataLoaderDispatcher"
    # A sampler without a generator draws on the main process alone. `iter` of a stream is called on every process.
    next_draws_of_ranks = [[draw for *_, draw in found] for found in ours]
    assert (next_draws_of_ranks[0] == next_draws_of_ranks[1]) == (kind is not Numbers)
