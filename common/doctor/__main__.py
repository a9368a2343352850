"""Which mistakes of parallel training a script makes: `python -m common.doctor my_train.py …`."""

import argparse
import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from common.doctor import launch, report
from common.doctor.answers import Answer, Finding, Healthy, Unseen
from common.doctor.ends import refusal
from common.errors import fail
from common.files import write_atomically
from common.numbers import positive

KINDS = {"findings": Finding, "healthy": Healthy, "not_looked_at": Unseen}


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m common.doctor", description=__doc__)
    flag = parser.add_argument
    flag("--processes", type=several, default=2, metavar="N", help="to start the script on (2)")
    flag("--steps", type=positive, metavar="N", help="optimizer steps after which to end it (none: its own end)")
    flag("--time-out", type=positive, default=120, metavar="S", help="seconds in which a rank must get on (120)")
    flag("--json", type=Path, metavar="PATH", help="also write the answer there")
    flag("script", type=Path, metavar="SCRIPT", help="a program that torchrun could start")
    flag("arguments", nargs=argparse.REMAINDER, metavar="…", help="arguments of the script")
    return parser.parse_args(argv)


def several(text: str) -> int:
    if positive(text) < 2:
        raise argparse.ArgumentTypeError("must be at least 2: the doctor compares ranks")
    return int(text)


def answer_doctor(options: argparse.Namespace) -> None:
    """Run the script, and say what was found. Exits with 1 if there is a finding, with 2 if nothing could be seen."""
    if not options.script.is_file():
        fail(f"there is no file {options.script}")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        ranks = launch.observe(
            options.script, options.arguments, options.processes, Path(folder), options.steps, options.time_out
        )
    records = [rank.record for rank in ranks]
    print(report.summary(options.script.name, ranks, time.monotonic() - started))
    found: list[Answer] = report.answers(ranks, options.time_out)
    refused = refusal(ranks)
    if any(record.starts_processes for record in records):
        found = []
        verdict = report.verdict_of_launcher()
    elif refused is not None:
        found = []
        verdict = report.verdict_of_refusal(refused)
    elif report.alone(records) and not isinstance(found[0], Finding):
        found = []
        verdict = report.verdict_alone(records)
    else:
        print()
        print(*report.lines(found, records), sep="\n")
        verdict = report.verdict(found, len(ranks))
    print()
    print(*verdict, sep="\n")
    if options.json:
        _write(options, records[0].steps, found, verdict)
    if refused is not None or not any(record.backend or record.steps for record in records):
        raise SystemExit(2)
    if any(isinstance(answer, Finding) for answer in found):
        raise SystemExit(1)


def _write(options: argparse.Namespace, steps: int, found: list[Answer], verdict: list[str]) -> None:
    record = {
        "question": "doctor",
        "script": str(options.script),
        "arguments": options.arguments,
        "processes": options.processes,
        "steps": steps,
    }
    for name, kind in KINDS.items():
        record[name] = [asdict(answer) for answer in found if isinstance(answer, kind)]
    record["never_looked_at"] = report.NEVER
    record["verdict"] = verdict
    write_atomically(options.json, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    answer_doctor(parse_options())
