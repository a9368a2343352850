"""The step in numbers is what two ranks print, started by torchrun or by the commands that it stands for."""

import runpy
import sys

import pytest

from common import ladder
from common.launch import free_port
from tests.docs.pages import outputs, run, section

LEVEL = "02_ddp_raw"
COMMAND = f"torchrun --standalone --nproc-per-node 2 {LEVEL}/one_step.py"
# What both ranks print: small numbers, which a reader can compute by hand.
SHOWN = outputs(ladder.ROOT / LEVEL / "README.md")[COMMAND]


@pytest.mark.slow
def test_two_ranks_print_what_the_page_shows():
    done = run(COMMAND.split())
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == SHOWN.strip()


@pytest.mark.slow
def test_the_commands_that_torchrun_stands_for_do_the_same():
    text = section(LEVEL, "What torchrun does", "COLLECTIVES.md")
    commands = text.partition("```bash\n")[2].partition("```")[0]
    done = run(["bash", "-c", commands.replace("29500", str(free_port()))])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == SHOWN.strip()


def test_another_number_of_ranks_is_refused_with_the_command(monkeypatch):
    script = str(ladder.ROOT / LEVEL / "one_step.py")
    monkeypatch.setattr(sys, "argv", [script])
    with pytest.raises(SystemExit, match=f"^error: this is about two ranks: {COMMAND}"):
        runpy.run_path(script, run_name="__main__")
