"""pytest, started by a test in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

from common import ladder


def run_pytest(*arguments: str, folder: Path = ladder.ROOT, **variables: str) -> subprocess.CompletedProcess:
    """Run pytest in `folder` with these arguments, and the environment variables added; its output is captured."""
    # pytest-benchmark measures nothing in a worker of pytest-xdist, as which the test itself may run.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=folder, env=inherited | variables)
