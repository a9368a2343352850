"""Find the mistakes of parallel training in a script: `python -m common.doctor my_train.py …`."""

import argparse
import functools
import sys
import tempfile
import time
from pathlib import Path

from common.doctor import checks, launch, report, run_script
from common.doctor.record import Record
from common.errors import fail
from common.flag_types import number, positive


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m common.doctor", description=__doc__.splitlines()[0])
    flag = parser.add_argument
    several = functools.partial(number, kind=int, description="at least 2: the doctor compares ranks", least=2)
    flag("--processes", type=several, default=2, metavar="N", help="to start the script on (2)")
    flag("--steps", type=positive, metavar="N", help="to end it after N optimizer steps, the last one not compared")
    hang = "the script hangs if for S seconds no rank reads a batch, computes, steps, saves or calls a collective (120)"
    flag("--time-out", type=positive, default=120, metavar="S", help=hang)
    flag("script", type=Path, metavar="SCRIPT", help="a program that torchrun could start")
    flag("arguments", nargs=argparse.REMAINDER, metavar="…", help="arguments of the script")
    return parser.parse_args(argv)


def examine(options: argparse.Namespace) -> int:
    """Run the script, and print what was found. Returns the exit code."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        command = [run_script.__file__, folder, str(options.steps), str(options.script), *options.arguments]
        records = launch.run_ranks(command, options.processes, Path(folder), options.time_out)
        failed = [record for reason in ("crash", "lost") for record in records if record.end.reason == reason]
        if failed:
            log = Path(folder, f"rank{failed[0].rank}", launch.LOG).read_text(errors="replace").splitlines()
            print(f"The end of rank {failed[0].rank}'s output:", *log[-20:], "", sep="\n", file=sys.stderr)
    seconds = time.monotonic() - started
    reason = why_nothing_was_examined(records)
    print(report.summary(options.script.name, records, seconds), end="\n\n")
    if reason:
        print(f"Nothing was examined: {reason}")
        return 2
    results = checks.run_all(records)
    print(*report.lines(results, records), sep="\n")
    return report.exit_code(results, records)


def why_nothing_was_examined(records: list[Record]) -> str | None:
    """The reason, if the script starts its own processes, or if there were neither ranks to compare nor a bad end."""
    if any(run_script.OWN_PROCESSES in record.end.text for record in records):
        return run_script.OWN_PROCESSES
    if any(record.backend or record.end.reason in ("crash", "lost", "stopped") for record in records):
        return None
    printed = records[0].last_printed or "nothing"
    return f"the script made no process group, so each process was on its own; it printed last: {printed}"


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)
    if not options.script.is_file():
        fail(f"there is no file {options.script}")
    try:
        return examine(options)
    except KeyboardInterrupt:
        print("interrupted: nothing was examined", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
