"""Run both versions of a pitfall on real processes, and judge its detector."""

import importlib
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.pitfalls.stage import Report

SECONDS = 180  # the last resort, for one version of one pitfall


@dataclass(frozen=True)
class Verdict:
    """Both versions of a pitfall in numbers, and what the detector says of it.

    Where the ranks have different numbers, all are there.
    """

    wrong: str
    right: str
    finding: str | None
    false_alarm: str | None

    @property
    def caught(self) -> bool:
        return self.finding is not None and self.false_alarm is None

    def __str__(self) -> str:
        if self.finding is None:
            return "MISSED: the detector is silent about the mistake"
        if self.false_alarm is not None:
            return f"FALSE ALARM about the correction: {self.false_alarm}"
        return f"caught: {self.finding}"


def examine(module: str) -> Verdict:
    """Run both versions of the pitfall in `module`.

    Raises:
        RuntimeError: if a rank fails where it should not.
    """
    wrong = reports(module, "wrong")
    right = reports(module, "right")
    return Verdict(
        wrong=_numbers(wrong),
        right=_numbers(right),
        finding=_finding(wrong),
        false_alarm=_finding(right),
    )


def reports(module: str, version: str) -> list["Report"]:
    """Every rank's Report on the "wrong" or "right" version of a pitfall.

    Raises:
        RuntimeError: with the traceback of every rank that raised or did not
            answer; the next call starts new processes.
    """
    # Torch takes seconds to import. Here Ctrl-C is expected, above it is not.
    from common.pitfalls.stage import play
    from common.processes import RankFailed, ranks

    pool = ranks(importlib.import_module(module).WORLD_SIZE)
    with tempfile.TemporaryDirectory(prefix="pitfall-") as folder:
        try:
            found = pool.run(play, module, version, folder, timeout=SECONDS)
        except RankFailed as error:
            message = f"{module} has failed in its {version} version\n{error}"
            raise RuntimeError(message) from error
    if any(report.hung for report in found):
        pool.stop()  # nobody knows what the collective has left behind
    return found


def _numbers(reports: list["Report"]) -> str:
    """The number of the ranks; where they differ, the number of each rank."""
    numbers = [report.number for report in reports]
    if len(set(numbers)) == 1:
        return numbers[0]
    of_ranks = (f"rank {rank}: {each}" for rank, each in enumerate(numbers))
    return ", ".join(of_ranks)


def _finding(reports: list["Report"]) -> str | None:
    """The detector's words on the first rank where it has any."""
    for report in reports:
        if report.finding:
            return report.finding
    return None
