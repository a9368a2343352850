"""The step in numbers is what two ranks print, started by torchrun or by the commands that it stands for."""

import runpy
import sys

import pytest

from common import ladder
from common.processes import free_port
from tests.docs.pages import run, text_block

SCRIPT = ladder.ROOT / "02_ddp_raw" / "one_step.py"
COLLECTIVES = (ladder.ROOT / "02_ddp_raw" / "COLLECTIVES.md").read_text()
# What the page says that both ranks print: small numbers, which a reader can compute by hand.
SHOWN = text_block(ladder.ROOT / "02_ddp_raw" / "README.md", "One step: ")
# The block of commands that torchrun stands for.
COMMANDS = COLLECTIVES.partition("```bash\n")[2].partition("```")[0]


@pytest.mark.slow
def test_two_ranks_print_what_the_page_shows():
    done = run(["torchrun", "--standalone", "--nproc-per-node", "2", str(SCRIPT)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == SHOWN.strip()


@pytest.mark.slow
def test_the_commands_that_torchrun_stands_for_do_the_same():
    done = run(["bash", "-c", COMMANDS.replace("29500", str(free_port()))])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == SHOWN.strip()


def test_another_number_of_ranks_is_refused_with_the_command(monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    with pytest.raises(SystemExit, match=r"^error: this is about two ranks: torchrun --standalone"):
        runpy.run_path(str(SCRIPT), run_name="__main__")
