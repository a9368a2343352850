"""The features that upstream's examples show, used as they use them: the same results here and on accelerate."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("feature_script.py")


def run(out: Path, world_size: int, on_the_core: bool) -> list[dict[str, dict[str, Any]]]:
    """What every feature left behind, by rank."""
    out.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    script = ["-m", "tests.alias", str(SCRIPT)] if on_the_core else [str(SCRIPT)]
    result = subprocess.run(
        [*torchrun, *script, str(out)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-6000:]
    return [torch.load(out / f"{rank}.pt", weights_only=True) for rank in range(world_size)]


@pytest.mark.parametrize(
    "world_size", [pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.slow)]
)
def test_every_feature_gives_what_it_gives_on_accelerate(tmp_path, world_size):
    theirs = run(tmp_path / "theirs", world_size, on_the_core=False)
    ours = run(tmp_path / "ours", world_size, on_the_core=True)
    for original, core in zip(theirs, ours, strict=True):
        assert original.keys() == core.keys()
        differing = [name for name in original if not equal(original[name], core[name])]
        assert differing == []


def equal(one: Any, other: Any) -> bool:
    """Whether two results are the same, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return one == other
