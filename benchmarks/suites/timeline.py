"""What every thread does during one step of two ranks that average their gradients.

Two ranks, one core each, train a small network over a link of 1 Gbit/s and of 100 Mbit/s between two network namespaces
(root and iproute2), and over loopback, which needs neither. Beside the steps' times a group holds the "lanes" of one
typical step, from which `benchmarks.report` draws pictures.
"""

from functools import partial

from benchmarks.harness import typical_steps
from benchmarks.harness.gradient_averaging import BATCH, WAYS
from benchmarks.harness.groups import Group, MeasureOptions
from benchmarks.harness.lanes import record_rank
from benchmarks.harness.spans import RecordedStep, to_spans
from benchmarks.harness.typical_steps import Recording
from benchmarks.suites.network import WaitingRanks, waiting_ranks
from common.processes import ranks

LINKS = ("1 Gbit/s", "100 Mbit/s")
LOOPBACK = "loopback"
TIMEOUT = 300  # seconds, for any one recording


def groups() -> list[Group]:
    """A group for each link; whether there can be two nodes here shows when it is measured."""
    found = []
    for link in (*LINKS, LOOPBACK):
        found.append(Group(f"timeline-{link}", title(link), tuple(WAYS), partial(measure_group, link)))
    return found


def title(link: str) -> str:
    return f"one step of two ranks over {link}, {BATCH} images a backward"


def measure_group(link: str, options: MeasureOptions) -> dict:
    """The record of all ways over one link."""
    if link == LOOPBACK:
        group = typical_steps.measure_group(title(link), tuple(WAYS), over_loopback, options)
    else:
        with waiting_ranks() as pair:
            pair.limit(link)
            over_link = partial(over_the_cable, pair)
            group = typical_steps.measure_group(title(link), tuple(WAYS), over_link, options)
    return group | {"link": link}


def over_loopback(way: str, steps: int) -> Recording:
    """Both ranks' steps, on this machine."""
    return ranks(2, on_cpu=True).run(record_rank, way, steps, timeout=TIMEOUT)


def over_the_cable(pair: WaitingRanks, way: str, steps: int) -> Recording:
    """Both ranks' steps, on two nodes whose cable is limited already; JSON has made lists of them."""
    recording = []
    for answer in pair.ask("record_rank", way=way, steps=steps):
        recording.append([RecordedStep(began, seconds, to_spans(spans)) for began, seconds, spans in answer])
    return recording
