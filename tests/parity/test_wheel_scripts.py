"""The scripts that accelerate's wheel ships for testing an installation, run on the core by the alias.

Each passes on accelerate itself on CPUs; of those that do not, `wheel_parts` runs what does.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

accelerate = pytest.importorskip("accelerate")

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(accelerate.__file__).parent / "test_utils" / "scripts"


def run(world_size: int, *command: str, **environment: str) -> str:
    """What a command under torchrun printed; it must end well."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    settings = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    result = subprocess.run(
        [*torchrun, *command], env={**os.environ, **settings}, cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    return result.stdout


# With one process under torchrun, test_sync fails on accelerate too.
@pytest.mark.parametrize(
    "name, world_size",
    [
        pytest.param("test_script", 1, marks=pytest.mark.long),
        pytest.param("test_script", 2, marks=pytest.mark.slow),
        pytest.param("test_sync", 2, marks=pytest.mark.slow),
        pytest.param("test_cli", 2, marks=pytest.mark.slow),
    ],
)
def test_a_script_of_the_wheel_passes_on_the_core(name, world_size):
    run(world_size, "-m", "tests.alias", str(SCRIPTS / f"{name}.py"))


@pytest.mark.parametrize(
    "name, library",
    [
        pytest.param("ops", "core", marks=pytest.mark.slow),
        pytest.param("ops", "original", marks=pytest.mark.long),
        pytest.param("ddp_comm_hook", "core", marks=pytest.mark.long),
        pytest.param("ddp_comm_hook", "original", marks=pytest.mark.long),
        pytest.param("distributed_data_loop", "core", marks=pytest.mark.long),
        pytest.param("distributed_data_loop", "original", marks=pytest.mark.long),
    ],
)
def test_the_parts_of_a_script_that_run_on_cpus_pass_on_both(name, library):
    run(2, "-m", "tests.parity.wheel_parts", name, library)


@pytest.mark.slow
def test_the_alias_gives_one_module_two_names():
    code = """
from tests import alias
alias.install()
import accelerate, accelerate.utils.operations, common.accelerator
from accelerate.state import PartialState
import accelerate.test_utils.testing
assert accelerate is common.accelerator and accelerate.utils.operations is common.accelerator.utils.operations
assert PartialState.__module__ == "common.accelerator.state"
assert accelerate.__spec__.name == "common.accelerator"
assert "common" not in accelerate.test_utils.testing.__file__.split("/")
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)
