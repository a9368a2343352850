"""The notebook runs from top to bottom, shows its plots, and is kept with the outputs of such a run.

After a change of its cells, run it and keep what it shows:

    python -m tests.docs.test_notebook
"""

import hashlib
import json
import os
import re
import sys
from typing import Any

import pytest

from common import ladder

NOTEBOOK = ladder.ROOT / "04_trainer" / "ladder.ipynb"
# In the notebook's metadata: the cells that its outputs come from.
EXECUTED = "executed_cells"
MOST_BYTES = 400_000
# Folders of the machine on which it was run.
MACHINE_PATH = re.compile(r"(?<![\w.:/])/(tmp|home|root|work|usr|opt|mnt|Users|private|var)/")


def kept() -> dict:
    return json.loads(NOTEBOOK.read_text())


def code_cells(notebook: dict) -> list[dict]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def fingerprint(notebook: dict) -> str:
    """A hash of what the cells of code say."""
    sources = ["".join(cell["source"]) for cell in code_cells(notebook)]
    return hashlib.sha256("\n\n".join(sources).encode()).hexdigest()


def check_outputs(notebook: dict) -> None:
    """The outputs of a whole run are there, and show what the texts between the cells say."""
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    shown = "".join("".join(output.get("text", "")) for output in outputs)
    for level in ladder.levels():
        assert f"{level}: " in shown and "of 500 |" in shown.partition(f"\n{level}: ")[2]
        assert f"{level:<18} max |Δw| to level 00: " in shown
    assert shown.count("2 × gloo on cpu") == 2 * len(ladder.DISTRIBUTED)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1


def executed() -> dict:
    """The notebook after a run of all its cells, without times and without what went to stderr."""
    import nbclient
    import nbformat

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources: dict[str, Any] = {"metadata": {"path": str(NOTEBOOK.parent)}}
    nbclient.NotebookClient(
        notebook, timeout=900, kernel_name="python3", resources=resources, record_timing=False
    ).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return json.loads(nbformat.writes(notebook))


def test_it_is_kept_with_the_outputs_of_its_cells():
    notebook = kept()
    assert notebook["metadata"].get(EXECUTED) == fingerprint(notebook), "python -m tests.docs.test_notebook"
    check_outputs(notebook)


def test_its_outputs_are_small_and_name_no_folder_of_a_machine():
    assert NOTEBOOK.stat().st_size < MOST_BYTES
    for cell in code_cells(kept()):
        for output in cell["outputs"]:
            text = "".join(output.get("text", ""))
            assert not MACHINE_PATH.search(text), text


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a minute and a half where nothing else runs
def test_it_runs_and_shows_what_it_says(monkeypatch):
    pytest.importorskip("nbformat", reason="the notebook is executed with nbclient, of the extra dev")
    pytest.importorskip("nbclient", reason="the notebook is executed with nbclient, of the extra dev")
    pytest.importorskip("ipykernel", reason="the notebook is executed by ipykernel, of the extra dev")
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel's own draws inline
    monkeypatch.setenv("PYTHONPATH", str(ladder.ROOT))
    check_outputs(executed())


def without_data_folder(notebook: dict) -> dict:
    """The notebook with `data`, the levels' default, where this machine's own folder of MNIST is named."""
    own = os.environ.get("MNIST_ROOT")
    for cell in code_cells(notebook) if own else ():
        for output in cell["outputs"]:
            if "text" in output:
                output["text"] = "".join(output["text"]).replace(own, "data").splitlines(keepends=True)
    return notebook


def main() -> None:
    """Run the notebook, and keep it with its outputs."""
    os.environ.pop("MPLBACKEND", None)
    os.environ["PYTHONPATH"] = str(ladder.ROOT)
    notebook = without_data_folder(executed())
    check_outputs(notebook)
    notebook["metadata"][EXECUTED] = fingerprint(notebook)
    notebook["metadata"]["language_info"] = {"name": "python"}
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
