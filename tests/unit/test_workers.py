"""The test ranks themselves: they share a group, and a failure on one of them reaches the test."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.workers import RankFailed, ranks


def _sum_of_ranks():
    dist.init_process_group("gloo")
    try:
        value = torch.tensor(dist.get_rank() + 1)
        dist.all_reduce(value)
        return value.item()
    finally:
        dist.destroy_process_group()


def _fail_on_rank_1():
    if os.environ["RANK"] == "1":
        raise ValueError("rank 1 says no")


def test_ranks_share_a_group_and_are_reused():
    assert ranks(2).run(_sum_of_ranks) == [3, 3]
    assert ranks(2).run(_sum_of_ranks) == [3, 3]


def test_a_failing_rank_is_named_and_the_pool_recovers():
    with pytest.raises(RankFailed, match="rank 1: ValueError: rank 1 says no"):
        ranks(2).run(_fail_on_rank_1)
    assert ranks(2).run(_sum_of_ranks) == [3, 3]


def _wait_for_rank_1_which_fails():
    if os.environ["RANK"] == "1":
        raise ValueError("rank 1 says no")
    time.sleep(600)


def test_nobody_waits_for_ranks_that_wait_for_a_failed_one():
    began = time.monotonic()
    with pytest.raises(RankFailed, match=r"(?s)rank 0: no answer \(alive\)\nrank 1: ValueError"):
        ranks(2).run(_wait_for_rank_1_which_fails, timeout=500)
    assert time.monotonic() - began < 250
