"""Measures suites, prints a table of each, and writes its record and its pictures.

python -m benchmarks all --quick
python -m benchmarks throughput overhead --record results
"""

import argparse
import os
import signal
import sys
from pathlib import Path

from benchmarks.harness import machine, records
from benchmarks.harness.level_runs import find_dataset
from benchmarks.harness.options import CannotMeasure, MeasureOptions
from benchmarks.report import pictures
from benchmarks.report.group_table import tables
from benchmarks.suites import network, one_step, overhead, sharing, throughput, timeline
from common.flag_types import positive
from common.processes import RankFailed

FULL_ROUNDS = 10
QUICK_ROUNDS = 2
# Without `memory`, which `benchmarks.compare` measures.
SUITES = {
    "throughput": throughput.measure,
    "overhead": overhead.measure,
    "network": network.measure,
    "timeline": timeline.measure,
    "one_step": one_step.measure,
    "sharing": sharing.measure,
}


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    flag = parser.add_argument
    flag("suites", nargs="+", choices=["all", *SUITES], metavar="SUITE", help=f"all, or of: {', '.join(SUITES)}")
    flag("--quick", action="store_true", help="a few short rounds: to see that everything runs")
    flag("--rounds", type=positive, metavar="N", help=f"how often the rows of a group take turns ({FULL_ROUNDS})")
    flag("--record", type=Path, metavar="FOLDER", help="write a record of each suite there, and its pictures")
    options = parser.parse_args(argv)
    if options.rounds is None:
        options.rounds = QUICK_ROUNDS if options.quick else FULL_ROUNDS
    return options


def prepare_main_process(quick: bool) -> None:
    """Settings of this process and of those that it starts, which compute."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would report its begin and its end
    if quick:
        # Where others compute too, OpenMP's threads otherwise spin in wait for those that do not get a core.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: a suite then removes its network namespaces


def main(argv: list[str] | None = None) -> None:
    options = parse_options(argv)
    if options.record:
        # Check now that the folder is writable, not after an hour.
        records.check_writable(options.record, "--record")
    prepare_main_process(options.quick)
    # Check the load once, before the first suite: afterwards it includes our own.
    load = machine.load_averages()
    machine.warn_if_busy(load)
    data_flags = find_dataset()
    if "synthetic" in data_flags:
        print("NOT MNIST: it is not in MNIST_ROOT, so levels train on synthetic digits", file=sys.stderr, flush=True)
    measure_options = MeasureOptions(options.rounds, data_flags, options.quick)
    hardware = machine.hardware_and_versions()
    has_failed = False
    for suite in SUITES if "all" in options.suites else options.suites:
        began = machine.run_metadata() | {"load": load}
        try:
            content = SUITES[suite](measure_options)
        except CannotMeasure as reason:
            print(f"{suite} is not measured: {reason}", flush=True)
            has_failed |= suite in options.suites  # it was named
            continue
        except (RankFailed, ChildProcessError) as failure:
            print(f"{suite} is not measured: {failure}", flush=True)
            has_failed = True
            continue
        except KeyboardInterrupt:
            print(f"INTERRUPTED: {suite}", file=sys.stderr)
            sys.exit(130)
        record = {"suite": suite, "machine": hardware, "began": began, "ended": machine.run_metadata(), **content}
        print(f"\n{tables(record)}", flush=True)
        if options.record:
            records.write_json(options.record / f"{suite}.json", record)
            written = [f"{suite}.json", *pictures.draw(suite, record, options.record)]
            print(f"\nWritten to {options.record}: {', '.join(written)}", flush=True)
    if has_failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
