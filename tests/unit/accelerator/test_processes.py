"""Several real processes: who they are, what the collectives do, and what is said when one does something else."""

import os
import random
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from common.accelerator import Accelerator, PartialState
from common.accelerator.local_sgd import LocalSGD
from common.accelerator.state import DistributedType
from common.accelerator.utils import (
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    set_seed,
    synchronize_rng_states,
)
from common.processes import RankFailed, ranks
from tests.states import forget_states

ROOT = Path(__file__).parents[3]


def ended(job):
    """Run `job(accelerator)` and end the run whatever happens."""

    def run(*args, **kwargs):
        accelerator = Accelerator(cpu=True)
        try:
            return job(accelerator, *args, **kwargs)
        finally:
            accelerator.end_training()

    return run


def identity():
    def job(accelerator):
        first = []
        with accelerator.main_process_first():
            first.append(time.monotonic())
        return {
            "index": (accelerator.process_index, accelerator.local_process_index, accelerator.num_processes),
            "type": accelerator.distributed_type,
            "backend": accelerator.state.backend,
            "threads": torch.get_num_threads(),
            "roles": (accelerator.is_main_process, accelerator.is_local_main_process, accelerator.is_last_process),
            "first": first[0],
        }

    return ended(job)()


def test_world_size_in_the_environment_means_one_distributed_run_on_cpu_too():
    # https://github.com/huggingface/accelerate/issues/2741: there, N lonely "main" processes.
    one, two = ranks(2).run(identity)
    assert (one["index"], two["index"]) == ((0, 0, 2), (1, 1, 2))
    assert one["type"] == DistributedType.MULTI_CPU and one["backend"] == "gloo"
    assert one["roles"] == (True, True, False) and two["roles"] == (False, False, True)
    assert one["first"] < two["first"]
    assert one["threads"] == max(1, len(os.sched_getaffinity(0)) // 2)


def training():
    handlers = [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
    accelerator = Accelerator(kwargs_handlers=handlers, gradient_accumulation_steps=2, cpu=True)
    torch.manual_seed(accelerator.process_index)
    model = torch.nn.Linear(3, 1)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.arange(24.0).view(8, 3) / 24
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(x, batch_size=1))
    local = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            local.append((accelerator.sync_gradients, model.module.weight.grad.clone()))
            optimizer.step()
            optimizer.zero_grad()
    result = before, accelerator.get_state_dict(model)["weight"].clone(), local
    assert accelerator.unwrap_model(model) is model.module
    accelerator.end_training()
    return result


def test_gradients_stay_local_until_the_window_ends_and_agree_then():
    one, two = ranks(2).run(training)
    assert not torch.equal(one[0], two[0])  # unequal before DDP, equal after
    assert torch.equal(one[1], two[1])
    for (sync, mine), (_, other) in zip(one[2], two[2], strict=True):
        assert torch.equal(mine, other) is sync


def joining(n):
    def job(accelerator):
        model = torch.nn.Linear(1, 1)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(torch.ones(n, 1), batch_size=1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        batches = 0
        with accelerator.join_uneven_inputs([model], even_batches=False):
            for x in loader:
                accelerator.backward(model(x).sum())
                optimizer.step()
                optimizer.zero_grad()
                batches += 1
        return batches, model.module.weight.item(), len(loader)

    return ended(job)()


def test_uneven_inputs_can_be_joined_on_gloo():
    # https://github.com/huggingface/accelerate/pull/820: there it has no effect but on several GPUs.
    one, two = ranks(2).run(joining, 5)
    assert (one[0], two[0]) == (3, 2) and one[2] == two[2] == 3
    assert one[1] == pytest.approx(two[1]) and one[1] == pytest.approx(-0.25)  # the last step counts half


def frozen():
    def job(accelerator):
        model = torch.nn.Linear(1, 1).requires_grad_(False)
        return accelerator.prepare(model) is model

    return ended(job)()


def test_a_frozen_model_can_be_prepared_on_several_processes():
    assert ranks(2).run(frozen) == [True, True]


def failing_in_local_sgd():
    def job(accelerator):
        model = accelerator.prepare(torch.nn.Linear(1, 1))
        try:
            with LocalSGD(accelerator, model, local_sgd_steps=2):
                if accelerator.is_main_process:
                    raise RuntimeError("oops")
        except RuntimeError as error:
            accelerator.reduce(torch.ones(1))  # what the other process averages: the weight,
            accelerator.reduce(torch.ones(1))  # and the bias
            return str(error)

    accelerator = Accelerator(cpu=True)
    accelerator.wait_for_everyone = lambda: None  # the other process does not meet this one before it averages
    try:
        return job(accelerator)
    finally:
        accelerator.end_training()


def test_an_error_within_local_sgd_is_raised_at_once():
    assert ranks(2).run(failing_in_local_sgd, timeout=30) == ["oops", None]


def seeds(use_seedable_sampler):
    def job(accelerator):
        accelerator.dataloader_config.use_seedable_sampler = use_seedable_sampler
        set_seed(3, device_specific=True)
        drawn = torch.rand(1).item(), random.random()
        loader = accelerator.prepare(DataLoader(range(12), batch_size=2, shuffle=True))
        order = [row for batch in loader for row in accelerator.gather(batch).tolist()]
        synchronize_rng_states(["torch"])
        return drawn, order, torch.rand(1).item()

    return ended(job)()


def test_seeds_that_differ_by_process_do_not_break_sharding():
    # https://github.com/huggingface/accelerate/issues/2823
    for use_seedable_sampler in (False, True):
        one, two = ranks(2).run(seeds, use_seedable_sampler)
        assert one[0] != two[0] and one[2] == two[2]
        assert one[1] == two[1] and sorted(one[1]) == list(range(12))
    assert one[1] == torch.randperm(12, generator=torch.Generator().manual_seed(3)).tolist()


def triggering():
    def job(accelerator):
        if accelerator.process_index == 1:
            accelerator.set_trigger()
        return accelerator.check_trigger(), accelerator.check_trigger()

    return ended(job)()


def test_a_trigger_on_one_process_is_seen_by_all_once():
    assert ranks(2).run(triggering) == [(True, False)] * 2


def starting_twice():
    for _ in range(2):
        accelerator = Accelerator(cpu=True)
        total = int(accelerator.reduce(torch.tensor(accelerator.process_index + 1)))
        accelerator.end_training()
        assert not torch.distributed.is_initialized() and accelerator.num_processes == 2
    torch.distributed.init_process_group("gloo")  # by the script itself
    accelerator = Accelerator(cpu=True)
    total += int(accelerator.reduce(torch.tensor(1)))
    accelerator.end_training()
    assert not torch.distributed.is_initialized()
    return total


def test_an_accelerator_after_end_training_joins_a_new_group():
    assert ranks(2).run(starting_twice) == [5, 5]


def outliving(folder):
    for number in range(50):
        meeting = InitProcessGroupKwargs(init_method=f"file://{folder}/{number}")
        accelerator = Accelerator(cpu=True, kwargs_handlers=[meeting])
        model = accelerator.prepare(torch.nn.Linear(16, 10))
        accelerator.backward(model(torch.ones(4, 16)).sum())
        accelerator.gather(torch.ones(1000))
        accelerator.end_training()
        del model, accelerator


@pytest.mark.slow
def test_a_model_that_outlives_its_group_can_be_freed(tmp_path):
    """With torch 2.11 it waited for the group's threads, and they for the GIL that it held."""
    ranks(2).run(outliving, tmp_path, timeout=60)


# Errors instead of hangs


# The environment


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"WORLD_SIZE": "2"}, "needs RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT too"),
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}, "needs MASTER_PORT too"),
        (
            {"WORLD_SIZE": "2", "RANK": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            "RANK=2 of WORLD_SIZE=2",
        ),
        (
            {
                "WORLD_SIZE": "4",
                "RANK": "1",
                "LOCAL_RANK": "3",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": "1",
            },
            "LOCAL_RANK=3 of 2 ",
        ),
    ],
)
def test_a_half_set_environment_says_what_is_missing(environment, said, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):  # and leaves nothing half made behind
        with pytest.raises(ValueError, match=said):
            PartialState(cpu=True)


def late(seconds):
    if os.environ["RANK"] == "1":
        time.sleep(seconds)
        return None
    try:
        Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=1))], cpu=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.slow
def test_a_rank_that_never_joins_is_named():
    message, _ = ranks(2).run(late, 3)
    assert "ranks [1] of 2 did not join" in message or "1/2" in message


def test_an_exception_in_the_first_process_does_not_leave_the_others_waiting():
    with pytest.raises(RankFailed, match="rank 0: RuntimeError: oops"):
        ranks(2).run(failing_first, timeout=20)


def failing_first():
    def job(accelerator):
        with accelerator.main_process_first():
            if accelerator.is_main_process:
                raise RuntimeError("oops")
        return True

    return ended(job)()


def threads():
    before = torch.get_num_threads()
    PartialState(cpu=True).wait_for_everyone()  # who leaves at once may leave the others connecting
    try:
        return torch.get_num_threads()
    finally:
        forget_states()
        torch.set_num_threads(before)


def test_cores_are_shared_out_unless_the_launcher_says_how_many_threads():
    """torchrun would leave every process one thread, whatever the number of cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert ranks(2).run(threads) == [max(1, cores // 2)] * 2
    assert ranks(2).run(threads, environment={"ACCELERATE_CPU_THREADS": "3"}) == [3, 3]
