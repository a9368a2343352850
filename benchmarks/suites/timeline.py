"""The lanes of each rank during one step of two ranks that average their gradients.

Two ranks, one core each, train a small network over a link of 1 Gbit/s and of 100 Mbit/s between two network namespaces
(root and iproute2). Over loopback, which needs neither, they have one thread each and share the cores. Beside the
steps' times a group holds the "lanes" of one typical step, from which `benchmarks.report` draws pictures.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from benchmarks.harness.lanes.gradient_averaging import IMAGES_PER_BACKWARD, WRAPPERS, record_rank
from benchmarks.harness.lanes.typical_steps import record_in_turns
from benchmarks.harness.node_ranks import run_on_nodes
from benchmarks.harness.options import TIMEOUT_SECONDS, CannotMeasure, MeasureOptions
from benchmarks.harness.two_nodes import BANDWIDTHS, two_nodes
from common.processes import ranks

LINKS = ("1 Gbit/s", "100 Mbit/s")
LOOPBACK = "loopback"


def measure(options: MeasureOptions) -> dict:
    groups = []
    with ExitStack() as stack:
        try:  # Only here an error means that this machine allows no two nodes.
            nodes = stack.enter_context(two_nodes())
        except CannotMeasure as reason:
            print(f"timeline measures {LOOPBACK} alone: {reason}", flush=True)
        else:
            run = stack.enter_context(run_on_nodes(nodes.names))
            for link in LINKS:
                nodes.limit(BANDWIDTHS[link])
                groups.append(record_over(link, run, options.rounds))
    groups.append(record_over(LOOPBACK, ranks(2, on_cpu=True).run, options.rounds))
    return {"groups": groups}


def record_over(link: str, run: Callable[..., list], rounds: int) -> dict:
    """The group of all wrappers on two ranks that the link joins; `run` calls a function on them."""
    title = f"one step of two ranks over {link}, {IMAGES_PER_BACKWARD} images a backward"
    record_steps = partial(run, record_rank, timeout=TIMEOUT_SECONDS)
    return record_in_turns(title, WRAPPERS, record_steps, rounds) | {"link": link}
