"""The test ranks themselves: they share a group, and a failure on one of them reaches the test."""

import os
import signal
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from common.process_group import process_group
from common.processes import RankFailed, Ranks, ranks


def sum_of_ranks():
    with process_group():
        value = torch.tensor(dist.get_rank() + 1)
        dist.all_reduce(value)
        return value.item()


def leave_the_group_before_the_model() -> None:
    """The backward of the model ends in Python code that a thread of the group has called."""
    with process_group():
        model = DistributedDataParallel(torch.nn.Linear(1, 1))
        model.register_comm_hook(None, average_in_python)
        model(torch.ones(1)).sum().backward()


def average_in_python(_, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def wait_for_rank_1_which_fails():
    if os.environ["RANK"] == "1":
        raise ValueError("rank 1 says no")
    time.sleep(600)


def test_a_failing_rank_is_named_and_nobody_waits_for_the_others(monkeypatch):
    monkeypatch.setattr("common.processes.SECONDS_AFTER_FAILURE", 1)
    with pytest.raises(RankFailed, match=r"(?s)rank 0: no answer \(alive\)\nrank 1: ValueError: rank 1 says no"):
        ranks(2).run(wait_for_rank_1_which_fails, timeout=500)
    assert ranks(2).run(sum_of_ranks) == [3, 3], "the next job has new ranks"


def free_the_gpu_slowly(note):
    torch.cuda.is_initialized = lambda: True
    torch.cuda.empty_cache = lambda: time.sleep(0.5) or note.touch()


def test_a_rank_answers_when_it_has_freed_its_gpu(pool, tmp_path):
    pool.run(free_the_gpu_slowly, tmp_path / "freed")
    assert (tmp_path / "freed").exists()


def test_a_result_that_cannot_be_pickled_is_a_failure(pool):
    with pytest.raises(RankFailed, match="rank 0: TypeError: cannot pickle"):
        pool.run(memoryview, b"")


@pytest.fixture
def pool():
    pool = Ranks(1)
    yield pool
    pool.stop()


def test_a_job_that_is_interrupted_does_not_answer_the_next_one(pool, monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("common.processes.wait", mock.Mock(side_effect=KeyboardInterrupt))
        pool.run(len, "first")
    assert pool.run(len, "the next one") == [12]


def test_ranks_that_have_ended_are_named_once_and_replaced(pool):
    (process,) = pool.run(os.getpid)
    os.kill(process, signal.SIGKILL)
    pool.workers[0].process.join()
    with pytest.raises(RankFailed, match="rank 0: the process ended with exit code -9"):
        pool.run(os.getpid)
    assert pool.run(os.getpid) != [process]


@pytest.mark.slow
def test_a_model_may_outlive_its_process_group():
    for _ in range(40):
        ranks(2).run(leave_the_group_before_the_model, timeout=30)
