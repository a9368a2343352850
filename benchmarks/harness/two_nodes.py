"""Two nodes on one machine: two network namespaces joined by a cable that can be throttled.

They need root, iproute2 (`ip` and `tc`) and a kernel with veth and tbf.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from benchmarks.harness.options import CannotMeasure
from common.cores import available_cores

ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACE = "cable"
# Bits per second; None is the cable as it is, which is the machine's memory.
BANDWIDTHS = {"unlimited": None, "10 Gbit/s": 1e10, "1 Gbit/s": 1e9, "100 Mbit/s": 1e8}
# After a pause a throttled cable lets a burst through at its own speed, so a burst is short: a millisecond of the rate,
# within two limits.
BURST_SECONDS = 1e-3
SMALLEST_BURST_BYTES = 16 * 1024
LARGEST_BURST_BYTES = 256 * 1024
# More than TCP keeps under way: nothing is dropped, so what is timed is the rate and not TCP's recovery from losses.
QUEUE_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True)
class Nodes:
    """The two nodes of `two_nodes`, 0 and 1, with the addresses `ADDRESSES`; `names` are those of their namespaces."""

    names: tuple[str, str]

    def limit(self, bits_per_second: float | None) -> None:
        """Throttle the cable in both directions; None lifts the limit."""
        if bits_per_second is None:
            queue = ["noqueue"]  # as a new cable has it
        else:
            burst = round(bits_per_second / 8 * BURST_SECONDS)
            burst = max(SMALLEST_BURST_BYTES, min(burst, LARGEST_BURST_BYTES))
            rate = f"{bits_per_second:.0f}bit"
            queue = ["tbf", "rate", rate, "burst", str(burst), "limit", str(QUEUE_BYTES)]
        for name in self.names:
            _run("tc", "-n", name, "qdisc", "replace", "dev", INTERFACE, "root", *queue)

    def kill(self, node: int) -> None:
        """Switch the node off: SIGKILL to every process on it, until there is none."""
        deadline = time.monotonic() + 20
        while pids := _run("ip", "netns", "pids", self.names[node]).split():
            if time.monotonic() > deadline:
                raise ChildProcessError(f"processes {pids} of {self.names[node]} survive SIGKILL")
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.05)


@contextmanager
def two_nodes() -> Iterator[Nodes]:
    """Two nodes and the cable between them, both gone afterwards together with every process still on them.

    Raises:
        CannotMeasure: where this machine allows no two nodes, no limit of their cable, or no process on them.
        ChildProcessError: from the `Nodes`, where a command fails later.
    """
    nodes = Nodes((f"ladder-{os.getpid()}-0", f"ladder-{os.getpid()}-1"))
    first, second = nodes.names
    if available_cores() < len(nodes.names):
        raise CannotMeasure("two nodes need as many cores")
    with ExitStack() as made:
        try:
            for node, name in enumerate(nodes.names):
                _run("ip", "netns", "add", name)
                made.callback(_clean_up, _run, "ip", "netns", "delete", name)
                made.callback(_clean_up, nodes.kill, node)
            _run("ip", "link", "add", INTERFACE, "netns", first, "type", "veth", "peer", INTERFACE, "netns", second)
            for name, address in zip(nodes.names, ADDRESSES, strict=True):
                _run("ip", "-n", name, "address", "add", f"{address}/30", "dev", INTERFACE)
                for interface in ("lo", INTERFACE):
                    _run("ip", "-n", name, "link", "set", interface, "up")
            # Some machines allow nodes, but not this.
            _run("ip", "netns", "exec", first, "true")
            nodes.limit(1e9)
            nodes.limit(None)
        except ChildProcessError as reason:
            raise CannotMeasure(f"two nodes need root, iproute2 and namespaces: {reason}") from reason
        yield nodes


def _clean_up(step: Callable, *args: object) -> None:
    """Call `step`. If it fails, that is printed and not raised, because what has been measured holds all the same."""
    try:
        step(*args)
    except ChildProcessError as failure:
        print(f"not cleaned up: {failure}", file=sys.stderr, flush=True)


def _run(*command: str) -> str:
    """The command's output; ChildProcessError with what it says on stderr if it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        reason = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
        raise ChildProcessError(f"{' '.join(command)}: {reason or error}") from error
