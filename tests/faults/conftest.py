"""Fixtures that skip a test of faults where this machine does not allow what the test does."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.faults.jobs import on_tmpfs


@pytest.fixture
def needs_mount(tmp_path_factory) -> None:
    if sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("mounting a small disk needs root on Linux")
    attempt = subprocess.run(on_tmpfs(tmp_path_factory.mktemp("disk"), "ro", ["true"]), capture_output=True)
    if attempt.returncode:
        pytest.skip("no small disk can be mounted here")
