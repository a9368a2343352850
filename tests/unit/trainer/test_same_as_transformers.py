"""Random trainings end the same on transformers' Trainer and on ours: every number that they give is equal.

Each training is drawn from a seed: the data, the sizes, the schedule, the loss, when to log, evaluate and save. What is
compared are the weights, the random number that comes next, the logged losses, rates and metrics, the evaluation and
the best checkpoint, bit for bit. Trainings that touch a row of the table of deliberate differences are counted.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from common.processes import ranks
from tests.unit.trainer.same import (
    ENDLESS,
    draw_configuration,
    is_endless,
    outcome_of_resumed,
    outcome_of_stopped_within_step,
    reset,
    rows_touched,
    run_all,
)

LIBRARIES = ("common.trainer", "transformers")
# Trainings that are given to the ranks at once.
CHUNK = 20


@pytest.fixture(autouse=True)
def transformers(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    library = pytest.importorskip("transformers")
    library.logging.set_verbosity_error()
    return library


def run_on(world_size: int, library: str, configurations: list[dict], folder: str) -> list[tuple]:
    """The outcomes of each training on the ranks, in their order."""
    if world_size == 1:
        return [(outcome,) for outcome in run_all(library, configurations, folder)]
    outcomes = []
    for start in range(0, len(configurations), CHUNK):
        chunk = configurations[start : start + CHUNK]
        by_rank = ranks(world_size).run(run_all, library, chunk, f"{folder}/{start}", timeout=600)
        outcomes += zip(*by_rank, strict=True)
    ranks(world_size).stop()  # the real library's state outlives its run
    return outcomes


def run_on_the_original(world_size: int, configurations: list[dict], ours: list[tuple], folder: str) -> list[tuple]:
    """The same on transformers' Trainer, with ENDLESS in the place of trainings that would not end there."""
    ending = [config for config, one in zip(configurations, ours, strict=True) if not is_endless(one[0])]
    outcomes = iter(run_on(world_size, LIBRARIES[1], ending, folder))
    return [(ENDLESS,) * world_size if is_endless(one[0]) else next(outcomes) for one in ours]


def differences(ours: tuple, theirs: tuple) -> list[str]:
    """What differs between the two outcomes of a training, rank by rank."""
    found = []
    for rank, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if isinstance(one, str) or isinstance(other, str):
            found += [f"rank {rank}: {one} / {other}"] if one != other else []
            continue
        found += [f"rank {rank}: {name}: {one[name]} / {other[name]}" for name in one if one[name] != other[name]]
    return found


def compare(seeds: range, world_size: int, folder: str) -> Counter:
    """Run the trainings on both libraries; returns how many touched each row."""
    configurations = [draw_configuration(seed, world_size) for seed in seeds]
    ours = run_on(world_size, LIBRARIES[0], configurations, folder)
    theirs = run_on_the_original(world_size, configurations, ours, folder)
    rows = Counter()
    unequal = []
    for seed, config, one, other in zip(seeds, configurations, ours, theirs, strict=True):
        touched = rows_touched(config, world_size, other[0])
        if touched:
            rows.update(touched)
            rows["all"] += 1
            continue
        found = differences(one, other)
        if found:
            unequal.append(f"training {seed} on {world_size} ranks: " + "\n  ".join(found))
    assert not unequal, f"{len(unequal)} of {len(seeds)} differ\n" + "\n".join(unequal)
    return rows


def on_both(outcome: Callable[..., Any], folder: Path) -> list:
    """What `outcome(library=…, folder=…)` is on our library and on theirs."""
    outcomes = []
    for library in LIBRARIES:
        outcomes.append(outcome(library=library, folder=str(folder / library)))
        reset(library)
    return outcomes


def test_a_few_trainings_end_the_same(tmp_path):
    assert compare(range(10), 1, str(tmp_path))["all"] <= 3


@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 2])
def test_two_hundred_trainings_end_the_same(world_size, tmp_path):
    rows = compare(range(1000, 1200), world_size, str(tmp_path))
    assert rows["all"] <= 50, rows


def test_trainings_that_differ_are_noticed(tmp_path):
    config = draw_configuration(0, 1)
    other = config | {"arguments": config["arguments"] | {"learning_rate": 0.02}}
    one, two = run_all("common.trainer", [config, other], str(tmp_path))
    assert differences((one,), (one,)) == []
    assert differences((one,), (two,))


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        ({}, {"per_device_train_batch_size": 2}),
        ({}, {"per_device_train_batch_size": 8}),
        ({}, {"gradient_accumulation_steps": 2}),
        ({"accelerator_config": {"use_seedable_sampler": False}}, {"per_device_train_batch_size": 8}),
    ],
)
def test_a_training_resumed_with_other_batches_ends_the_same(settings, changed, tmp_path):
    """With dropout, and from the middle of an epoch: what is passed over draws random numbers too."""
    ours, theirs = on_both(partial(outcome_of_resumed, settings=settings, changed=changed), tmp_path)
    assert ours == theirs


@pytest.mark.parametrize(("step", "is_stream"), [(1, False), (3, False), (4, False), (1, True), (2, True)])
def test_a_training_stopped_within_a_step_and_resumed_ends_the_same(step, is_stream, tmp_path):
    """Both train the whole step again. 7 micro-batches make the steps 3 + 3 + 1; of a stream, the last is no step."""
    ours, theirs = on_both(partial(outcome_of_stopped_within_step, step=step, is_stream=is_stream), tmp_path)
    assert ours == theirs
