"""The classic mistakes of parallel training, each with what catches it.

    python -m common.pitfalls

runs them all on real processes. A pitfall is a module of this package with

    LEVELS              the levels of the ladder where one meets it; the first
                        one's page names it
    WORLD_SIZE          how many processes it runs on
    SYMPTOM             "error" or "hang", or "silent": the training goes on,
                        and something is wrong with it
    TIMEOUT             where the mistake is a hang: seconds until it is ended
    wrong(), right()    the code with and without the mistake, run on every rank
                        inside a process group; returns what shows the mistake
    detect(outcome)     a sentence about the mistake, or None if there is none:
                        a check to be used in one's own code
    measure(outcome)    the outcome in a few words, with a number

`outcome` is what `wrong` or `right` has returned, or the RuntimeError that has
ended it after TIMEOUT. `examine.py` runs both versions on the ranks of
`common/processes.py`, and `stage.py` is what a pitfall stands on there.
Most of these mistakes can be seen from outside, in a script of somebody's own.
This looks for them:

    python -m benchmarks.your_network doctor my_train.py
"""

import ast
import importlib
from pathlib import Path

# As a run meets them: data, gradients, schedule, collectives, files, clock.
NAMES = (
    "batch_size_per_process",
    "set_epoch_forgotten",
    "different_orders",
    "same_random_numbers",
    "forward_through_module",
    "moved_after_wrapping",
    "replaced_parameters",
    "unused_parameter",
    "accumulation_off_by_one",
    "mean_of_means",
    "schedule_on_rank_0",
    "schedule_too_fast",
    "uneven_inputs",
    "collective_on_rank_0",
    "padded_evaluation",
    "metrics_not_gathered",
    "batchnorm_statistics",
    "every_rank_saves",
    "prefixed_keys",
    "clock_without_wait",
    "fast_halves",
)


def module_name(name: str) -> str:
    return f"{__name__}.{name}"


def place(name: str) -> str:
    """The level whose page names the pitfall."""
    return importlib.import_module(module_name(name)).LEVELS[0]


def symptom(name: str) -> str:
    """How the mistake shows without a detector: "error", "hang" or "silent"."""
    return importlib.import_module(module_name(name)).SYMPTOM


def source(name: str) -> str:
    return Path(__file__).with_name(f"{name}.py").read_text()


def explanation(name: str) -> str:
    """The docstring of a pitfall, which is read and not imported."""
    return ast.get_docstring(ast.parse(source(name)))


def title(name: str) -> str:
    """One line that names the mistake and what comes of it."""
    return explanation(name).splitlines()[0]
