"""The stage of a pitfall: a process group, and the view of all its ranks."""

import importlib
import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector

from common.accelerator.state import GradientState, PartialState
from common.process_group import all_gather_object, process_group

PATIENCE = timedelta(seconds=120)
# gloo's words on the rank whose patience ends first, and then on the others.
GIVEN_UP = ("Timed out", "timeout caused", "Connection closed by peer")
_store: dist.Store | None = None
_folder: Path | None = None


@dataclass(frozen=True)
class Report:
    """The report of one rank on one version of a pitfall."""

    number: str
    finding: str | None
    hung: bool


def play(module: str, version: str, folder: str) -> Report:
    """Run `wrong` or `right` of a pitfall as one of its ranks.

    `folder` is new and the same on all ranks. What the pitfall raises is
    raised, except by a collective of `wrong` that gives up after TIMEOUT.
    """
    global _store, _folder
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    pitfall = importlib.import_module(module)
    # The correction has all the time it needs on a slow machine.
    timeout = getattr(pitfall, "TIMEOUT", None) if version == "wrong" else None
    _folder = Path(folder)
    _store = dist.FileStore(str(_folder / "meeting"), world_size)
    _store.set_timeout(PATIENCE)
    at("nowhere")
    torch.manual_seed(0)
    _forget_the_job_before()
    _wait_for_all("join", rank, world_size)
    group = process_group(
        store=dist.PrefixStore("group", _store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout) if timeout else PATIENCE,
    )
    try:
        with group:
            # Who has joined and fails at once would take down those who join.
            _wait_for_all("start", rank, world_size)
            try:
                outcome = getattr(pitfall, version)()
            except RuntimeError as error:
                gave_up = any(sign in str(error) for sign in GIVEN_UP)
                if not timeout or not gave_up:
                    raise
                outcome = error
            finding = pitfall.detect(outcome)  # at once: it may be about time
            number = pitfall.measure(outcome)
            hung = isinstance(outcome, RuntimeError)
            # A rank that leaves closes its connections. Whoever still waits
            # for it would see that, and not a time-out.
            _wait_for_all("end", rank, world_size)
            return Report(number, finding, hung)
    finally:
        _forget_the_job_before()


def _forget_the_job_before() -> None:
    """Let the core find out anew who this process is and what it counts."""
    for state in (PartialState, GradientState):
        state._reset_state()


def _wait_for_all(what: str, rank: int, world_size: int) -> None:
    _store.set(f"{what}/{rank}", "")
    _store.wait([f"{what}/{other}" for other in range(world_size)])


def scratch() -> Path:
    """A folder for this run of the pitfall, the same on all ranks."""
    folder = _folder / "scratch"
    folder.mkdir(exist_ok=True)
    return folder


def at(place: str) -> None:
    """Tell all ranks where this one is, by no collective: also in a hang."""
    _store.set(f"place/{os.environ['RANK']}", place)


def places() -> list[str]:
    """The places of the ranks, in rank order, by their last call of `at`."""
    ranks = range(dist.get_world_size())
    return [_store.get(f"place/{rank}").decode() for rank in ranks]


def farthest_apart(model: nn.Module) -> float:
    """The largest difference between rank 0's parameters and another rank's."""
    mine = parameters_to_vector(model.parameters()).detach()
    first, *others = all_gather_object(mine)
    distances = []
    for other in others:
        difference = (first - other).abs()
        distances.append(difference.max().item())
    return max(distances)
