"""Two machines, made of network namespaces: the same training as on one, and what a cut cable and a lost node do to it.

gloo notices a dead link when a collective's `--timeout` is over. torchrun's agents hear of it from TCP, which goes on
trying for a quarter of an hour: Linux's net.ipv4.tcp_retries2 says how long, and each node has its own.

A new agent that joins a later round of the rendezvous waits in vain for MASTER_ADDR with torch 2.15: the agent that was
there before believes that it is known. With TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which the launcher sets, every round
tells it anew.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks.harness.two_nodes import ADDRESSES, INTERFACE, Nodes, two_nodes, why_not
from common import ladder
from common.weights import farthest
from tests.faults.jobs import Job, job, launcher, newest_checkpoint, script, torchrun
from tests.levels import run_level

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(why_not() is not None, reason=f"no two nodes: {why_not()}"),
]

RENDEZVOUS = f"{ADDRESSES[0]}:29400"  # All ports of the namespaces are free.
TOLERANCE = 1e-9
STEPS = 12
TIMEOUT = 20  # Seconds. The slowest rank may come that late to any collective, the first one included.
EXACT = ["--dataset", "synthetic", "--train-samples", "2000", "--batch-size", "96", "--max-steps", str(STEPS)]
EXACT += ["--dtype", "float64", "--no-dropout"]
# A rank's, by gloo's time-out or TCP's own; or its agent's, which may hear of it first and then ends its ranks.
LOST = re.compile(r"^.*\b(RuntimeError|DistNetworkError|RendezvousConnectionError): .+", re.MULTILINE)


def by_torchrun(node: int, restarts: int, script: list[str]) -> list[str]:
    """A node's torchrun. A namespace has no name by which the others could find it, so it gets the address."""
    rendezvous = ["--nnodes", "2", "--rdzv-id", "two-nodes", "--rdzv-backend", "c10d", "--rdzv-endpoint", RENDEZVOUS]
    rendezvous += ["--rdzv-conf", f"is_host={node == 0}", "--local-addr", ADDRESSES[node]]
    return torchrun(*script, restarts=restarts, rendezvous=rendezvous)


def by_launcher(node: int, restarts: int, script: list[str]) -> list[str]:
    """A node's launcher, which has no flag for the address: torchrun also takes it from a variable."""
    ip, port = RENDEZVOUS.split(":")
    machines = ["--num_machines=2", f"--machine_rank={node}", f"--main_process_ip={ip}", f"--main_process_port={port}"]
    command = launcher(*script, processes=4, restarts=restarts, machines=[*machines, "--rdzv_backend=c10d"])
    return ["env", f"PET_LOCAL_ADDR={ADDRESSES[node]}", *command]


def set_cable(nodes: Nodes, state: str) -> None:
    """Pull the plug ("down"), or plug it in again: packets vanish, and neither side gets an error."""
    subprocess.run(["ip", "-n", nodes.names[1], "link", "set", INTERFACE, state], check=True)


def give_up_after(nodes: Nodes, retries: int) -> None:
    """Let TCP send so many times what nobody acknowledges. 5 take some 13 s, and Linux's 15 a quarter of an hour."""
    for node in (0, 1):
        setting = f"echo {retries} > /proc/sys/net/ipv4/tcp_retries2"
        assert nodes.start(node, ["sh", "-c", setting]).wait(30) == 0


@pytest.fixture
def nodes():
    """A new pair of nodes, which go with all that is on them."""
    with two_nodes() as pair:
        yield pair


@contextmanager
def start(nodes: Nodes, folder: Path, level: str, *flags: str, restarts: int = 0, command=by_torchrun) -> Iterator[Job]:
    """A level on 2 nodes × 2 processes; rank 0 saves the weights in `folder`."""
    level_flags = [*EXACT, "--timeout", str(TIMEOUT), "--save", str(folder / "weights.pt"), *flags]
    commands = []
    for node in (0, 1):
        agent = command(node, restarts, [script(level), *level_flags])
        commands.append(["ip", "netns", "exec", nodes.names[node], *agent])
    environment = {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
    with job(*commands, **environment) as run:
        yield run


@contextmanager
def start_slowly(nodes: Nodes, folder: Path, restarts: int, command=by_torchrun) -> Iterator[Job]:
    """Level 03 after its first checkpoint, over a cable slow enough to be hurt in time."""
    flags = ["--eval-samples", "96", "--checkpoint-dir", str(folder / "saved"), "--checkpoint-every", "3"]
    nodes.limit(200e6)  # 9.6 MB of gradients pass 1.5 times from node to node in a ring of four: 0.6 s a step.
    with start(nodes, folder, ladder.FULL, *flags, restarts=restarts, command=command) as run:
        run.wait_for(lambda: newest_checkpoint(folder / "saved") >= 0)
        assert not (folder / "weights.pt").exists(), "the job was over before anything could happen to it"
        yield run


@cache
def on_one_machine() -> dict:
    return run_level("00_single_gpu", [*EXACT, "--eval-samples", "96"])[1]


def assert_ends_as_on_one_machine(run: Job, folder: Path) -> None:
    assert run.end() == [0, 0], run.out + run.err
    assert farthest(torch.load(folder / "weights.pt", weights_only=True), on_one_machine()) <= TOLERANCE


LEVELS = [
    pytest.param("02_ddp_raw", marks=pytest.mark.long),
    pytest.param("03_accelerate", marks=pytest.mark.slow),
    pytest.param("04_trainer", marks=pytest.mark.long),
]


@pytest.mark.parametrize("level", LEVELS)
def test_two_machines_train_the_weights_of_one_process(level, nodes, tmp_path):
    path = tmp_path / "result.json"
    with start(nodes, tmp_path, level, "--eval-samples", "101", "--json", str(path)) as run:
        assert_ends_as_on_one_machine(run, tmp_path)
        assert f"{level}: 4 × gloo" in run.out
    result = json.loads(path.read_text())
    assert (result["world_size"], result["steps"], result["evaluated"]) == (4, STEPS, 101)


@pytest.mark.long
def test_a_cut_cable_is_an_error_on_both_sides_within_the_time_out(nodes, tmp_path):
    give_up_after(nodes, 5)  # This takes 13 s.
    with start_slowly(nodes, tmp_path, restarts=0) as run:
        set_cable(nodes, "down")
        assert 0 not in run.end(TIMEOUT + 100)
        for node in (0, 1):
            assert LOST.search(run.err_of(node)), run.err_of(node)
    assert not (tmp_path / "weights.pt").exists()


@pytest.mark.long
def test_a_cable_cut_and_mended_costs_a_restart_and_nothing_else(nodes, tmp_path):
    with start_slowly(nodes, tmp_path, restarts=3) as run:
        set_cable(nodes, "down")
        run.wait_for(lambda: LOST.search(run.err_of(0)) and LOST.search(run.err_of(1)), TIMEOUT + 60)
        set_cable(nodes, "up")
        assert_ends_as_on_one_machine(run, tmp_path)
        assert re.search(r"resumed at step \d", run.out)


@pytest.mark.long
def test_a_lost_node_that_is_started_again_goes_on_from_the_checkpoint(nodes, tmp_path, monkeypatch):
    """Under the launcher. A torchrun that is given the variable takes a newcomer too: see `test_rank_killed.py`."""
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    with start_slowly(nodes, tmp_path, restarts=3, command=by_launcher) as run:
        nodes.kill(1)
        run.wait_for(lambda: "Traceback" in run.err_of(0))
        run.restart(1)
        assert_ends_as_on_one_machine(run, tmp_path)
        assert re.search(r"resumed at step \d", run.out)
