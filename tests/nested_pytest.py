"""pytest, started by a test in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

from common import ladder


def environment_without_xdist() -> dict[str, str]:
    """This process's environment, but for what makes it a worker of pytest-xdist.

    pytest-benchmark measures nothing in such a worker.
    """
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}


def run_pytest(*arguments: str, folder: Path = ladder.ROOT, **variables: str) -> subprocess.CompletedProcess:
    """Run pytest in `folder` with these arguments, and the environment variables added; its output is captured."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    environment = environment_without_xdist() | variables
    return subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=folder, env=environment)
