"""What every thread does during one step of two ranks that average their gradients.

Two ranks, one core each, train a small network over a link of 1 Gbit/s and of 100 Mbit/s between two network namespaces
(root and iproute2), and over loopback, which needs neither. Beside the steps' times a group holds the "lanes" of one
typical step, from which `benchmarks.report` draws pictures.
"""

from collections.abc import Callable
from functools import partial

from benchmarks.harness import typical_steps
from benchmarks.harness.gradient_averaging import BATCH, WRAPPERS
from benchmarks.harness.lanes import record_rank
from benchmarks.harness.options import CannotMeasure, MeasureOptions
from benchmarks.harness.spans import RecordedStep, to_spans
from benchmarks.suites.network import WaitingRanks, waiting_ranks
from common.processes import ranks

LINKS = ("1 Gbit/s", "100 Mbit/s")
LOOPBACK = "loopback"
TIMEOUT = 300  # seconds, for any one recording


def measure(options: MeasureOptions) -> dict:
    """A group for each link."""
    groups = []
    try:
        with waiting_ranks() as pair:
            for link in LINKS:
                pair.limit(link)
                groups.append(record_over(link, partial(over_the_cable, pair), options))
    except CannotMeasure as reason:
        print(f"timeline measures {LOOPBACK} alone: {reason}", flush=True)
    groups.append(record_over(LOOPBACK, over_loopback, options))
    return {"groups": groups}


def record_over(link: str, record_steps: Callable, options: MeasureOptions) -> dict:
    """The group of all wrappers over one link."""
    title = f"one step of two ranks over {link}, {BATCH} images a backward"
    return typical_steps.record_in_turns(title, tuple(WRAPPERS), record_steps, options) | {"link": link}


def over_loopback(wrapper: str, steps: int) -> list[list[RecordedStep]]:
    """For both ranks their steps, on this machine."""
    return ranks(2, on_cpu=True).run(record_rank, wrapper, steps, timeout=TIMEOUT)


def over_the_cable(pair: WaitingRanks, wrapper: str, steps: int) -> list[list[RecordedStep]]:
    """For both ranks their steps, on two nodes whose cable is limited already; JSON has made lists of them."""
    of_ranks = []
    for answer in pair.ask("record_rank", wrapper=wrapper, steps=steps):
        of_ranks.append([RecordedStep(began, seconds, to_spans(spans)) for began, seconds, spans in answer])
    return of_ranks
