"""Options of `pytest benchmarks`, the groups that its tests ask for, and what is shown and written at its end."""

import functools
import os
from pathlib import Path

import pytest
import torch

from benchmarks.harness import records
from benchmarks.harness.groups import CannotMeasure, Group, MeasureOptions
from benchmarks.report import pictures
from benchmarks.report.group_table import comparisons
from common.allocator import keep_large_blocks
from common.cores import available_cores
from common.data import mnist_on_disk
from common.numbers import positive

FULL_ROUNDS = 10
QUICK_ROUNDS = 2

# Of each suite the records of its groups, in the order in which they were measured.
MEASURED = pytest.StashKey[dict[str, list[dict]]]()


def pytest_addoption(parser):
    group = parser.getgroup("ladder", "the ladder's benchmarks")
    group.addoption("--quick", action="store_true", help="a few short rounds: to see that everything runs")
    turns = f"how often the rows of a group take turns ({FULL_ROUNDS})"
    group.addoption("--rounds", type=positive, metavar="N", help=turns)
    group.addoption("--record", type=Path, metavar="FOLDER", help="write a record of each suite there, and pictures")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    config.stash[MEASURED] = {}
    config.addinivalue_line("markers", "timeout(seconds): of pytest-timeout, where it is installed")
    # Before the first tensor, so that what a group measures in this process does not depend on the groups before it.
    keep_large_blocks()
    torch.set_num_threads(1)  # it has little to do here, and several threads would wait for each other
    recorded = config.getoption("--record", None)
    # An hour of measuring should not end in an error that was there before.
    if recorded and (reason := records.why_not_writable(recorded)):
        raise pytest.UsageError(f"--record: {reason}")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would report its begin and its end
    if config.getoption("--quick", False):
        # Where others compute too, OpenMP's threads otherwise spin in wait for those that do not get a core.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_report_header() -> str | None:
    return records.busy(records.run_metadata()["load"], available_cores())


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter, config):
    """Below the plugin's table of rows: how rows compare within a round, and the files that --record asks for."""
    write_line = terminalreporter.write_line
    for groups in config.stash[MEASURED].values():
        for group in groups:
            if group["pairs"]:
                write_line(f"\n{comparisons(group)}")
            for note in group.get("skipped", []):
                write_line(f"not measured: {note}")
    folder = config.getoption("--record", None)
    if folder:
        written = []
        for suite, groups in config.stash[MEASURED].items():
            record = records.write(folder, suite, groups)
            written += [f"{suite}.json", *pictures.draw(suite, record, folder)]
        write_line(f"written to {folder}: {', '.join(written)}")


@pytest.fixture(scope="session")
def options(request) -> MeasureOptions:
    """MNIST is measured with if it is on disk, else the synthetic digits; nothing is downloaded."""
    quick = request.config.getoption("--quick", False)
    rounds = request.config.getoption("--rounds") or (QUICK_ROUNDS if quick else FULL_ROUNDS)
    root = Path(os.environ.get("MNIST_ROOT", "data")).resolve()
    data_flags = ("--dataset", "mnist", "--data-dir", str(root)) if mnist_on_disk(root) else ("--dataset", "synthetic")
    return MeasureOptions(rounds=rounds, data_flags=data_flags, quick=quick)


@pytest.fixture(scope="session")
def record_of(request, options):
    """`record_of(suite, group)`: the group's record. It is measured once, whichever of its rows were selected."""

    @functools.cache
    def record_of(suite: str, group: Group) -> dict:
        began = records.run_metadata()
        try:
            record = group.measure(options)
        except CannotMeasure as reason:
            pytest.skip(str(reason))
        record |= {"began": began, "ended": records.run_metadata()}
        request.config.stash[MEASURED].setdefault(suite, []).append(record)
        return record

    return record_of
