"""A comparison as its user starts it: it ends with a report, whatever happens meanwhile."""

import json
import os
import signal
import sys
from unittest.mock import MagicMock

import pytest
import torch

from benchmarks import compare
from benchmarks.compare import Settings, choose_settings, parse_options
from benchmarks.harness import level_runs
from benchmarks.report.verdicts import exact
from common import ladder
from common.errors import UserError
from common.eval_sampler import DistributedEvalSampler
from common.processes import RankFailed
from tests.jobs import ON_LINUX, job

LARGE = ["--dataset", "synthetic", "--train-samples", "300", "--batch-size", "96"]
QUICK = ["--dataset", "synthetic", "--steps", "2", "--rounds", "2"]


def settings_of(*flags: str, gpus: int = 0) -> Settings:
    return choose_settings(parse_options(flags), "synthetic", gpus)


@ON_LINUX
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("interrupt", [os.kill, os.killpg], ids=["kill", "ctrl-c"])
def test_an_interruption_leaves_the_record_of_before_and_no_process(tmp_path, interrupt):
    """`kill -INT` reaches one process, Ctrl-C in a terminal all of its group."""
    (tmp_path / "results.json").write_text("of before")
    with job([sys.executable, "-m", "benchmarks.compare", *QUICK, "--out", str(tmp_path)]) as comparison:
        comparison.wait_for(lambda: len(comparison.environments()) > 2)  # it, and what starts the ranks
        interrupt(comparison.processes[0].pid, signal.SIGINT)
        assert comparison.end() == [130], comparison.err
        assert comparison.out == "" and "INTERRUPTED: training" in comparison.err
        assert "Traceback" not in comparison.err and "leaked" not in comparison.err
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", compare.INCOMPLETE}
    assert (tmp_path / "results.json").read_text() == "of before"


@pytest.mark.parametrize(
    ("failure", "ended"),
    [
        (RankFailed({1: "NameError"}), "FAILED: training 01_data_parallel: rank 1: NameError"),
        (KeyboardInterrupt(), "130"),
    ],
)
def test_a_part_that_fails_is_named_and_the_parts_before_are_kept(failure, ended, tmp_path, monkeypatch):
    def train_or_fail(level, settings):
        if level != "00_single_gpu":
            raise failure
        return {"steps": 60}

    monkeypatch.setattr(compare, "train", train_or_fail)
    monkeypatch.setattr(sys, "argv", ["compare", "--dataset", "synthetic", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match=ended):
        compare.main()
    (written,) = tmp_path.iterdir()
    assert written.name == compare.INCOMPLETE
    assert json.loads(written.read_text())["levels"]["00_single_gpu"] == {"run": {"steps": 60}}


def test_a_comparison_that_succeeds_removes_what_a_failed_one_left(tmp_path, monkeypatch, report):
    (tmp_path / compare.INCOMPLETE).write_text("of before")
    monkeypatch.setattr(compare, "run_parts", lambda settings, new, begin_part: vars(new).update(report))
    monkeypatch.setattr(compare, "draw", lambda *args: [])
    monkeypatch.setattr(sys, "argv", ["compare", "--dataset", "synthetic", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="0"):
        compare.main()
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_the_batch_is_the_largest_that_all_processes_can_share():
    assert settings_of().batch_sizes == (64,)
    assert settings_of("--world-size", "3", "--full").batch_sizes == (63, 255)
    assert settings_of().steps < settings_of("--full").steps == 937


def test_two_replicas_on_a_machine_with_one_gpu_are_charged_to_two_devices(monkeypatch):
    """Both would compute on the GPU, be charged to it together, and look balanced."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    first, second = level_runs.peaks("01_data_parallel", [*LARGE, "--replicas", "2"])
    assert sum(first.values()) > 1.2 * sum(second.values()) > 0


def test_a_folder_that_cannot_be_written_is_an_error_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["compare", "--out", "/proc/x"])
    monkeypatch.setattr(compare, "run_parts", lambda *_: pytest.fail("it was measured"))
    with pytest.raises(SystemExit, match="nothing can be written to /proc/x"):
        compare.main()


@pytest.mark.parametrize("gpus", [0, 1, 2, 8])
def test_more_ranks_than_gpus_run_on_the_cpu(gpus, monkeypatch):
    """Level 02's nccl needs a GPU for each process, and the evaluation takes three."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    started = []

    class Ranks:
        def __init__(self, processes, on_cpu):
            started.append((processes, on_cpu))

        def run(self, *args, **kwargs):
            return [{"evaluated": 10_000, "eval_loss": 2.3}]

    monkeypatch.setattr(level_runs, "ranks", Ranks)
    settings = settings_of(gpus=gpus)
    compare.train("02_ddp_raw", settings)
    compare.evaluate("02_ddp_raw", settings.data_flags)
    compare.run_script("00_single_gpu", 2, [])  # on the same kind of device as two ranks, which it is compared with
    assert started == [(gpus or 2, gpus == 0), (3, gpus < 3), (1, gpus < 2)]


def test_one_device_is_not_compared_with_itself(monkeypatch):
    for part in ("train", "evaluate", "max_weight_difference", "checksum", "throughput", "memory"):
        monkeypatch.setattr(compare, part, MagicMock())
    sizes = []
    for part in ("train_exactly", "simulate_memory"):
        monkeypatch.setattr(compare, part, lambda script, settings: sizes.append(settings.world_size))
    compare.run_parts(settings_of("--world-size", "1"), compare.Report({}, {}, 1, None, 64, 1), print)
    assert set(sizes) == {2}


def train_with_one_sample_twice(level, flags):
    """`level_runs.run_level`, where rank 0 evaluates its first sample in place of its last one."""
    indices = DistributedEvalSampler.__iter__

    def one_twice(sampler):
        first, *others = indices(sampler)
        return iter([first, *others[:-1], first] if sampler.rank == 0 else [first, *others])

    DistributedEvalSampler.__iter__ = one_twice
    try:
        return level_runs.run_level(level, flags)
    finally:
        DistributedEvalSampler.__iter__ = indices


@pytest.mark.slow
def test_a_sample_in_anothers_place_is_inexact_although_as_many_are_counted(monkeypatch, report):
    data_flags = ("--dataset", "synthetic", *level_runs.EVALUATE_FEW)
    levels = report["levels"]
    for result in levels.values():
        result["run"]["evaluated"] = 100
        result["evaluated_on"] = {"3": 100}
    for level in ladder.LEVELS:
        if level != "01_data_parallel":
            levels[level].update(compare.evaluate(level, data_flags))
    assert exact(levels, 100).kept
    monkeypatch.setattr(level_runs, "run_level", train_with_one_sample_twice)
    levels["02_ddp_raw"].update(compare.evaluate("02_ddp_raw", data_flags))
    verdict = exact(levels, 100)
    assert not verdict.kept and "02_ddp_raw adds up losses to" in verdict.line
    assert levels["02_ddp_raw"]["evaluated_on"] == {"3": 100}


def test_more_processes_than_gpus_are_refused():
    assert settings_of(gpus=1).world_size == 1
    with pytest.raises(UserError, match="--world-size 2: this machine has 1 GPU"):
        settings_of("--world-size", "2", gpus=1)
