"""Two machines, made of network namespaces: the same training as on one, and what a cut cable and a lost node do to it.

gloo notices a dead link when a collective's `--timeout` is over. torchrun's agents hear of it from TCP, which sends
again for a quarter of an hour: Linux's net.ipv4.tcp_retries2 sets how often, and each node has its own.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks.harness.options import CannotMeasure
from benchmarks.harness.two_nodes import ADDRESSES, INTERFACE, Nodes, two_nodes
from common.weights import max_weight_difference
from tests.jobs import Job, job, launcher, newest_checkpoint, resumed_at, script, torchrun
from tests.levels import FULL, run_level

pytestmark = pytest.mark.timeout(600)

RENDEZVOUS = f"{ADDRESSES[0]}:29400"  # All ports of the namespaces are free.
TOLERANCE = 1e-9
STEPS = 12
TIMEOUT = 20  # Seconds that a rank may come later than another to a collective, the first one included.
EXACT = ["--dataset", "synthetic", "--train-samples", "2000", "--batch-size", "96", "--max-steps", str(STEPS)]
EXACT += ["--dtype", "float64", "--no-dropout"]
# The error of a rank, or of its agent where that one notices the lost connection first and ends its ranks.
# "[rank0]: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer"
LOST = re.compile(r"^.*\b(RuntimeError|DistNetworkError|RendezvousConnectionError): .+", re.MULTILINE)


def by_torchrun(node: int, restarts: int, script: list[str]) -> list[str]:
    """The torchrun of a node. It gets the node's address, because a namespace has no host name."""
    rendezvous = ["--nnodes", "2", "--rdzv-id", "two-nodes", "--rdzv-backend", "c10d", "--rdzv-endpoint", RENDEZVOUS]
    rendezvous += ["--rdzv-conf", f"is_host={node == 0}", "--local-addr", ADDRESSES[node]]
    return torchrun(*script, restarts=restarts, rendezvous=rendezvous)


def by_launcher(node: int, restarts: int, script: list[str]) -> list[str]:
    """The launcher of a node. It has no flag for the address, which torchrun also reads from a variable."""
    ip, port = RENDEZVOUS.split(":")
    machines = ["--num_machines=2", f"--machine_rank={node}", f"--main_process_ip={ip}", f"--main_process_port={port}"]
    command = launcher(*machines, "--rdzv_backend=c10d", *script, processes=4, restarts=restarts)
    return ["env", f"PET_LOCAL_ADDR={ADDRESSES[node]}", *command]


def set_cable(nodes: Nodes, state: str) -> None:
    """Cut the cable ("down"), so that packets vanish and neither side gets an error, or mend it ("up")."""
    subprocess.run(["ip", "-n", nodes.names[1], "link", "set", INTERFACE, state], check=True)


def give_up_after(nodes: Nodes, retries: int) -> None:
    """Let TCP send again so many times what is not acknowledged: 5 times take some 13 s."""
    setting = f"echo {retries} > /proc/sys/net/ipv4/tcp_retries2"
    for name in nodes.names:
        subprocess.run(["ip", "netns", "exec", name, "sh", "-c", setting], check=True)


@pytest.fixture
def nodes():
    """A new pair of nodes, which end with all their processes after the test. It is skipped where none can be made."""
    with ExitStack() as stack:
        try:
            pair = stack.enter_context(two_nodes())
        except CannotMeasure as reason:
            pytest.skip(str(reason))
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
    """Level 03 after its first checkpoint. The cable is slow, so that there is time to cut it before the end."""
    flags = ["--eval-samples", "96", "--checkpoint-dir", str(folder / "saved"), "--checkpoint-every", "3"]
    nodes.limit(200e6)  # 9.6 MB of gradients pass 1.5 times from node to node in a ring of four: 0.6 s a step.
    with start(nodes, folder, FULL, *flags, restarts=restarts, command=command) as run:
        run.wait_for(lambda: newest_checkpoint(folder / "saved") >= 0)
        assert not (folder / "weights.pt").exists(), "the job was over before anything could happen to it"
        yield run


@cache
def on_one_machine() -> dict:
    return run_level("00_single_gpu", [*EXACT, "--eval-samples", "96"])[1]


def assert_ends_as_on_one_machine(run: Job, folder: Path) -> None:
    assert run.end() == [0, 0], run.out + run.err
    assert max_weight_difference(torch.load(folder / "weights.pt", weights_only=True), on_one_machine()) <= TOLERANCE


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
    give_up_after(nodes, 5)
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
        assert resumed_at(run.out)


@pytest.mark.long
def test_a_lost_node_that_is_started_again_goes_on_from_the_checkpoint(nodes, tmp_path, monkeypatch):
    """The launcher sets TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.

    Without it the agent that stayed believes, with torch 2.15, that MASTER_ADDR is known to all, and the new agent
    waits for it in vain. Plain torchrun with this variable is tested in `test_rank_killed.py`.
    """
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    with start_slowly(nodes, tmp_path, restarts=3, command=by_launcher) as run:
        nodes.kill(1)
        run.wait_for(lambda: "Traceback" in run.err_of(0))
        run.start(1, run.processes[1].args)
        assert_ends_as_on_one_machine(run, tmp_path)
        assert resumed_at(run.out)
