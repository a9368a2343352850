"""pytest, started by a test in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from common import ladder

# One process for several sessions: the first one imports what they all need, which takes most of the time.
SESSIONS = """
import json, sys, traceback, pytest
sys.stderr = sys.stdout
for arguments in json.loads(sys.argv[1]):
    try:
        code = int(pytest.main(["-p", "no:cacheprovider", *arguments]))
    except Exception:
        traceback.print_exc()
        code = 1
    print("\\nSESSION ENDED", code, flush=True)
"""


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


def run_sessions(sessions: Sequence[Sequence[str]]) -> list[subprocess.CompletedProcess]:
    """Run pytest with each of these lists of arguments, one after another; stdout has all that each has printed."""
    command = [sys.executable, "-c", SESSIONS, json.dumps([list(arguments) for arguments in sessions])]
    environment = environment_without_xdist()
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ladder.ROOT, env=environment)
    ended = []
    printed = done.stdout
    for arguments in sessions:
        own, mark, printed = printed.partition("\nSESSION ENDED ")
        assert mark, f"{arguments} ended the process\n{own}{done.stderr}"
        code, _, printed = printed.partition("\n")
        ended.append(subprocess.CompletedProcess(arguments, int(code), own))
    return ended
