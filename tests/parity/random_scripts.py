"""Random scripts in the four steps that `tests/parity/__init__.py` lists: draw, change, run on both libraries, compare.

The outcome of a script on one rank is a nest of dicts and lists. An error, or a bit that differs, ends the comparison
with an error that shows the script.
"""

import operator
import random
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


def one_of(values: Sequence | dict[Any, int]) -> Any:
    """A field of a script that is drawn from `values`, of which the first is its default.

    All are equally likely, or as likely as their weights in a dict say.
    """
    if isinstance(values, dict):
        values = [value for value, weight in values.items() for _ in range(weight)]
    return field(default=values[0], metadata={"values": values})


def choices_of(script_class: type) -> dict[str, Sequence]:
    return {one.name: one.metadata["values"] for one in fields(script_class) if one.metadata}


def draw_from(choices: dict[str, Sequence], generator: random.Random) -> dict[str, Any]:
    return {name: generator.choice(values) for name, values in choices.items()}


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
