"""The notebook runs from top to bottom, shows its plots, and is kept with the outputs of such a run."""

import json
import re

import pytest

from common import ladder
from tests.docs.notebook import EXECUTED, NOTEBOOK, code_cells, executed, fingerprint

MOST_BYTES = 400_000
# Folders of the machine on which it was run.
MACHINE_PATH = re.compile(r"(?<![\w.:/])/(tmp|home|root|work|usr|opt|mnt|Users|private|var)/")


def check_outputs(notebook: dict) -> None:
    """The outputs of a whole run are there, and show what the texts between the cells say."""
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1
    shown = printed(notebook)
    for level in ladder.LEVELS:
        assert "of 500 |" in shown.partition(f"\n{level}: ")[2]
        assert f"{level:<18} max |Δw| to level 00: " in shown
    assert shown.count("2 × gloo on cpu") == 2 * len(ladder.DISTRIBUTED)


def printed(notebook: dict) -> str:
    outputs = [output for cell in code_cells(notebook) for output in cell["outputs"]]
    return "".join("".join(output.get("text", "")) for output in outputs)


def test_it_is_kept_with_the_outputs_of_its_cells():
    kept = json.loads(NOTEBOOK.read_text())
    assert kept["metadata"].get(EXECUTED) == fingerprint(kept), "python -m tests.docs.notebook"
    check_outputs(kept)


def test_its_outputs_are_small_and_name_no_folder_of_a_machine():
    assert NOTEBOOK.stat().st_size < MOST_BYTES
    assert not MACHINE_PATH.search(printed(json.loads(NOTEBOOK.read_text())))


@pytest.mark.long
@pytest.mark.timeout(1200)  # It takes a minute and a half where nothing else runs.
def test_it_runs_and_shows_what_it_says():
    for package in ("nbformat", "nbclient", "ipykernel"):
        pytest.importorskip(package, reason="the notebook is executed with nbclient and ipykernel, of the extra dev")
    check_outputs(executed())
