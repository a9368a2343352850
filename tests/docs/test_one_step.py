"""The step in numbers, the commands behind torchrun and the table of the collectives are right on the pages."""

import re
import runpy
import sys

import pytest
import torch
import torch.distributed as dist

from common import ladder
from common.process_group import process_group
from common.processes import free_port, ranks
from tests.docs.pages import run

SCRIPT = ladder.ROOT / "02_ddp_raw" / "one_step.py"
PAGE = (ladder.ROOT / "02_ddp_raw" / "README.md").read_text()
COLLECTIVES = (ladder.ROOT / "02_ddp_raw" / "COLLECTIVES.md").read_text()
# What the page says that both ranks print: small numbers, which a reader can compute by hand.
(SHOWN,) = re.findall(r"^```text\n(One step: .*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_two_ranks_print_what_the_page_shows():
    done = run(["torchrun", "--standalone", "--nproc-per-node", "2", str(SCRIPT)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == SHOWN.strip()


@pytest.mark.slow
def test_the_commands_that_torchrun_stands_for_do_the_same():
    (commands,) = re.findall(r"^```bash\n(export MASTER_ADDR.*?)^```$", COLLECTIVES, re.MULTILINE | re.DOTALL)
    done = run(["bash", "-c", commands.replace("29500", str(free_port()))])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == SHOWN.strip()


def test_another_number_of_ranks_is_refused_with_the_command(monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    with pytest.raises(SystemExit, match=r"^error: this is about two ranks: torchrun --standalone"):
        runpy.run_path(str(SCRIPT), run_name="__main__")


def numbers_after_collectives() -> dict[str, list[float]]:
    """The numbers of this rank after each collective of the table, by its name there."""
    with process_group():
        rank = dist.get_rank()
        own = torch.tensor([1.0 + rank])
        pair = torch.tensor([1.0, 2.0]) + 2 * rank
        broadcast = own.clone()
        dist.broadcast(broadcast, src=0)
        reduced = own.clone()
        dist.all_reduce(reduced)
        gathered = [torch.zeros(1), torch.zeros(1)] if rank == 0 else []
        dist.gather(own, gathered or None, dst=0)
        everywhere = [torch.zeros(1), torch.zeros(1)]
        dist.all_gather(everywhere, own)
        scattered = torch.zeros(1)
        dist.reduce_scatter_tensor(scattered, pair)
        return {
            "broadcast from rank 0": broadcast.tolist(),
            "all-reduce": reduced.tolist(),
            "gather to rank 0": [value.item() for value in gathered],
            "all-gather": [value.item() for value in everywhere],
            "reduce-scatter": scattered.tolist(),
        }


@pytest.mark.slow
def test_the_collectives_do_what_the_table_says():
    results = ranks(2).run(numbers_after_collectives)
    for name in results[0]:
        ((shown_0, shown_1),) = re.findall(rf"^\| {name} \| .* \| (.*) and (.*) \|$", COLLECTIVES, re.MULTILINE)
        for shown, of_rank in ((shown_0, results[0]), (shown_1, results[1])):
            numbers = " ".join(f"{value:g}" for value in of_rank[name])
            assert shown.strip("`") == (numbers or "nothing"), name
