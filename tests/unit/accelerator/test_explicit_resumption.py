"""By default a script says where its loaders go on: `set_epoch`, `skip_first_batches`, and nothing else moves them."""

import logging

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from common.accelerator import Accelerator, DistributedEvalSampler
from common.accelerator.utils import DataLoaderConfiguration
from common.processes import ranks
from tests.states import forget_states
from tests.toys import Augmented, Stream

N = 22


# How the loader is made, and how it is prepared.
ORDERS = {
    "sequential": (lambda: DataLoader(range(N), 3), {}),
    "seedable, no seed": (lambda: DataLoader(range(N), 3, shuffle=True), {"use_seedable_sampler": True}),
    "a generator of the loader": (
        lambda: DataLoader(range(N), 3, shuffle=True, generator=torch.Generator()),
        {"use_seedable_sampler": True},
    ),
    "uneven": (lambda: DataLoader(range(N), 3), {"even_batches": False}),
    "drawn by the data set": (lambda: DataLoader(Augmented(N), 3, shuffle=True), {"use_seedable_sampler": True}),
    "workers": (lambda: DataLoader(range(N), 3, num_workers=1), {}),
    "no batches": (lambda: DataLoader(torch.arange(N), batch_size=None), {}),
    "evaluation": (
        lambda: DataLoader(range(N), 2, sampler=DistributedEvalSampler(range(N), 1, 0, shuffle=True, seed=4)),
        {},
    ),
    "a stream": (lambda: DataLoader(Stream(range(N)), 3), {"dispatch_batches": False}),
    "a dispatched stream": (lambda: DataLoader(Stream(range(N)), 3), {}),
    "dispatched": (lambda: DataLoader(range(N), 2, drop_last=True), {"dispatch_batches": True}),
}


def run(kind, folder, resumes, stop=(1, 2), rng_types=None):
    """The batches of three epochs with a draw, as for dropout, beside each; saved at `stop`, or what follows that."""
    forget_states()
    make, how = ORDERS[kind]
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**how), rng_types=rng_types, cpu=True)
    torch.manual_seed(100 * resumes + 3 + accelerator.process_index)
    loader = accelerator.prepare(make())
    first_epoch, done = stop if resumes else (0, 0)
    if resumes:
        torch.rand(5)
        accelerator.load_state(folder)
    rows = []
    for epoch in range(first_epoch, 3):
        loader.set_epoch(epoch)
        rest = accelerator.skip_first_batches(loader, done) if done else loader
        for step, batch in enumerate(rest, done + 1):
            rows.append((epoch, step, batch.tolist(), rest.end_of_dataloader, torch.rand(()).item()))
            if not resumes and (epoch, step) == stop:
                accelerator.save_state(folder)
        done = 0
        rows.append((epoch, "end", torch.rand(()).item()))
    accelerator.end_training()
    return rows


def assert_goes_on(straight, resumed, stop=(1, 2)):
    (last_before,) = [index for index, row in enumerate(straight) if row[:2] == stop]
    assert resumed == straight[last_before + 1 :] and len(resumed) > 5


@pytest.mark.parametrize("kind", ORDERS)
def test_set_epoch_and_skip_first_batches_go_on_bit_for_bit(kind, tmp_path):
    straight = run(kind, tmp_path / "c", resumes=False)
    assert_goes_on(straight, run(kind, tmp_path / "c", resumes=True))


@pytest.mark.parametrize(
    ("kind", "rng_types"),
    [
        ("sequential", ["torch"]),
        ("seedable, no seed", None),
        ("drawn by the data set", ["torch"]),
        ("dispatched", None),
    ],
)
def test_two_processes_go_on_bit_for_bit(kind, rng_types, tmp_path):
    straight = ranks(2).run(run, kind, tmp_path / "c", resumes=False, rng_types=rng_types)
    resumed = ranks(2).run(run, kind, tmp_path / "c", resumes=True, rng_types=rng_types)
    for rows, rest in zip(straight, resumed, strict=True):
        assert_goes_on(rows, rest)


def test_in_a_random_order_one_warning_says_that_it_is_lost(tmp_path, caplog):
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(N), 3, sampler=RandomSampler(range(N))))
    accelerator.save_state(tmp_path / "c")
    accelerator.load_state(tmp_path / "c")
    with caplog.at_level(logging.WARNING):
        rest = accelerator.skip_first_batches(loader, 2)
        assert len(list(rest)) == 6 and len(list(rest)) == 6
        assert len(list(accelerator.skip_first_batches(loader, 1))) == 7
    (record,) = caplog.records
    assert "use_seedable_sampler" in record.getMessage() and "use_stateful_dataloader" in record.getMessage()


def seedable(accelerator, seed):
    torch.manual_seed(seed)
    return accelerator.prepare(DataLoader(range(N), 4, shuffle=True))


def epochs(loader, number):
    return [torch.cat(list(loader)).tolist() for _ in range(number)]


@pytest.mark.parametrize("where", ["between", "within", "at the last step"])
def test_seed_and_epoch_of_a_seedable_sampler_come_back(where, tmp_path):
    """A resumed script that does not call `set_epoch` does not visit the first epoch's order again."""
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True), cpu=True)
    loader = seedable(accelerator, 1)
    expected = epochs(loader, 4)
    loader = seedable(accelerator, 1)
    accelerator._dataloaders[:] = [loader]
    epochs(loader, 2)
    if where == "between":
        accelerator.save_state(tmp_path / "c")
    for step, _ in enumerate(loader, 1):
        if (where, step) in (("within", 3), ("at the last step", len(loader))):
            accelerator.save_state(tmp_path / "c")
    loader = seedable(accelerator, 99)
    accelerator._dataloaders[:] = [loader]
    accelerator.load_state(tmp_path / "c")
    if where == "at the last step":
        assert epochs(loader, 1) == expected[3:]
    else:
        assert epochs(loader, 2) == expected[2:]


# What moves no loader


def numbers(loader):
    return [int(batch) for batch in loader]


@pytest.mark.parametrize("stateful", [False, True])
def test_after_a_checkpoint_at_the_last_step_comes_a_whole_epoch(stateful, tmp_path):
    """A script that computes `first_epoch = step // len(loader)` begins with the next epoch."""
    config = DataLoaderConfiguration(use_stateful_dataloader=stateful)
    accelerator = Accelerator(dataloader_config=config, cpu=True)
    loader = accelerator.prepare(DataLoader(range(4)))
    for step, _ in enumerate(loader):
        if step == 3:
            accelerator.save_state(tmp_path / "c")
    accelerator.load_state(tmp_path / "c")
    assert numbers(loader) == [0, 1, 2, 3] == numbers(loader)
    accelerator.load_state(tmp_path / "c")
    assert numbers(accelerator.skip_first_batches(loader, 0)) == [0, 1, 2, 3]
    accelerator.load_state(tmp_path / "c")
    loader.set_epoch(1)
    assert numbers(loader) == [0, 1, 2, 3]


def test_load_state_moves_no_loader(tmp_path):
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(4)))
    look = iter(loader)
    next(look)
    for step, _ in enumerate(loader):
        if step == 1:
            accelerator.save_state(tmp_path / "c")
        if step == 2:
            accelerator.load_state(tmp_path / "c")
    assert numbers(loader) == [0, 1, 2, 3]


def test_a_look_at_the_first_batch_in_the_loop_does_not_move_a_stateful_loader(tmp_path):
    config = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(dataloader_config=config, cpu=True)
    loader = accelerator.prepare(DataLoader(range(6)))
    for step, _ in enumerate(loader):
        assert int(next(iter(loader))) == 0
        if step == 3:
            accelerator.save_state(tmp_path / "c")
            break
    accelerator.load_state(tmp_path / "c")
    assert numbers(loader) == [4, 5]


def looked_at_within(samples):
    """What is gathered in each step of a loop that also looks at the first batch, and whether a window ends there."""
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    loader = accelerator.prepare(DataLoader(range(samples)))
    rows = []
    for batch in loader:
        assert int(next(iter(loader))) == accelerator.process_index
        with accelerator.accumulate():
            rows.append((accelerator.gather_for_metrics(batch).tolist(), accelerator.sync_gradients))
    accelerator.end_training()
    return rows


@pytest.mark.parametrize(("samples", "last"), [(6, [4, 5]), (5, [4])])
def test_a_look_at_the_first_batch_in_the_loop_leaves_the_last_step_known(samples, last):
    for rows in ranks(2).run(looked_at_within, samples):
        assert rows == [([0, 1], False), ([2, 3], True), (last, True)]
    assert looked_at_within(6)[-1] == ([5], True)


def test_the_loop_between_two_over_the_same_loader_stays_active_after_the_inner_one():
    accelerator = Accelerator(cpu=True)
    examples = accelerator.prepare(DataLoader(range(2)))
    batches = accelerator.prepare(DataLoader(range(3)))
    ends = []
    for _ in examples:
        for _ in batches:
            list(examples)
            ends.append(accelerator.gradient_state.end_of_dataloader)
        assert accelerator.gradient_state.active_dataloader is examples
    assert ends == [False, False, True] * 2
