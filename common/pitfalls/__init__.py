"""The classic mistakes of parallel training, each with what catches it.

    python -m common.pitfalls

runs them all on real processes. A pitfall is a module of this package with

    LEVELS              the levels of the ladder where one meets it; the first
                        one's page names it
    WORLD_SIZE          how many processes it runs on, if not on two
    SYMPTOM             "error" or "hang"; most are silent: the training goes
                        on, and something is wrong with it
    TIMEOUT             where the mistake is a hang: seconds until it is ended
    wrong(), right()    the code with and without the mistake, run on every rank
                        inside a process group; returns what shows the mistake
    detect(outcome)     a sentence about the mistake, or None if there is none;
                        most of these checks can stand in one's own code
    TAKES_STAGE         True if a `Stage` is the last argument of these three:
                        a folder, and notes that can be read in a hang

`outcome` is what `wrong` or `right` has returned, or the RuntimeError that has
ended it after TIMEOUT.
"""

import importlib
from types import ModuleType

# As a run meets them: data, gradients, schedule, collectives, files, clock.
NAMES = (
    "batch_size_per_process",
    "set_epoch_forgotten",
    "different_orders",
    "same_random_numbers",
    "forward_through_module",
    "moved_after_wrapping",
    "replaced_parameters",
    "optimizer_made_first",
    "unused_parameter",
    "accumulation_off_by_one",
    "forward_outside_no_sync",
    "mean_of_means",
    "schedule_on_rank_0",
    "schedule_too_fast",
    "uneven_inputs",
    "uneven_evaluation",
    "collective_on_rank_0",
    "padded_evaluation",
    "metrics_not_gathered",
    "batchnorm_statistics",
    "every_rank_saves",
    "prefixed_keys",
    "clock_without_wait",
)


def load(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")


def place(name: str) -> str:
    """The level whose page names the pitfall."""
    return load(name).LEVELS[0]


def symptom(name: str) -> str:
    """How the mistake shows without a detector: "error", "hang" or "silent"."""
    return getattr(load(name), "SYMPTOM", "silent")


def world_size(name: str) -> int:
    return getattr(load(name), "WORLD_SIZE", 2)


def title(name: str) -> str:
    """One line that names the mistake and what comes of it."""
    return load(name).__doc__.splitlines()[0]
