"""The throughput of the levels: what is measured is the level's own step, with its fair share of the cores."""

import time
from types import SimpleNamespace
from unittest import mock

import pytest

from benchmarks import records, throughput
from benchmarks.throughput import Configuration, Throughput, train
from common import ladder, report
from common.accelerator.state import available_cores

SYNTHETIC = ("--dataset", "synthetic", "--train-samples", "400")


def test_strong_scaling_keeps_the_global_batch_and_weak_scaling_the_share():
    strong, weak = throughput.strong_scaling(64), throughput.weak_scaling(64)
    share = strong.pop()
    assert {row.batch_size for row in strong} == {64} and (share.batch_size, share.workers) == (32, 1)
    assert {row.batch_size // row.workers for row in weak} == {64}
    for rows in (strong, weak):
        assert {(row.level, row.workers) for row in rows} >= {
            (level, workers) for level in ladder.levels() for workers in (1, 2) if workers == 1 or level[:2] != "00"
        }
        assert len({row.name for row in rows}) == len(rows)


@pytest.mark.slow
def test_a_sample_is_of_the_slowest_rank_with_its_share_of_the_cores(monkeypatch):
    rows = Throughput([Configuration("02_ddp_raw", workers, 8) for workers in (1, 2)], 0.1, SYNTHETIC)
    one, two = rows.facts.values()
    assert (one["processes"], two["processes"]) == (1, 2)
    assert (one["backend"], two["dataset"]) == ("gloo", "synthetic")
    assert one["threads_per_process"] == available_cores()
    assert two["threads_per_process"] == max(1, available_cores() // 2)

    class Pool:
        def run(self, *args, **kwargs):
            return [{"images_per_sec": 20.0}, {"images_per_sec": 10.0}]

    monkeypatch.setattr(throughput, "ranks", lambda processes: Pool())
    assert rows.contestants["02_ddp_raw, 2 processes"]() == 10.0


def by_its_sleeps(*arguments) -> dict:
    """`throughput.train` by a clock that goes on while a level sleeps and by a millisecond whenever it is looked at."""
    now, sleep = [0.0], time.sleep

    def counted(seconds: float) -> None:
        sleep(seconds)
        now[0] += seconds

    def look() -> float:
        now[0] += 0.001
        return now[0]

    clock = SimpleNamespace(perf_counter=look)
    with mock.patch.object(report, "time", clock), mock.patch.object(time, "sleep", counted):
        return train(*arguments)


@pytest.mark.slow
def test_a_sleep_of_2_ms_shows_in_its_levels_row_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(throughput, "train", by_its_sleeps)
    slow_level, source = "03_accelerate", ladder.script("03_accelerate").read_text()
    changed = source.replace("loss = F.nll_loss(", "__import__('time').sleep(0.002); loss = F.nll_loss(")
    assert changed != source
    slowed = tmp_path / slow_level / "train.py"
    slowed.parent.mkdir()
    slowed.write_text(changed)

    def milliseconds(level: str, path=None) -> float:
        return 1000 * 2 / Configuration(level, 1, 2, 1, path).run(15, SYNTHETIC)["images_per_sec"]

    for level in ("00_single_gpu", "02_ddp_raw", slow_level):
        before = milliseconds(level)
        after = milliseconds(level, slowed if level == slow_level else None)
        assert 0 < before < 1
        assert after - before == pytest.approx(2 if level == slow_level else 0, abs=0.01)


def test_the_reason_is_given_where_two_processes_are_no_faster_and_only_there():
    facts = {row.name: {"level": row.level, "workers": row.workers, "global_batch_size": row.batch_size}
             | {"processes": row.processes, "threads_per_process": 1, "backend": "gloo", "dataset": "mnist"}
             | {"device": "cpu", "steps": 5} for row in throughput.strong_scaling(64)}  # fmt: skip

    def table(one: float, half: float, two: float) -> str:
        samples = {name: [one] for name in facts} | {"02_ddp_raw, 2 processes": [two]}
        share = next(name for name in facts if "of the cores" in name)
        return records.table(throughput.strong_scaling_record(64, samples | {share: [half]}, facts))

    # 64 / 800 s with all cores, 32 / 500 s for a rank's half, 64 / 640 s for two processes.
    told = " ".join(table(800, 500, 640).split())
    for words in ("reach 0.80 of one", "80.0 ms", "64.0 ms", "1.25", "100.0 ms"):
        assert words in told, words
    assert "Why" not in table(800, 500, 900)
    for speeds in ((800, 500, 640), (8, 5, 6), (0.8, 0.5, 0.6), (80_000, 50_000, 64_000)):  # short numbers, and long
        lines = table(*speeds).splitlines()
        assert any(line.startswith("Why") for line in lines) and max(map(len, lines)) <= 80


def test_a_missed_promise_is_called_missed():
    facts = {row.name: {"level": row.level, "workers": row.workers, "processes": row.processes, "backend": "gloo"}
             | {"threads_per_process": 1, "dataset": "mnist", "device": "cpu", "steps": 5}
             for row in throughput.weak_scaling(64)}  # fmt: skip
    samples = {name: [1000.0] for name in facts} | {"04_trainer, 2 processes": [960.0]}
    notes = throughput.weak_scaling_record(64, samples, facts)["notes"]
    assert [note for note in notes if note.startswith("MISSED")] == [
        "MISSED: 04_trainer, 2 processes: 0.960 of level 02, at least 0.97"
    ]
    assert sum(note.startswith("kept") for note in notes) == 2 * len(throughput.world_sizes()) - 1
