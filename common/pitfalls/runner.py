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
from torch import nn
from torch.nn.utils import parameters_to_vector

from common.accelerator.state import fresh_states
from common.pitfalls import PITFALLS, load
from common.process_group import all_gather_object, process_group
from common.processes import ranks
from common.weights import distance

PATIENCE = timedelta(seconds=120)


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


def examine(name: str) -> Verdict:
    """Run both versions of a pitfall.

    Raises:
        RankFailed: if a rank fails where it should not.
    """
    finding, hung = _run(name, "wrong")
    false_alarm, _ = _run(name, "right")
    return Verdict(finding, false_alarm, hung)


def _run(name: str, version: str) -> tuple[str | None, bool]:
    """The first finding of a rank, and True if a rank hung."""
    pool = ranks(PITFALLS[name].world_size, on_cpu=True)
    with tempfile.TemporaryDirectory(prefix="pitfall-") as folder:
        of_ranks = pool.run(run_on_rank, name, version, Path(folder))
    findings, hung = zip(*of_ranks, strict=True)
    if any(hung):
        pool.stop()  # nobody knows what the collective has left behind
    return next(filter(None, findings), None), any(hung)


def run_on_rank(
    name: str, version: str, folder: Path
) -> tuple[str | None, bool]:
    """The detector's finding on a rank's `wrong` or `right`; True if it hung.

    `folder` is new and the same on all ranks. What the pitfall raises is
    raised, except by a `wrong` that hangs until its time is over.
    """
    module = load(name)
    pitfall = PITFALLS[name]
    arguments: list[Any] = []
    if pitfall.timeout is not None:
        arguments = [Trace(folder)]
    elif pitfall.takes_folder:
        arguments = [folder]
    # The correction has all the time it needs on a slow machine.
    timeout = PATIENCE
    may_hang = version == "wrong" and pitfall.timeout is not None
    if may_hang:
        timeout = timedelta(seconds=pitfall.timeout)
    store = dist.FileStore(str(folder / "meeting"), pitfall.world_size)
    store.set_timeout(PATIENCE)
    torch.manual_seed(0)
    _meet("before the group", store, pitfall.world_size)
    group = process_group(
        store=dist.PrefixStore("group", store),
        rank=int(os.environ["RANK"]),
        world_size=pitfall.world_size,
        timeout=timeout,
    )
    # The process runs other pitfalls too, and an Accelerator keeps its state.
    with fresh_states(), group:
        started = time.monotonic()  # earlier than any rank begins to wait
        _meet("before the pitfall", store, pitfall.world_size)
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
        _meet("after the pitfall", store, pitfall.world_size)
    return finding, isinstance(outcome, RuntimeError)


def _meet(place: str, store: dist.Store, count: int) -> None:
    """Wait for all ranks, in the store, whose time-out is long.

    The group's time-out may be 2 s, and counts while the group is made: so all
    ranks begin that together. A rank that fails closes its connections: so the
    pitfall begins when all ranks have made theirs. A rank that leaves closes
    them too, and one that still waits would see that instead of its time-out:
    so all leave together.
    """
    store.set(f"{place}/{os.environ['RANK']}", "")
    store.wait([f"{place}/{rank}" for rank in range(count)])


def own_samples(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Eight samples of four numbers, on every rank others."""
    data = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(8, 4, generator=data, dtype=dtype)


def farthest_gradient(model: nn.Module) -> float:
    """The largest difference of a gradient on rank 0 and on another rank."""
    mine = parameters_to_vector([each.grad for each in model.parameters()])
    first, *others = all_gather_object(mine)
    return max(distance(first, other) for other in others)
