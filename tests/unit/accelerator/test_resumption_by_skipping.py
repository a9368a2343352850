"""By default a script says where its loaders go on: `set_epoch`, `skip_first_batches`, and nothing else moves them."""

import copy
import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from common.accelerator import Accelerator, DistributedEvalSampler
from common.accelerator.data_loader import skip_first_batches
from common.accelerator.utils import DataLoaderConfiguration
from tests.toys import Numbers, NumbersOfEpoch, Stream, seeded_order
from tests.unit.accelerator.several_processes import gathered, on_ranks

N = 22
SEEDABLE = {"use_seedable_sampler": True}


class Case(NamedTuple):
    """A loader of a script, which is copied for each run, and the configuration under which it is prepared."""

    loader: DataLoader
    how: Mapping[str, Any] = MappingProxyType({})


CASES = {
    "sequential": Case(DataLoader(range(N), 3)),
    "seedable, no seed": Case(DataLoader(range(N), 3, shuffle=True), SEEDABLE),
    "a generator of the loader": Case(DataLoader(range(N), 3, shuffle=True, generator=torch.Generator()), SEEDABLE),
    "uneven": Case(DataLoader(range(N), 3), {"even_batches": False}),
    "workers": Case(DataLoader(range(N), 3, num_workers=1)),
    "no batches": Case(DataLoader(torch.arange(N), batch_size=None)),
    "evaluation": Case(DataLoader(range(N), 2, sampler=DistributedEvalSampler(range(N), 1, 0, shuffle=True, seed=4))),
    "a stream": Case(DataLoader(Stream(range(N)), 3), {"dispatch_batches": False}),
    "a dispatched stream": Case(DataLoader(Stream(range(N)), 3)),
    "dispatched": Case(DataLoader(range(N), 2, drop_last=True), {"dispatch_batches": True}),
    "data of its epoch": Case(DataLoader(NumbersOfEpoch(N), 3)),
}
STOP = (1, 2)  # after two steps of the second epoch


class Step(NamedTuple):
    """A step with a draw, as for dropout, beside it. After an epoch comes one that has no number and no batch."""

    epoch: int
    number: int | None
    batch: list | None
    is_last: bool
    draw: float


def visited(accelerator, kind, folder, resumes, sets_each_epoch=True):
    """The steps of three epochs, or those that follow the checkpoint."""
    torch.manual_seed(100 * resumes + 3 + accelerator.process_index)
    loader = accelerator.prepare(copy.deepcopy(CASES[kind].loader))
    first_epoch, done = STOP if resumes else (0, 0)
    if resumes:
        torch.rand(5)
        accelerator.load_state(folder)
        accelerator.save_state(f"{folder}-2")  # as a run that is stopped again before its first batch
        accelerator.load_state(f"{folder}-2")
    steps = []
    for epoch in range(first_epoch, 3):
        if sets_each_epoch or epoch == first_epoch:
            loader.set_epoch(epoch)
        rest = accelerator.skip_first_batches(loader, done) if done else loader
        for number, batch in enumerate(rest, done + 1):
            steps.append(Step(epoch, number, batch.tolist(), rest.end_of_dataloader, torch.rand(()).item()))
            if not resumes and (epoch, number) == STOP:
                accelerator.save_state(folder)
        steps.append(Step(epoch, None, None, True, torch.rand(()).item()))
        done = 0
    return steps


@pytest.mark.parametrize(
    ("kind", "world", "rng_types"),
    [(kind, 1, None) for kind in CASES]
    + [("sequential", 2, ["torch"]), ("seedable, no seed", 2, None), ("dispatched", 2, None)],
)
def test_set_epoch_and_skip_first_batches_go_on_bit_for_bit(kind, world, rng_types, tmp_path):
    settings = {"dataloader_config": DataLoaderConfiguration(**CASES[kind].how), "rng_types": rng_types}
    straight = on_ranks(world, visited, kind, tmp_path / "c", False, **settings)
    resumed = on_ranks(world, visited, kind, tmp_path / "c", True, **settings)
    for steps, rest in zip(straight, resumed, strict=True):
        (last_before,) = [index for index, step in enumerate(steps) if (step.epoch, step.number) == STOP]
        assert rest == steps[last_before + 1 :] and len(rest) > 5


@pytest.mark.parametrize("kind", ["data of its epoch", "seedable, no seed"])
@pytest.mark.parametrize("world", [1, 2])
def test_after_the_rest_of_an_epoch_the_loader_visits_the_next_one(kind, world, tmp_path):
    # https://github.com/huggingface/accelerate/issues/2016
    config = DataLoaderConfiguration(**CASES[kind].how)
    straight = on_ranks(world, visited, kind, tmp_path / "c", False, False, dataloader_config=config)
    resumed = on_ranks(world, visited, kind, tmp_path / "c", True, False, dataloader_config=config)
    for steps, rest in zip(straight, resumed, strict=True):
        assert rest == steps[-len(rest) :] and {step.epoch for step in rest} == {1, 2}


class Shuffled(SequentialSampler):
    def __iter__(self):
        yield from torch.randperm(N).tolist()


@pytest.mark.parametrize(("stateful", "sampler"), [(False, RandomSampler), (True, RandomSampler), (False, Shuffled)])
def test_in_a_random_order_one_warning_says_that_it_is_lost(stateful, sampler, tmp_path, caplog):
    """A stateful loader that is saved outside of a loop, here after one was left, has not kept the order."""
    config = DataLoaderConfiguration(use_stateful_dataloader=stateful)
    accelerator = Accelerator(dataloader_config=config, cpu=True)
    loader = accelerator.prepare(DataLoader(range(N), 3, sampler=sampler(range(N))))
    next(iter(loader))
    accelerator.save_state(tmp_path / "c")
    accelerator.load_state(tmp_path / "c")
    with caplog.at_level(logging.WARNING):
        rest = accelerator.skip_first_batches(loader, 2)
        assert len(list(rest)) == 6 and len(list(rest)) == 6
        assert len(list(accelerator.skip_first_batches(loader, 1))) == 7
    (record,) = caplog.records
    assert "use_seedable_sampler" in record.getMessage() and "use_stateful_dataloader" in record.getMessage()


@pytest.mark.parametrize("stateful", [False, True])
def test_a_pass_that_skips_is_no_rest_where_no_epoch_was_interrupted(stateful, tmp_path):
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=stateful), cpu=True)
    loader = accelerator.prepare(DataLoader(range(N), 3))
    kept = iter(loader)
    next(kept)
    assert len(list(loader)) == 8
    accelerator.save_state(tmp_path / "c")
    straight = [(len(list(skip_first_batches(loader, 1))), torch.rand(()).item()) for _ in range(2)]
    accelerator.load_state(tmp_path / "c")
    assert [(len(list(skip_first_batches(loader, 1))), torch.rand(()).item()) for _ in range(2)] == straight


def rest_after_an_uneven_step(accelerator, folder):
    loader = accelerator.prepare(DataLoader(range(6), 2))
    for step, _ in enumerate(loader):
        if step == 0:
            accelerator.save_state(folder)
    accelerator.load_state(folder)
    return {"rest": [batch.tolist() for batch in loader], "next epoch": loader.iteration}


def test_a_rank_that_has_no_more_batches_stays_in_the_epoch_of_the_others(tmp_path):
    config = DataLoaderConfiguration(even_batches=False, use_stateful_dataloader=True)
    one, two = on_ranks(2, rest_after_an_uneven_step, tmp_path / "c", dataloader_config=config)
    assert one == {"rest": [[4, 5]], "next epoch": 1}
    assert two == {"rest": [], "next epoch": 1}


def seedable(seed):
    torch.manual_seed(seed)
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True), cpu=True)
    return accelerator, accelerator.prepare(DataLoader(range(N), 4, shuffle=True))


@pytest.mark.parametrize(("saved_at", "skipped", "next_epoch"), [(None, 0, 2), (3, 0, 2), (6, 0, 3), (6, 2, 3)])
def test_seed_and_epoch_of_a_seedable_sampler_come_back(saved_at, skipped, next_epoch, tmp_path):
    accelerator, loader = seedable(1)
    for _ in range(2):
        assert len(list(loader)) == 6
    if saved_at is None:
        accelerator.save_state(tmp_path / "c")
    for step, _ in enumerate(accelerator.skip_first_batches(loader, skipped), skipped + 1):
        if step == saved_at:
            accelerator.save_state(tmp_path / "c")
    accelerator, loader = seedable(99)
    accelerator.load_state(tmp_path / "c")
    for epoch in (next_epoch, next_epoch + 1):
        assert gathered([loader]) == seeded_order(N, seed=1, epoch=epoch)


def test_after_a_load_within_a_loop_the_saved_epoch_comes_next(tmp_path):
    accelerator, loader = seedable(1)
    accelerator.save_state(tmp_path / "c")
    assert len(list(loader)) == 6
    for _ in loader:
        accelerator.load_state(tmp_path / "c")
    assert gathered([loader]) == seeded_order(N, seed=1, epoch=0)


def test_skipping_works_on_loaders_that_were_not_prepared():
    for data in (Numbers(5), Stream(range(5))):
        rest = skip_first_batches(DataLoader(data, batch_size=2), 1)
        assert [batch.tolist() for batch in rest] == [[2, 3], [4]]
        assert [batch.tolist() for batch in skip_first_batches(rest, 2 / 2)] == [[4]]
    assert [sample.item() for sample in skip_first_batches(DataLoader(Numbers(5), batch_size=None), 2)] == [2, 3, 4]


def test_skipping_in_a_prepared_loader_stays_as_it_is_when_the_rest_is_prepared():
    accelerator = Accelerator(cpu=True, split_batches=True)
    rest = accelerator.skip_first_batches(accelerator.prepare(DataLoader(Numbers(5), batch_size=2)), 1)
    assert accelerator.prepare(rest) is rest
