"""A fixture that skips a test where this machine allows no mount."""

import shutil
import subprocess

import pytest

from tests.jobs import on_tmpfs


@pytest.fixture(scope="session")
def needs_mount(tmp_path_factory) -> None:
    command = on_tmpfs(tmp_path_factory.mktemp("disk"), "ro", ["true"])
    if not shutil.which("unshare") or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a small disk needs root on Linux")
