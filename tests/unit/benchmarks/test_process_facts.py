"""Facts of a row about the process that did its work are true: its threads, its allocator and its cores."""

import json
import os
import subprocess
import sys

import pytest
import torch

from benchmarks.harness.groups import Extent
from benchmarks.harness.process_facts import process_facts
from benchmarks.suites import overhead
from common import ladder
from common.cores import available_cores
from common.processes import Ranks

SYNTHETIC = ("--dataset", "synthetic")
SEVERAL_CORES = pytest.mark.skipif(
    available_cores() < 2 or not hasattr(os, "sched_setaffinity"), reason="a process cannot be confined to fewer cores"
)


def python(*arguments: str, text: str = "", **environment: str) -> str:
    """The output of a fresh Python that reads `text`."""
    command = [sys.executable, *arguments]
    environment = os.environ | environment
    done = subprocess.run(
        command, input=text, cwd=ladder.ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def facts_before_and_after_pinning() -> tuple[dict, dict]:
    torch.set_num_threads(2)
    before = process_facts()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    return before, process_facts()


@pytest.mark.slow
@SEVERAL_CORES
def test_the_facts_are_those_of_the_process():
    pool = Ranks(1)  # of its own: it stays on one core
    try:
        ((before, pinned),) = pool.run(facts_before_and_after_pinning)
    finally:
        pool.stop()
    assert (before["threads_per_process"], before["pinned_to_cores"]) == (2, False)
    assert (pinned["threads_per_process"], pinned["pinned_to_cores"]) == (1, True)
    assert before["allocator"] == pinned["allocator"] and before["allocator"]["name"]


JOB = json.dumps(["alone", 29_477, {"batch_per_process": 2, "steps": 1}])
PLACE = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.slow
@SEVERAL_CORES
def test_one_node_trains_alone_where_there_are_two_and_says_how_it_is_set():
    """Rank 0 would wait for rank 1 if it took part."""
    answer = json.loads(python("-m", "benchmarks.harness.network_rank", text=JOB + "\n", **PLACE, RANK="0"))
    assert answer["images_per_sec"] > 0
    assert answer["threads_per_process"] == 1 and answer["pinned_to_cores"]
    assert "minor_faults_per_step" in answer


@pytest.mark.slow
@SEVERAL_CORES
def test_the_other_node_keeps_large_blocks_before_it_takes_a_job_and_has_nothing_to_do_meanwhile():
    program = "from benchmarks.harness import network_rank\n"
    program += "network_rank.keep_large_blocks = lambda: print('allocator')\nnetwork_rank.main()"
    assert python("-c", program, text=JOB + "\n", **PLACE, RANK="1") == "allocator\nnull\n"


def test_every_row_of_the_overhead_says_how_its_process_is_set(monkeypatch):
    rows = [overhead.RAW, "common.accelerator"]
    monkeypatch.setattr(overhead, "contestants", lambda: dict.fromkeys(rows, lambda: 1.0))
    record = overhead.measured(tuple(rows), Extent(rounds=2, seconds=0.1, data_flags=(), quick=True))
    for row in record["rows"].values():
        assert row["threads_per_process"] == 1 and row["allocator"] == process_facts()["allocator"]
