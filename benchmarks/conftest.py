"""Fixtures and options of all suites: groups are measured once, in turns, and their rows shown to pytest-benchmark.

One test is one row of a group. The first test of a group measures all rows of it that were selected, in turns; each
test then replays what a step of its row took in every round. So the times in pytest-benchmark's table are seconds per
step, and its options to sort, group, save and compare work on rows. See `benchmarks.harness.groups`.
"""

import os
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.harness import records
from benchmarks.harness.groups import CannotMeasure, Extent, Group, ReplayClock, info, seconds_per_step
from benchmarks.report.pictures import DRAWN
from benchmarks.suites import memory
from common.allocator import keep_large_blocks
from common.data import mnist_on_disk

TIMEOUT = 3600  # seconds for any one test: a group takes some minutes on two quiet cores
FULL_ROUNDS = 10
QUICK_ROUNDS = 2
CLOCK = ReplayClock()
LITTLE = "--quick: a few short rounds show that everything runs; these numbers say little."


class Kept(NamedTuple):
    """Measurements of the session, kept until it ends.

    Attributes:
        groups: of each suite the records of its groups, which say by "began" and "ended" how they were measured.
        memory: parts of the memory's rows; each says the same.
        written: the files that --record has left.
    """

    groups: dict[str, list[dict]]
    memory: list[dict]
    written: list[str]


KEPT = pytest.StashKey[Kept]()


def pytest_addoption(parser):
    group = parser.getgroup("ladder", "the ladder's benchmarks")
    group.addoption("--quick", action="store_true", help="a few short rounds: to see that everything runs")
    group.addoption("--rounds", type=int, metavar="N", help=f"how often the rows of a group take turns ({FULL_ROUNDS})")
    group.addoption("--record", type=Path, metavar="FOLDER", help="write a record of each suite there, and pictures")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    config.stash[KEPT] = Kept(groups={}, memory=[], written=[])
    # Before the first tensor, so that what a group measures in this process does not depend on the groups before it.
    keep_large_blocks()
    rounds = config.getoption("--rounds", None)
    if rounds is not None and rounds < 1:
        raise pytest.UsageError("--rounds must be at least 1")
    recorded = config.getoption("--record", None)
    # An hour of measuring should not end in an error that was there before.
    if recorded and (reason := records.why_not_writable(recorded)):
        raise pytest.UsageError(f"--record: {reason}")
    # Each group is shown in its own unit. The plugin's table would say the same again, in seconds.
    if not any(argument.startswith("--benchmark") for argument in config.invocation_params.args):
        config.option.benchmark_quiet = True
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would report its begin and its end
    if config.getoption("--quick", False):
        # Where others compute too, OpenMP's threads otherwise spin in wait for those that do not get a core.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_generate_tests(metafunc):
    """A test that asks for a group and a row runs once for every row of the GROUPS of its module."""
    if {"group_key", "row"} <= set(metafunc.fixturenames):
        cases = []
        for group in metafunc.module.GROUPS.values():
            cases += [pytest.param(group.key, row, id=f"{group.key}-{row}") for row in group.rows]
        metafunc.parametrize(("group_key", "row"), cases)


def pytest_collection_modifyitems(config, items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.benchmark(timer=CLOCK.now))
            if config.pluginmanager.hasplugin("timeout"):
                item.add_marker(pytest.mark.timeout(TIMEOUT))


def pytest_benchmark_update_machine_info(config, machine_info):
    machine_info["ladder"] = records.machine()


@pytest.hookimpl(wrapper=True)
def pytest_terminal_summary(terminalreporter, config):
    """Below pytest-benchmark's table, if there is one: each group in its own unit, with its rows' ratios."""
    try:
        return (yield)
    finally:
        _write_summary(terminalreporter, config)


def _write_summary(terminalreporter, config) -> None:
    missing: dict[str, None] = {}
    kept = config.stash[KEPT]
    for groups in kept.groups.values():
        for group in groups:
            terminalreporter.write_line("")
            terminalreporter.write_line(records.table(group))
            missing |= dict.fromkeys(group.get("skipped", []))
    rows = [row for part in kept.memory for row in part["rows"]]
    if rows:
        terminalreporter.write_line("")
        terminalreporter.write_line(memory.table(rows))
    for note in missing:
        terminalreporter.write_line(f"not measured: {note}")
    if kept.written:
        terminalreporter.write_line(f"written to {config.getoption('--record')}: {', '.join(kept.written)}")
    if config.getoption("--quick", False):
        terminalreporter.write_line(LITTLE)


def pytest_sessionfinish(session):
    folder = session.config.getoption("--record", None)
    if not folder:
        return
    kept = session.config.stash[KEPT]
    for suite, groups in kept.groups.items():
        began, ended = _times(groups)
        records.write(folder / f"{suite}.json", suite, began, ended, groups=groups)
        kept.written.append(f"{suite}.json")
    if kept.memory:
        began, ended = _times(kept.memory)
        rows = [row for part in kept.memory for row in part["rows"]]
        records.write(folder / "memory.json", "memory", began, ended, groups=[], memory=rows)
        kept.written.append("memory.json")
    for suite, draw in DRAWN.items():
        if suite in kept.groups:
            kept.written.extend(draw(kept.groups[suite], records.machine(), folder))


def _times(measured: list[dict]) -> tuple[dict, dict]:
    """The circumstances before the first of these was measured, and after the last of them."""
    return measured[0]["began"], measured[-1]["ended"]


@pytest.fixture(scope="session")
def quick(request) -> bool:
    return request.config.getoption("--quick", False)


@pytest.fixture(scope="session")
def data_flags() -> tuple[str, ...]:
    """MNIST if it is on disk, else the synthetic digits, without trying to download anything."""
    root = Path(os.environ.get("MNIST_ROOT", "data")).resolve()
    return ("--dataset", "mnist", "--data-dir", str(root)) if mnist_on_disk(root) else ("--dataset", "synthetic")


@pytest.fixture(scope="session")
def extent(request, quick, data_flags) -> Extent:
    rounds = request.config.getoption("--rounds") or (QUICK_ROUNDS if quick else FULL_ROUNDS)
    return Extent(rounds=rounds, seconds=0.2 if quick else 1.0, data_flags=data_flags, quick=quick)


@pytest.fixture(scope="session")
def measured(request, extent):
    """`measured(suite, group)`: the group's record. It is measured once, with all rows of it that were selected."""
    known: dict[str, dict | Exception] = {}

    def measure(suite: str, group: Group) -> dict:
        began = records.circumstances()
        keys = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
        selected = {params["row"] for params in keys if params.get("group_key") == group.key}
        record = group.measure(tuple(row for row in group.rows if row in selected), extent)
        return record | {"began": began, "ended": records.circumstances()}

    def once(suite: str, group: Group) -> dict:
        if group.key not in known:
            try:
                known[group.key] = measure(suite, group)
                request.config.stash[KEPT].groups.setdefault(suite, []).append(known[group.key])
            except Exception as error:  # it failed for all of its rows, each of which says so
                known[group.key] = error
        if isinstance(known[group.key], Exception):
            raise known[group.key]
        return known[group.key]

    return once


@pytest.fixture
def record_of(request, measured):
    """`record_of(group_key)`: the record of a group of the test's module."""
    suite = request.path.stem.removeprefix("test_")

    def find(group_key: str) -> dict:
        try:
            return measured(suite, request.module.GROUPS[group_key])
        except CannotMeasure as reason:
            pytest.skip(str(reason))

    return find


@pytest.fixture
def replay(benchmark, record_of):
    """`replay(group_key, row)`: pytest-benchmark's rounds are what a step of the row took. Returns the row's facts."""

    def run(group_key: str, row: str) -> dict:
        record = record_of(group_key)
        if row not in record["rows"]:
            pytest.skip(f"{row} was not recorded")
        durations = iter(seconds_per_step(record, row))

        def next_duration():
            CLOCK.reset()
            return (next(durations),), {}

        benchmark.group = record["group"]
        benchmark.extra_info.update(info(record, row))
        benchmark.pedantic(CLOCK.advance, setup=next_duration, rounds=len(record["rows"][row]["samples"]))
        return record["rows"][row]

    return run


@pytest.fixture
def keep_memory(request):
    """`keep_memory(rows)`: leave rows of `benchmarks.suites.memory` that this test has measured for --record."""
    began = records.circumstances()

    def keep(rows: list[dict]) -> None:
        part = {"rows": rows, "began": began, "ended": records.circumstances()}
        request.config.stash[KEPT].memory.append(part)

    return keep
