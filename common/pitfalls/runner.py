"""The run of both versions of a pitfall on real processes."""

import os
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from common.accelerator.state import fresh_states
from common.pitfalls import PATIENCE, PITFALLS, load
from common.process_group import process_group
from common.processes import ranks


class Verdict(NamedTuple):
    """The detector's findings on both versions; None where it is silent."""

    finding: str | None
    false_alarm: str | None
    hung: bool  # the mistake ended by its time-out

    @property
    def caught(self) -> bool:
        return self.finding is not None and self.false_alarm is None


@dataclass(frozen=True)
class Trace:
    """The notes of each rank, in files, so that a rank that hangs has some."""

    folder: Path

    def note(self, text: str) -> None:
        """Add a note of this rank, without a collective."""
        with self._file_of(dist.get_rank()).open("a") as file:
            file.write(f"{text}\n")

    def notes_by_rank(self) -> list[list[str]]:
        """The notes of each rank; each must have made one."""
        files = map(self._file_of, range(dist.get_world_size()))
        return [file.read_text().splitlines() for file in files]

    def last_notes(self) -> str:
        """For example "rank 0 in step 4, rank 1 in step 3"."""
        last = []
        for rank, notes in enumerate(self.notes_by_rank()):
            last.append(f"rank {rank} in {notes[-1]}")
        return ", ".join(last)

    def _file_of(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.txt"


class Result(NamedTuple):
    """The run of one version, on one rank or on all."""

    finding: str | None  # the detector's; None where it is silent
    hung: bool


def examine(name: str) -> Verdict:
    """Run both versions. Raises RankFailed if a rank fails unexpectedly."""
    wrong = _run(name, "wrong")
    right = _run(name, "right")
    return Verdict(wrong.finding, right.finding, wrong.hung)


def _run(name: str, version: str) -> Result:
    pool = ranks(PITFALLS[name].world_size, on_cpu=True)
    with tempfile.TemporaryDirectory(prefix="pitfall-") as folder:
        of_ranks = pool.run(run_on_rank, name, version, Path(folder))
    hung = any(result.hung for result in of_ranks)
    if hung:
        pool.stop()  # nobody knows what the collective has left behind
    for result in of_ranks:
        if result.finding is not None:
            return Result(result.finding, hung)
    return Result(None, hung)


def run_on_rank(name: str, version: str, folder: Path) -> Result:
    """Run the pitfall's `wrong` or `right` on this rank, and its detector.

    `folder` is new and the same on all ranks. What the pitfall raises is
    raised, except by a `wrong` that hangs until its time is over.
    """
    module = load(name)
    pitfall = PITFALLS[name]
    arguments: list[Any] = []
    if pitfall.extra == "trace":
        arguments = [Trace(folder)]
    elif pitfall.extra == "folder":
        arguments = [folder]
    may_hang = version == "wrong" and pitfall.symptom == "hang"
    # The correction has all the time it needs on a slow machine.
    timeout = pitfall.timeout if version == "wrong" else PATIENCE
    store = dist.FileStore(str(folder / "meeting"), pitfall.world_size)
    store.set_timeout(timedelta(seconds=PATIENCE))
    torch.manual_seed(0)
    # All ranks begin to make the group together, because its time-out, which
    # may be 2 s, counts while it is made.
    _wait_for_all("before the group", store, pitfall.world_size)
    group = process_group(
        store=dist.PrefixStore("group", store),
        rank=int(os.environ["RANK"]),
        world_size=pitfall.world_size,
        timeout=timedelta(seconds=timeout),
    )
    # The process runs other pitfalls too, and an Accelerator keeps its state.
    with fresh_states(), group:
        started = time.monotonic()  # earlier than any rank begins to wait
        # A rank that fails in the pitfall closes its connections, and one that
        # still made the group would fail too.
        _wait_for_all("before the pitfall", store, pitfall.world_size)
        try:
            outcome = getattr(module, version)(*arguments)
        except RuntimeError as error:
            # gloo has no class of its own for a time-out, but none comes
            # before its time.
            waited = time.monotonic() - started
            if not may_hang or waited < pitfall.timeout:
                raise
            outcome = error
        finding = module.detect(outcome, *arguments)
        # A rank that leaves closes its connections, and one that still waited
        # would see that instead of its time-out.
        _wait_for_all("after the pitfall", store, pitfall.world_size)
    return Result(finding, hung=isinstance(outcome, RuntimeError))


def _wait_for_all(place: str, store: dist.Store, count: int) -> None:
    store.set(f"{place}/{os.environ['RANK']}", "")
    store.wait([f"{place}/{rank}" for rank in range(count)])
