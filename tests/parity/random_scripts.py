"""Random scripts on the original and on ours: drawn from a seed, run on both, compared bit for bit.

A kind of script (`random_orders`, `random_trainings`, `random_trainers`) says how a script is drawn and run. On each
rank its outcome is a nest of dicts and lists. Where the libraries differ on purpose, a script is changed until they
agree; each such difference has a test of its own, which `without_known_differences` names. An error, or a number that
differs, ends the comparison with an error that shows the script.
"""

import operator
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from common.processes import ranks
from tests.bits import differences, with_digests
from tests.states import forget_states, reset_states

TIMEOUT = 1200  # Seconds for all scripts of a comparison.


@dataclass(frozen=True)
class Kind:
    """A kind of script.

    Attributes:
        ours, theirs: the packages of both libraries.
        draw: the script of a seed and a number of processes.
        without_known_differences: the script itself, or a similar one that should end alike on both libraries.
        run: runs a script on this rank, called with the library, the script, a folder, and a dict to fill with all that
            is compared.
    """

    ours: str
    theirs: str
    draw: Callable[[int, int], Any]
    without_known_differences: Callable[[Any], Any]
    run: Callable[[str, Any, str, dict[str, Any]], None]

    def scripts(self, seeds: range, processes: int) -> list:
        """The scripts of `seeds` that are compared. How many of them are not as they were drawn is printed."""
        drawn = [self.draw(seed, processes) for seed in seeds]
        compared = [self.without_known_differences(script) for script in drawn]
        changed = sum(map(operator.ne, drawn, compared))
        print(f"{changed} of {len(seeds)} scripts are changed because the libraries differ on purpose")
        return compared


def one_of(values: Sequence | dict) -> Any:
    """A field of a script's dataclass that is drawn from `values`. The first of them is its default."""
    return field(default=next(iter(values)), metadata={"values": values})


def choices_of(script_class: type) -> dict[str, Sequence | dict]:
    """The values of each field that is drawn."""
    return {one.name: one.metadata["values"] for one in fields(script_class) if one.metadata}


def draw_from(choices: dict[str, Sequence | dict], generator: random.Random) -> dict[str, Any]:
    """One value of each name. The values of a sequence are equally likely, and a dict has a weight for each value."""
    drawn = {}
    for name, values in choices.items():
        if isinstance(values, dict):
            values = list(Counter(values).elements())  # each as often as its weight says
        drawn[name] = generator.choice(values)
    return drawn


def outcomes_of(kind: Kind, library: str, scripts: list, folder: str) -> list[dict[str, Any]]:
    """The outcomes of scripts that run one after the other on this rank, in one process group."""
    outcomes = []
    for number, script in enumerate(scripts):
        torch.manual_seed(11)
        outcome: dict[str, Any] = {}
        try:
            kind.run(library, script, f"{folder}/{number}", outcome)
        except Exception as error:
            error.add_note(f"{library} ran {script}")
            raise
        finally:
            reset_states()
        outcomes.append(with_digests(outcome))
    forget_states()
    return outcomes


def run_on(kind: Kind, library: str, scripts: list, processes: int, folder: str) -> list[tuple]:
    """The outcomes of each script on the ranks, in their order."""
    if processes == 1:
        return [(outcome,) for outcome in outcomes_of(kind, library, scripts, folder)]
    by_rank = ranks(processes).run(outcomes_of, kind, library, scripts, folder, timeout=TIMEOUT)
    return list(zip(*by_rank, strict=True))


def assert_same(kind: Kind, seeds: range, processes: int, folder: str) -> None:
    """Run the scripts of `seeds` on both libraries; on every rank the outcomes of each are the same."""
    scripts = kind.scripts(seeds, processes)
    ours = run_on(kind, kind.ours, scripts, processes, f"{folder}/ours")
    theirs = run_on(kind, kind.theirs, scripts, processes, f"{folder}/theirs")
    for seed, script, here, there in zip(seeds, scripts, ours, theirs, strict=True):
        places = list(differences(here, there))
        assert not places, f"script {seed}, {script}: the ranks differ at {places[:10]}"
