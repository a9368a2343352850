"""Execute level 04's notebook and save its outputs. Run this after changing a cell.

python -m tests.docs.notebook
"""

import hashlib
import json
import os

from common import ladder

NOTEBOOK = ladder.ROOT / "04_trainer" / "ladder.ipynb"
# In the notebook's metadata: the cells that its outputs come from.
EXECUTED = "executed_cells"


def code_cells(notebook: dict) -> list[dict]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def fingerprint(notebook: dict) -> str:
    sources = ["".join(cell["source"]) for cell in code_cells(notebook)]
    return hashlib.sha256("\n\n".join(sources).encode()).hexdigest()


def executed() -> dict:
    """The notebook after a run of all its cells, without times and without what went to stderr."""
    import nbclient
    import nbformat

    environment = os.environ | {"PYTHONPATH": str(ladder.ROOT)}
    environment.pop("MPLBACKEND", None)  # The kernel's own backend draws inline.
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    place = {"metadata": {"path": str(NOTEBOOK.parent)}}
    client = nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3", resources=place, record_timing=False)
    client.execute(env=environment)
    for cell in code_cells(notebook):
        cell["outputs"] = [output for output in cell["outputs"] if output.get("name") != "stderr"]
    return json.loads(nbformat.writes(notebook))


def main() -> None:
    notebook = executed()
    notebook["metadata"][EXECUTED] = fingerprint(notebook)
    notebook["metadata"]["language_info"] = {"name": "python"}
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
