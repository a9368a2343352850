"""The classic mistakes of parallel training, each with what catches it.

    python -m common.pitfalls

runs them all on real processes. A pitfall is a module of this package with

    wrong(), right()    the code with and without the mistake, run on every rank
                        inside a process group; returns what shows the mistake
    detect(outcome)     a sentence about the mistake, or None if there is none;
                        most of these checks can stand in one's own code

`outcome` is what `wrong` or `right` has returned, or the error of the time-out
that has ended it. Some pitfalls take a `Trace` or a folder; `detect` then too.
"""

import importlib
from types import ModuleType
from typing import Literal, NamedTuple

from common.levels import LEVELS

PATIENCE = 120  # seconds, for all that is not meant to hang


class Pitfall(NamedTuple):
    """The place of a pitfall on the ladder, and how it is run."""

    level: str  # whose page names it
    # Where it is silent the training goes on.
    symptom: Literal["silent", "error", "hang"] = "silent"
    # What the functions take: a `Trace`, or a new folder that all ranks share.
    extra: Literal["trace", "folder"] | None = None
    # Seconds, after which a collective of `wrong` fails.
    timeout: int = PATIENCE
    world_size: int = 2  # processes


LEVEL_00, LEVEL_01, LEVEL_02, LEVEL_03, LEVEL_04 = LEVELS
# As a run meets them: data, gradients, schedule, collectives, files, clock.
PITFALLS = {
    "batch_size_per_process": Pitfall(LEVEL_02),
    "set_epoch_forgotten": Pitfall(LEVEL_02),
    "different_orders": Pitfall(LEVEL_02),
    "same_random_numbers": Pitfall(LEVEL_02),
    "forward_through_module": Pitfall(LEVEL_02),
    "moved_after_wrapping": Pitfall(LEVEL_02),
    "replaced_parameters": Pitfall(LEVEL_00),
    "optimizer_made_first": Pitfall(LEVEL_02),
    "unused_parameter": Pitfall(LEVEL_02, "error"),
    "accumulation_off_by_one": Pitfall(LEVEL_03),
    "forward_outside_no_sync": Pitfall(LEVEL_03),
    "mean_of_means": Pitfall(LEVEL_04),
    "schedule_on_rank_0": Pitfall(LEVEL_02),
    "schedule_too_fast": Pitfall(LEVEL_03),
    "uneven_inputs": Pitfall(LEVEL_02, "hang", "trace", timeout=2),
    # Before they hang, the ranks shard a network, which takes longer.
    "uneven_evaluation": Pitfall(LEVEL_02, "hang", "trace", timeout=5),
    "collective_on_rank_0": Pitfall(LEVEL_02, "hang", "trace", timeout=2),
    "padded_evaluation": Pitfall(LEVEL_02, world_size=3),
    "metrics_not_gathered": Pitfall(LEVEL_03),
    "batchnorm_statistics": Pitfall(LEVEL_02),
    "every_rank_saves": Pitfall(LEVEL_03, extra="folder"),
    "prefixed_keys": Pitfall(LEVEL_01),
    "clock_without_wait": Pitfall(LEVEL_00),
}
NAMES = tuple(PITFALLS)


def load(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")


def title(name: str) -> str:
    """One line that names the mistake and what comes of it."""
    return load(name).__doc__.splitlines()[0]
