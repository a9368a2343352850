"""What the suites share: contestants that take turns as pytest-benchmark's rounds, and the record that remains.

One test is one group of rows, and one round of pytest-benchmark is one turn of all its contestants: what takes turns
can be compared, and the time that pytest-benchmark shows is the time of a whole round. The rows, with their samples,
are in `extra_info`, in the shape of `benchmarks.records`.
"""

import itertools
import os
from pathlib import Path

import pytest
import torch

from benchmarks import records
from benchmarks.paired import take_turns
from common.data import mnist_on_disk

RECORDS = pytest.StashKey[dict[str, list[dict]]]()
TIMEOUT = 1800  # seconds for any one test: a group takes a minute or two on two quiet cores


def pytest_addoption(parser):
    group = parser.getgroup("ladder", "the ladder's benchmarks")
    group.addoption("--quick", action="store_true", help="a few short rounds: to see that everything runs")
    group.addoption("--record", type=Path, metavar="FOLDER", help="write the records there, one file for each suite")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    # Our tables take the place of pytest-benchmark's, which --benchmark-verbose shows.
    config.option.benchmark_quiet = True
    config.stash[RECORDS] = {}
    if config.getoption("--quick", False):
        # Where others compute too, OpenMP's threads otherwise spin in wait for those that do not get a core.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_collection_modifyitems(config, items):
    if config.pluginmanager.hasplugin("timeout"):
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.timeout(TIMEOUT))


def pytest_benchmark_update_machine_info(config, machine_info):
    machine_info["ladder"] = records.machine()


def pytest_terminal_summary(terminalreporter, config):
    missing = [note for suite in config.stash[RECORDS].values() for group in suite for note in group.get("skipped", [])]
    for note in dict.fromkeys(missing):
        terminalreporter.write_line(f"not measured: {note}")


def pytest_sessionfinish(session):
    folder = session.config.getoption("--record", None)
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        for suite, groups in session.config.stash[RECORDS].items():
            records.write(folder / f"{suite}.json", suite, groups)


@pytest.fixture(scope="session")
def quick(request) -> bool:
    return request.config.getoption("--quick", False)


@pytest.fixture(scope="session")
def data_flags() -> tuple[str, ...]:
    """MNIST if it is on disk, else the synthetic digits, without trying to download anything."""
    root = Path(os.environ.get("MNIST_ROOT", "data")).resolve()
    return ("--dataset", "mnist", "--data-dir", str(root)) if mnist_on_disk(root) else ("--dataset", "synthetic")


@pytest.fixture
def in_turns(benchmark):
    """`in_turns(contestants, rounds)`: their samples, one of each per round of the benchmark."""

    def run(contestants, rounds):
        samples = {name: [] for name in contestants}
        turns = itertools.count()

        def one_round():
            for name, sample in take_turns(contestants, next(turns)).items():
                samples[name].append(sample)

        benchmark.pedantic(one_round, rounds=rounds)
        return samples

    return run


@pytest.fixture
def keep(request, benchmark, capsys):
    """`keep(record)`: print the group's table and leave its record in `extra_info` and for --record."""

    def run(record):
        if benchmark.stats:  # not with --benchmark-disable
            benchmark.stats.group = record["group"]
        benchmark.extra_info.update(record)
        suite = request.path.stem.removeprefix("test_")
        request.config.stash[RECORDS].setdefault(suite, []).append(record)
        with capsys.disabled():
            print(f"\n{records.table(record)}")

    return run


@pytest.fixture
def one_thread():
    """Torch computes on one thread: several wait for each other where there is little to do, or another job runs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
