"""The small Accelerator: whose samples are whose, and what it refuses."""

from datetime import timedelta

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler

from common.small.accelerator import Accelerator, DataLoaderConfiguration, DataLoaderShard, InitProcessGroupKwargs

DATA = TensorDataset(torch.arange(10))


@pytest.fixture
def accelerator():
    """One rank of two. The shards need no process group, so it stands in one of its own."""
    made = make()
    made.num_processes = 2
    yield made
    made.end_training()


def make(split_batches: bool = True) -> Accelerator:
    config = DataLoaderConfiguration(split_batches, use_seedable_sampler=True, data_seed=42)
    return Accelerator(True, config, [InitProcessGroupKwargs(timedelta(seconds=60))])


def test_the_ten_samples_of_the_docstring_are_shared_as_it_says(accelerator):
    table = DataLoaderShard.__doc__.split("samples_in_step\n")[1].split("\n\n")[0]
    # A line is "0 1 2 3     0 1       2 3       4": the batch, the samples of ranks 0 and 1, and how many are counted.
    rows = [[cell.split() for cell in line.strip().split("   ") if cell.strip()] for line in table.splitlines()]
    shown = {0: [row[1] for row in rows], 1: [row[2] for row in rows]}
    for rank, batches in shown.items():
        accelerator.process_index = rank
        counted = []
        read = []
        for (batch,) in accelerator.prepare(DataLoader(DATA, 4))[0]:
            read.append([str(number) for number in batch.tolist()])
            counted.append(str(accelerator.samples_in_step))
        assert read == batches
        assert counted == [row[3][0] for row in rows] == ["4", "4", "2"]


def test_a_loop_goes_on_with_its_own_count_after_another_one_within_it(accelerator):
    outer, inner = accelerator.prepare(DataLoader(DATA, 4), DataLoader(DATA, 6))
    counted = []
    for _ in outer:
        for _ in inner:
            if len(counted) == 1:
                break
        counted.append(accelerator.samples_in_step)
    assert counted == [4, 4, 2]
    assert accelerator.samples_in_step is None  # so `gather_for_metrics` cuts nothing off


def test_the_small_accelerator_refuses_what_it_cannot_do(accelerator):
    with pytest.raises(NotImplementedError, match="only the whole Accelerator"):
        make(split_batches=False)
    for loader in (
        DataLoader(DATA, 4, sampler=WeightedRandomSampler(range(10), 10)),
        DataLoader(DATA, 4, sampler=RandomSampler(DATA, replacement=True)),
        DataLoader(DATA, 4, sampler=RandomSampler(DATA, num_samples=8)),
        DataLoader(DATA, batch_sampler=BatchSampler(range(10), 4, drop_last=False)),
    ):
        with pytest.raises(NotImplementedError, match="only the whole Accelerator takes samplers"):
            accelerator.prepare(loader)
    [loader] = accelerator.prepare(DataLoader(DATA, 3))
    with pytest.raises(ValueError, match="2 processes cannot share a batch of 3"):
        next(iter(loader))
