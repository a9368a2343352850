"""Published programs end on the core, under the original's name, with the bits that they have on accelerate.

The programs are in `programs.py`. Both runs must agree in the loss of every backward, in the weights, the state of the
optimizer and the learning rates after every optimizer step, and in the results: predictions, logs, names of files.
"""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.jobs import run_to_end, torchrun
from tests.parity import programs
from tests.states import ONE_THREAD

# Nothing is looked for on a network.
ENVIRONMENT = {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **ONE_THREAD}


def run(name: str, library: str, processes: int, folder: Path) -> list[dict]:
    programs.make_images(folder / "images")
    program = ["-m", "tests.parity.programs", name, library, str(folder)]
    command = torchrun(*program, processes=processes) if processes > 1 else [sys.executable, *program]
    done = run_to_end(command, **ENVIRONMENT, HF_HOME=str(folder.parent / "hub"))
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(processes)]


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_a_published_program_ends_with_the_bits_of_the_original(name, processes, tmp_path):
    _, needed = programs.PROGRAMS[name]
    for package in ("accelerate", needed):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: the extra `programs` has it")
    theirs = run(name, "theirs", processes, tmp_path / "theirs")
    ours = run(name, "ours", processes, tmp_path / "ours")
    for expected, found in zip(theirs, ours, strict=True):
        assert (expected.pop("library"), found.pop("library")) == ("accelerate", "common.accelerator")
        assert len(expected["steps"]) >= programs.STEPS
        assert found == expected
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")
