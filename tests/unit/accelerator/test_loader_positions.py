"""A stateful loader's position is taken over by the loader that it was saved for, and by no other."""

import logging

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, TensorDataset

from common.accelerator import Accelerator
from common.accelerator.utils import DataLoaderConfiguration
from common.processes import ranks
from tests.states import forget_states
from tests.toys import SizedStream


def numbers(n, batch_size=4, **how):
    return DataLoader(TensorDataset(torch.arange(n)), batch_size=batch_size, **how)


def seen(loader):
    return [number for (batch,) in loader for number in batch.tolist()]


def new_accelerator(**config):
    config = DataLoaderConfiguration(use_stateful_dataloader=True, **config)
    return Accelerator(dataloader_config=config, cpu=True)


def save_after_two_steps(folder, *loaders):
    """Save a checkpoint within an epoch of the first of `loaders`."""
    accelerator = new_accelerator()
    first, *_ = [accelerator.prepare(loader) for loader in loaders]
    for step, _ in enumerate(first, 1):
        if step == 2:
            accelerator.save_state(folder)
            break


ANOTHER = {
    "fewer samples": (lambda: numbers(24, shuffle=True), lambda: numbers(10, shuffle=True)),
    "in order": (lambda: numbers(24, shuffle=True), lambda: numbers(24)),
    "a stream": (lambda: numbers(24), lambda: DataLoader(SizedStream(TensorDataset(torch.arange(24))), batch_size=4)),
    "a shorter stream": (
        lambda: DataLoader(SizedStream(TensorDataset(torch.arange(24))), batch_size=4),
        lambda: DataLoader(SizedStream(TensorDataset(torch.arange(10))), batch_size=4),
    ),
    "another part of the data": (
        lambda: numbers(24, sampler=SubsetRandomSampler(range(20))),
        lambda: numbers(24, sampler=SubsetRandomSampler(range(12, 24))),
    ),
    "no whole number of its steps": (lambda: numbers(24), lambda: numbers(10, batch_size=3)),
}


@pytest.mark.parametrize("kind", ANOTHER)
def test_a_loader_of_other_data_starts_at_its_beginning_with_a_warning(kind, tmp_path, caplog):
    training, evaluation = ANOTHER[kind]
    save_after_two_steps(tmp_path / "c", training())
    caplog.clear()
    accelerator = new_accelerator()
    loader = accelerator.prepare(evaluation())
    with caplog.at_level(logging.WARNING):
        accelerator.load_state(tmp_path / "c")
    (record,) = caplog.records
    assert "starts at its beginning" in record.getMessage() and "\n" not in record.getMessage()
    assert len(seen(loader)) == len(seen(evaluation()))


THE_SAME = {
    "unchanged": (lambda: numbers(24, shuffle=True), lambda: numbers(24, shuffle=True)),
    "smaller batches": (lambda: numbers(24, shuffle=True), lambda: numbers(24, batch_size=2, shuffle=True)),
    "larger batches": (lambda: numbers(24), lambda: numbers(24, batch_size=8)),
    "without the tail": (
        lambda: numbers(24, sampler=RandomSampler(range(24), num_samples=24)),
        lambda: numbers(24, batch_size=8, sampler=RandomSampler(range(24), num_samples=16)),
    ),
    "a stream": (
        lambda: DataLoader(SizedStream(TensorDataset(torch.arange(24))), batch_size=4),
        lambda: DataLoader(SizedStream(TensorDataset(torch.arange(24))), batch_size=8),
    ),
    "batches of the script's own": (
        lambda: DataLoader(TensorDataset(torch.arange(24)), batch_sampler=[[n, n + 1] for n in range(0, 24, 2)]),
        lambda: DataLoader(TensorDataset(torch.arange(24)), batch_sampler=[[n, n + 1] for n in range(0, 24, 2)]),
    ),
}


@pytest.mark.parametrize("kind", THE_SAME)
def test_a_loader_of_the_same_data_goes_on_also_with_other_batches(kind, tmp_path, caplog):
    training, resumed = THE_SAME[kind]
    torch.manual_seed(1)
    save_after_two_steps(tmp_path / "c", training())
    caplog.clear()
    accelerator = new_accelerator()
    loader = accelerator.prepare(resumed())
    accelerator.load_state(tmp_path / "c")
    assert not caplog.records
    whole = len(seen(resumed()))
    done = 4 if kind == "batches of the script's own" else 8
    assert len(seen(loader)) == whole - done


def with_data_on_the_main_process_only(folder):
    """What is left of an epoch after a checkpoint, and a random number drawn after it, on processes without data."""
    accelerator = new_accelerator(dispatch_batches=True)

    def prepared():
        return accelerator.prepare(numbers(16 if accelerator.is_main_process else 1, batch_size=2))

    for _ in prepared():
        accelerator.save_state(folder)
        break
    accelerator.free_memory()
    loader = prepared()
    accelerator.load_state(folder)
    torch.manual_seed(8)
    rest = seen(loader)
    drawn = torch.rand(()).item()
    accelerator.end_training()
    forget_states()
    return rest, drawn


def test_the_main_process_says_whether_a_loader_is_the_same(tmp_path):
    (first, drawn), (second, drawn_elsewhere) = ranks(2).run(with_data_on_the_main_process_only, str(tmp_path / "c"))
    assert sorted(first + second) == list(range(4, 16))
    assert drawn == drawn_elsewhere


def test_a_loader_prepared_after_the_checkpoint_starts_at_its_beginning(tmp_path):
    accelerator = new_accelerator()
    training = accelerator.prepare(numbers(24))
    for step, _ in enumerate(training, 1):
        if step == 2:
            accelerator.save_state(tmp_path / "c")
    evaluation = accelerator.prepare(numbers(10))
    accelerator.load_state(tmp_path / "c")
    assert seen(evaluation) == list(range(10))
    assert seen(training) == list(range(8, 24))
