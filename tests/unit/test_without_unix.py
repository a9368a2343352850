"""The levels train without what only Linux has, and where there is no `fcntl` and no `os.getuid`, as on Windows."""

import os
from pathlib import Path

import pytest

from common import ladder
from tests.jobs import level_command, run_to_end
from tests.levels import FULL, SHORT

WITHOUT_LINUX = Path(__file__).parent / "without_linux"  # It has a sitecustomize.py.
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(WITHOUT_LINUX), str(ladder.ROOT)]), "USERNAME": "somebody"}


@pytest.mark.slow
@pytest.mark.parametrize("level", [*ladder.LEVELS, FULL])
def test_a_level_trains_without_what_only_linux_has(level, tmp_path):
    flags = ["--checkpoint-dir", f"{tmp_path}/checkpoints"] if level == FULL else []
    processes = 2 if level in ladder.DISTRIBUTED else None
    done = run_to_end(level_command(level, *SHORT, *flags, processes=processes), **ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("synthetic accuracy") == 1
    assert bool(flags) == any(tmp_path.rglob("manifest.json"))
