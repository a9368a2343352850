"""Two machines, made of network namespaces: the same training as on one, and what a cut cable and a lost node do to it.

gloo notices a dead link when a collective's `--timeout` is over. torchrun's agents hear of it from TCP, which goes on
trying for a quarter of an hour: Linux's net.ipv4.tcp_retries2 says how long, and each node has its own.

A new agent that joins a later round of the rendezvous waits in vain for MASTER_ADDR with torch 2.15: the agent that was
there before takes it for said. TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 has every round say it anew; the launcher sets it.
"""

import glob
import json
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks.harness.two_nodes import ADDRESSES, INTERFACE, RENDEZVOUS, Nodes, two_nodes, why_not
from common import ladder
from tests.levels import farthest, run_level

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(why_not() is not None, reason=f"no two nodes: {why_not()}"),
]

TOLERANCE = 1e-9
STEPS = 12
TIMEOUT = 20  # seconds: the slowest rank may come that late to any collective, the first one included
PATIENCE = 240  # seconds, for whatever must happen soon
SAME = ["--dataset", "synthetic", "--train-samples", "2000", "--batch-size", "96", "--max-steps", str(STEPS)]
EXACT = [*SAME, "--dtype", "float64", "--no-dropout"]
# A rank's, by gloo's time-out or TCP's own; or its agent's, which may hear of it first and then ends its ranks.
LOST = re.compile(r"^.*\b(RuntimeError|DistNetworkError|RendezvousConnectionError): .+", re.MULTILINE)


def torchrun(nodes: Nodes, node: int, arguments: list[str], **options):
    return nodes.torchrun(node, arguments, 2, **options)


def launcher(nodes: Nodes, node: int, arguments: list[str], environment: dict[str, str], **options):
    ip, port = RENDEZVOUS.split(":")
    command = [sys.executable, "-m", "common.accelerator", "launch", "--cpu", "--num_machines=2", "--num_processes=4"]
    command += [f"--machine_rank={node}", f"--main_process_ip={ip}", f"--main_process_port={port}"]
    # torchrun's --local-addr: a namespace has no name by which the others could find it.
    environment |= {"PET_LOCAL_ADDR": ADDRESSES[node]}
    return nodes.start(node, [*command, "--rdzv_backend=c10d", *arguments], environment=environment, **options)


def set_cable(nodes: Nodes, state: str) -> None:
    """Pull the plug ("down"), or plug it in again: packets vanish, and neither side is told."""
    subprocess.run(["ip", "-n", nodes.names[1], "link", "set", INTERFACE, state], check=True)


def give_up_after(nodes: Nodes, retries: int) -> None:
    """Let TCP repeat so often what nobody acknowledges: 5 times take some 13 s, Linux's 15 a quarter of an hour."""
    for node in (0, 1):
        setting = f"echo {retries} > /proc/sys/net/ipv4/tcp_retries2"
        assert nodes.start(node, ["sh", "-c", setting]).wait(30) == 0


class Job:
    """A level on 2 nodes × 2 processes, and what each node's `agent` (torchrun or the launcher) and ranks have said."""

    def __init__(self, nodes: Nodes, stack: ExitStack, folder: Path, level: str, flags: list[str], restarts, agent):
        self.nodes = nodes
        self.stack = stack
        self.folder = folder
        self.weights = folder / "weights.pt"
        self.agent = agent
        script = [str(ladder.script(level)), *EXACT, "--timeout", str(TIMEOUT), "--save", str(self.weights), *flags]
        self.arguments = [f"--max-restarts={restarts}", *script]
        self.environment = {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
        self.agents = [self.start(node) for node in (0, 1)]

    def start(self, node: int):
        log = self.stack.enter_context((self.folder / f"node.{node}").open("a"))
        return self.agent(self.nodes, node, self.arguments, environment=self.environment, stdout=log, stderr=log)

    def said(self, node: int) -> str:
        return (self.folder / f"node.{node}").read_text()

    def wait_for(self, condition, what: str, seconds: float = PATIENCE) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not {what} in {seconds} s:\n{self.said(0)}\n{self.said(1)}"
            time.sleep(0.1)

    def wait_for_a_checkpoint(self) -> None:
        manifest = f"{self.folder}/saved/checkpoints/*/manifest.json"
        self.wait_for(lambda: glob.glob(manifest), "a checkpoint")
        assert all(agent.poll() is None for agent in self.agents)
        assert not self.weights.exists(), "the job was over before anything could happen to it"

    def exit_codes(self, seconds: float = PATIENCE) -> list[int]:
        self.wait_for(lambda: all(agent.poll() is not None for agent in self.agents), "ended", seconds)
        return [agent.returncode for agent in self.agents]

    def assert_finished_as_on_one_machine(self) -> None:
        assert self.exit_codes() == [0, 0], self.said(0) + self.said(1)
        assert farthest(torch.load(self.weights, weights_only=True), on_one_machine()) <= TOLERANCE


@cache
def on_one_machine() -> dict:
    return run_level("00_single_gpu", [*EXACT, "--eval-samples", "96"])[1]


@pytest.fixture
def start(tmp_path):
    """`start(level, flags)`: the job on a new pair of nodes, which go with all that is on them."""
    with ExitStack() as stack:
        nodes = stack.enter_context(two_nodes())

        def on_both(*job, restarts: int = 0, agent=torchrun) -> Job:
            return Job(nodes, stack, tmp_path, *job, restarts, agent)

        yield on_both


@pytest.fixture
def slowly(start, tmp_path):
    """`slowly(restarts, **more)`: level 03 with checkpoints, over a cable slow enough to be hurt in time."""

    def run(restarts: int, **more) -> Job:
        flags = ["--eval-samples", "96", "--checkpoint-dir", str(tmp_path / "saved"), "--checkpoint-every", "3"]
        job = start(ladder.FULL, flags, restarts=restarts, **more)
        job.nodes.limit(200e6)  # 9.6 MB of gradients, 1.5 times from node to node in a ring of four: 0.6 s a step
        return job

    return run


LEVELS = [
    pytest.param("02_ddp_raw", marks=pytest.mark.long),
    pytest.param("03_accelerate", marks=pytest.mark.slow),
    pytest.param("04_trainer", marks=pytest.mark.long),
]


@pytest.mark.parametrize("level", LEVELS)
def test_two_machines_train_the_weights_of_one_process(level, start, tmp_path):
    job = start(level, ["--eval-samples", "101", "--json", str(tmp_path / "result.json")])
    job.assert_finished_as_on_one_machine()
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["world_size"], result["steps"], result["evaluated"]) == (4, STEPS, 101)
    assert f"{level}: 4 × gloo" in job.said(0) + job.said(1)


@pytest.mark.long
def test_a_cut_cable_is_an_error_on_both_sides_within_the_time_out(slowly):
    job = slowly(restarts=0)
    give_up_after(job.nodes, 5)  # 13 s
    job.wait_for_a_checkpoint()
    set_cable(job.nodes, "down")
    assert 0 not in job.exit_codes(TIMEOUT + 100)
    for node in (0, 1):
        assert LOST.search(job.said(node)), job.said(node)
    assert not job.weights.exists()


@pytest.mark.long
def test_a_cable_cut_and_mended_costs_a_restart_and_nothing_else(slowly):
    job = slowly(restarts=3)
    job.wait_for_a_checkpoint()
    set_cable(job.nodes, "down")
    for node in (0, 1):
        job.wait_for(lambda node=node: LOST.search(job.said(node)), f"an error on {node}", TIMEOUT + 60)
    set_cable(job.nodes, "up")
    job.assert_finished_as_on_one_machine()
    assert re.search(r"resumed at step \d", job.said(0) + job.said(1))


@pytest.mark.long
def test_a_lost_node_that_is_started_again_goes_on_from_the_checkpoint(slowly, monkeypatch):
    """Under the launcher. A torchrun that is given the variable takes a newcomer too: see `test_rank_killed.py`."""
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    job = slowly(restarts=3, agent=launcher)
    job.wait_for_a_checkpoint()
    job.nodes.kill(1)
    job.wait_for(lambda: "Traceback" in job.said(0), "an error on the node that is left")
    job.agents[1] = job.start(1)
    job.assert_finished_as_on_one_machine()
    assert re.search(r"resumed at step \d", job.said(0) + job.said(1))
