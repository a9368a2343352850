"""The notebook runs from top to bottom, shows its plots, and is kept without outputs."""

import json
from itertools import pairwise

import pytest

from common import ladder

NOTEBOOK = ladder.ROOT / "04_trainer" / "ladder.ipynb"


def test_it_is_kept_without_outputs():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 8 and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert len({cell["id"] for cell in cells}) == len(cells)


def test_a_text_stands_above_every_cell_of_code():
    kinds = [cell["cell_type"] for cell in json.loads(NOTEBOOK.read_text())["cells"]]
    assert kinds[0] == "markdown" and all(pair != ("code", "code") for pair in pairwise(kinds))


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a minute and a half where nothing else runs
def test_it_runs_and_shows_what_it_says(monkeypatch):
    nbformat = pytest.importorskip("nbformat", reason="the notebook is executed with nbclient, of the extra dev")
    nbclient = pytest.importorskip("nbclient", reason="the notebook is executed with nbclient, of the extra dev")
    pytest.importorskip("ipykernel", reason="the notebook is executed by ipykernel, of the extra dev")
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel's own draws inline
    monkeypatch.setenv("PYTHONPATH", str(ladder.ROOT))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(NOTEBOOK.parent)}}
    nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = "".join(output.get("text", "") for output in outputs)
    for level in ladder.levels():
        assert f"{level}: " in shown and "of 2000 |" in shown.partition(f"\n{level}: ")[2]
        assert f"{level:<18} max |Δw| to level 00: " in shown
    assert "divides by the number of ranks: the gradient is 3" in shown
    assert "rank 0 has the sum of the gradients: divide by the world size" in shown
    assert shown.count("2 × gloo on cpu") == 2 * len(ladder.DISTRIBUTED)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
