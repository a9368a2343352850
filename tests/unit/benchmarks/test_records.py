"""Records of benchmarks: small, complete, printable in 80 columns."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks.harness import records
from common import ladder
from common.cores import available_cores

# A file for each suite; results.json is a comparison's.
FILES = list(ladder.ROOT.glob("benchmarks/results/*/*.json"))
RECORDED = sorted(path for path in FILES if path.name != "results.json")


def _record() -> dict:
    samples = {
        "01_data_parallel, 2 replicas": [1234.5678, 1200.0, 1300.0],
        "02_ddp_raw, 2 processes": [2000.0, 1000.0, 3000.0],
    }
    one, two = samples
    facts = {one: {"level": "01_data_parallel"}}
    return records.group("a group", "images/s", samples, facts, [(one, two)], [(two, one)], ["A note."])


def test_a_record_holds_samples_summaries_facts_and_pairs():
    record = _record()
    first, second = record["rows"].values()
    assert first == {
        "median": 1234.6, "low": 1217.3, "high": 1267.3, "spread": 0.0405, "noisy": False,
        "samples": [1234.6, 1200.0, 1300.0], "level": "01_data_parallel",
    }  # fmt: skip
    assert second["noisy"] and record["rounds"] == 3
    ratio, difference = record["pairs"]
    assert (ratio["of"], ratio["to"], ratio["kind"]) == (*record["rows"], "ratio")
    assert ratio["median"] == 0.61728  # of 0.617, 1.2 and 0.433
    assert difference["kind"] == "difference" and difference["median"] == 765.43


def test_the_table_fits_80_columns_and_marks_what_is_noisy():
    note, row = "the rows of a group have this in common, " * 5, f"  {'unlimited':<30}{'22.6':>40}"
    lines = records.table(_record() | {"notes": [note, row]}).splitlines()
    assert max(map(len, lines)) <= 80
    marked = [line for line in lines if line.endswith("*")]
    assert len(marked) == 1 and "02_ddp_raw" in marked[0]
    # A note is folded, and a line of a table within notes is not.
    assert lines[-1] == row and " ".join(lines[-4:-1]) == note.strip()


def test_differences_on_a_slow_machine_need_no_exponent():
    samples = {"transformers.Trainer": [2400.0, 3100.0], "raw loop like a Trainer's": [1000.0, 1350.0]}
    lines = records.table(records.group("g", "µs", samples, differences=[tuple(samples)])).splitlines()
    assert lines[-1].endswith("1575 (1400 to 1750)") and len(lines[-1]) <= 80


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_what_was_recorded_fits_into_80_columns(path):
    for record in json.loads(path.read_text())["groups"]:
        assert all(len(line) <= 80 for line in records.table(record).splitlines()), record["group"]


def test_a_file_is_read_back_as_it_was_written(tmp_path):
    began = records.circumstances()
    assert set(began) == {"commit", "command", "date", "load"}
    written = records.write(tmp_path, "suite", [_record()], began)
    assert json.loads((tmp_path / "suite.json").read_text()) == written
    assert list(written) == ["suite", "machine", "began", "ended", "groups"]
    assert written["began"] == began and written["ended"]["date"] >= began["date"]
    assert [file.name for file in tmp_path.iterdir()] == ["suite.json"]


def test_the_machine_is_described_by_what_numbers_depend_on():
    machine = records.machine()
    assert (machine["cores"], machine["torch"]) == (available_cores(), torch.__version__)
    assert len(machine["gpus"]) == torch.cuda.device_count() and machine["processor"].strip()


def test_a_pair_of_rows_that_were_measured_has_the_interval_of_its_median_and_what_it_can_claim():
    for pair in _record()["pairs"]:
        low, high = pair["interval"]
        assert low <= pair["median"] <= high and pair["confidence"] == 0.75
    record = records.group("g", "s", {"a": [1.0]}, ratios=[("a", "b"), ("b", "a")], differences=[("b", "c")])
    assert record["pairs"] == []


@pytest.mark.parametrize(
    "module, argv, command",
    [
        (
            None,
            ["/home/me/bin/pytest", "benchmarks", "--record", "/home/out", "-k", "a or b"],
            "pytest benchmarks --record out -k 'a or b'",
        ),
        (
            "benchmarks.compare",
            ["/home/me/clone/benchmarks/compare.py", "--full"],
            "python -m benchmarks.compare --full",
        ),
        ("pytest.__main__", ["/home/me/pytest/__main__.py", "--full"], "python -m pytest --full"),
    ],
)
def test_the_command_is_what_a_user_types_without_the_folders_of_the_machine(module, argv, command, monkeypatch):
    import __main__

    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(__main__, "__spec__", module and SimpleNamespace(name=module))
    assert records.circumstances()["command"] == command


@pytest.mark.parametrize("path", sorted(FILES), ids=lambda path: path.stem)
def test_nothing_that_was_recorded_names_a_folder_of_the_machine(path):
    texts = re.findall(r'"((?:[^"\\]|\\.)*)"', path.read_text())
    named = [text for text in texts if re.search(r"(^|\s)/\w", text)]
    assert not named


def test_only_a_change_outside_of_the_results_makes_a_commit_dirty(tmp_path):
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=A", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    code = tmp_path / "train.py"
    result = tmp_path / "benchmarks" / "results" / "a-laptop" / "network.json"
    result.parent.mkdir(parents=True)
    for path in (code, result):
        path.write_text("1")
    assert records.commit(tmp_path) is None
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "Begin")
    clean = records.commit(tmp_path)
    assert re.fullmatch("[0-9a-f]{12}", clean)
    result.write_text("2")
    (result.parent / "new.json").write_text("3")
    assert records.commit(tmp_path) == clean
    code.write_text("2")
    assert records.commit(tmp_path) == f"{clean}-dirty"
