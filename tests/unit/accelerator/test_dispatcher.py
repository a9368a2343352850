"""Loaders that the main process alone reads: everybody gets what reading everywhere would have given them."""

import importlib
import itertools
import multiprocessing

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

from common.accelerator import Accelerator, DistributedEvalSampler
from common.accelerator.data_loader import DataLoaderDispatcher, prepare_data_loader, skip_first_batches
from common.accelerator.utils import DataLoaderConfiguration, slice_tensors
from tests.workers import ranks


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
        self.generator = torch.Generator()

    def __iter__(self):
        order = torch.randperm(self.numbers.n, generator=self.generator).tolist()
        return (self.numbers[index] for index in order)


class SizedStream(Stream):
    def __len__(self):
        return self.numbers.n


def run(job, *args, **config):
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**config), cpu=True)
    try:
        return job(accelerator, *args)
    finally:
        accelerator.end_training()


def seen(accelerator, loader):
    """What a loop sees in two epochs, and what it can gather where every process has a batch."""
    steps = []
    for epoch in range(2):
        for batch in loader:
            real, present = loader.irregular or (None, accelerator.num_processes)
            rows = None
            if present == accelerator.num_processes:
                rows = accelerator.gather_for_metrics(batch)["number"].tolist()
            steps.append((epoch, batch["row"].tolist(), real, present, loader.end_of_dataloader, rows))
    return steps


SHAPES = list(itertools.product((0, 1, 5, 13), (1, 4), *[(False, True)] * 3))


def both_ways(accelerator, kind, dispatch, workers):
    """For every shape: the steps of a loader that dispatches, or of one that does not, and its length."""
    found = []
    rank = accelerator.process_index
    for n, batch, split, even, drop_last in SHAPES:
        data = kind(n, rank if dispatch else None)
        options = {"shuffle": n > 0} if kind is Numbers else {}
        size = batch * accelerator.num_processes if split else batch
        loader = prepare_data_loader(
            DataLoader(data, batch_size=size, drop_last=drop_last, num_workers=workers, **options),
            put_on_device=True,
            device=accelerator.device,
            split_batches=split,
            even_batches=even,
            dispatch_batches=dispatch,
            data_seed=3,
        )
        assert isinstance(loader, DataLoaderDispatcher) == dispatch
        length = None if kind is Stream else len(loader)
        steps = seen(accelerator, loader)
        assert length in (None, len(steps) / 2), (n, batch, split, even, drop_last)
        found.append((steps, loader.total_batch_size, loader.total_dataset_length if kind is Numbers else None))
    return found


@pytest.mark.parametrize(("kind", "world"), [(Numbers, 2), (Numbers, 3), (Stream, 2), (SizedStream, 3)])
def test_every_process_gets_what_it_would_have_read_itself(kind, world):
    sent, read = (ranks(world).run(run, both_ways, kind, dispatch, 0) for dispatch in (True, False))
    for rank in range(world):
        for shape, ours, theirs in zip(SHAPES, sent[rank], read[rank], strict=True):
            assert ours == theirs, (rank, shape)
    steps = sent[0][SHAPES.index((13, 4, True, True, False))][0]
    epochs = [[row for step in steps if step[0] == epoch for row in step[-1]] for epoch in range(2)]
    assert epochs[0] != epochs[1] and sorted(epochs[0]) == sorted(epochs[1]) == list(range(13))


def with_workers(accelerator, kind, workers):
    multiprocessing.current_process()._config["daemon"] = False  # as a rank that torchrun starts
    data = kind(13, accelerator.process_index)
    context = "fork" if workers else None
    plain = DataLoader(data, batch_size=2, num_workers=workers, multiprocessing_context=context)
    loader = accelerator.prepare(plain)
    return seen(accelerator, loader)


@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_workers_of_the_main_process_change_nothing(kind):
    plain, loaded = (
        ranks(2).run(run, with_workers, kind, workers, dispatch_batches=True, data_seed=1) for workers in (0, 2)
    )
    assert plain == loaded and len(plain[0]) > 4


def resumed(accelerator):
    """Three steps of an epoch, and what follows them: by going on, by a checkpoint, by skipping."""

    def prepared():
        return accelerator.prepare(DataLoader(Numbers(21, accelerator.process_index), batch_size=2, shuffle=True))

    straight, loader = prepared(), prepared()
    whole = [batch["number"].tolist() for batch in straight]
    for step, _ in enumerate(loader):
        if step == 2:
            state = loader.state_dict()
            break
    later = prepared()
    later.load_state_dict(state)
    skipping = skip_first_batches(prepared(), 3)
    assert len(skipping) == len(whole) - 3
    return whole[3:], *([batch["number"].tolist() for batch in each] for each in (later, skipping))


def test_it_continues_where_a_checkpoint_was_made_and_skips_whole_steps():
    for rest, after_load, after_skip in ranks(2).run(run, resumed, dispatch_batches=True, data_seed=1):
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


def test_texts_are_dealt_out_like_rows():
    one, two = ranks(2).run(run, texts, dispatch_batches=True)
    gathered = [(list("abcd"), [0, 1, 2, 3]), (["e"], [4])]
    assert one == [(batch, *both) for batch, both in zip((["a", "b"], ["e", "a"]), gathered, strict=True)]
    assert two == [(batch, *both) for batch, both in zip((["c", "d"], ["b", "c"]), gathered, strict=True)]


def test_what_has_no_entry_per_sample_is_an_error():
    loss = {"rows": torch.arange(4), "scale": 2.0}
    with pytest.raises(TypeError):
        slice_tensors(loss, slice(0, 2))


def test_what_cannot_be_dispatched_is_refused():
    def prepare(loader, **kwargs):
        return prepare_data_loader(loader, num_processes=2, process_index=0, **kwargs)

    whole = [DataLoader(Numbers(4), batch_size=None), DataLoader(Stream(4), batch_size=None)]
    for loader in [*whole, DataLoader(Numbers(4), batch_sampler=[[0, 1], [2], [3]])]:
        with pytest.raises(ValueError, match="dispatch_batches needs a batch size"):
            prepare(loader, dispatch_batches=True)
    with pytest.raises(ValueError, match="twice"):
        prepare(DataLoader(Numbers(4), sampler=DistributedEvalSampler(range(4), 2, 0)), dispatch_batches=True)
    with pytest.raises(ValueError, match="slice_fn_for_dispatch goes with dispatch_batches"):
        prepare(DataLoader(Numbers(4)), slice_fn_for_dispatch=lambda *_, **__: None)
    sized = DataLoader(Numbers(4), batch_sampler=BatchSampler(SequentialSampler(range(4)), 2, False))
    assert isinstance(prepare(sized, dispatch_batches=True), DataLoaderDispatcher)


class InOrder(SizedStream):
    def __iter__(self):
        return map(self.numbers.__getitem__, range(self.numbers.n))


def whole_epochs(package, kind):
    accelerate, data_loader, state = (importlib.import_module(package + end) for end in ("", ".data_loader", ".state"))
    accelerator = accelerate.Accelerator(cpu=True)
    kwargs = {"dispatch_batches": True, "put_on_device": True, "device": accelerator.device}
    found = []
    for n, split in itertools.product((8, 16), (False, True)):
        loader = data_loader.prepare_data_loader(DataLoader(kind(n), batch_size=4), split_batches=split, **kwargs)
        found.append((type(loader).__name__, len(loader), [batch["number"].tolist() for batch in loader]))
    accelerator.end_training()
    state.AcceleratorState._reset_state(reset_partial_state=True)
    return found


@pytest.mark.parametrize("kind", [Numbers, InOrder])
def test_whole_steps_equal_those_of_accelerate(kind):
    """The last step, if it lacks samples, is filled to its size here and to the next whole share there."""
    pytest.importorskip("accelerate")
    ours, theirs = (ranks(2).run(whole_epochs, package, kind) for package in ("common.accelerator", "accelerate"))
    assert ours == theirs and ours[0][0][0] == "DataLoaderDispatcher"
